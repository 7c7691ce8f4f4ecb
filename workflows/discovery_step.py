"""DiscoveryStep: select, sample and judge, barrier, train, publish, commit. One child a step: the unit of reset."""

from __future__ import annotations

import asyncio
from datetime import datetime

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy

from workflows import names, policies
from workflows.calls import call
from workflows.contracts.base import Digest, PolicyRef
from workflows.contracts.messages import (
    Assembled,
    AssembleRequest,
    CommitRequest,
    Committed,
    GroupInput,
    GroupResult,
    Phase,
    Selected,
    SelectRequest,
    StepInput,
    StepResult,
    StepStatus,
    Trained,
    TrainRequest,
)
from workflows.publishing import publish_everywhere


@workflow.defn(name=names.DISCOVERY_STEP)
class DiscoveryStep:
    """Nothing overlaps across steps: step s+1 samples only from the adapter that step s produced (spec algorithm, "One step")."""

    @workflow.init
    def __init__(self, step: StepInput) -> None:
        self._input = step
        self._phase = Phase(name="starting", since=workflow.now().isoformat())
        self._groups = 0
        self._seconds: dict[str, float] = {}
        self._lines: list[str] = []

    @workflow.run
    async def run(self, step: StepInput) -> StepResult:
        head = step.head
        self._enter("select")
        selected = await self._select()
        self._groups = selected.groups
        self._enter("sample+judge", f"{selected.groups} groups x {step.rollouts} rollouts")
        await self._sample_and_judge(selected)
        self._enter("barrier")
        batch = await self._assemble(selected)
        self._lines.append(
            f"{batch.valid}/{batch.rollouts} valid, mean reward {batch.mean_reward:.4f}, "
            f"best of the step {'none' if batch.best_score is None else f'{batch.best_score:.8f}'}"
        )
        policy = head.policy
        record: Digest | None = None
        reports: tuple[Digest, ...] = ()
        if step.train:
            self._enter("train", f"one optimizer step on {batch.rollouts} rollouts")
            trained = await self._train(batch.batch)
            policy, record = trained.policy, trained.record
            self._lines.extend(trained.notes)
            self._enter("publish", f"policy version {policy.version}")
            reports = await publish_everywhere(step.run, policy, head.policy, head.initial_policy, step.timeouts)
        self._enter("commit")
        committed = await self._commit(selected.plan, batch.batch, policy, record, reports)
        self._enter("done")
        return StepResult(head=committed.head, summary=committed.summary)

    @workflow.query(name=names.STATUS)
    def status(self) -> StepStatus:
        return StepStatus(step=self._input.step, groups=self._groups, rollouts=self._input.rollouts, phase=self._phase)

    def _enter(self, name: str, detail: str = "") -> None:
        """Begin a phase: account for the one before, and show it in the Web UI."""
        now = workflow.now()
        began = datetime.fromisoformat(self._phase.since)
        self._seconds[self._phase.name] = (now - began).total_seconds()
        self._phase = Phase(name=name, since=now.isoformat(), detail=detail)
        done = "  \n".join(self._lines)
        workflow.set_current_details(f"**{name}** {detail}  \n{done}")

    async def _select(self) -> Selected:
        s = self._input
        return await call(
            names.SELECT_PARENTS,
            SelectRequest(run=s.run, step=s.step, archive=s.head.archive),
            Selected,
            queue=names.CONTROL_QUEUE,
            options=policies.control(s.timeouts),
            summary=f"select parents for step {s.step}",
            activity_id="select",
        )

    async def _sample_and_judge(self, selected: Selected) -> None:
        s = self._input
        await asyncio.gather(*(self._group(group, selected.plan) for group in range(selected.groups)))
        workflow.logger.info("step %d: all groups judged", s.step)

    async def _group(self, group: int, plan: Digest) -> GroupResult:
        s = self._input
        result: GroupResult = await workflow.execute_child_workflow(
            names.ROLLOUT_GROUP,
            GroupInput(
                run=s.run,
                step=s.step,
                group=group,
                rollouts=s.rollouts,
                plan=plan,
                policy=s.head.policy,
                higher_is_better=s.higher_is_better,
                score_base=s.train,
                timeouts=s.timeouts,
            ),
            result_type=GroupResult,
            id=f"{workflow.info().workflow_id}/group/{group:02d}",
            id_reuse_policy=WorkflowIDReusePolicy.TERMINATE_IF_RUNNING,  # of a step that a reset has started again
            task_queue=names.CONTROL_QUEUE,
            static_summary=f"group {group} of step {s.step}: {s.rollouts} rollouts from one parent",
        )
        return result

    async def _assemble(self, selected: Selected) -> Assembled:
        s = self._input
        return await call(
            names.ASSEMBLE_BATCH,
            AssembleRequest(run=s.run, step=s.step, plan=selected.plan, policy=s.head.policy),
            Assembled,
            queue=names.CONTROL_QUEUE,
            options=policies.control(s.timeouts),
            summary="all rollouts present, one policy version",
            activity_id="barrier",
        )

    async def _train(self, batch: Digest) -> Trained:
        s = self._input
        return await call(
            names.TRAIN,
            TrainRequest(run=s.run, step=s.step, batch=batch, policy=s.head.policy),
            Trained,
            queue=names.TRAIN_QUEUE,
            options=policies.train(s.timeouts),
            summary=f"one optimizer step: version {s.head.policy.version} -> {s.head.policy.version + 1}",
            activity_id="train",
        )

    async def _commit(
        self, plan: Digest, batch: Digest, policy: PolicyRef, record: Digest | None, reports: tuple[Digest, ...]
    ) -> Committed:
        s = self._input
        return await call(
            names.COMMIT_STEP,
            CommitRequest(
                run=s.run,
                step=s.step,
                head=s.head,
                plan=plan,
                batch=batch,
                policy=policy,
                train_record=record,
                publish_reports=reports,
                seconds={name: seconds for name, seconds in self._seconds.items() if name != "starting"},
            ),
            Committed,
            queue=names.CONTROL_QUEUE,
            options=policies.control(s.timeouts),
            summary=f"commit step {s.step} to the chain",
            activity_id="commit",
        )
