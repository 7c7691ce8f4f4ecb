"""The processes of the measurement: Temporal's server as `tttd up` starts it, and one worker per role. Knows no run.

Everything lies in one folder and dies with the process that started it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from activities.blobs import Blobs, LocalStore
from activities.fleet import read_notice
from scripts.scale.engine import RESPONSE_TOKENS
from scripts.scale.worker import STORE_DELAY
from workers import temporal_server
from workers.ports import free_port
from workers.services import ROLES, die_with_parent
from workers.settings import BUILT_IN_PROPOSERS, Settings

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MODEL = "noop"
_ENGINE = "scale"
_POSITIONS = 1 << 17
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0


class Fleet:
    """One host with everything.

    Args:
        home: a folder that is not there yet.
        response_tokens: of every response.
        judge_slots: programs judged at once, as many as a fleet of judge hosts would have cores.
        store_seconds: that every request to the object store takes longer.
    """

    def __init__(self, home: Path, *, response_tokens: int, judge_slots: int, store_seconds: float = 0.0) -> None:
        self.home = home.resolve()
        self.settings = Settings(home=self.home, temporal_port=free_port(), temporal_ui_port=free_port(), engine_id=_ENGINE)
        self.blobs = Blobs(LocalStore(self.home / "store"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        engine = {"PYTHONPATH": f"{HERE / 'standin'}:{ROOT}", RESPONSE_TOKENS: str(response_tokens)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TEMPORAL_", "TTTD_"))}
        self._environment = kept | {
            "TTTD_HOME": str(self.home),
            "TTTD_TEMPORAL_PORT": str(self.settings.temporal_port),
            "TTTD_TEMPORAL_UI_PORT": str(self.settings.temporal_ui_port),
            "TTTD_ENGINE_ID": _ENGINE,
            "TTTD_ENGINE_KIND": "sglang",
            "TTTD_ENGINE_MODEL": MODEL,
            "TTTD_ENGINE_ENVIRONMENT": json.dumps(engine),
            "TTTD_TASK_DIRS": json.dumps([str(HERE / "task")]),
            "TTTD_MODEL_DIRS": json.dumps([str(self.home / "models")]),
            "TTTD_JUDGE_SLOTS": str(judge_slots),
            STORE_DELAY: str(store_seconds),
        }

    def start(self) -> None:
        """Start everything and wait for Temporal; workers connect by themselves.

        Raises:
            RuntimeError: the server does not come up.
        """
        _make_model(self.home / "models" / MODEL)
        self.settings.logs.mkdir(parents=True)
        temporal_server.write_client_config(self.settings)
        server = self._spawn("temporal", temporal_server.server_command(self.settings))
        temporal_server.wait_until_serving(self.settings, server)
        temporal_server.prepare_namespace(self.settings)
        for role in ROLES:
            self._spawn(role, [sys.executable, "-m", "scripts.scale.worker", role])

    def wait_for_engine(self) -> None:
        """Wait until the engine has said that it is there: before that no run can begin.

        Raises:
            RuntimeError: it has not within two minutes, or a process ended.
        """
        deadline = time.monotonic() + _START_SECONDS
        while read_notice(self.blobs, _ENGINE) is None:
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"no engine within {_START_SECONDS:.0f} s; logs: {self.settings.logs}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Workers first, so that they can tell the server what they finished."""
        for names in (ROLES, ("temporal",)):
            running = [self._processes.pop(name) for name in names if name in self._processes]
            for process in running:
                process.send_signal(signal.SIGTERM)
            for process in running:
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def check(self) -> None:
        """Whether everything that was started still runs.

        Raises:
            RuntimeError: a process ended; names it and its log.
        """
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with code {process.returncode}; see {self.settings.logs / name}.log and .out")

    def pids(self) -> dict[str, int]:
        """Process ids by name: `temporal`, the five workers (`engine` is the worker), and `engine process`."""
        found = {name: process.pid for name, process in self._processes.items()}
        file = self.home / "engines" / f"{_ENGINE}.pid"
        if file.is_file():
            found["engine process"] = int(json.loads(file.read_text(encoding="utf-8"))["leader"])
        return found

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.settings.logs / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                preexec_fn=die_with_parent,
                env=self._environment | {"TTTD_LOG_FILE": str(self.settings.logs / f"{name}.log")},
            )
        self._processes[name] = process
        return process


def _make_model(folder: Path) -> None:
    """The built-in proposer, with a context that takes responses of any length."""
    shutil.copytree(BUILT_IN_PROPOSERS / "packing", folder)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"max_position_embeddings": _POSITIONS}), encoding="utf-8")
