"""The `judge` activity: one verdict, stored as soon as it is decided, and never decided twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

from temporalio import activity

from activities.blobs import Blobs
from activities.context import beating_async, log, translate_errors
from activities.errors import JudgeError, JudgeStarved
from activities.judge.cases import Services
from activities.judge.judging import Case, Judgement, judge, limits_of, stored_construction, verdict_of
from activities.judge.sandbox import Sandbox
from activities.judge.seeding import certify_roots
from activities.judge.slots import Slots
from activities.records import RolloutRecord, RunSpec, StepPlan, Verdict
from activities.run_store import SEED, RunStore
from tasks.environments import DEFAULT_DIRECTORY
from tasks.registry import Task, TaskSource, judge_digest
from workflows import names
from workflows.contracts.base import Coordinate, RunRef
from workflows.contracts.messages import Judged, JudgeRequest, JudgeSeedRequest


class JudgeActivities:
    """What a judge worker registers. The sandbox has passed its self-test before it comes here.

    Args:
        environments: where this host has the Python environments of programs.
        services: addresses of judges that are services.
    """

    def __init__(
        self,
        blobs: Blobs,
        tasks: TaskSource,
        sandbox: Sandbox,
        slots: Slots,
        environments: Path = DEFAULT_DIRECTORY,
        services: Services | None = None,
    ) -> None:
        self._blobs = blobs
        self._tasks = tasks
        self._sandbox = sandbox
        self._slots = slots
        self._environments = environments
        self._services = services or {}
        self._specs: dict[str, RunSpec] = {}

    @activity.defn(name=names.JUDGE)
    @translate_errors
    async def judge(self, request: JudgeRequest) -> Judged:
        store = RunStore(self._blobs, request.run.run_id)
        key = store.rollout_key(request.at, "verdict")
        async with beating_async():
            digest = await asyncio.to_thread(store.find, key)
            if digest is None:
                judgement = await self._judge(store, request)
                digest, verdict = await asyncio.to_thread(_claim, store, request.at, judgement)
            else:
                verdict = await asyncio.to_thread(store.load, Verdict, digest)
        return Judged(verdict=digest, outcome=verdict.outcome, score=verdict.score, reward=verdict.reward)

    @activity.defn(name=names.JUDGE_SEED)
    @translate_errors
    async def judge_seed(self, request: JudgeSeedRequest) -> Judged:
        """Certify what opens the archive, so that its value is as proved as any child's: a program, or the roots' constructions."""
        store = RunStore(self._blobs, request.run.run_id)
        async with beating_async():
            spec = await asyncio.to_thread(store.spec, request.run)
            task = await asyncio.to_thread(self._tasks.of, spec)
            if task.starts[spec.start].construction is not None:
                _same_judge(task, spec)
                await asyncio.to_thread(certify_roots, store, spec, task)
            digest = await asyncio.to_thread(store.find, store.rollout_key(SEED, "verdict"))
            if digest is None:
                judgement = await self._run(spec, task, Case(task.start_program(spec.start), spec.request.seed), SEED)
                digest, verdict = await asyncio.to_thread(_claim, store, SEED, judgement)
            else:
                verdict = await asyncio.to_thread(store.load, Verdict, digest)
        return Judged(verdict=digest, outcome=verdict.outcome, score=verdict.score, reward=verdict.reward)

    async def _judge(self, store: RunStore, request: JudgeRequest) -> Judgement:
        spec = await asyncio.to_thread(self._spec, store, request.run)
        case = await asyncio.to_thread(_case, store, spec, request)
        return await self._run(spec, await asyncio.to_thread(self._tasks.of, spec), case, request.at)

    def _spec(self, store: RunStore, run: RunRef) -> RunSpec:
        """A slot waits while its worker reads, so what never changes is read once."""
        if run.spec not in self._specs:
            self._specs[run.spec] = store.spec(run)
        return self._specs[run.spec]

    async def _run(self, spec: RunSpec, task: Task, case: Case, at: Coordinate) -> Judgement:
        _same_judge(task, spec)
        limits = limits_of(spec)
        async with self._slots.take(limits.cores, limits.memory_bytes):
            judge_here = judge(task, task.make_judge(), case, limits, self._sandbox, self._environments, self._services)
            judgement = await judge_here
        log.info("rollout_judged", run=spec.run_id, outcome=judgement.outcome.value, reward=judgement.reward)
        if judgement.starved_timeout and activity.info().attempt == 1:
            raise JudgeStarved(
                f"run {spec.run_id} {at}: timed out after waiting for a core for more than a tenth of its time; "
                "one more attempt is made. If this is frequent, give the judge fewer slots"
            )
        return judgement


def _claim(store: RunStore, at: Coordinate, judgement: Judgement) -> tuple[str, Verdict]:
    """First stored verdict wins: a late duplicate (a zombie, a retry after a lost answer) reads the winner."""
    verdict = verdict_of(judgement, at, store)
    digest, won = store.claim(store.rollout_key(at, "verdict"), verdict)
    return digest, verdict if won else store.load(Verdict, digest)


def _same_judge(task: Task, spec: RunSpec) -> None:
    """Verdicts of one run compare only under one judge."""
    found = judge_digest(task)
    if found != spec.judge_digest:
        raise JudgeError(
            f"run {spec.run_id}: this worker's judge of {task.name} has digest {found[:12]}, the run was opened with "
            f"{spec.judge_digest[:12]}; deploy the judge workers of the version that opened the run"
        )


def _case(store: RunStore, spec: RunSpec, request: JudgeRequest) -> Case:
    rollout = store.load(RolloutRecord, request.rollout)
    construction = None
    if spec.offers_construction and rollout.program is not None:
        plan = store.load(StepPlan, request.plan)
        parent = next(group.parent for group in plan.groups if group.group == request.at.group)
        if parent.construction is not None:
            construction = stored_construction(store, parent.construction)
    return Case(program=rollout.program, seed=rollout.seed, construction=construction)
