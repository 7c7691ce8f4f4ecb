"""Puts a bundle's run into a store: checks everything first, then creates what is not there yet. Knows no terminal.

Nothing is overwritten. A run of the same name goes on growing from the bundle only if it is the same run: same identity, and one
chain that begins like the other. Entries are created step by step, each step's commit last, so that an import that was killed can
be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from activities.blobs import Blobs
from activities.errors import ConflictError, InputError
from activities.records import RunSpec
from activities.run_store import RunStore
from console.storage.bundle import BundleStore, Manifest
from console.storage.checking import TaskOf, check_run
from console.storage.collection import write_retired
from console.storage.reach import Kind, place_of
from console.storage.retention import read_history


@dataclass(frozen=True)
class Imported:
    """What became of a bundle."""

    run_id: str
    step: int
    """Last committed step in the store now."""
    blobs: int
    entries: int
    """Created now; 0 for a run that was there already."""
    light: bool


def import_bundle(blobs: Blobs, path: Path, task_of: TaskOf = lambda _: None) -> Imported:
    """Check a bundle and store its run.

    Raises:
        InputError: the file is no bundle, or something in it is not what its digests say; names it.
        ConflictError: the store has another run of this name.
    """
    bundle = BundleStore(path)
    try:
        manifest = bundle.manifest
        source, target = RunStore(Blobs(bundle), manifest.run), RunStore(blobs, manifest.run)
        _check_bundle(path, source, manifest, task_of)
        _check_same_run(source, target, manifest)
        new_blobs = sum(_copy_blob(blobs, digest, source.blobs.get(digest)) for digest in sorted(manifest.blobs))
        # Where the run is already, its own opening record stays: it may name the model by another path.
        committed = target.last_step()
        created = 0
        for key in _in_order(source.root, manifest.entries):
            place = place_of(source.root, key)
            if place is not None and place.kind is Kind.RETIRED and committed is not None and (place.step or 0) <= committed:
                continue
            created += blobs.store.create(key, manifest.entries[key].encode())
        _forget_restored(target)
        last = target.last_step()
        assert last is not None
        return Imported(manifest.run, last, new_blobs, created, manifest.light)
    finally:
        bundle.close()


def _check_bundle(path: Path, source: RunStore, manifest: Manifest, task_of: TaskOf) -> None:
    checked = check_run(source.blobs, source.run_id, task_of)
    if checked.problems:
        first, more = checked.problems[0], len(checked.problems) - 1
        named = f", named by {', '.join(first.named_by)}" if first.named_by else ""
        raise InputError(f"{path}: {first.where}: {first.what}{named}{f'; and {more} more' if more else ''}. Nothing was imported")
    last = source.last_step()
    if last is None or (last, source.commit_digest(last)) != (manifest.step, manifest.commit):
        raise InputError(
            f"{path}: its manifest names commit {manifest.commit} of step {manifest.step}, its entries end at step {last}"
        )


def _check_same_run(source: RunStore, target: RunStore, manifest: Manifest) -> None:
    """Whether the store's run of this name, if it has one, is the bundle's."""
    there = target.read(RunSpec, f"{target.root}/open")
    if there is None:
        return
    brought = source.read(RunSpec, f"{source.root}/open")
    assert brought is not None
    where = f"run {target.run_id} in {target.blobs.store.url}"
    if there.identity != brought.identity:
        raise ConflictError(
            f"{where} is another one (identity {there.identity[:8]}, the bundle's {brought.identity[:8]}): "
            "import into another store"
        )
    ours, theirs = read_history(target), read_history(source)
    for commit, here, brings in zip(ours.commits, ours.digests, theirs.digests, strict=False):
        if here != brings:
            raise ConflictError(
                f"{where} went another way at step {commit.step}: its commit is {here[:12]}, the bundle's {brings[:12]}; "
                "import into another store"
            )
    last = target.last_step()
    for key, digest in manifest.entries.items():
        place = place_of(source.root, key)
        if place is None or place.step is None or place.kind is Kind.RETIRED or (last is not None and place.step <= last):
            continue
        if target.find(key) not in (None, digest):
            raise ConflictError(f"{where} has a step {place.step} in progress with a {place.kind} of its own; let it end first")


def _copy_blob(blobs: Blobs, digest: str, data: bytes) -> bool:
    new = not blobs.store.exists(Blobs.key(digest))
    blobs.put(data)
    return new


def _in_order(root: str, entries: dict[str, str]) -> Iterator[str]:
    """The opening record, then step by step, commits last."""

    def rank(key: str) -> tuple[int, bool, str]:
        place = place_of(root, key)
        return (-1 if place is None or place.step is None else place.step, place is not None and place.kind is Kind.COMMIT, key)

    yield from sorted(entries, key=rank)


def _forget_restored(store: RunStore) -> None:
    """What a bundle brought back is not retired any more."""
    for name in store.blobs.store.folders(f"{store.root}/steps/"):
        record = store.retired(int(name)) if name.isdigit() else None
        if record is not None:
            gone = {digest for digest in record.blobs if not store.blobs.store.exists(Blobs.key(digest))}
            if gone != set(record.blobs):
                write_retired(store, int(name), gone, record.reason)
