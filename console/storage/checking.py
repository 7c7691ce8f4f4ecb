"""Checks a run as it lies in a store: every blob against its digest, every document against its form, the chain against a replay.

What is damaged or missing is named by digest, with the documents that name it; an intact copy in a bundle mends it. Knows no
terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from activities.blobs import Blobs, MissingKey, digest_of
from activities.errors import CorruptBlob, InputError
from activities.records import RetiredBlobs, RunSpec
from activities.run_store import RunStore
from console.storage.chain import replay
from console.storage.reach import MODELS, Found, Kind, Reach, parse, place_of, reach, read_entries
from console.storage.retention import read_history
from tasks.registry import Task

Spare = Callable[[str], bytes | None]
"""An intact copy of a blob by its digest, or None."""
TaskOf = Callable[[RunSpec], Task | None]


@dataclass(frozen=True)
class Problem:
    """Something that is not as it must be."""

    where: str
    """`blob DIGEST`, an entry's key, or `step N`."""
    what: str
    named_by: tuple[str, ...] = ()
    """Entries and documents that name the blob."""


@dataclass
class Checked:
    """What was found."""

    run_id: str
    entries: int = 0
    blobs: int = 0
    bytes: int = 0
    """Read and found intact."""
    last_step: int | None = None
    steps: int = 0
    """Commits, the first one counted."""
    replayed: int = 0
    """Of them made again from their records, with the same digests."""
    absent: int = 0
    """Blobs that were dropped on purpose."""
    repaired: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def check_run(blobs: Blobs, run_id: str, task_of: TaskOf = lambda _: None, spare: Spare = lambda _: None) -> Checked:
    """Read everything that a run reaches.

    Args:
        task_of: the run's task, or None where this machine has none.
        spare: where to mend damaged and missing blobs from.

    Raises:
        InputError: the store has no such run.
    """
    store = RunStore(blobs, run_id)
    entries = read_entries(store)
    if not entries:
        raise InputError(f"no run {run_id!r} in {blobs.store.url}")
    result = Checked(run_id, entries=len(entries), last_step=store.last_step())
    reader = _Reader(blobs, spare, result)
    found = reach(store.root, entries, reader.read)
    absent = _absent(store.root, entries, reader)
    for key, why in found.problems.items():
        if key in entries:
            result.problems.append(Problem(key, why))
    for digest, blob in sorted(found.blobs.items()):
        _check_blob(digest, blob, found, absent, reader)
    _check_chain(store, result, task_of, frozenset(absent))
    return result


class _Reader:
    """Reads blobs, and mends them where it can."""

    def __init__(self, blobs: Blobs, spare: Spare, result: Checked) -> None:
        self._blobs = blobs
        self._spare = spare
        self.result = result

    def read(self, digest: str) -> bytes:
        """The bytes of a blob.

        Raises:
            CorruptBlob: it is missing or damaged, and there is no intact copy.
        """
        key = Blobs.key(digest)
        try:
            data = self._blobs.store.get(key)
            if (real := digest_of(data)) == digest:
                return data
            problem = f"damaged: its {len(data)} bytes have digest {real}"
        except MissingKey:
            problem = "missing"
        copy = self._spare(digest)
        if copy is None or digest_of(copy) != digest:
            raise CorruptBlob(problem)
        self._blobs.store.put(key, copy)
        self.result.repaired.append(digest)
        return copy

    def is_there(self, digest: str) -> bool:
        return self._blobs.store.exists(Blobs.key(digest))


def _absent(root: str, entries: Mapping[str, str], reader: _Reader) -> set[str]:
    """Blobs that were dropped on purpose and are not there."""
    found: set[str] = set()
    for key, digest in entries.items():
        place = place_of(root, key)
        if place is not None and place.kind is Kind.RETIRED:
            try:
                record: RetiredBlobs = parse(Kind.RETIRED, digest, reader.read(digest))
            except CorruptBlob:
                continue  # named as a problem with all others
            found |= {blob for blob in record.blobs if not reader.is_there(blob)}
    return found


def _check_blob(digest: str, blob: Found, found: Reach, absent: set[str], reader: _Reader) -> None:
    result = reader.result
    if digest in absent:
        result.absent += 1
        return
    try:
        data = reader.read(digest)
        for kind in blob.kinds & MODELS.keys():
            parse(kind, digest, data)
    except CorruptBlob as error:
        result.problems.append(Problem(f"blob {digest}", f"{', '.join(sorted(blob.kinds))}: {error}", tuple(blob.named_by)))
        return
    result.blobs += 1
    result.bytes += len(data)


def _check_chain(store: RunStore, result: Checked, task_of: TaskOf, absent: frozenset[str]) -> None:
    """Replay, unless the documents that it begins with are damaged: those are named already."""
    try:
        history = read_history(store)
        spec = store.read(RunSpec, f"{store.root}/open")
    except (CorruptBlob, ValueError):
        return
    result.steps = len(history.commits)
    if spec is None:
        result.problems.append(Problem(f"{store.root}/open", "the run has no opening record"))
    elif history.commits:
        for step in replay(store, spec, history, task_of(spec), absent):
            result.replayed += step.replayed and not step.problem
            if step.problem:
                result.problems.append(Problem(f"step {step.step}", step.problem))
