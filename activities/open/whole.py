"""What must still be in the store for a run to go on from one of its commits, or for a fork to begin there.

A commit needs its adapter, its optimizer state and the gate's evidence; and, for the gate, the adapters of the version before and
of version 0. Knows nothing of when such things are dropped (console/storage).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from activities.blobs import Blobs
from activities.errors import CorruptBlob, Retired
from activities.records import AdapterManifest, Checkpoint, StepCommit
from activities.run_store import RunStore


@dataclass(frozen=True)
class Need:
    """One blob that going on from a commit reads."""

    what: str
    """For people: `optimizer state`, `adapter of version 3`, ..."""
    digest: str


def needs(store: RunStore, commit: StepCommit) -> Iterator[Need]:
    """Every large blob that going on from a commit reads, each once.

    Raises:
        CorruptBlob: a manifest, which is never dropped, is missing or damaged.
    """
    checkpoint = store.load(Checkpoint, commit.policy.checkpoint)
    if checkpoint.optimizer is not None:
        yield Need("optimizer state", checkpoint.optimizer)
    if commit.policy.gate is not None:
        yield Need("evidence for the gate", commit.policy.gate)
    policies = (commit.policy, commit.previous_policy, commit.initial_policy)
    for policy in {p.adapter: p for p in policies if p is not None}.values():
        adapter = store.load(AdapterManifest, policy.adapter)
        yield Need(f"adapter of version {policy.version}", adapter.weights)
        yield Need(f"adapter configuration of version {policy.version}", adapter.config)


def check_whole(store: RunStore, commit: StepCommit) -> None:
    """Whether one can go on from a commit.

    Raises:
        Retired: something was dropped on purpose; names it, and what to do.
        CorruptBlob: something is missing, and nobody dropped it.
    """
    blobs = store.blobs
    missing = {need.digest: need.what for need in needs(store, commit) if not blobs.store.exists(Blobs.key(need.digest))}
    if not missing:
        return
    dropped = _retired(store)
    where = f"step {commit.step} of run {store.run_id}"
    if lost := [f"{what} ({digest})" for digest, what in missing.items() if digest not in dropped]:
        raise CorruptBlob(
            f"{where} is not whole: missing from {blobs.store.url} are {', '.join(lost)}; `tttd storage check {store.run_id} "
            "--from BUNDLE` restores them from a bundle that has them"
        )
    reasons = " and ".join(sorted({dropped[digest] for digest in missing}))
    verb = "is" if len(missing) == 1 else "are"
    raise Retired(
        f"{where} was retired ({reasons}): its {', '.join(missing.values())} {verb} not kept. Go on "
        "from a step that is (`tttd storage list` names them), or import a bundle that has it"
    )


def _retired(store: RunStore) -> dict[str, str]:
    """Everything that was dropped of a run on purpose, with the reason."""
    found: dict[str, str] = {}
    for name in store.blobs.store.folders(f"{store.root}/steps/"):
        record = store.retired(int(name)) if name.isdigit() else None
        if record is not None:
            found |= dict.fromkeys(record.blobs, record.reason)
    return found
