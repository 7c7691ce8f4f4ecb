"""Which steps of a run keep what going on from them needs, and what the others may lose. Pure: reads documents, deletes nothing.

Kept whole: the first commit (version 0 is needed by every gate), every step that improved the best, and the latest few. Of the
others go the optimizer's moments, the adapter's weights and the gate's evidence, which are nearly all of a run's bytes; their
documents stay. Never touched: whatever the chain, its replay, answers, metrics and certificates are made of. None of this is part
of a run's identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from activities.commit.expand import best_node
from activities.open.whole import needs
from activities.records import AdapterManifest, ArchiveState, Checkpoint, StepCommit, TrainRecord
from activities.run_store import RunStore
from workflows.contracts.base import PolicyRef


@dataclass(frozen=True)
class History:
    """A run's commits, in order; a fork's begin at the step that it shares with the other run."""

    commits: tuple[StepCommit, ...]
    digests: tuple[str, ...]


def read_history(store: RunStore) -> History:
    """Every commit that the store has of a run."""
    steps = sorted(int(name) for name in store.blobs.store.folders(f"{store.root}/steps/") if name.isdigit())
    digests = [digest for step in steps if (digest := store.commit_digest(step)) is not None]
    return History(tuple(store.load(StepCommit, digest) for digest in digests), tuple(digests))


def kept_steps(store: RunStore, commits: Sequence[StepCommit], keep: int) -> dict[int, str]:
    """Steps that stay whole, with the reason: `first`, `best` or `latest`.

    Args:
        keep: how many of the latest steps; at least 1, since a run goes on from its last one.
    """
    kept: dict[int, str] = {}
    before: float | None = None
    for number, commit in enumerate(commits):
        best = best_node(store.load(ArchiveState, commit.archive))
        value = None if best is None else best.value
        if number == 0:
            kept[commit.step] = "first"
        elif value is not None and (before is None or value > before):
            kept[commit.step] = "best"
        before = value
    for commit in commits[-max(1, keep) :]:
        kept.setdefault(commit.step, "latest")
    return kept


def retirable(store: RunStore, keep: int) -> dict[int, dict[str, str]]:
    """What each step may lose: step -> digest -> what it is.

    Never what a kept step needs, nor what a step in progress has made. Other runs may need it all the same.
    """
    commits = read_history(store).commits
    kept = kept_steps(store, commits, keep)
    needed = {need.digest for commit in commits if commit.step in kept for need in needs(store, commit)}
    needed |= _in_progress(store, commits)
    found: dict[int, dict[str, str]] = {}
    for commit in commits:
        if commit.step not in kept:
            own = {d: what for d, what in large_blobs(store, commit.policy).items() if d not in needed}
            if own:
                found[commit.step] = own
    return found


def large_blobs(store: RunStore, policy: PolicyRef) -> Mapping[str, str]:
    """What a policy version takes most of the room for: digest -> what it is."""
    checkpoint = store.load(Checkpoint, policy.checkpoint)
    found = {store.load(AdapterManifest, policy.adapter).weights: "weights"}
    if checkpoint.optimizer is not None:
        found[checkpoint.optimizer] = "optimizer"
    if policy.gate is not None:
        found[policy.gate] = "gate"
    return found


def _in_progress(store: RunStore, commits: Sequence[StepCommit]) -> set[str]:
    """What a step after the last commit has trained already."""
    record = store.read(TrainRecord, store.step_key(commits[-1].step + 1, "train")) if commits else None
    if record is None:
        return set()
    checkpoint = store.load(Checkpoint, record.checkpoint)
    weights = store.load(AdapterManifest, record.adapter).weights
    return {digest for digest in (checkpoint.optimizer, weights, record.gate) if digest is not None}
