"""Writes a run into a bundle: everything that its committed steps reach, and nothing of the machine that it lay on.

A step in progress is left out. The opening record names the model by a path only if the user did; the bundle keeps the folder's
name, since the model's digest says which one it is. Reads a store and writes one file. Knows no terminal.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

from activities.blobs import Blobs, digest_of
from activities.errors import CorruptBlob, InputError
from activities.records import RetiredBlobs, RunSpec, canonical_json
from activities.run_store import RunStore
from console.storage.bundle import (
    MANIFEST,
    README,
    README_TEXT,
    AbsentBlob,
    BundledBlob,
    Manifest,
    add_member,
    manifest_bytes,
    member_name,
)
from console.storage.reach import Found, Kind, Reach, place_of, reach, read_entries
from console.storage.retention import large_blobs, read_history
from console.stored import find_run, lineage_of, unknown_run

LIGHT_REASON: Final = "light bundle"
_HEAVY: Final = frozenset({Kind.ROLLOUT, Kind.BASE, Kind.OPTIMIZER, Kind.WEIGHTS, Kind.GATE})


@dataclass(frozen=True)
class Exported:
    """What was written."""

    run_id: str
    step: int
    blobs: int
    bytes: int
    """Of the file."""
    absent: int


def export_run(blobs: Blobs, run_id: str, path: Path, *, light: bool = False) -> Exported:
    """Write a bundle; the file appears when it is complete.

    Args:
        light: leave out rollouts, base scores, adapters, optimizer states and gate evidence.

    Raises:
        InputError: no such run, or nothing committed yet.
        CorruptBlob: a blob is missing or damaged; names it.
    """
    run = find_run(blobs, run_id)
    if run is None:
        raise InputError(unknown_run(blobs, run_id))
    if run.spec is None or run.step is None or run.commit is None:
        raise InputError(f"run {run_id} has nothing committed yet, so there is nothing to export")
    store = RunStore(blobs, run_id)
    made: dict[str, bytes] = {}
    entries = _entries(store, run.spec, run.step, made, light=light)

    def read(digest: str) -> bytes:
        return made[digest] if digest in made else blobs.get(digest)

    found = reach(store.root, entries, read)
    if found.problems:
        name, why = next(iter(found.problems.items()))
        raise CorruptBlob(f"run {run_id} cannot be exported: {name}: {why}")
    absent = _absent(store, found, made, light=light)
    fork = lineage_of(run.spec)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as tar:
            add_member(tar, README, README_TEXT.encode())
            listed: dict[str, BundledBlob] = {}
            for digest in sorted(found.blobs.keys() - absent.keys()):
                data = read(digest)
                add_member(tar, member_name(digest), data)
                listed[digest] = BundledBlob(bytes=len(data), kind=_kind(found.blobs[digest]))
            manifest = Manifest(
                run=run_id,
                task=run.spec.task,
                identity=run.spec.identity,
                step=run.step,
                commit=run.commit,
                fork_of=None if fork is None else f"{fork.run}@{fork.step}",
                light=light,
                entries=entries,
                blobs=listed,
                absent=absent,
                readme=digest_of(README_TEXT.encode()),
            )
            add_member(tar, MANIFEST, manifest_bytes(manifest))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Exported(run_id, run.step, len(listed), path.stat().st_size, len(absent))


def _entries(store: RunStore, spec: RunSpec, last: int, made: dict[str, bytes], *, light: bool) -> dict[str, str]:
    """The run's entries up to its last commit; documents that only the bundle has go to `made`."""

    def make(document: object) -> str:
        data = canonical_json(document)
        made[digest_of(data)] = data
        return digest_of(data)

    entries = read_entries(store, last)
    entries[f"{store.root}/open"] = make(_portable(spec))
    if light:
        for step, lost in _left_out(store, entries).items():
            before = store.retired(step)
            everything = sorted(lost | set(before.blobs if before else ()))
            entries[store.step_key(step, "retired")] = make(RetiredBlobs(step=step, reason=LIGHT_REASON, blobs=tuple(everything)))
    return dict(sorted(entries.items()))


def _portable(spec: RunSpec) -> RunSpec:
    """The opening record without paths of this machine."""
    name = spec.request.model
    if not name.startswith(("/", "~", ".")):
        return spec
    return spec.model_copy(update={"request": spec.request.model_copy(update={"model": PurePath(name).name or "model"})})


def _left_out(store: RunStore, entries: Mapping[str, str]) -> dict[int, set[str]]:
    """What a light bundle lacks of each step."""
    found: dict[int, set[str]] = {}
    for key, digest in entries.items():
        place = place_of(store.root, key)
        if place is not None and place.step is not None and place.kind in _HEAVY:
            found.setdefault(place.step, set()).add(digest)
    for number, commit in enumerate(read_history(store).commits):
        # The first commit of a fork names three versions that no step of its own made.
        policies = (commit.policy,) if number else (commit.policy, commit.previous_policy, commit.initial_policy)
        for policy in policies:
            found.setdefault(commit.step, set()).update({} if policy is None else large_blobs(store, policy))
    return found


def _absent(store: RunStore, found: Reach, made: Mapping[str, bytes], *, light: bool) -> dict[str, AbsentBlob]:
    """What the run names and the bundle will not have: what was left out now, and what was dropped before."""
    absent: dict[str, AbsentBlob] = {}
    for digest, blob in sorted(found.blobs.items()):
        if light and blob.kinds & _HEAVY:
            absent[digest] = AbsentBlob(kind=_kind(blob), reason=LIGHT_REASON)
    for key, digest in found.entries.items():
        place = place_of(store.root, key)
        if place is None or place.kind is not Kind.RETIRED:
            continue
        record = RetiredBlobs.model_validate_json(made[digest] if digest in made else store.blobs.get(digest))
        for lost in record.blobs:
            if lost not in absent and lost in found.blobs and not store.blobs.store.exists(Blobs.key(lost)):
                absent[lost] = AbsentBlob(kind=_kind(found.blobs[lost]), reason=record.reason)
    return absent


def _kind(blob: Found) -> str:
    return min(blob.kinds)
