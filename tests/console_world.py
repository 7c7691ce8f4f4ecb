"""A small but real run for the console's tests: real records, judge, selection, barrier and commit.

Programs are sampled from a table and graded without a sandbox, and nothing is trained, so that a step takes milliseconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.barrier.activity import BarrierActivities
from activities.blobs import Blobs, LocalStore
from activities.commit.activity import CommitActivities
from activities.open.activity import OpenActivities
from activities.records import PublishReport, RolloutRecord, StepPlan, Verdict
from activities.run_store import SEED, RunStore
from activities.sample.prompt import template_digest_source
from activities.select.activity import SelectActivities
from tasks.registry import TaskSource
from workers.settings import Settings
from workflows import names
from workflows.contracts import messages as m
from workflows.contracts.base import Coordinate, Outcome, PolicyRef, RunRef
from workflows.contracts.request import parse_request

TASK = "circle_packing_26"
ENGINE = "console-test"
SETTINGS = {"train": "off", "model": "tiny", "search": {"groups": 2, "rollouts": 3, "steps": 2}}
ARGUMENTS = ("--set", "train=off", "--set", "model=tiny", "--set", "search.groups=2", "--set", "search.rollouts=3")


def write_model(folder: Path) -> None:
    """A model folder with headers only as large as LoRA's shapes need."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    projections = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
    weights = {f"model.layers.0.{name}.weight": np.zeros((4, 4), np.float32) for name in projections}
    safetensors.numpy.save_file(weights, folder / "model.safetensors")


def packing(radius: float) -> bytes:
    """A program's result: 25 equal circles on a grid, and one small one in a gap, as JSON."""
    points = [[0.1 + 0.2 * i, 0.1 + 0.2 * j] for i in range(5) for j in range(5)] + [[0.2, 0.2]]
    return json.dumps([points, [radius] * 25 + [0.02], 0.0]).encode()


def radius_of(at: Coordinate) -> float:
    """Better from step to step and from rollout to rollout; the last rollout of each group overlaps and is invalid."""
    return 0.2 if at.rollout == 2 else 0.09 + 0.002 * at.step + 0.001 * at.group + 0.0001 * at.rollout


@dataclass
class World:
    """One home directory with a store, a model and the activities of a run."""

    home: Path
    blobs: Blobs
    settings: Settings
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Samplers wait for it."""
    broken: set[int] = field(default_factory=set)
    """Steps whose programs the judge refuses with an error that nobody can retry away."""

    flaky: set[int] = field(default_factory=set)
    """Steps whose programs the judge refuses with an error that is worth another attempt."""

    @classmethod
    def make(cls, home: Path) -> World:
        write_model(home / "models" / "tiny")
        settings = Settings(home=home, store=str(home / "store"), model_dirs=(home / "models",), task_dirs=())
        world = cls(home, Blobs(LocalStore(home / "store")), settings)
        world.gate.set()
        return world

    @property
    def environment(self) -> dict[str, str]:
        """For the command line."""
        return {"TTTD_HOME": str(self.home), "TTTD_STORE": str(self.home / "store"), "TTTD_MODEL_DIRS": f'["{self.home}/models"]'}

    # What is not real ------------------------------------------------------------------------------------------------------
    def sample_now(self, run: RunRef, at: Coordinate, plan: str, policy: PolicyRef) -> m.Sampled:
        store = RunStore(self.blobs, run.run_id)
        parent = store.load(StepPlan, plan).groups[at.group].parent
        program = f"def run_packing():\n    # {at}\n    return {radius_of(at)!r}\n"
        record = RolloutRecord(
            at=at,
            parent=parent.id,
            policy_version=policy.version,
            policy_name=policy.name,
            engine=ENGINE,
            boot_id="boot",
            seed=at.rollout,
            prompt_tokens=(1, 2),
            response_tokens=(at.step, at.group, at.rollout),
            log_probs=(-0.5, -0.5, -0.5),
            mask=(1, 1, 1),
            finish_reason="stop",
            text=program,
            program=program,
        )
        digest, _ = store.claim(store.rollout_key(at, "rollout"), record)
        return m.Sampled(rollout=digest, response_tokens=3, has_program=True)

    def judge_now(self, run: RunRef, at: Coordinate, radius: float) -> m.Judged:
        store = RunStore(self.blobs, run.run_id)
        grade = TaskSource().load(TASK).make_judge().grade(packing(radius))
        verdict = Verdict(
            at=at,
            outcome=Outcome.VALID if grade.valid else Outcome.INVALID,
            reason=grade.reason,
            score=grade.score,
            exact=str(grade.exact) if grade.exact is not None else None,
            value=grade.score,
            reward=grade.score or 0.0,
            construction=store.put(grade.construction) if grade.valid else None,
        )
        digest, _ = store.claim(store.rollout_key(at, "verdict"), verdict)
        return m.Judged(verdict=digest, outcome=verdict.outcome, score=verdict.score, reward=verdict.reward)

    # Activities -------------------------------------------------------------------------------------------------------------
    def opening(self) -> OpenActivities:
        return OpenActivities(self.blobs, TaskSource(), self.settings.model_directories, template_digest_source())

    def control_activities(self) -> list[Callable[..., Any]]:
        opening = self.opening()

        @activity.defn(name=names.LIST_ENGINES)
        async def list_engines(request: m.ListEnginesRequest) -> m.Engines:
            return m.Engines(engines=(ENGINE,))

        return [
            opening.prepare_run,
            opening.open_run,
            SelectActivities(self.blobs).select_parents,
            BarrierActivities(self.blobs, TaskSource()).assemble_batch,
            CommitActivities(self.blobs, TaskSource()).commit_step,
            list_engines,
        ]

    def sample_activity(self) -> Callable[..., Any]:
        @activity.defn(name=names.SAMPLE)
        async def sample(request: m.SampleRequest) -> m.Sampled:
            while not self.gate.is_set():
                activity.heartbeat()
                await asyncio.sleep(0.1)
            return self.sample_now(request.run, request.at, request.plan, request.policy)

        return sample

    def judge_activities(self) -> list[Callable[..., Any]]:
        @activity.defn(name=names.JUDGE)
        async def judge(request: m.JudgeRequest) -> m.Judged:
            if request.at.step in self.broken:
                raise ApplicationError("blob 00 is missing from the store", type="CorruptBlob", non_retryable=True)
            if request.at.step in self.flaky and (request.at.group, request.at.rollout) == (0, 0):
                raise ApplicationError("no room in the sandbox", type="JudgeError")
            return self.judge_now(request.run, request.at, radius_of(request.at))

        @activity.defn(name=names.JUDGE_SEED)
        async def judge_seed(request: m.JudgeSeedRequest) -> m.Judged:
            return self.judge_now(request.run, SEED, 0.09)

        return [judge, judge_seed]

    def publish_activity(self) -> Callable[..., Any]:
        @activity.defn(name=names.PUBLISH)
        async def publish(request: m.PublishRequest) -> m.Published:
            store = RunStore(self.blobs, request.run.run_id)
            report = PublishReport(
                engine=ENGINE, boot_id="boot", policy=request.policy.name, version=request.policy.version, passed=True
            )
            return m.Published(report=store.put(report), engine=ENGINE, boot_id="boot", passed=True)

        return publish

    # A run without a server -------------------------------------------------------------------------------------------------
    def open_run(self, run_id: str, **changes: Any) -> tuple[RunRef, m.Opened]:
        """The opening commit of a run."""
        request = parse_request({"task": TASK, **SETTINGS, **changes})
        environment, opening = ActivityEnvironment(), self.opening()
        prepared = environment.run(opening.prepare_run, m.PrepareRequest(run_id=run_id, request=request))
        if prepared.judge_seed:
            self.judge_now(prepared.run, SEED, 0.09)
        return prepared.run, environment.run(opening.open_run, m.OpenRequest(run=prepared.run))

    def commit_steps(self, run: RunRef, opened: m.Opened, steps: int) -> m.Committed:
        """Steps 1 to `steps`, by the real activities."""
        environment, head = ActivityEnvironment(), opened.head
        committed: m.Committed | None = None
        for step in range(1, steps + 1):
            select = SelectActivities(self.blobs).select_parents
            selected = environment.run(select, m.SelectRequest(run=run, step=step, archive=head.archive))
            for at in (Coordinate(step=step, group=g, rollout=r) for g in range(selected.groups) for r in range(3)):
                self.sample_now(run, at, selected.plan, head.policy)
                self.judge_now(run, at, radius_of(at))
            assemble = BarrierActivities(self.blobs, TaskSource()).assemble_batch
            asked = m.AssembleRequest(run=run, step=step, plan=selected.plan, policy=head.policy)
            batch = environment.run(assemble, asked).batch
            request = m.CommitRequest(run=run, step=step, head=head, plan=selected.plan, batch=batch, policy=head.policy)
            committed = environment.run(CommitActivities(self.blobs, TaskSource()).commit_step, request)
            head = committed.head
        assert committed is not None
        return committed
