"""The `select_parents` activity: reads an archive snapshot, stores the step's plan once."""

from __future__ import annotations

from temporalio import activity

from activities.blobs import Blobs
from activities.context import control_activity, log
from activities.records import ArchiveState, PlannedGroup, RunStore, StepPlan
from activities.select.puct import as_pick, select_parents
from workflows import names
from workflows.contracts.messages import Selected, SelectRequest


class SelectActivities:
    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    @activity.defn(name=names.SELECT_PARENTS)
    @control_activity
    def select_parents(self, request: SelectRequest) -> Selected:
        store = RunStore(self._blobs, request.run.run_id)
        settings = store.spec(request.run).request.search
        archive = store.load(ArchiveState, request.archive)
        selection = select_parents(
            archive,
            settings.groups,
            exploration=settings.exploration,
            visit_unit=1 if settings.visit_unit == "rollout" else settings.rollouts,
        )
        plan = StepPlan(
            step=request.step,
            archive=request.archive,
            groups=tuple(
                PlannedGroup(group=g, pick=as_pick(parent), parent=parent.node) for g, parent in enumerate(selection.parents)
            ),
            scale=selection.scale,
            note=selection.note,
        )
        digest, _ = store.claim(store.step_key(request.step, "plan"), plan)
        log.info("parents_selected", step=request.step, parents=[g.parent.id for g in plan.groups], note=plan.note)
        return Selected(plan=digest, groups=len(plan.groups), note=plan.note)
