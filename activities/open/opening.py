"""Commit 0: seed states, the empty archive around them, and policy version 0. A second open finds the last commit instead."""

from __future__ import annotations

from pathlib import Path

from activities.errors import ArchiveFork, InputError
from activities.open.identity_adapter import make_initial_policy
from activities.records import SEED, ArchiveState, Node, RunSpec, RunStore, StepCommit, StepReport, Verdict
from tasks.registry import Task
from workflows.contracts.base import Head, Outcome
from workflows.contracts.messages import StepSummary


def seed_nodes(spec: RunSpec, task: Task, verdict: Verdict | None) -> tuple[Node, ...]:
    """G independent roots from the task's start (spec algorithm 1.6), so that the first step has a full grid.

    Raises:
        InputError: the seed program is not valid; says why.
    """
    code = task.start_program(spec.start)
    value, score, construction, tail = task.starts[spec.start].value, None, None, ""
    if code:
        if verdict is None or verdict.outcome is not Outcome.VALID or verdict.value is None:
            why = "it was not judged" if verdict is None else f"{verdict.outcome.value}: {verdict.reason}"
            raise InputError(
                f"the seed program {spec.start!r} of task {task.name} has no certified value ({why}); mend it or choose another"
            )
        value, score, construction, tail = verdict.value, verdict.score, verdict.construction, verdict.output_tail
    return tuple(
        Node(id=f"seed-{i:02d}", step=0, value=value, score=score, code=code, construction=construction, output_tail=tail)
        for i in range(spec.request.search.groups)
    )


def open_run(store: RunStore, spec: RunSpec, task: Task, model: Path) -> tuple[Head, tuple[StepSummary, ...]]:
    """The run's last commit, made now if there is none. Returns it with the summaries of the steps before it.

    Raises:
        InputError: the seed program is not valid.
        ArchiveFork: the last commit does not continue the one before it, or is of another identity.
    """
    if (last := store.last_step()) is None:
        _commit_zero(store, spec, task, model)
        last = 0
    return _head(store, spec, last), _summaries(store, last)


def _commit_zero(store: RunStore, spec: RunSpec, task: Task, model: Path) -> None:
    nodes = seed_nodes(spec, task, store.read(Verdict, store.rollout_key(SEED, "verdict")))
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
