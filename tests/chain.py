"""A run without an engine or a judge: real open, select, barrier and commit over rollouts and verdicts that a test writes.

What is stored is what the real rooms store; only where programs and scores come from is made up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from temporalio.testing import ActivityEnvironment

from activities.barrier.activity import BarrierActivities
from activities.blobs import Blobs
from activities.commit.activity import CommitActivities
from activities.models import PROJECTIONS
from activities.open.activity import OpenActivities
from activities.records import ArchiveState, RolloutRecord, StepPlan, Verdict
from activities.run_store import RunStore
from activities.select.activity import SelectActivities
from tasks.bundles import BundleCache
from tasks.registry import TaskSource
from workflows.contracts.base import Coordinate, Head, Outcome, PolicyRef, RunRef
from workflows.contracts.messages import (
    Assembled,
    AssembleRequest,
    CommitRequest,
    Committed,
    Opened,
    OpenRequest,
    Prepared,
    PrepareRequest,
    Selected,
    SelectRequest,
)
from workflows.contracts.request import parse_request

TASK_TOML = """
[metadata.discovery]
judge = "tasks.judges.circle_packing:CirclePacking"
judge_parameters = {{ circles = 3 }}
entry = "run"
direction = "{direction}"
score_name = "size"
construction_name = "parent"
default_start = "empty"

[metadata.discovery.limits]
wall_seconds = 5.0

[metadata.discovery.starts.empty]
value = 0.5

[metadata.discovery.starts.given]
program = "seeds/given.py"
"""


def make_task(directory: Path, name: str = "sizes", direction: str = "maximize") -> Path:
    """A task folder with a start that has no program and one that has."""
    folder = directory / name
    (folder / "seeds").mkdir(parents=True)
    (folder / "task.toml").write_text(TASK_TOML.format(direction=direction))
    (folder / "instruction.md").write_text("Return the largest size.\n")
    (folder / "seeds" / "given.py").write_text("def run():\n    return 1\n")
    return folder


def make_model(folder: Path, width: int = 4) -> Path:
    """A model folder as far as opening a run reads it: configuration and the shapes of one layer's projections."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    tensors = {f"model.layers.0.self_attn.{name}.weight": np.ones((width, width), np.float32) for name in PROJECTIONS}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass
class Chain:
    """One run in one store."""

    blobs: Blobs
    tasks_directory: Path
    models_directory: Path
    run_id: str = "sizes-run"
    request: Any = None
    prompt_text: str = "prompt"

    @classmethod
    def fresh(cls, blobs: Blobs, folder: Path, **request: Any) -> Chain:
        make_task(folder / "tasks")
        make_model(folder / "models" / "tiny")
        base = {"task": "sizes", "model": "tiny", "search": {"groups": 2, "rollouts": 3, "steps": 4}, "lora": {"rank": 2}}
        return cls(blobs, folder / "tasks", folder / "models", request=base | request)

    def with_request(self, **changes: Any) -> Chain:
        return replace(self, request={**self.request, **changes})

    @property
    def store(self) -> RunStore:
        return RunStore(self.blobs, self.run_id)

    @property
    def _tasks(self) -> TaskSource:
        return TaskSource([self.tasks_directory], BundleCache(self.tasks_directory.parent / "bundles", self.blobs.get))

    # The rooms ------------------------------------------------------------------------------------------------------------
    def _open_activities(self) -> OpenActivities:
        return OpenActivities(self.blobs, self._tasks, (self.models_directory,), self.prompt_text)

    def prepare(self) -> Prepared:
        request = PrepareRequest(run_id=self.run_id, request=parse_request(self.request))
        return ActivityEnvironment().run(self._open_activities().prepare_run, request)

    def open(self) -> tuple[RunRef, Opened]:
        run = self.prepare().run
        return run, ActivityEnvironment().run(self._open_activities().open_run, OpenRequest(run=run))

    def select(self, run: RunRef, head: Head) -> Selected:
        request = SelectRequest(run=run, step=head.step + 1, archive=head.archive)
        return ActivityEnvironment().run(SelectActivities(self.blobs).select_parents, request)

    def assemble(self, run: RunRef, step: int, plan: str, policy: PolicyRef) -> Assembled:
        request = AssembleRequest(run=run, step=step, plan=plan, policy=policy)
        return ActivityEnvironment().run(BarrierActivities(self.blobs, self._tasks).assemble_batch, request)

    def commit(self, request: CommitRequest) -> Committed:
        return ActivityEnvironment().run(CommitActivities(self.blobs, self._tasks).commit_step, request)

    # What a test writes -----------------------------------------------------------------------------------------------------
    def coordinates(self, plan: str, step: int) -> list[Coordinate]:
        groups = self.store.load(StepPlan, plan).groups
        rollouts = parse_request(self.request).search.rollouts
        return [Coordinate(step=step, group=g.group, rollout=r) for g in groups for r in range(rollouts)]

    def write(self, plan: str, at: Coordinate, policy: PolicyRef, result: float | Outcome, **changes: Any) -> None:
        """Store one rollout and its verdict; `changes` replace fields of either document."""
        documents = (
            ("rollout", rollout_record(self.store.load(StepPlan, plan), at, policy)),
            ("verdict", verdict(self.store, at, result)),
        )
        for what, document in documents:
            fields = {k: v for k, v in changes.items() if k in type(document).model_fields}
            self.store.claim(self.store.rollout_key(at, what), document.model_copy(update=fields))

    def step(
        self, run: RunRef, head: Head, results: Callable[[Coordinate], float | Outcome], order: Iterable[int] | None = None
    ) -> tuple[CommitRequest, Committed]:
        """One whole step without training; rollouts arrive in the given order of positions."""
        plan = self.select(run, head).plan
        coordinates = self.coordinates(plan, head.step + 1)
        for i in order if order is not None else range(len(coordinates)):
            self.write(plan, coordinates[i], head.policy, results(coordinates[i]))
        batch = self.assemble(run, head.step + 1, plan, head.policy).batch
        request = CommitRequest(run=run, step=head.step + 1, head=head, plan=plan, batch=batch, policy=head.policy)
        return request, self.commit(request)

    def archive(self, head: Head) -> ArchiveState:
        return self.store.load(ArchiveState, head.archive)


def rollout_record(plan: StepPlan, at: Coordinate, policy: PolicyRef) -> RolloutRecord:
    program = f"def run():\n    return {str(at)!r}\n"
    return RolloutRecord(
        at=at,
        parent=plan.groups[at.group].parent.id,
        policy_version=policy.version,
        policy_name=policy.name,
        engine="engine",
        boot_id="boot",
        seed=0,
        prompt_tokens=(1, 2, 3),
        response_tokens=(at.step, at.group, at.rollout),
        log_probs=(-0.5, -0.25, -1.0),
        mask=(1, 1, 1),
        finish_reason="stop",
        text=f"```python\n{program}```",
        program=program,
    )


def verdict(store: RunStore, at: Coordinate, result: float | Outcome) -> Verdict:
    if isinstance(result, Outcome):
        return Verdict(at=at, outcome=result, reason=result.value)
    construction = store.put({"size": result})
    exact = f"{int(result * 1000)}/1000"
    return Verdict(
        at=at, outcome=Outcome.VALID, reason="", score=result, exact=exact, value=result, reward=result, construction=construction
    )


def spread(at: Coordinate) -> float | Outcome:
    """A fixed mixture of valid, better and failed rollouts."""
    failures = {1: Outcome.CRASHED, 4: Outcome.NO_PROGRAM}
    number = at.step * 7 + at.group * 3 + at.rollout
    return failures.get(number % 5, 1.0 + (number * 37 % 101) / 100)
