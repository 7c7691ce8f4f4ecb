"""Commit 0: seed states, the empty archive around them, and policy version 0. A second open finds the last commit instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from activities.errors import ArchiveFork, InputError
from activities.open.forking import commit_fork
from activities.open.identity_adapter import make_initial_policy
from activities.open.whole import check_whole
from activities.records import ArchiveState, Node, RunSpec, StepCommit, StepReport, Verdict
from activities.run_store import RunStore, seed_at
from tasks.registry import Task
from tasks.starts import verdicts_needed
from workflows.contracts.base import Head, Outcome
from workflows.contracts.messages import StepSummary


def verdict_keys(store: RunStore, spec: RunSpec, task: Task) -> list[str]:
    """Where the verdicts stand that the roots need: none, one that all share, or one for each root. A fork's roots have theirs."""
    if spec.request.fork is not None:
        return []
    count = verdicts_needed(task.starts[spec.start], spec.request.search.groups)
    return [store.rollout_key(seed_at(root), "verdict") for root in range(count)]


def seed_nodes(spec: RunSpec, task: Task, verdicts: Sequence[Verdict | None]) -> tuple[Node, ...]:
    """G independent roots from the task's start (spec algorithm 1.6), so that the first step has a full grid.

    Args:
        verdicts: of the keys in :func:`verdict_keys`; None for one that is not there.

    Raises:
        InputError: the seed program, or a root's construction, is not valid; says why.
    """
    start, roots = task.starts[spec.start], range(spec.request.search.groups)
    code = task.start_program(spec.start)
    if not verdicts:
        return tuple(_root(i, value=start.value, score=None, code=code) for i in roots)
    certified = [_certified(spec, task, verdict) for verdict in verdicts]
    return tuple(_certified_root(i, certified[i % len(certified)], code) for i in roots)


def _certified(spec: RunSpec, task: Task, verdict: Verdict | None) -> Verdict:
    if verdict is not None and verdict.outcome is Outcome.VALID and verdict.value is not None:
        return verdict
    what = "program" if task.starts[spec.start].construction is None else "construction"
    why = "it was not judged" if verdict is None else f"{verdict.outcome.value}: {verdict.reason}"
    raise InputError(
        f"the seed {what} {spec.start!r} of task {task.name} has no certified value ({why}); mend it or choose another"
    )


def _certified_root(number: int, verdict: Verdict, code: str) -> Node:
    assert verdict.value is not None
    return _root(
        number,
        value=verdict.value,
        score=verdict.score,
        code=code,
        construction=verdict.construction,
        output_tail=verdict.output_tail,
    )


def _root(
    number: int, *, value: float, score: float | None, code: str, construction: str | None = None, output_tail: str = ""
) -> Node:
    return Node(
        id=f"seed-{number:02d}",
        step=0,
        value=value,
        score=score,
        code=code,
        construction=construction,
        output_tail=output_tail,
    )


def open_run(store: RunStore, spec: RunSpec, task: Task, model: Path) -> tuple[Head, tuple[StepSummary, ...]]:
    """The run's last commit, made now if there is none. Returns it with the summaries of the steps before it.

    Raises:
        InputError: the seed program, or a root's construction, is not valid.
        ArchiveFork: the last commit does not continue the one before it, or is of another identity.
        Retired: it cannot be gone on from, because its adapter or optimizer state was dropped or never imported.
    """
    if (last := store.last_step()) is None:
        if spec.request.fork is not None:
            last = commit_fork(store, spec)
        else:
            _commit_zero(store, spec, task, model)
            last = 0
    return _head(store, spec, last), _summaries(store, last)


def _commit_zero(store: RunStore, spec: RunSpec, task: Task, model: Path) -> None:
    nodes = seed_nodes(spec, task, [store.read(Verdict, key) for key in verdict_keys(store, spec, task)])
    archive = ArchiveState(nodes=nodes, seeds=tuple(node.id for node in nodes))
    policy = make_initial_policy(store, spec, model)
    commit = StepCommit(
        step=0,
        previous=None,
        identity=spec.identity,
        rows=(),
        archive=store.put(archive),
        policy=policy,
        previous_policy=None,
        initial_policy=policy,
    )
    store.claim(store.step_key(0, "commit"), commit)


def _head(store: RunStore, spec: RunSpec, step: int) -> Head:
    digest = store.commit_digest(step)
    assert digest is not None
    commit = store.load(StepCommit, digest)
    before = store.commit_digest(step - 1) if step else None
    if (commit.step, commit.previous, commit.identity) != (step, before, spec.identity):
        raise ArchiveFork(
            f"run {store.run_id}: commit {digest} of step {step} says step {commit.step} after {commit.previous} under identity "
            f"{commit.identity[:8]}; the store has {before} and identity {spec.identity[:8]}. Restore the run's folder "
            f"{store.root}/steps from one backup."
        )
    check_whole(store, commit)
    scored = [n for n in store.load(ArchiveState, commit.archive).nodes if n.score is not None]
    return Head(
        step=step,
        commit=digest,
        archive=commit.archive,
        policy=commit.policy,
        previous_policy=commit.previous_policy,
        initial_policy=commit.initial_policy,
        best=max(scored, key=lambda n: n.value).score if scored else None,
    )


def _summaries(store: RunStore, last: int, count: int = 20) -> tuple[StepSummary, ...]:
    """A crash between commit and report leaves one report out; the chain does not need it."""
    found = (store.read(StepReport, store.step_key(step, "report")) for step in range(max(1, last - count + 1), last + 1))
    return tuple(report.summary for report in found if report is not None)
