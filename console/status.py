"""What `tttd status --json` prints: models for the whole picture, from services down to a waiting activity.

Knows how the report looks, not how it is gathered (`inquiry.py`). ``python -m console.status`` rewrites the JSON schema,
docs/status.schema.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from workflows.contracts.messages import Phase, StepSummary

SCHEMA_FILE = Path(__file__).resolve().parent.parent / "docs" / "status.schema.json"
VERSION: Final = 1

State = Literal["opening", "running", "paused", "blocked", "stopped", "completed", "failed", "terminated", "unknown"]
"""A run's own states, and three that only its execution knows: it failed, it was terminated (or cancelled), nobody can be asked."""


class Report(BaseModel):
    """A piece of the report: frozen, documented by its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ServiceReport(Report):
    """One process of this machine's supervisor."""

    name: str
    pid: int | None
    starts: int
    """Times it was started; more than 1 means that it ended and came back."""


class ServicesReport(Report):
    """Where things are, and whether they can be reached."""

    temporal: str
    """Address of the Temporal server."""
    namespace: str
    reachable: bool
    problem: str | None = None
    """Why Temporal cannot be asked, and what to do."""
    ui: str | None
    """Temporal's Web UI, where this machine runs it."""
    supervised: bool
    """Whether the supervisor of `tttd up` runs on this machine."""
    processes: tuple[ServiceReport, ...] = ()
    home: str
    store: str
    store_problem: str | None = None
    """Why the object store cannot be asked, and what to do."""
    logs: str


class GridReport(Report):
    """The grid of the step in progress."""

    groups: int
    rollouts: int
    """Of all groups together."""
    sampled: int
    judged: int
    valid: int
    best_score: float | None
    """Best certified score of this grid so far, in the task's unit. Not the run's best."""
    mean_reward: float | None
    """Of the rollouts judged so far; None before the first."""


class Wait(Report):
    """Work that Temporal holds for a run: what it waits for, and what to do if nobody comes."""

    kind: str
    """Activity type, or `workflow` for the run's own progress."""
    role: str
    """The worker role that does it."""
    queue: str
    pollers: int
    """Workers that asked this queue for work in the last 90 s."""
    last_poll: str | None = None
    """ISO 8601: when one of them asked last."""
    waiting: int
    """Not yet taken by a worker."""
    running: int
    attempts: int
    """Highest attempt among them; 1 is the first."""
    since: str | None = None
    """ISO 8601: when the oldest of them was scheduled; for work that is tried again, its first attempt."""
    progress: str | None = None
    """What a worker that does it told last: a phase, or a count."""
    failure: str | None = None
    """Last failure of any of them."""
    advice: str | None = None
    """What to do; None when there is nothing to be done."""


class RunReport(Report):
    """One run."""

    run_id: str
    source: Literal["workflow", "list", "store"]
    """Asked of the workflow itself, taken from Temporal's list, or read from the store because nobody could be asked."""
    state: State
    execution: str | None
    """Temporal's status of the workflow (RUNNING, COMPLETED, ...); None if Temporal does not know it."""
    started: str | None = None
    """ISO 8601, of the newest execution."""
    task: str
    model: str = ""
    score_name: str = "score"
    step: int | None
    """Last committed step; None before the opening commit."""
    steps: int | None
    """Steps asked for in total."""
    best_score: float | None
    """Best certified score so far, in the task's unit."""
    best_known: float | None = None
    policy_version: int | None
    commit: str | None = None
    """Hash of the chain up to `step`."""
    pause_requested: bool = False
    phase: Phase | None = None
    """What the run, or its step in progress, does now."""
    error: str | None = None
    """Why the run is blocked or has failed, and what to do."""
    problem: str | None = None
    """Why this report is not complete."""
    fork_of: str | None = None
    """RUN@STEP of the run that this one is a fork of, and the last step that both have in common."""
    web: str | None = None
    grid: GridReport | None = None
    waits: tuple[Wait, ...] = ()
    recent: tuple[StepSummary, ...] = ()
    """The last committed steps."""


class StatusReport(RunReport):
    """`tttd status RUN --json`: one run, with its grid, its waits and its last steps, and the services around it."""

    version: Literal[1] = VERSION
    """Of this document's shape."""
    at: str
    """ISO 8601, when the report was made."""
    services: ServicesReport


class StatusList(Report):
    """`tttd status --json`: the services and every run, without grids, waits and steps."""

    version: Literal[1] = VERSION
    """Of this document's shape."""
    at: str
    """ISO 8601, when the report was made."""
    services: ServicesReport
    runs: tuple[RunReport, ...]
    """Newest first."""


def schema_text() -> str:
    """The JSON schema of both documents, as docs/status.schema.json holds it."""
    schema = TypeAdapter[StatusReport | StatusList](StatusReport | StatusList).json_schema(mode="serialization")
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    print(f"wrote {SCHEMA_FILE}", file=sys.stderr)
