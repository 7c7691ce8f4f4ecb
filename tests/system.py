"""The whole system as separate processes, for tests that kill parts of it: a real Temporal server and the five roles."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowHandle, WorkflowQueryFailedError
from temporalio.service import RPCError

from activities.blobs import Blobs, LocalStore
from activities.records import ArchiveState, StepCommit
from activities.run_store import RunStore
from workers import temporal_server
from workers.connect import connect_temporal
from workers.ports import free_port
from workers.settings import Settings
from workflows import names
from workflows.contracts import messages as m

ROLES = ("control", "sample", "judge", "train", "engine")

SHORT_TIMEOUTS = {
    "heartbeat_seconds": 5,
    "judge_heartbeat_seconds": 5,
    "retry_seconds": 0.5,
    "engine_wait_seconds": 5,
}
"""Operational time-outs for a test: none of them is part of the run's identity."""


class System:
    """Processes that can be killed and started again one by one."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = home
        self.settings = Settings(home=home, temporal_port=free_port(), temporal_ui_port=free_port(), engine_id="here")
        self.blobs = Blobs(LocalStore(home / "store"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(("TEMPORAL_", "TTTD_"))}
        self._environment |= {
            "TTTD_HOME": str(home),
            "TTTD_TEMPORAL_PORT": str(self.settings.temporal_port),
            "TTTD_TEMPORAL_UI_PORT": str(self.settings.temporal_ui_port),
            "TTTD_ENGINE_ID": "here",
            **environment,
        }
        self.settings.logs.mkdir(parents=True)

    # Processes ------------------------------------------------------------------------------------------------------------
    def start_temporal(self) -> None:
        temporal_server.write_client_config(self.settings)
        process = self._spawn("temporal", temporal_server.server_command(self.settings))
        temporal_server.wait_until_serving(self.settings, process)

    def start(self, *roles: str) -> None:
        for role in roles:
            self._spawn(role, [sys.executable, "-m", "console.main", "worker", role])

    def start_all(self) -> None:
        self.start_temporal()
        self.start(*ROLES)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        process = self._processes.pop(name)
        process.send_signal(number)
        process.wait(30)

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(30)
        self._processes.clear()

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def _spawn(self, name: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        log = self.settings.logs.resolve() / f"{name}.log"
        with (self.settings.logs / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment | environment | {"TTTD_LOG_FILE": str(log)},
                start_new_session=True,
            )
        self._processes[name] = process
        return process

    # Command line ---------------------------------------------------------------------------------------------------------
    def temporal(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Temporal's own CLI against this server."""
        command = [temporal_server.find_temporal(), *arguments, "--address", temporal_server.address(self.settings)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def tttd(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "console.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=self._environment)

    # Runs -----------------------------------------------------------------------------------------------------------------
    async def run(
        self, name: str, request: dict[str, Any], disturb: Callable[[], None] | None = None, seconds: float = 400
    ) -> m.RunResult:
        """Start a run, disturb it, and wait for its end; one that blocks, or takes too long, fails with the ends of all logs."""
        client = await connect_temporal(self.settings)
        handle = await client.start_workflow(names.DISCOVERY_RUN, request, id=f"run/{name}", task_queue=names.CONTROL_QUEUE)
        if disturb is not None:
            await asyncio.to_thread(disturb)
        result = asyncio.create_task(handle.result())
        try:
            for _ in range(round(seconds / 2)):
                done, _ = await asyncio.wait({result}, timeout=2)
                if done and isinstance(result.exception(), RPCError):
                    result = asyncio.create_task(handle.result())  # the server may be the one that was killed
                elif done:
                    return m.RunResult.model_validate(result.result())
                await self._fail_if_blocked(handle)
        finally:
            result.cancel()
        raise AssertionError(f"run {name} did not end within {seconds:.0f} s; logs in {self.settings.logs}\n{self.log_tails()}")

    async def _fail_if_blocked(self, handle: WorkflowHandle[Any, Any]) -> None:
        try:
            status = await handle.query(names.STATUS, result_type=m.RunStatus, rpc_timeout=timedelta(seconds=5))
        except (RPCError, WorkflowQueryFailedError):
            return  # the control worker may be the one that was killed
        assert status.state != "blocked", f"{status.error}\n{self.log_tails()}"

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float = 180, pause: float = 0.01) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {seconds:.0f} s; logs in {self.settings.logs}\n{self.log_tails()}")
            time.sleep(pause)

    def entries(self, run: str, step: int, suffix: str) -> dict[str, str]:
        """Stored entries of a step by key: what was done, by digest."""
        store = self.blobs.store
        prefix = f"runs/{run}/steps/{step:06d}/"
        return {key: store.get(key).decode() for key in store.keys(prefix) if key.endswith(suffix)}

    def has(self, run: str, step: int, what: str) -> bool:
        return self.blobs.store.exists(f"runs/{run}/steps/{step:06d}/{what}")

    def chain(self, run: str) -> list[StepCommit]:
        """The commits of a run, each checked to name its predecessor."""
        store = RunStore(self.blobs, run)
        last = store.last_step()
        assert last is not None
        commits = []
        previous = None
        for step in range(last + 1):
            digest = store.commit_digest(step)
            assert digest is not None, f"step {step} has no commit"
            commit = store.load(StepCommit, digest)
            assert commit.previous == previous
            previous = digest
            commits.append(commit)
        return commits

    def archive(self, run: str) -> ArchiveState:
        store = RunStore(self.blobs, run)
        return store.load(ArchiveState, self.chain(run)[-1].archive)

    def events(self, role: str, event: str) -> list[dict[str, Any]]:
        """Log lines of one event, in order."""
        lines = (self.settings.logs / f"{role}.log").read_text(encoding="utf-8").splitlines()
        parsed = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [line for line in parsed if line.get("event") == event]

    def log_tails(self, lines: int = 8) -> str:
        texts = []
        for file in sorted(self.settings.logs.iterdir()):
            tail = re.sub(r"[^\x20-\x7e\n]", "?", file.read_text(encoding="utf-8", errors="replace")).splitlines()[-lines:]
            texts.append(f"--- {file.name}\n" + "\n".join(line[:400] for line in tail))
        return "\n".join(texts)


def coordinates(events: list[dict[str, Any]], run: str) -> list[tuple[int, int, int]]:
    """(step, group, rollout) of sampling or judging events of one run."""
    return [(e["step"], e["group"], e["rollout"]) for e in events if e["run"] == run]
