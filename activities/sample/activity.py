"""The `sample` activity: one rollout, stored as soon as it is complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from temporalio import activity

from activities.blobs import Blobs
from activities.context import beating_async, log, translate_errors
from activities.models import find_model
from activities.records import RolloutRecord, RunSpec, StepPlan
from activities.run_store import RunStore
from activities.sample.pool import EnginePool
from activities.sample.sampling import find_rollout, sample_rollout
from activities.sample.tokens import codec_for
from tasks.registry import TaskSource
from workflows import names
from workflows.contracts.base import RunRef
from workflows.contracts.messages import Sampled, SampleRequest

_FOR_ENGINES = 0.95
"""Of an attempt's time; the rest is for reading the answer and storing it, so that a slow engine is named before time is up."""


class SampleActivities:
    def __init__(self, blobs: Blobs, tasks: TaskSource, model_directories: tuple[Path, ...], pool: EnginePool) -> None:
        self._blobs = blobs
        self._tasks = tasks
        self._model_directories = model_directories
        self._pool = pool
        self._specs: dict[str, RunSpec] = {}
        self._plans: dict[str, StepPlan] = {}

    @activity.defn(name=names.SAMPLE)
    @translate_errors
    async def sample(self, request: SampleRequest) -> Sampled:
        store = RunStore(self._blobs, request.run.run_id)
        seconds_left = _seconds_left()
        async with beating_async():
            found = await asyncio.to_thread(find_rollout, store, request.at)
            if found is None:
                found = await self._sample(store, request, seconds_left)
        digest, record = found
        return Sampled(rollout=digest, response_tokens=len(record.response_tokens), has_program=record.program is not None)

    async def _sample(
        self, store: RunStore, request: SampleRequest, seconds_left: Callable[[], float]
    ) -> tuple[str, RolloutRecord]:
        spec = await asyncio.to_thread(self._spec, store, request.run)
        plan = await asyncio.to_thread(self._plan, store, request.plan)
        task = await asyncio.to_thread(self._tasks.of, spec)
        model = find_model(spec.request.model, self._model_directories)
        codec = await asyncio.to_thread(codec_for, model, spec.request.sampling.thinking)
        record = await sample_rollout(spec, task, codec, self._pool, plan, request.at, request.policy, seconds_left)
        # First stored record wins: a late duplicate (a zombie, a retry after a lost answer) reads the winner.
        log.info("rollout_sampled", run=spec.run_id, tokens=len(record.response_tokens), engine=record.engine)
        digest, won = await asyncio.to_thread(store.claim, store.rollout_key(request.at, "rollout"), record)
        return digest, record if won else await asyncio.to_thread(store.load, RolloutRecord, digest)

    def _spec(self, store: RunStore, run: RunRef) -> RunSpec:
        if run.spec not in self._specs:
            self._specs[run.spec] = store.spec(run)
        return self._specs[run.spec]

    def _plan(self, store: RunStore, digest: str) -> StepPlan:
        if digest not in self._plans:
            self._plans.clear()  # one step at a time per run: the newest plans are all that is asked for
            self._plans[digest] = store.load(StepPlan, digest)
        return self._plans[digest]


def _seconds_left() -> Callable[[], float]:
    """What is left of this attempt's start-to-close time-out, as the workflow set it; never less than a second."""
    info = activity.info()
    limit = info.start_to_close_timeout or info.schedule_to_close_timeout
    assert limit is not None, "Temporal schedules no activity without either time-out"
    end = time.monotonic() + _FOR_ENGINES * limit.total_seconds()
    return lambda: max(1.0, end - time.monotonic())
