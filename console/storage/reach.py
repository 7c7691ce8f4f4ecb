"""Which blobs a run needs: from its named entries, through every document that they name. Source: `activities/records.py`.

One function over a store, with one rule for each kind of document. A commit's `tokens` and a spec's task, judge, model and prompt
are digests of what is no blob, and lead nowhere. Knows nothing of retention: what is reached here may have been dropped on
purpose.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from activities.errors import CorruptBlob
from activities.records import (
    AdapterManifest,
    ArchiveState,
    BaseScores,
    Batch,
    Checkpoint,
    GateEvidence,
    RetiredBlobs,
    RolloutRecord,
    RunSpec,
    StepCommit,
    StepPlan,
    StepReport,
    TrainRecord,
    Verdict,
)
from activities.run_store import RunStore
from workflows.contracts.base import PolicyRef


class Kind(StrEnum):
    """What a blob is to the document that names it."""

    OPEN = "open"
    PLAN = "plan"
    ROLLOUT = "rollout"
    VERDICT = "verdict"
    BASE = "base"
    BATCH = "batch"
    TRAIN = "train"
    COMMIT = "commit"
    REPORT = "report"
    RETIRED = "retired"
    ORIGIN = "origin"
    """The commit that a fork begins after, with the archive and the policies that it needs from there."""
    ANCESTOR = "ancestor"
    """An earlier commit of the chain, or of the run that a fork left: the commits alone, down to the first."""
    ARCHIVE = "archive"
    CHECKPOINT = "checkpoint"
    ADAPTER = "adapter"
    ADAPTER_CONFIG = "adapter_config"
    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    GATE = "gate"
    CONSTRUCTION = "construction"
    TASK = "task"
    """A task's folder."""


MODELS: Final[Mapping[Kind, type[BaseModel]]] = {
    Kind.OPEN: RunSpec,
    Kind.PLAN: StepPlan,
    Kind.ROLLOUT: RolloutRecord,
    Kind.VERDICT: Verdict,
    Kind.BASE: BaseScores,
    Kind.BATCH: Batch,
    Kind.TRAIN: TrainRecord,
    Kind.COMMIT: StepCommit,
    Kind.REPORT: StepReport,
    Kind.RETIRED: RetiredBlobs,
    Kind.ORIGIN: StepCommit,
    Kind.ANCESTOR: StepCommit,
    Kind.ARCHIVE: ArchiveState,
    Kind.CHECKPOINT: Checkpoint,
    Kind.ADAPTER: AdapterManifest,
    Kind.GATE: GateEvidence,
}
"""The document that each kind holds; the others are plain bytes."""

_LEAVES: Final = frozenset(set(Kind) - set(MODELS) | {Kind.ROLLOUT, Kind.GATE, Kind.REPORT, Kind.RETIRED})
"""Kinds that name no blob of their own; they need not be read to know what a run reaches."""

_ENTRY = re.compile(
    r"(?:open|steps/(\d{6,})/(?:(plan|batch|train|commit|report|retired)|g\d{2,}/(base)|g\d{2,}/r\d{2,}/(rollout|verdict)))"
)


@dataclass(frozen=True)
class Link:
    """One document names one blob."""

    kind: Kind
    digest: str
    shallow: bool = False
    """What it names is named by the same document, too."""


@dataclass(frozen=True)
class Place:
    """What a named entry of a run is."""

    kind: Kind
    step: int | None
    """None for the opening record."""


@dataclass
class Found:
    """A blob that a run reaches."""

    kinds: set[Kind] = field(default_factory=set)
    named_by: list[str] = field(default_factory=list)
    """Entries, or documents as `kind digest`, that name it; the first few."""


@dataclass
class Reach:
    """Everything that a run's entries name."""

    entries: dict[str, str]
    """Key -> digest."""
    blobs: dict[str, Found] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Digest or key -> why it cannot be followed."""


_NAMED = 3


def place_of(root: str, key: str) -> Place | None:
    """What an entry below `runs/<run>` is; None for one that no version of ours has written."""
    match = _ENTRY.fullmatch(key.removeprefix(f"{root}/"))
    if match is None:
        return None
    step, *names = match.groups()
    name = next((n for n in names if n), "open")
    return Place(Kind(name), None if step is None else int(step))


def read_entries(store: RunStore, last_step: int | None = None) -> dict[str, str]:
    """A run's named entries, in order.

    Args:
        last_step: leave out those of later steps; None: all.
    """
    found: dict[str, str] = {}
    for key in store.blobs.store.keys(f"{store.root}/"):
        place = place_of(store.root, key)
        if last_step is None or place is None or place.step is None or place.step <= last_step:
            found[key] = store.blobs.store.get(key).decode("ascii", "replace")
    return found


def reach(root: str, entries: Mapping[str, str], read: Callable[[str], bytes]) -> Reach:
    """Walk from a run's entries to every blob that they name.

    Args:
        root: `runs/<run>`.
        read: the bytes of a blob; asked only for documents that name others. May raise CorruptBlob, which becomes a problem.
    """
    result = Reach(dict(entries))
    waiting: deque[Link] = deque()
    done: set[tuple[Kind, str]] = set()

    def found(link: Link, by: str) -> None:
        blob = result.blobs.setdefault(link.digest, Found())
        blob.kinds.add(link.kind)
        if len(blob.named_by) < _NAMED and by not in blob.named_by:
            blob.named_by.append(by)
        if link.kind not in _LEAVES and not link.shallow and (link.kind, link.digest) not in done:
            done.add((link.kind, link.digest))
            waiting.append(link)

    batched = {place.step for key in entries if (place := place_of(root, key)) and place.kind is Kind.BATCH}
    for key, digest in entries.items():
        place = place_of(root, key)
        if place is None or not re.fullmatch(r"[0-9a-f]{64}", digest):
            result.problems[key] = "is no entry of a run" if place is None else "does not hold a digest"
            continue
        # A complete batch names every construction of its verdicts, and is one document instead of hundreds.
        found(Link(place.kind, digest, shallow=place.kind is Kind.VERDICT and place.step in batched), key)
    while waiting:
        link = waiting.popleft()
        try:
            document = parse(link.kind, link.digest, read(link.digest))
        except CorruptBlob as error:
            result.problems[link.digest] = str(error)
            continue
        for named in links_of(link.kind, document):
            found(named, f"{link.kind} {link.digest}")
    return result


def parse(kind: Kind, digest: str, data: bytes) -> Any:
    """A blob as the document that it should be.

    Raises:
        CorruptBlob: it is none; names kind and digest.
    """
    try:
        return MODELS[kind].model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptBlob(f"blob {digest} is no {kind} document: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def links_of(kind: Kind, document: Any) -> Iterator[Link]:
    """The blobs that a document names."""
    yield from (link for link in _RULES.get(kind, _nothing)(document) if link is not None)


def _nothing(_: Any) -> Iterator[Link | None]:
    yield from ()


def _maybe(kind: Kind, digest: str | None) -> Link | None:
    return None if digest is None else Link(kind, digest)


def _of_spec(spec: RunSpec) -> Iterator[Link | None]:
    yield _maybe(Kind.TASK, spec.bundle)
    if spec.request.fork is not None:
        yield _maybe(Kind.ORIGIN, spec.request.fork.commit)


def _of_plan(plan: StepPlan) -> Iterator[Link | None]:
    yield Link(Kind.ARCHIVE, plan.archive)
    yield from (_maybe(Kind.CONSTRUCTION, group.parent.construction) for group in plan.groups)


def _of_verdict(verdict: Verdict) -> Iterator[Link | None]:
    yield _maybe(Kind.CONSTRUCTION, verdict.construction)


def _of_base(scores: BaseScores) -> Iterator[Link | None]:
    yield from (Link(Kind.ROLLOUT, digest) for digest in scores.rollouts)


def _of_batch(batch: Batch) -> Iterator[Link | None]:
    yield Link(Kind.PLAN, batch.plan)
    for row in batch.rows:
        yield Link(Kind.ROLLOUT, row.rollout)
        yield Link(Kind.VERDICT, row.verdict, shallow=True)
        yield _maybe(Kind.CONSTRUCTION, row.construction)


def _of_train(record: TrainRecord) -> Iterator[Link | None]:
    yield Link(Kind.CHECKPOINT, record.base)
    yield Link(Kind.BATCH, record.batch)
    yield Link(Kind.CHECKPOINT, record.checkpoint)
    yield Link(Kind.ADAPTER, record.adapter)
    yield Link(Kind.GATE, record.gate)


def _of_commit(commit: StepCommit) -> Iterator[Link | None]:
    yield from _of_ancestor(commit)
    yield from (_maybe(Kind.CONSTRUCTION, row.construction) for row in commit.rows)
    yield Link(Kind.ARCHIVE, commit.archive)
    for policy in (commit.policy, commit.previous_policy, commit.initial_policy):
        yield from () if policy is None else of_policy(policy)


def _of_ancestor(commit: StepCommit) -> Iterator[Link | None]:
    yield _maybe(Kind.ANCESTOR, commit.previous)
    yield _maybe(Kind.ANCESTOR, commit.origin.commit if commit.origin else None)


def of_policy(policy: PolicyRef) -> Iterator[Link | None]:
    """What a policy version is made of."""
    yield Link(Kind.CHECKPOINT, policy.checkpoint)
    yield Link(Kind.ADAPTER, policy.adapter)
    yield _maybe(Kind.GATE, policy.gate)


def _of_archive(archive: ArchiveState) -> Iterator[Link | None]:
    yield from (_maybe(Kind.CONSTRUCTION, node.construction) for node in archive.nodes)


def _of_checkpoint(checkpoint: Checkpoint) -> Iterator[Link | None]:
    yield Link(Kind.ADAPTER, checkpoint.adapter)
    yield _maybe(Kind.OPTIMIZER, checkpoint.optimizer)


def _of_adapter(manifest: AdapterManifest) -> Iterator[Link | None]:
    yield Link(Kind.ADAPTER_CONFIG, manifest.config)
    yield Link(Kind.WEIGHTS, manifest.weights)


_RULES: Final[Mapping[Kind, Callable[[Any], Iterator[Link | None]]]] = {
    Kind.OPEN: _of_spec,
    Kind.PLAN: _of_plan,
    Kind.VERDICT: _of_verdict,
    Kind.BASE: _of_base,
    Kind.BATCH: _of_batch,
    Kind.TRAIN: _of_train,
    Kind.COMMIT: _of_commit,
    Kind.ORIGIN: _of_commit,
    Kind.ANCESTOR: _of_ancestor,
    Kind.ARCHIVE: _of_archive,
    Kind.CHECKPOINT: _of_checkpoint,
    Kind.ADAPTER: _of_adapter,
}
