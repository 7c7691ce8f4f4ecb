"""The `select_parents` activity: reads an archive snapshot, stores the step's plan once."""

from __future__ import annotations

import random

from temporalio import activity

from activities.blobs import Blobs
from activities.context import control_activity, log
from activities.records import ArchiveState, PlannedGroup, StepPlan
from activities.run_store import RunStore
from activities.select.strategies import STRATEGIES
from activities.select.strategy import as_pick, step_seed
from workflows import names
from workflows.contracts.messages import Selected, SelectRequest


class SelectActivities:
    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    @activity.defn(name=names.SELECT_PARENTS)
    @control_activity
    def select_parents(self, request: SelectRequest) -> Selected:
        store = RunStore(self._blobs, request.run.run_id)
        run = store.spec(request.run).request
        archive = store.load(ArchiveState, request.archive)
        seed = step_seed(run.seed, request.step)
        strategy = STRATEGIES[run.search.strategy]
        selection = strategy.select(archive, run.search.groups, run.search, random.Random(seed))
        plan = StepPlan(
            step=request.step,
            archive=request.archive,
            groups=tuple(
                PlannedGroup(group=g, pick=as_pick(parent), parent=parent.node) for g, parent in enumerate(selection.parents)
            ),
            scale=selection.scale,
            seed=seed,
            note=selection.note,
        )
        digest, _ = store.claim(store.step_key(request.step, "plan"), plan)
        log.info("parents_selected", strategy=run.search.strategy, parents=[g.parent.id for g in plan.groups], note=plan.note)
        return Selected(plan=digest, groups=len(plan.groups), note=plan.note)
