"""The `assemble_batch` activity."""

from __future__ import annotations

from temporalio import activity

from activities.barrier.assemble import assemble
from activities.blobs import Blobs
from activities.context import control_activity
from activities.records import Batch
from activities.run_store import RunStore
from tasks.registry import TaskSource
from workflows import names
from workflows.contracts.base import Outcome
from workflows.contracts.messages import Assembled, AssembleRequest


class BarrierActivities:
    def __init__(self, blobs: Blobs, tasks: TaskSource) -> None:
        self._blobs = blobs
        self._tasks = tasks

    @activity.defn(name=names.ASSEMBLE_BATCH)
    @control_activity
    def assemble_batch(self, request: AssembleRequest) -> Assembled:
        store = RunStore(self._blobs, request.run.run_id)
        spec = store.spec(request.run)
        built = assemble(store, request.step, request.plan, spec.request.search.rollouts, request.policy)
        digest, _ = store.claim(store.step_key(request.step, "batch"), built)
        rows = store.load(Batch, digest).rows
        scores = [row.score for row in rows if row.score is not None]
        best = max if self._tasks.of(spec).sign > 0 else min
        return Assembled(
            batch=digest,
            rollouts=len(rows),
            valid=sum(row.outcome is Outcome.VALID for row in rows),
            mean_reward=sum(row.reward for row in rows) / len(rows),
            best_score=best(scores, default=None),
        )
