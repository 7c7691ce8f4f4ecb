"""Builds one commit and its report from stored documents. Plain Python; times come in as arguments."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from activities.commit.expand import best_node, expand, make_child, node_key, parents_of
from activities.errors import ArchiveFork
from activities.records import (
    ArchiveState,
    Batch,
    BatchRow,
    CommitRow,
    Node,
    PublishReport,
    RolloutRecord,
    RunSpec,
    RunStore,
    StepCommit,
    StepPlan,
    StepReport,
    TrainRecord,
    Verdict,
)
from workflows.contracts.base import Head, Outcome
from workflows.contracts.messages import CommitRequest, Committed, StepSummary


@dataclass(frozen=True)
class Grid:
    """Everything of one step that the commit reads."""

    plan: StepPlan
    rows: tuple[BatchRow, ...]
    archive: ArchiveState
    parents: dict[int, Node]


def commit_step(store: RunStore, spec: RunSpec, request: CommitRequest, sign: int) -> Committed:
    """Expand the archive, link the step to the chain once, and report on it.

    Raises:
        ArchiveFork: the step is already committed with other content, or the head to build on is not the chain's.
    """
    grid = _load(store, request)
    submissions = [(grid.parents[row.at.group], _child(store, row, grid)) for row in grid.rows]
    settings = spec.request.search
    archive = expand(grid.archive, submissions, children_per_parent=settings.children_per_parent, capacity=settings.capacity)
    commit = StepCommit(
        step=request.step,
        previous=request.head.commit,
        identity=spec.identity,
        rows=tuple(_commit_row(row, grid.parents) for row in grid.rows),
        archive=store.put(archive),
        policy=request.policy,
        previous_policy=request.head.policy if request.policy != request.head.policy else request.head.previous_policy,
        initial_policy=request.head.initial_policy,
    )
    digest = _link(store, commit, request)
    best = best_node(archive)
    head = Head(
        step=request.step,
        commit=digest,
        archive=commit.archive,
        policy=commit.policy,
        previous_policy=commit.previous_policy,
        initial_policy=commit.initial_policy,
        best=best.score if best else None,
    )
    summary = summarise(store, grid, request, head, sign)
    report = StepReport(
        step=request.step,
        commit=digest,
        metrics=_metrics(store, grid, archive, request),
        best_score=head.best,
        best_node=best.id if best else None,
        notes=summary.notes,
        publish=tuple(store.load(PublishReport, d) for d in request.publish_reports),
        seconds=request.seconds,
        summary=summary,
    )
    winner, _ = store.claim(store.step_key(request.step, "report"), report)
    return Committed(head=head, summary=store.load(StepReport, winner).summary)


def _load(store: RunStore, request: CommitRequest) -> Grid:
    plan = store.load(StepPlan, request.plan)
    rows = store.load(Batch, request.batch).rows
    return Grid(plan, rows, store.load(ArchiveState, request.head.archive), parents_of(plan))


def _child(store: RunStore, row: BatchRow, grid: Grid) -> Node | None:
    if row.outcome is not Outcome.VALID:
        return None
    program = store.load(RolloutRecord, row.rollout).program
    verdict = store.load(Verdict, row.verdict)
    return make_child(row, grid.parents[row.at.group], program or "", verdict.output_tail)


def _commit_row(row: BatchRow, parents: dict[int, Node]) -> CommitRow:
    return CommitRow(
        group=row.at.group,
        rollout=row.at.rollout,
        parent=parents[row.at.group].id,
        tokens=row.tokens_digest,
        outcome=row.outcome,
        exact=row.exact,
        construction=row.construction,
    )


def _link(store: RunStore, commit: StepCommit, request: CommitRequest) -> str:
    before = store.commit_digest(request.step - 1)
    if before != request.head.commit:
        raise ArchiveFork(
            f"run {store.run_id} step {request.step}: built on commit {request.head.commit}, but step {request.step - 1} of the "
            f"chain is {before}; another execution went on from elsewhere. Resume the run from its last commit."
        )
    digest, _ = store.claim(store.step_key(request.step, "commit"), commit)
    if digest != store.put(commit):
        raise ArchiveFork(
            f"run {store.run_id} step {request.step} is already committed as {digest} with other content; "
            "resume the run from its last commit, or fork it under a new name"
        )
    return digest


def summarise(store: RunStore, grid: Grid, request: CommitRequest, head: Head, sign: int) -> StepSummary:
    """One step in numbers. Best (of the archive) and mean (of the grid) are different things and have different names."""
    valid = [row for row in grid.rows if row.outcome is Outcome.VALID]
    seen = {node_key(node) for node in grid.archive.nodes}
    new = {row.construction for row in valid} - seen
    train = store.load(TrainRecord, request.train_record) if request.train_record else None
    scores = [row.score for row in valid if row.score is not None]
    notes = [note for note in (grid.plan.note, _collapse(grid), *(train.notes if train else ())) if note]
    return StepSummary(
        step=request.step,
        rollouts=len(grid.rows),
        valid=len(valid),
        valid_and_new=len(new),
        improved=sum(row.value is not None and row.value > grid.parents[row.at.group].value for row in valid),
        mean_reward=statistics.fmean(row.reward for row in grid.rows),
        step_best=(max if sign > 0 else min)(scores, default=None),
        best=head.best,
        previous_best=request.head.best,
        kl=train.metrics.get("kl_policy_base") if train else None,
        gap=train.metrics.get("gap_engine_trainer_rms") if train else None,
        policy_version=head.policy.version,
        seconds=request.seconds,
        notes=tuple(dict.fromkeys(notes)),
    )


def _collapse(grid: Grid) -> str:
    rewards = {row.reward for row in grid.rows}
    if len(rewards) > 1:
        return ""
    if rewards == {0.0}:
        return f"collapsed: none of {len(grid.rows)} programs is valid, so this step carries no signal"
    return f"no signal: all {len(grid.rows)} rewards are equal ({rewards.pop():.8f})"


def _metrics(store: RunStore, grid: Grid, archive: ArchiveState, request: CommitRequest) -> dict[str, float | None]:
    rewards = [row.reward for row in grid.rows]
    records = [store.load(RolloutRecord, row.rollout) for row in grid.rows]
    lengths = [len(record.response_tokens) for record in records]
    metrics: dict[str, float | None] = {
        "reward/mean": statistics.fmean(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/std": statistics.pstdev(rewards),
        "sample/response_tokens_mean": statistics.fmean(lengths),
        "sample/response_tokens_max": max(lengths),
        "sample/truncated_fraction": sum(r.finish_reason == "length" for r in records) / len(records),
        "search/archive_size": len(archive.nodes),
        "search/total_visits": archive.total_visits,
        "search/scale": grid.plan.scale,
    }
    metrics |= {
        f"judge/{o.value}_fraction": sum(row.outcome is o for row in grid.rows) / len(grid.rows) for o in Outcome if o.is_result
    }
    if request.train_record:
        metrics |= {f"train/{k}": v for k, v in store.load(TrainRecord, request.train_record).metrics.items()}
    return metrics
