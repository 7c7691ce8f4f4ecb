"""Builds one commit and its report from stored documents. Plain Python; times come in as arguments."""

from __future__ import annotations

import statistics

from activities.commit.expand import best_node, expand
from activities.commit.grid import Grid, Sample, load_grid
from activities.commit.measuring import improved, measure_step, new_answers
from activities.errors import ArchiveFork
from activities.records import ArchiveState, CommitRow, PublishReport, RunSpec, StepCommit, StepReport, TrainRecord
from activities.run_store import RunStore
from workflows.contracts.base import Head, Outcome
from workflows.contracts.messages import CommitRequest, Committed, StepSummary


def commit_step(store: RunStore, spec: RunSpec, request: CommitRequest, sign: int) -> Committed:
    """Expand the archive, link the step to the chain once, and report on it.

    Raises:
        ArchiveFork: the step is already committed with other content, or the head to build on is not the chain's.
    """
    grid = load_grid(store, request)
    train = store.load(TrainRecord, request.train_record) if request.train_record else None
    publish = tuple(store.load(PublishReport, digest) for digest in request.publish_reports)
    archive = expanded(grid, spec)
    commit = build_commit(spec, request, grid, store.put(archive))
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
    summary = summarise(grid, request, head, sign, train)
    report = StepReport(
        step=request.step,
        commit=digest,
        metrics=measure_step(grid, archive, train, publish, request.seconds).flat(),
        best_score=head.best,
        best_node=best.id if best else None,
        notes=summary.notes,
        publish=publish,
        seconds=request.seconds,
        summary=summary,
    )
    winner, _ = store.claim(store.step_key(request.step, "report"), report)
    return Committed(head=head, summary=store.load(StepReport, winner).summary)


def expanded(grid: Grid, spec: RunSpec) -> ArchiveState:
    """The archive after a step."""
    submissions = [(sample.parent, sample.child) for sample in grid.samples]
    settings = spec.request.search
    return expand(grid.archive, submissions, children_per_parent=settings.children_per_parent, capacity=settings.capacity)


def build_commit(spec: RunSpec, request: CommitRequest, grid: Grid, archive: str) -> StepCommit:
    """A step's link of the chain, from what is stored alone.

    Args:
        archive: digest of the archive after the step.
    """
    head = request.head
    return StepCommit(
        step=request.step,
        previous=head.commit,
        identity=spec.identity,
        rows=tuple(_commit_row(sample) for sample in grid.samples),
        archive=archive,
        policy=request.policy,
        previous_policy=head.policy if request.policy != head.policy else head.previous_policy,
        initial_policy=head.initial_policy,
    )


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


def summarise(grid: Grid, request: CommitRequest, head: Head, sign: int, train: TrainRecord | None) -> StepSummary:
    """One step in numbers. Best (of the archive) and mean (of the grid) are different things and have different names."""
    children = [sample.child for sample in grid.samples if sample.child is not None]
    scores = [child.score for child in children if child.score is not None]
    notes = [note for note in (grid.plan.note, _collapse(grid), *(train.notes if train else ())) if note]
    return StepSummary(
        step=request.step,
        rollouts=len(grid.rows),
        valid=len(children),
        valid_and_new=new_answers(grid),
        improved=improved(grid),
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
