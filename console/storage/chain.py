"""Replays a run from its records and compares it, step by step, with its commits.

The same pure functions that made the run are asked again: the barrier's batch, the archive, the commit. What comes out must have
the digests that stand in the chain. Training is not repeated: a step's adapter is compared with the trainer's record. Writes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from activities.barrier.assemble import assemble
from activities.blobs import digest_of
from activities.commit.committing import build_commit, expanded
from activities.commit.grid import load_grid
from activities.errors import TttdError
from activities.open.opening import seed_nodes, verdict_keys
from activities.records import ArchiveState, Batch, RunSpec, StepCommit, TrainRecord, Verdict, canonical_json, policy_name
from activities.run_store import RunStore
from console.storage.retention import History
from tasks.registry import Task, task_digest
from workflows.contracts.base import Head, PolicyRef, RunRef
from workflows.contracts.messages import CommitRequest


@dataclass(frozen=True)
class Replay:
    """What was found of one step."""

    step: int
    problem: str = ""
    replayed: bool = False
    """The step was made again from its records; False for one whose rollouts are not kept."""


def replay(store: RunStore, spec: RunSpec, history: History, task: Task | None, absent: frozenset[str]) -> Iterator[Replay]:
    """Walk the chain from its first commit.

    Args:
        task: None, or another version than the run's: the first commit's roots are then not made again.
        absent: blobs that are known not to be there, such as the rollouts of a light bundle.
    """
    if digest_of(canonical_json(spec.science)) != spec.identity:
        yield Replay(
            history.commits[0].step, f"its opening record says identity {spec.identity[:8]}, and holds the science of another"
        )
    before: StepCommit | None = None
    for commit, digest in zip(history.commits, history.digests, strict=True):
        try:
            yield _opening(store, spec, commit, task) if before is None else _step(store, spec, before, commit, digest, absent)
        except (TttdError, ValidationError, KeyError) as error:
            yield Replay(commit.step, f"cannot be made again from its records: {error}")
        before = commit


def _opening(store: RunStore, spec: RunSpec, commit: StepCommit, task: Task | None) -> Replay:
    if commit.previous is not None or commit.identity != spec.identity:
        return Replay(commit.step, "the first commit has a predecessor or another identity")
    fork = spec.request.fork
    if fork is not None:
        return Replay(commit.step, _fork_problem(store, spec, commit), replayed=True)
    if commit.step != 0 or commit.origin is not None:
        return Replay(commit.step, f"the chain of a run that is no fork begins at step {commit.step}")
    if task is None or task_digest(task) != spec.task_digest:
        return Replay(0)
    nodes = seed_nodes(spec, task, [store.read(Verdict, key) for key in verdict_keys(store, spec, task)])
    archive = digest_of(canonical_json(ArchiveState(nodes=nodes, seeds=tuple(node.id for node in nodes))))
    return Replay(0, "" if archive == commit.archive else _differs("archive", archive, commit.archive), replayed=True)


def _fork_problem(store: RunStore, spec: RunSpec, commit: StepCommit) -> str:
    fork, origin = spec.request.fork, commit.origin
    if origin is None or fork is None or (origin.step, origin.commit) != (fork.step, fork.commit) or commit.step != fork.step:
        return f"the fork's first commit names {origin}, its opening record {fork}"
    left = store.load(StepCommit, origin.commit)
    if left.archive != commit.archive:
        return _differs("archive", commit.archive, left.archive)
    if _contents(left) != _contents(commit):
        return "its policies are not those of the commit that it begins after"
    return ""


def _contents(commit: StepCommit) -> list[PolicyRef | None]:
    policies = (commit.policy, commit.previous_policy, commit.initial_policy)
    return [None if policy is None else policy.model_copy(update={"name": ""}) for policy in policies]


def _step(store: RunStore, spec: RunSpec, before: StepCommit, commit: StepCommit, digest: str, absent: frozenset[str]) -> Replay:
    step = commit.step
    previous = store.commit_digest(before.step)
    if (step, commit.previous, commit.identity) != (before.step + 1, previous, spec.identity):
        return Replay(step, f"its commit follows {commit.previous}; step {before.step} is {previous}")
    policy = _policy_after(store, spec, before, step)
    if policy != commit.policy:
        return Replay(step, f"its commit has policy {commit.policy.name}, training made {policy.name}")
    plan, batch = store.find(store.step_key(step, "plan")), store.find(store.step_key(step, "batch"))
    if plan is None or batch is None:
        return Replay(step, f"its {'plan' if plan is None else 'batch'} is not stored")
    if any(key in absent for key in _rollouts(store, batch)):
        return Replay(step)
    made = digest_of(canonical_json(assemble(store, step, plan, spec.request.search.rollouts, before.policy)))
    if made != batch:
        return Replay(step, _differs("batch", made, batch))
    request = CommitRequest(
        run=RunRef(run_id=store.run_id, identity=spec.identity, spec=store.find(f"{store.root}/open") or ""),
        step=step,
        head=_head(before, commit.previous or ""),
        plan=plan,
        batch=batch,
        policy=policy,
    )
    grid = load_grid(store, request)
    archive = digest_of(canonical_json(expanded(grid, spec)))
    if archive != commit.archive:
        return Replay(step, _differs("archive", archive, commit.archive))
    again = digest_of(canonical_json(build_commit(spec, request, grid, archive)))
    return Replay(step, "" if again == digest else _differs("commit", again, digest), replayed=True)


def _policy_after(store: RunStore, spec: RunSpec, before: StepCommit, step: int) -> PolicyRef:
    record = store.read(TrainRecord, store.step_key(step, "train"))
    if record is None:
        return before.policy
    version = before.policy.version + 1
    return PolicyRef(
        version=version,
        name=policy_name(spec.identity, version, record.adapter),
        checkpoint=record.checkpoint,
        adapter=record.adapter,
        gate=record.gate,
    )


def _rollouts(store: RunStore, batch: str) -> Iterator[str]:
    yield from (row.rollout for row in store.load(Batch, batch).rows)


def _head(commit: StepCommit, digest: str) -> Head:
    return Head(
        step=commit.step,
        commit=digest,
        archive=commit.archive,
        policy=commit.policy,
        previous_policy=commit.previous_policy,
        initial_policy=commit.initial_policy,
    )


def _differs(what: str, made: str, stored: str) -> str:
    return f"made again from its records, its {what} is {made}, the chain has {stored}"
