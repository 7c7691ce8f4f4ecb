"""What a measurement stores, and the numbers that follow from it. Definitions: the package's docstring. Measures nothing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Requests(_Data):
    """To the object store, by one method on one sort of key."""

    calls: int
    bytes: int
    seconds: float
    """Inside the store, added up over threads."""


class History(_Data):
    """Of one or several executions of a workflow type."""

    executions: int
    events_most: int
    bytes_most: int
    bytes_total: int


class PayloadSizes(_Data):
    """Of one execution whose whole history was read."""

    workflow: str
    events: dict[str, int]
    event_bytes_median: float
    payloads: int
    payload_bytes: int
    payload_bytes_most: int
    payload_most_in: str


class Step(_Data):
    """One step. Everything but memory and sizes is of this step alone."""

    step: int
    wall_seconds: float
    between_seconds: float
    """From the end of the step before; from the opening's end for the first."""
    phase_seconds: dict[str, float]
    """As the step's own report has them; `commit` is what they leave of the wall time."""
    work_seconds: dict[str, float]
    """Of the parts that do nothing: engine (CPU of its process), trainer, judge."""
    cpu_seconds: dict[str, float]
    """By process."""
    memory_bytes: dict[str, int]
    """Resident, by process, when the step was over."""
    open_files: dict[str, int]
    threads: dict[str, int]
    other_cpu_seconds: float
    """Used on this machine by anything else, the measurement itself included."""
    load: float
    """Average of the last minute."""
    requests: dict[str, dict[str, Requests]]
    """To the object store, by role and method."""
    histories: dict[str, History]
    """By workflow type."""
    document_bytes: dict[str, int]
    """Of the step's own documents and blobs."""
    database_bytes: int
    """Temporal's, its write-ahead log included."""
    archive_nodes: int


class StoreSize(_Data):
    """The object store when everything was over."""

    files: int
    bytes: int
    disk_bytes: int
    """In blocks of the file system."""


class Measurement(_Data):
    """One run of the command."""

    command: str
    hardware: str
    began: str
    groups: int
    rollouts: int
    train: bool
    response_tokens: int
    judge_slots: int
    store_milliseconds: float = 0.0
    """Added to every request to the object store."""
    judge_microseconds: float
    """For one program, measured apart."""
    opening_seconds: float
    """From the start of the run's workflow to the first step's, the first publication included."""
    steps: tuple[Step, ...]
    run_history: tuple[tuple[int, int], ...] = ()
    """(events, bytes) of each execution of DiscoveryRun."""
    payloads: tuple[PayloadSizes, ...] = ()
    store: StoreSize | None = None
    rollout_bytes: dict[str, int] = {}
    """Mean size of the documents of one rollout of the last step."""
    workflow_tasks_slow: int | None = None
    """That took the control worker more than five seconds, of the ten that Temporal gives them. None: not counted."""
    workflow_tasks_lost: int | None = None
    """That took more than the ten: their result was thrown away."""
    retried: dict[str, int] | None = None
    """Activities that needed another attempt, by role. None: not counted."""
    finished: bool = False

    @property
    def grid(self) -> int:
        return self.groups * self.rollouts


def write(m: Measurement, file: Path) -> None:
    """Write or replace a result file: a field a line, and a step a line."""
    fields = _rounded(m.model_dump(mode="json"))
    steps = ",\n  ".join(json.dumps(step) for step in fields.pop("steps"))
    lines = [f' "{name}": {json.dumps(value)}' for name, value in fields.items()]
    text = ",\n".join([*lines, f' "steps": [\n  {steps}\n ]'])
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    temporary.replace(file)


def read(file: Path) -> Measurement:
    """Read a result file."""
    data = file.read_bytes()
    return Measurement.model_validate_json(gzip.decompress(data) if file.suffix == ".gz" else data)


def _rounded(value: Any) -> Any:
    """Floats to a tenth of a millisecond: what is below is noise."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def wall_ms(m: Measurement, step: Step) -> float:
    """Milliseconds of a step per rollout, the work of the replaced parts included."""
    return 1000 * (step.wall_seconds + step.between_seconds) / m.grid


def orchestration_ms(m: Measurement, step: Step) -> float:
    """See the package's docstring."""
    return 1000 * (step.wall_seconds + step.between_seconds - sum(step.work_seconds.values())) / m.grid


def cpu_ms(m: Measurement, steps: Sequence[Step], process: str) -> float:
    """CPU milliseconds of a process per rollout, over several steps."""
    return 1000 * sum(s.cpu_seconds.get(process, 0.0) for s in steps) / (m.grid * len(steps))


def requests_per_rollout(m: Measurement, steps: Sequence[Step]) -> dict[str, dict[str, float]]:
    """Calls of the object store per rollout, by role and method, over several steps."""
    out: dict[str, dict[str, float]] = {}
    for step in steps:
        for role, methods in step.requests.items():
            for method, found in methods.items():
                calls = out.setdefault(role, {})
                calls[method] = calls.get(method, 0.0) + found.calls / (m.grid * len(steps))
    return out


def created_bytes(step: Step) -> int:
    """Bytes that the step's creates brought to the store, copies that were there already included."""
    return sum(
        found.bytes for methods in step.requests.values() for method, found in methods.items() if method.startswith("create")
    )
