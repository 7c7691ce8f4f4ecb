"""Forks: a run that begins after a committed step of another run, with its archive, its adapter and its optimizer state.

A fork counts on from the step it leaves at: node ids and policy versions stay unique, and step K of the fork is step K of the other
run. That step holds the fork's opening commit, which names the other run's commit by digest. Visits and values of the archive are
kept. Knows no workflow; what the fork does from there on is a run like any other.
"""

from __future__ import annotations

from activities.blobs import Blobs
from activities.errors import InputError
from activities.open.whole import check_whole
from activities.records import ForkOrigin, RunSpec, StepCommit, policy_name
from activities.run_store import RunStore
from workflows.contracts.base import PolicyRef
from workflows.contracts.request import ForkSettings, RunRequest


def with_origin(blobs: Blobs, request: RunRequest, run_id: str | None) -> RunRequest:
    """The request with the commit's digest filled in; as it is, if it asks for no fork.

    A fork that was opened before knows its origin itself, so the other run need not be there any more.

    Raises:
        InputError: no such run or step, or another commit than the request names.
    """
    fork = request.fork
    if fork is None:
        return request
    if fork.run == run_id:
        raise InputError(f"fork: run {run_id} cannot be a fork of itself; give the fork another name")
    own = RunStore(blobs, run_id).read(RunSpec, f"runs/{run_id}/open") if run_id else None
    before = own.request.fork if own else None
    if before is not None and (before.run, before.step) == (fork.run, fork.step):
        commit = before.commit
    else:
        commit = _commit_of(RunStore(blobs, fork.run), fork)
    return request.model_copy(update={"fork": fork.model_copy(update={"commit": fork.commit or commit})})


def _commit_of(store: RunStore, fork: ForkSettings) -> str:
    found = store.commit_digest(fork.step)
    if found is None:
        last = store.last_step()
        there = "there is no such run" if last is None else f"its last committed step is {last}"
        first = _first_step(store)
        there = f"it is a fork itself and begins at step {first}" if first is not None and fork.step < first else there
        raise InputError(f"fork: run {fork.run} has no commit of step {fork.step} in {store.blobs.store.url}: {there}")
    if fork.commit not in (None, found):
        raise InputError(
            f"fork.commit: step {fork.step} of run {fork.run} is commit {found}, not {fork.commit}; leave fork.commit out, or name "
            "the run that has it"
        )
    return found


def _first_step(store: RunStore) -> int | None:
    spec = store.read(RunSpec, f"{store.root}/open")
    return None if spec is None or spec.request.fork is None else spec.request.fork.step


def check_fork(blobs: Blobs, spec: RunSpec) -> None:
    """Whether a fork that is not open yet may begin where it asks to.

    Raises:
        InputError: it changes what adapters and archives depend on; names the fields with both values.
        Retired: that step's adapter or optimizer state is not in the store any more.
    """
    fork = spec.request.fork
    assert fork is not None and fork.commit is not None  # noqa: PT018  resolved
    store = RunStore(blobs, fork.run)
    parent = store.read(RunSpec, f"{store.root}/open")
    if parent is None:
        raise InputError(f"fork: run {fork.run} has no opening record in {blobs.store.url}; import it, or fork another run")
    before, after = _fixed(parent), _fixed(spec)
    if changed := [f"{name}: {before[name]!r} -> {after[name]!r}" for name in before if before[name] != after[name]]:
        raise InputError(
            f"a fork of {fork.run} cannot change {'; '.join(changed)}: its archive and adapter were made with them. Everything "
            "else may change; for these, start a new run"
        )
    check_whole(store, store.load(StepCommit, fork.commit))


def _fixed(spec: RunSpec) -> dict[str, object]:
    lora = spec.request.lora
    return {
        "task": spec.task,
        "digests.task": spec.task_digest,
        "digests.judge": spec.judge_digest,
        "digests.model": spec.model_digest,
        "lora.rank": lora.rank,
        "lora.alpha": lora.alpha,
    }


def commit_fork(store: RunStore, spec: RunSpec) -> int:
    """Make a fork's opening commit; returns its step.

    Raises:
        Retired: what the fork needs was collected since it was asked for.
    """
    fork = spec.request.fork
    assert fork is not None and fork.commit is not None  # noqa: PT018  resolved
    other = RunStore(store.blobs, fork.run)
    left = store.load(StepCommit, fork.commit)
    check_whole(other, left)
    _copy_verdicts(other, store)

    def renamed(policy: PolicyRef) -> PolicyRef:
        # Names hold the identity of the run that serves them, so that unloading old ones of one run never touches another's.
        return policy.model_copy(update={"name": policy_name(spec.identity, policy.version, policy.adapter)})

    commit = StepCommit(
        step=left.step,
        previous=None,
        identity=spec.identity,
        rows=(),
        archive=left.archive,
        policy=renamed(left.policy),
        previous_policy=None if left.previous_policy is None else renamed(left.previous_policy),
        initial_policy=renamed(left.initial_policy),
        origin=ForkOrigin(step=left.step, commit=fork.commit),
    )
    store.claim(store.step_key(left.step, "commit"), commit)
    return left.step


def _copy_verdicts(other: RunStore, store: RunStore) -> None:
    """The verdicts on the roots, so that the exact values of a fork's roots can be looked up in the fork itself."""
    for key in other.blobs.store.keys(f"{other.root}/steps/{0:06d}/"):
        if key.endswith("/verdict"):
            store.blobs.store.create(store.root + key.removeprefix(other.root), other.blobs.store.get(key))
