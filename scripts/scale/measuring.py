"""Follows one run from step to step and writes down what each cost. Starts no process and no run."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from temporalio.client import Client

from activities.records import Batch, Checkpoint, StepCommit, StepReport, TrainRecord
from activities.run_store import RunStore
from scripts.scale.fleet import HERE, Fleet
from scripts.scale.histories import Execution, closed_execution, executions_of, payloads
from scripts.scale.processes import Usage, machine_cpu_seconds, usage
from scripts.scale.records import History, Measurement, PayloadSizes, Requests, Step, StoreSize, write
from workers.services import ROLES
from workflows import names

_JUDGED = 2000
"""Programs that the judge's own time is measured with."""


@dataclass
class _Moment:
    """Everything that only grows, at the end of a step."""

    time: float
    usages: dict[str, Usage]
    machine: float
    requests: dict[str, dict[str, Requests]]
    trainer: float


@dataclass
class Follower:
    """Of one run.

    Args:
        measurement: what is known beforehand.
        file: rewritten after every step, so that a run that is cut off leaves what it had.
    """

    fleet: Fleet
    client: Client
    run: str
    measurement: Measurement
    file: Path
    _last: _Moment = field(init=False)
    _closed: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._last = self._moment()

    # Steps ----------------------------------------------------------------------------------------------------------------
    def has_step(self, step: int) -> bool:
        """Whether a step's report is written: the last thing that its commit does."""
        return self.fleet.blobs.store.exists(RunStore(self.fleet.blobs, self.run).step_key(step, "report"))

    async def take_step(self, step: int) -> Step:
        """Measure a step that has just been committed.

        Raises:
            TimeoutError: its workflow does not end.
        """
        before, now = self._last, self._moment()
        closed = await closed_execution(self.client, names.step_workflow_id(self.run, step))
        if step == 1:
            opened = await executions_of(self.client, names.run_workflow_id(self.run))
            self._closed = closed.started
            self._set(opening_seconds=closed.started - opened[0].started)
        taken = await self._step(step, closed, before, now)
        self._last, self._closed = now, closed.closed or closed.started
        self._set(steps=(*self.measurement.steps, taken))
        return taken

    async def _step(self, step: int, closed: Execution, before: _Moment, now: _Moment) -> Step:
        m = self.measurement
        store = RunStore(self.fleet.blobs, self.run)
        report = store.read(StepReport, store.step_key(step, "report"))
        assert report is not None
        wall = (closed.closed or closed.started) - closed.started
        cpu = {name: u.cpu_seconds - _cpu(before, name) for name, u in now.usages.items()}
        work = {
            "engine": cpu.get("engine process", 0.0),
            "trainer": now.trainer - before.trainer,
            "judge": m.judge_microseconds * 1e-6 * m.grid,
        }
        groups = [await closed_execution(self.client, names.group_workflow_id(self.run, step, group)) for group in range(m.groups)]
        return Step(
            step=step,
            wall_seconds=wall,
            between_seconds=closed.started - self._closed,
            phase_seconds={**report.seconds, "commit": wall - sum(report.seconds.values())},
            work_seconds=work,
            cpu_seconds=cpu,
            memory_bytes={name: u.memory_bytes for name, u in now.usages.items()},
            open_files={name: u.files for name, u in now.usages.items()},
            threads={name: u.threads for name, u in now.usages.items()},
            other_cpu_seconds=now.machine - before.machine - sum(cpu.values()),
            load=os.getloadavg()[0],
            requests=_difference(now.requests, before.requests),
            histories={names.DISCOVERY_STEP: _history([closed]), names.ROLLOUT_GROUP: _history(groups)},
            document_bytes=_documents(store, step),
            database_bytes=sum(f.stat().st_size for f in self.fleet.home.glob("temporal.db*")),
            archive_nodes=int(report.metrics.get("search/archive_size") or 0),
        )

    def _moment(self) -> _Moment:
        numbers = {role: _numbers(self.fleet.home / "numbers" / f"{role}.json") for role in ROLES}
        return _Moment(
            time=time.time(),
            usages={name: usage(pid) for name, pid in self.fleet.pids().items()},
            machine=machine_cpu_seconds(),
            requests={
                role: {name: Requests.model_validate(count) for name, count in found["store"].items()}
                for role, found in numbers.items()
            },
            trainer=numbers["train"]["work_seconds"],
        )

    # The end --------------------------------------------------------------------------------------------------------------
    async def finish(self, read_steps: tuple[int, ...]) -> None:
        """Look at the histories of some steps in full, at those of the run, and at the whole store."""
        run = names.run_workflow_id(self.run)
        executions = await executions_of(self.client, run)
        log = (self.fleet.settings.logs / "control.log").read_text(encoding="utf-8")
        ids = [run]
        for step in read_steps:
            ids += [names.step_workflow_id(self.run, step), names.group_workflow_id(self.run, step, 0)]
        self._set(
            run_history=tuple((e.events, e.bytes) for e in executions),
            payloads=tuple([await self._payloads(i) for i in ids]),
            rollout_bytes=_rollout_bytes(RunStore(self.fleet.blobs, self.run), read_steps[-1]),
            store=_store_size(self.fleet.home / "store"),
            retried={role: _retried(self.fleet.settings.logs / f"{role}.log") for role in ROLES},
            workflow_tasks_slow=log.count("Workflow task duration exceeded"),
            workflow_tasks_lost=log.count("Task not found when completing"),
            finished=True,
        )

    async def _payloads(self, workflow_id: str) -> PayloadSizes:
        found = await payloads(self.client, workflow_id)
        return PayloadSizes(
            workflow=workflow_id.removeprefix(names.run_workflow_id(self.run)).lstrip("/") or "run",
            events=found.events,
            event_bytes_median=found.event_bytes_median,
            payloads=found.count,
            payload_bytes=found.bytes,
            payload_bytes_most=found.largest,
            payload_most_in=found.largest_in,
        )

    def _set(self, **fields: Any) -> None:
        self.measurement = self.measurement.model_copy(update=fields)
        write(self.measurement, self.file)


def judge_microseconds() -> float:
    """What the judge takes for one program."""
    spec = importlib.util.spec_from_file_location("scale_judge", HERE / "task" / "noop" / "tests" / "judge.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    judge = module.ReadsTheText()
    began = time.perf_counter()
    for i in range(_JUDGED):
        judge.submit(f"def run():\n    return {i / _JUDGED:.9f}\n")
    return 1e6 * (time.perf_counter() - began) / _JUDGED


def _numbers(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:  # the worker is starting
        return {"store": {}, "work_seconds": 0.0}
    return found


def _retried(log: Path) -> int:
    """Activities of a worker that came through at a later attempt than the first, or failed at one, once each."""
    found = set()
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line) if line.endswith("}") else {}  # the last one may be half written
        if isinstance(entry.get("attempt"), int) and entry["attempt"] > 1:
            found.add((entry.get("activity"), *(entry.get(key) for key in ("workflow", "step", "group", "rollout"))))
    return len(found)


def _cpu(moment: _Moment, name: str) -> float:
    return moment.usages[name].cpu_seconds if name in moment.usages else 0.0


def _difference(now: dict[str, dict[str, Requests]], before: dict[str, dict[str, Requests]]) -> dict[str, dict[str, Requests]]:
    out: dict[str, dict[str, Requests]] = {}
    for role, methods in now.items():
        for method, count in methods.items():
            old = before.get(role, {}).get(method, Requests(calls=0, bytes=0, seconds=0.0))
            if count.calls > old.calls:
                out.setdefault(role, {})[method] = Requests(
                    calls=count.calls - old.calls, bytes=count.bytes - old.bytes, seconds=round(count.seconds - old.seconds, 4)
                )
    return out


def _history(executions: list[Execution]) -> History:
    return History(
        executions=len(executions),
        events_most=max(e.events for e in executions),
        bytes_most=max(e.bytes for e in executions),
        bytes_total=sum(e.bytes for e in executions),
    )


def _documents(store: RunStore, step: int) -> dict[str, int]:
    """Sizes of what a step stores besides its rollouts and verdicts."""
    found = {what: store.find(store.step_key(step, what)) for what in ("plan", "batch", "train", "commit", "report")}
    sizes = {what: len(store.blobs.get(digest)) for what, digest in found.items() if digest is not None}
    commit = store.read(StepCommit, store.step_key(step, "commit"))
    assert commit is not None
    sizes["archive"] = len(store.blobs.get(commit.archive))
    if (record := store.read(TrainRecord, store.step_key(step, "train"))) is not None:
        sizes["gate evidence"] = len(store.blobs.get(record.gate))
        checkpoint = store.load(Checkpoint, record.checkpoint)
        manifest = json.loads(store.blobs.get(checkpoint.adapter))
        sizes["adapter"] = len(store.blobs.get(manifest["weights"]))
        sizes["optimizer"] = 0 if checkpoint.optimizer is None else len(store.blobs.get(checkpoint.optimizer))
    return sizes


def _rollout_bytes(store: RunStore, step: int) -> dict[str, int]:
    digest = store.find(store.step_key(step, "batch"))
    assert digest is not None
    rows = store.load(Batch, digest).rows
    documents = {
        "rollout": [len(store.blobs.get(row.rollout)) for row in rows],
        "verdict": [len(store.blobs.get(row.verdict)) for row in rows],
        "construction": [len(store.blobs.get(row.construction)) for row in rows if row.construction is not None],
    }
    return {name: round(sum(sizes) / max(1, len(sizes))) for name, sizes in documents.items()}


def _store_size(folder: Path) -> StoreSize:
    found = [file.stat() for file in folder.rglob("*") if file.is_file()]
    return StoreSize(files=len(found), bytes=sum(f.st_size for f in found), disk_bytes=512 * sum(f.st_blocks for f in found))
