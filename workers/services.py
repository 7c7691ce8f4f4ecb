"""The services of one machine: `tttd up` starts a supervisor, which keeps the Temporal server and a worker per role running.

    supervisor (holds the lock)
      ├─ temporal server start-dev
      └─ tttd worker control | sample | judge | train | engine (as many engines as the settings say)

Whatever dies is started again. Everything dies with the supervisor, so no orphan keeps a port, a database or a GPU; nothing is lost
by that, because Temporal's database and the object store are on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from workers import temporal_server
from workers.engine.launch import engine_variables
from workers.logs import configure_logging
from workers.settings import Settings, child_environment, load_settings

log: structlog.stdlib.BoundLogger = structlog.get_logger()

ROLES = ("control", "sample", "judge", "train", "engine")
_STOP_SECONDS = 15.0
_UP_SECONDS = 120.0


@dataclass
class Service:
    """One process that is kept running."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside the supervisor's own."""
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    next_start: float = 0.0
    """time.monotonic() before which it is not started again."""
    exits: list[int] = field(default_factory=list)


def lock_path(settings: Settings) -> Path:
    return settings.home / "supervisor.lock"


def state_path(settings: Settings) -> Path:
    return settings.home / "services.json"


@contextlib.contextmanager
def _exclusive(settings: Settings) -> Iterator[bool]:
    """The supervisor's lock; yields whether we got it. Two servers on one database would fight over it."""
    settings.home.mkdir(parents=True, exist_ok=True)
    with lock_path(settings).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def read_state(settings: Settings) -> dict[str, Any] | None:
    """What the supervisor last wrote, if one is running: its pid, each service's pid and number of starts. {}: it starts."""
    with _exclusive(settings) as free:
        if free:
            return None
    with contextlib.suppress(OSError, json.JSONDecodeError):
        state: dict[str, Any] = json.loads(state_path(settings).read_text(encoding="utf-8"))
        return state
    return {}


def up(settings: Settings, roles: Sequence[str] = ROLES, engine_model: str | None = None) -> bool:
    """Start the supervisor unless it runs, and wait until Temporal serves. Returns False if it was running already.

    Args:
        engine_model: what the engine serves; None: as the settings say.

    Raises:
        RuntimeError: it did not come up; the message holds the end of its log.
    """
    if (state := read_state(settings)) is not None:
        _wait_for_state(settings, None)
        missing = [role for role in roles if role not in (read_state(settings) or state).get("services", {})]
        if missing:
            raise RuntimeError(
                f"services are up without {', '.join(missing)}: run `tttd down` first, or start `tttd worker` yourself"
            )
        return False
    settings.logs.mkdir(parents=True, exist_ok=True)
    state_path(settings).unlink(missing_ok=True)
    with (settings.logs / "supervisor.out").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.services", *roles],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
            env=child_environment(**({"TTTD_ENGINE_MODEL": engine_model} if engine_model else {})),
        )
    _wait_for_state(settings, process)
    return True


def _wait_for_state(settings: Settings, process: subprocess.Popen[bytes] | None) -> None:
    deadline = time.monotonic() + _UP_SECONDS
    while time.monotonic() < deadline:
        state = read_state(settings)
        if state and state.get("ready"):
            return
        if process is not None and process.poll() is not None:
            output = (settings.logs / "supervisor.out").read_text(errors="replace").strip()
            raise RuntimeError(output.splitlines()[-1] if output else f"the supervisor ended with code {process.returncode}")
        time.sleep(0.1)
    raise RuntimeError(f"services did not come up within {_UP_SECONDS:.0f} s; logs: {settings.logs}")


def down(settings: Settings) -> bool:
    """Stop everything; False if nothing ran. Runs stay in Temporal's database and go on at the next `tttd up`."""
    if read_state(settings) is None:
        return False
    deadline = time.monotonic() + 2 * _STOP_SECONDS + 10
    number = signal.SIGTERM
    while read_state(settings) is not None:
        if (pid := _supervisor_pid(settings)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.2)
        if time.monotonic() > deadline:
            number = signal.SIGKILL
    return True


def _supervisor_pid(settings: Settings) -> int | None:
    """Process that wrote the lock file, if it is a supervisor: a number left by a killed one may be anybody's by now."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(lock_path(settings).read_text(encoding="utf-8"))
        if b"workers.services" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent does (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def worker_services(settings: Settings, roles: Sequence[str]) -> list[Service]:
    """A worker for each role; for the role `engine`, one for each engine of this host.

    Raises:
        RuntimeError: engines and GPUs do not match in number.
    """
    found = []
    for role in roles:
        command = [sys.executable, "-m", "console.main", "worker", role]
        if role != "engine":
            found.append(Service(role, command))
            continue
        try:
            variables = engine_variables(settings)
        except ValueError as error:
            raise RuntimeError(str(error)) from None
        found += [Service("engine" if i == 0 else f"engine-{i + 1}", command, env) for i, env in enumerate(variables)]
    return [replace(s, environment={**s.environment, **probe_ports(settings, i)}) for i, s in enumerate(found)]


def probe_ports(settings: Settings, index: int) -> dict[str, str]:
    """Ports of the host's worker number `index`: ten above those of the one before, so that none meets another."""
    ports = {
        "TTTD_HEALTH_PORT": settings.health_port,
        "TTTD_METRICS_PORT": settings.metrics_port,
        "TTTD_TEMPORAL_METRICS_PORT": settings.temporal_metrics_port,
    }
    return {name: str(port + 10 * index) for name, port in ports.items() if port}


class Supervisor:
    """Keeps services running until it is told to stop."""

    def __init__(self, settings: Settings, roles: Sequence[str]) -> None:
        self._settings = settings
        self._server = Service("temporal", temporal_server.server_command(settings))
        self._services = [self._server, *worker_services(settings, roles)]
        self._stopping = False

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            temporal_server.refuse_taken_ports(self._settings)
            temporal_server.write_client_config(self._settings)
            self._start(self._server)
            assert self._server.process is not None
            temporal_server.wait_until_serving(self._settings, self._server.process)
            temporal_server.prepare_namespace(self._settings)
            self._write_state()
            while not self._stopping:
                self._tend()
                time.sleep(0.2)
        finally:
            self._stop_all()

    def _on_signal(self, *_: object) -> None:
        self._stopping = True

    def _tend(self) -> None:
        changed = False
        for service in self._services:
            process = service.process
            if process is not None and process.poll() is None:
                continue
            if process is not None:
                log.warning("service_ended", service=service.name, code=process.returncode)
                service.exits.append(process.returncode)
                service.process = None
                service.next_start = time.monotonic() + min(10.0, 0.5 * len(service.exits))
            if time.monotonic() >= service.next_start:
                self._start(service)
                changed = True
        if changed:
            self._write_state()

    def _start(self, service: Service) -> None:
        with (self._settings.logs / f"{service.name}.out").open("ab") as output:
            service.process = subprocess.Popen(
                service.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
                env=child_environment(
                    **service.environment, TTTD_LOG_FILE=str(self._settings.logs.resolve() / f"{service.name}.log")
                ),
            )
        service.starts += 1
        log.info("service_started", service=service.name, pid=service.process.pid, starts=service.starts)

    def _write_state(self) -> None:
        state = {
            "pid": os.getpid(),
            "ready": True,
            "temporal": temporal_server.address(self._settings),
            "ui": temporal_server.ui_url(self._settings),
            "engine_model": self._settings.engine_model,
            "services": {
                s.name: {"pid": s.process.pid if s.process else None, "starts": s.starts, "exits": s.exits[-5:]}
                for s in self._services
            },
        }
        temporary = state_path(self._settings).with_suffix(".tmp")
        temporary.write_text(json.dumps(state), encoding="utf-8")
        temporary.replace(state_path(self._settings))

    def _stop_all(self) -> None:
        """Workers first, so that they can tell the server what they finished; the server last."""
        for group in (self._services[1:], [self._server]):
            running = [s.process for s in group if s.process is not None and s.process.poll() is None]
            for process in running:
                process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + _STOP_SECONDS
            for process in running:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def main(roles: Sequence[str]) -> int:
    """Entry of the supervisor process."""
    settings = load_settings()
    settings.logs.mkdir(parents=True, exist_ok=True)
    configure_logging(settings.log_level, role="supervisor", file=settings.logs / "supervisor.log")
    with _exclusive(settings) as free:
        if not free:
            print("another supervisor holds", lock_path(settings))
            return 1
        lock_path(settings).write_text(str(os.getpid()), encoding="utf-8")
        try:
            Supervisor(settings, roles).run()
        except RuntimeError as error:
            print(error)
            return 1
        finally:
            state_path(settings).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
