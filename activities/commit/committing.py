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
class Sample:
    """What the commit needs of one rollout; the whole records of a grid would fill a gigabyte."""

    row: BatchRow
    parent: Node
    child: Node | None
    """None unless valid."""
    response_tokens: int
    truncated: bool


@dataclass(frozen=True)
class Grid:
    """Everything of one step that the commit reads."""

    plan: StepPlan
    samples: tuple[Sample, ...]
    """By group, then rollout: the order in which the archive takes them, whenever they arrived."""
    archive: ArchiveState
    """Before the step."""

    @property
    def rows(self) -> list[BatchRow]:
        return [sample.row for sample in self.samples]


def commit_step(store: RunStore, spec: RunSpec, request: CommitRequest, sign: int) -> Committed:
    """Expand the archive, link the step to the chain once, and report on it.

    Raises:
        ArchiveFork: the step is already committed with other content, or the head to build on is not the chain's.
    """
    grid = _load(store, request)
    submissions = [(sample.parent, sample.child) for sample in grid.samples]
    settings = spec.request.search
    archive = expand(grid.archive, submissions, children_per_parent=settings.children_per_parent, capacity=settings.capacity)
    commit = StepCommit(
        step=request.step,
        previous=request.head.commit,
        identity=spec.identity,
        rows=tuple(_commit_row(sample) for sample in grid.samples),
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
        metrics=_metrics(grid, archive) | _train_metrics(store, request),
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
    batch = store.load(Batch, request.batch)
    found = (plan.step, batch.step, batch.plan, plan.archive)
    if found != (request.step, request.step, request.plan, request.head.archive):
        raise ArchiveFork(
            f"run {store.run_id} step {request.step}: the plan is of step {plan.step} from archive {plan.archive[:12]}, the batch "
            f"of step {batch.step} from plan {batch.plan[:12]}; to be committed is plan {request.plan[:12]} on archive "
            f"{request.head.archive[:12]}. Resume the run from its last commit."
        )
    parents = parents_of(plan)
    samples = tuple(_sample(store, row, parents[row.at.group]) for row in batch.rows)
    return Grid(plan, samples, store.load(ArchiveState, request.head.archive))


def _sample(store: RunStore, row: BatchRow, parent: Node) -> Sample:
    record = store.load(RolloutRecord, row.rollout)
    child = None
    if row.outcome is Outcome.VALID:
        child = make_child(row, parent, record.program or "", store.load(Verdict, row.verdict).output_tail)
    return Sample(row, parent, child, len(record.response_tokens), record.finish_reason == "length")


def _commit_row(sample: Sample) -> CommitRow:
    row = sample.row
    return CommitRow(
        group=row.at.group,
        rollout=row.at.rollout,
        parent=sample.parent.id,
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
    children = [sample.child for sample in grid.samples if sample.child is not None]
    new = {node_key(child) for child in children} - {node_key(node) for node in grid.archive.nodes}
    train = store.load(TrainRecord, request.train_record) if request.train_record else None
    scores = [child.score for child in children if child.score is not None]
    notes = [note for note in (grid.plan.note, _collapse(grid), *(train.notes if train else ())) if note]
    return StepSummary(
        step=request.step,
        rollouts=len(grid.rows),
        valid=len(children),
        valid_and_new=len(new),
        improved=sum(s.child is not None and s.child.value > s.parent.value for s in grid.samples),
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
    if all(row.outcome is not Outcome.VALID for row in grid.rows):
        return f"collapsed: none of {len(grid.rows)} programs is valid, so this step carries no signal"
    return f"no signal: all {len(grid.rows)} rewards are equal ({rewards.pop():.8f})"


def _metrics(grid: Grid, archive: ArchiveState) -> dict[str, float | None]:
    rewards = [row.reward for row in grid.rows]
    lengths = [sample.response_tokens for sample in grid.samples]
    metrics: dict[str, float | None] = {
        "reward/mean": statistics.fmean(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/std": statistics.pstdev(rewards),
        "sample/response_tokens_mean": statistics.fmean(lengths),
        "sample/response_tokens_max": max(lengths),
        "sample/truncated_fraction": statistics.fmean(sample.truncated for sample in grid.samples),
        "search/archive_size": len(archive.nodes),
        "search/total_visits": archive.total_visits,
        "search/scale": grid.plan.scale,
    }
    fractions = {o: sum(row.outcome is o for row in grid.rows) / len(grid.rows) for o in Outcome if o.is_result}
    return metrics | {f"judge/{outcome.value}_fraction": fraction for outcome, fraction in fractions.items()}


def _train_metrics(store: RunStore, request: CommitRequest) -> dict[str, float | None]:
    if request.train_record is None:
        return {}
    return {f"train/{name}": value for name, value in store.load(TrainRecord, request.train_record).metrics.items()}
