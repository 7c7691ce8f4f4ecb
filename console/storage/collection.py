"""Garbage collection: deletes what retention drops and what nothing names, and is safe while runs are going.

Three things make it safe. Nothing younger than the grace goes, and storing bytes again makes them young (`ObjectStore.refresh`);
blobs that a run in progress may have made since its step began are spared, whatever their age; and before anything is deleted,
all runs are read again. What retention drops is written down first (`RetiredBlobs`), so that nobody takes it for lost. Knows no
terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pydantic import BaseModel

from activities.blobs import Blobs, Entry
from activities.errors import CorruptBlob, InputError
from activities.records import RetiredBlobs
from activities.run_store import RunStore
from console.storage.reach import Kind, Link, links_of, of_policy, parse, reach, read_entries
from console.storage.retention import retirable
from console.stored import run_ids
from workflows.contracts.messages import PublishRequest

_PREFIX = "blobs/"


class _PublishedRuns(BaseModel):
    """What engines remember, as far as it names blobs."""

    requests: tuple[PublishRequest, ...] = ()


@dataclass(frozen=True)
class Wish:
    """What to collect."""

    runs: tuple[str, ...] | None
    """Apply retention to these. None: to every run, and collect what no run names, too."""
    keep_checkpoints: int
    grace_seconds: float
    dry_run: bool = False


@dataclass
class Collected:
    """What was deleted, or would be."""

    retired: dict[str, dict[int, int]] = field(default_factory=dict)
    """Run -> step -> blobs dropped by retention."""
    retired_bytes: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    unfinished: int = 0
    unfinished_bytes: int = 0
    """Files that killed writers left."""
    spared: int = 0
    """Blobs that nothing needs, and that are younger than the grace or became needed meanwhile."""

    @property
    def bytes(self) -> int:
        return self.retired_bytes + self.orphan_bytes + self.unfinished_bytes


@dataclass(frozen=True)
class _Marked:
    required: frozenset[str]
    retire: dict[str, dict[int, tuple[str, ...]]]
    """Run -> step -> digests that no run requires."""

    @property
    def retired(self) -> set[str]:
        return {digest for steps in self.retire.values() for digests in steps.values() for digest in digests}


def collect(blobs: Blobs, wish: Wish, now: float, is_busy: Callable[[str], bool] = lambda _: True) -> Collected:
    """Apply retention, and delete what nothing names.

    Args:
        now: Unix seconds.
        is_busy: whether a run that has begun a step may still be working on it.

    Raises:
        InputError: no such run, or a document of some run cannot be read: what it names is not known, so nothing is deleted.
    """
    result = Collected()
    cutoff = min([now - wish.grace_seconds, *_steps_in_progress(blobs, is_busy)])
    marked = _mark(blobs, wish)
    sizes = {entry.key.rpartition("/")[2]: entry for entry in blobs.store.entries(_PREFIX)}
    unwanted = marked.retired if wish.runs is not None else sizes.keys() - marked.required
    doomed = {digest for digest in unwanted if digest in sizes and sizes[digest].modified <= cutoff}
    result.spared = len([digest for digest in unwanted if digest in sizes]) - len(doomed)
    if not wish.dry_run:
        _write_down(blobs, marked, doomed)
        still = _mark(blobs, wish)
        gone = _delete(blobs, doomed - still.required, cutoff)
        result.spared += len(doomed) - len(gone)
        _strike_out(blobs, marked, doomed - gone)
        doomed = gone
    _count(result, marked, doomed, sizes)
    if wish.runs is None and not wish.dry_run:
        result.unfinished, result.unfinished_bytes = blobs.store.remove_unfinished(cutoff)
    return result


def _mark(blobs: Blobs, wish: Wish) -> _Marked:
    known = run_ids(blobs)
    if wish.runs is not None and (unknown := set(wish.runs) - set(known)):
        raise InputError(f"no run {', '.join(sorted(unknown))} in {blobs.store.url}; runs there: {', '.join(known) or 'none'}")
    required = set(_published(blobs))
    droppable: dict[str, dict[int, dict[str, str]]] = {}
    for run in known:
        store = RunStore(blobs, run)
        found = reach(store.root, read_entries(store), blobs.get)
        if found.problems:
            name, why = next(iter(found.problems.items()))
            raise InputError(
                f"nothing is collected: {name} of run {run}: {why}. What it names cannot be known; `tttd storage check {run}` "
                "says more, `--from BUNDLE` mends it"
            )
        may_lose = retirable(store, wish.keep_checkpoints) if wish.runs is None or run in wish.runs else {}
        required |= found.blobs.keys() - {digest for step in may_lose.values() for digest in step}
        if may_lose:
            droppable[run] = may_lose
    retire = {
        run: {step: kept for step, lost in steps.items() if (kept := tuple(sorted(lost.keys() - required)))}
        for run, steps in droppable.items()
    }
    return _Marked(frozenset(required), retire)


def _published(blobs: Blobs) -> Iterator[str]:
    """What engines give back to themselves after a restart: the adapters and the evidence of what was published last."""
    for key in blobs.store.keys("fleet/published/"):
        try:
            requests = _PublishedRuns.model_validate_json(blobs.store.get(key)).requests
        except ValueError:
            raise InputError(f"nothing is collected: {key} cannot be read, so what that engine needs is not known") from None
        for request in requests:
            yield request.run.spec
            for policy in (request.policy, request.previous, request.initial):
                yield from () if policy is None else _with_parts(blobs, of_policy(policy))


def _with_parts(blobs: Blobs, links: Iterable[Link | None]) -> Iterator[str]:
    for link in links:
        if link is None or link.kind is Kind.CHECKPOINT:  # only trainers read checkpoints
            continue
        yield link.digest
        if link.kind is Kind.ADAPTER:
            try:
                yield from (part.digest for part in links_of(link.kind, parse(link.kind, link.digest, blobs.get(link.digest))))
            except CorruptBlob:
                continue  # of a run that is not here any more: the engine will say so itself


def _steps_in_progress(blobs: Blobs, is_busy: Callable[[str], bool]) -> Iterator[float]:
    """When each step began that is not committed yet, in Unix seconds."""
    for run in run_ids(blobs):
        store = RunStore(blobs, run)
        last = store.last_step()
        later = [
            name
            for name in blobs.store.folders(f"{store.root}/steps/")
            if name.isdigit() and int(name) > (-1 if last is None else last)
        ]
        if (later or last is None) and is_busy(run):
            prefixes = [f"{store.root}/steps/{name}/" for name in later] or [f"{store.root}/open"]
            yield from (entry.modified for prefix in prefixes for entry in blobs.store.entries(prefix))


def _write_down(blobs: Blobs, marked: _Marked, doomed: set[str]) -> None:
    for run, steps in marked.retire.items():
        for step, digests in steps.items():
            if going := doomed.intersection(digests):
                store = RunStore(blobs, run)
                before = store.retired(step)
                write_retired(store, step, {*going, *(before.blobs if before else ())}, "retention")


def write_retired(store: RunStore, step: int, digests: Iterable[str], reason: str) -> None:
    """Say what was dropped of a step; an empty list removes the record."""
    key = store.step_key(step, "retired")
    if listed := tuple(sorted(digests)):
        store.blobs.store.put(key, store.put(RetiredBlobs(step=step, reason=reason, blobs=listed)).encode())
    else:
        store.blobs.store.delete(key)


def _strike_out(blobs: Blobs, marked: _Marked, spared: set[str]) -> None:
    """What was spared in the end is not retired."""
    for run, steps in marked.retire.items():
        for step, digests in steps.items():
            store = RunStore(blobs, run)
            if spared.intersection(digests) and (record := store.retired(step)) is not None:
                write_retired(store, step, set(record.blobs) - spared, record.reason)


def _delete(blobs: Blobs, digests: set[str], cutoff: float) -> set[str]:
    """Delete what is still old, folder by folder, so that ages are seconds old when they decide."""
    gone: set[str] = set()
    for folder in sorted({digest[:2] for digest in digests}):
        for entry in list(blobs.store.entries(f"{_PREFIX}{folder}/")):
            digest = entry.key.rpartition("/")[2]
            if digest in digests and entry.modified <= cutoff:
                blobs.store.delete(entry.key)
                gone.add(digest)
    return gone


def _count(result: Collected, marked: _Marked, gone: set[str], sizes: dict[str, Entry]) -> None:
    for run, steps in marked.retire.items():
        if counted := {step: n for step, digests in steps.items() if (n := len(gone.intersection(digests)))}:
            result.retired[run] = counted
    retired = marked.retired
    for digest in gone:
        if digest in retired:
            result.retired_bytes += sizes[digest].size
        else:
            result.orphans += 1
            result.orphan_bytes += sizes[digest].size
