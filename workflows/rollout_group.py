"""RolloutGroup: one parent, R rollouts. A rollout is judged as soon as it is sampled, while siblings are still sampled."""

from __future__ import annotations

import asyncio

from temporalio import workflow

from workflows import names, policies
from workflows.calls import call
from workflows.contracts.base import Coordinate, Digest, Outcome
from workflows.contracts.messages import (
    BaseScored,
    GroupInput,
    GroupProgress,
    GroupResult,
    Judged,
    JudgeRequest,
    Sampled,
    SampleRequest,
    ScoreBaseRequest,
)


@workflow.defn(name=names.ROLLOUT_GROUP)
class RolloutGroup:
    """2R activities and one, about 7R events: small enough to replay in a fraction of a second (spec temporal 3)."""

    @workflow.init
    def __init__(self, group: GroupInput) -> None:
        self._input = group
        self._sampled: dict[int, Digest] = {}
        self._judged: list[Judged] = []

    @workflow.run
    async def run(self, group: GroupInput) -> GroupResult:
        rollouts = (self._rollout(rollout) for rollout in range(group.rollouts))
        await asyncio.gather(*rollouts, *([self._score_base()] if group.score_base else []))
        progress = self.progress()
        return GroupResult(
            group=group.group,
            valid=progress.valid,
            best_score=progress.best_score,
            mean_reward=sum(j.reward for j in self._judged) / group.rollouts,
        )

    @workflow.query(name=names.STATUS)
    def progress(self) -> GroupProgress:
        scores = [j.score for j in self._judged if j.outcome is Outcome.VALID and j.score is not None]
        value = max if self._input.higher_is_better else min
        return GroupProgress(
            group=self._input.group,
            rollouts=self._input.rollouts,
            sampled=len(self._sampled),
            judged=len(self._judged),
            valid=len(scores),
            best_score=value(scores, default=None),
            mean_reward=sum(j.reward for j in self._judged) / len(self._judged) if self._judged else None,
        )

    async def _rollout(self, rollout: int) -> None:
        g = self._input
        at = Coordinate(step=g.step, group=g.group, rollout=rollout)
        sampled = await call(
            names.SAMPLE,
            SampleRequest(run=g.run, at=at, plan=g.plan, policy=g.policy),
            Sampled,
            queue=names.SAMPLE_QUEUE,
            options=policies.sample(g.timeouts),
            summary=f"sample rollout {rollout}",
            activity_id=f"r{rollout:02d}-sample",
        )
        self._sampled[rollout] = sampled.rollout
        judged = await call(
            names.JUDGE,
            JudgeRequest(run=g.run, at=at, plan=g.plan, rollout=sampled.rollout),
            Judged,
            queue=names.JUDGE_QUEUE,
            options=policies.judge(g.timeouts),
            summary=f"judge rollout {rollout}",
            activity_id=f"r{rollout:02d}-judge",
        )
        self._judged.append(judged)
        self._show()

    async def _score_base(self) -> None:
        """Log-probs under the frozen base need no reward: the trainer works while judges do (design 5)."""
        g = self._input
        await workflow.wait_condition(lambda: len(self._sampled) == g.rollouts)
        ordered = tuple(digest for _, digest in sorted(self._sampled.items()))
        await call(
            names.SCORE_BASE,
            ScoreBaseRequest(run=g.run, step=g.step, group=g.group, rollouts=ordered),
            BaseScored,
            queue=names.TRAIN_QUEUE,
            options=policies.train(g.timeouts),
            summary=f"score {g.rollouts} rollouts under the frozen base",
            activity_id="score-base",
        )

    def _show(self) -> None:
        p = self.progress()
        best = "none yet" if p.best_score is None else f"{p.best_score:.8f}"
        workflow.set_current_details(
            f"**{p.judged}/{p.rollouts}** judged, {p.valid} valid  \nbest of this group: **{best}**  \n"
            f"mean reward so far: {p.mean_reward or 0.0:.4f}"
        )
