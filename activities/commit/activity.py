"""The `commit_step` activity."""

from __future__ import annotations

from temporalio import activity

from activities.blobs import Blobs
from activities.commit.committing import commit_step
from activities.context import control_activity, log
from activities.run_store import RunStore
from tasks.registry import TaskSource
from workflows import names
from workflows.contracts.messages import CommitRequest, Committed


class CommitActivities:
    def __init__(self, blobs: Blobs, tasks: TaskSource) -> None:
        self._blobs = blobs
        self._tasks = tasks

    @activity.defn(name=names.COMMIT_STEP)
    @control_activity
    def commit_step(self, request: CommitRequest) -> Committed:
        store = RunStore(self._blobs, request.run.run_id)
        spec = store.spec(request.run)
        committed = commit_step(store, spec, request, self._tasks.of(spec).sign)
        log.info("step_committed", step=request.step, commit=committed.head.commit, best=committed.head.best)
        return committed
