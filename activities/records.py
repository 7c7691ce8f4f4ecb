"""The documents that a run stores. Where they lie: `activities/run_store.py`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from workflows.contracts.base import Coordinate, Digest, Outcome, PolicyRef
from workflows.contracts.messages import StepSummary
from workflows.contracts.request import RunRequest


class Document(BaseModel):
    """A stored document: frozen, strict about fields, canonical when written."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def canonical_json(value: Any) -> bytes:
    """One byte string per value: sorted keys, no spaces, UTF-8, no NaN. Floats are Python's shortest round-trip form."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def policy_name(identity: str, version: int, adapter: str) -> str:
    """What engines call a policy version: immutable per content, so a name is never reused for other weights.

    It holds the identity and not the run's name, so that two runs of one request have one chain.
    """
    return f"{identity[:8]}-v{version:04d}-{adapter[:12]}"


class RunSpec(Document):
    """A run request with everything resolved that its identity covers."""

    run_id: str
    request: RunRequest
    identity: Digest
    task: str
    start: str
    """Name of the seed state, `default` resolved."""
    task_digest: Digest
    judge_digest: Digest
    model_digest: Digest
    prompt_digest: Digest
    wall_seconds: float
    """Told to programs; the task's or the request's."""
    cores: int
    memory_bytes: int
    result_bytes: int
    processes: int = 1
    offer_construction: bool | None = None
    """Whether programs get their parent's construction: the request's choice, else the task's. None in a spec from before tasks had
    one; see :attr:`offers_construction`."""
    bundle: Digest | None = None
    """The task's folder as a blob, for a task that lies outside the repository; its content is in the identity by task and judge
    digest."""
    science: dict[str, Any]
    """What the identity hashes, kept readable so that a changed field can be named."""

    @property
    def offers_construction(self) -> bool:
        """Whether programs get their parent's construction as a global."""
        asked = self.request.search.offer_construction
        return bool(asked if self.offer_construction is None else self.offer_construction)


class Node(Document):
    """One state of the archive (spec algorithm 1.1)."""

    id: str
    step: int
    """Step that made it; 0 for seeds."""
    value: float
    """Higher is better; sign x score."""
    score: float | None
    """Certified score in the task's unit; None for a seed without a program."""
    code: str
    construction: Digest | None
    """Blob of the certified construction's JSON."""
    output_tail: str = ""
    ancestors: tuple[str, ...] = ()
    """Ids, nearest first; stored here so that they outlive the ancestors' eviction."""
    ancestor_values: tuple[float, ...] = ()
    ancestor_scores: tuple[float | None, ...] = ()


class ArchiveState(Document):
    """The whole archive after a step: enough to select from, and to go on from."""

    nodes: tuple[Node, ...]
    """List order matters: ties are resolved by it."""
    seeds: tuple[str, ...]
    visits: dict[str, int] = {}
    """n; outlives eviction."""
    best_child: dict[str, float] = {}
    """m: best value among direct children ever submitted; outlives eviction."""
    total_visits: int = 0
    """T."""


class ParentPick(Document):
    """One selected parent and why."""

    node: str
    visits: int
    q: float
    prior: float
    bonus: float
    score: float


class PlannedGroup(Document):
    """One group: the parent as the sampler and the judge need it, without the archive."""

    group: int
    pick: ParentPick
    parent: Node


class StepPlan(Document):
    """What one step samples."""

    step: int
    archive: Digest
    groups: tuple[PlannedGroup, ...]
    scale: float
    seed: int | None = None
    """Of the strategy's choices by chance: a function of run seed and step. None in plans from before it was recorded."""
    note: str = ""


class RolloutRecord(Document):
    """One sampled response (spec algorithm 4, data contract). Lists have one entry per response token (T)."""

    at: Coordinate
    parent: str
    policy_version: int
    policy_name: str
    engine: str
    boot_id: str
    seed: int
    prompt_tokens: tuple[int, ...]
    prompt_shortened: str = ""
    """Empty, or what was left out to make the prompt fit: `output`, `code` or `output and code`."""
    response_tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Under the policy that sampled, at temperature 1; 0.0 for forced tokens."""
    mask: tuple[int, ...]
    """1: sampled by the policy; 0: forced into the response."""
    thinking_tokens: int = 0
    """Response tokens before the answer, forced ones included; all of them if it never came to an answer."""
    finish_reason: str
    """`stop` or `length`."""
    text: str
    program: str | None


class Resources(Document):
    """What a judged program used; reported, never hashed into the chain."""

    wall_seconds: float
    cpu_seconds: float | None = None
    wait_seconds: float | None = None
    """Time spent runnable but waiting for a core; over 10 % of wall marks the run as starved."""
    peak_memory_bytes: int | None = None


class Verdict(Document):
    """The judge's decision on one rollout."""

    at: Coordinate
    outcome: Outcome
    reason: str
    score: float | None = None
    """Certified, rounded against the candidate; None unless valid (never 0.0, which would be a score)."""
    exact: str | None = None
    """The certified value as a fraction."""
    value: float | None = None
    """sign x score."""
    reward: float = 0.0
    """What is trained: 0 unless valid."""
    construction: Digest | None = None
    claimed: float | None = None
    output_tail: str = ""
    error_tail: str = ""
    isolation: str = ""
    """Which sandbox ran it."""
    resources: Resources | None = None


class BatchRow(Document):
    """One rollout of a complete grid."""

    at: Coordinate
    rollout: Digest
    verdict: Digest
    outcome: Outcome
    reward: float
    value: float | None
    score: float | None
    exact: str | None
    construction: Digest | None
    tokens_digest: Digest
    """Of prompt and response ids; part of the chain."""


class Batch(Document):
    """A complete grid under one policy version: what `train` and `commit` read."""

    step: int
    policy_version: int
    plan: Digest
    rows: tuple[BatchRow, ...]
    """By group, then rollout."""


class AdapterManifest(Document):
    """A PEFT adapter directory as blobs."""

    config: Digest
    """adapter_config.json"""
    weights: Digest
    """adapter_model.safetensors"""


class Checkpoint(Document):
    """All that training goes on from. The base model is never part of it."""

    step: int
    """Optimizer steps taken; 0 for the identity adapter."""
    adapter: Digest
    """Blob of an AdapterManifest."""
    optimizer: Digest | None
    """safetensors with Adam's moments by parameter name; None before the first step."""


class BaseScores(Document):
    """One group's log-probs under the frozen base, made as soon as it was sampled: the reference of the KL term."""

    step: int
    group: int
    rollouts: tuple[Digest, ...]
    """By rollout number."""
    log_probs: tuple[tuple[float, ...], ...]
    """One per response token (T) of each rollout."""


class TrainRecord(Document):
    """The result of one optimizer step: create-once, a pure function of `base` and `batch`."""

    step: int
    base: Digest
    batch: Digest
    checkpoint: Digest
    adapter: Digest
    gate: Digest
    metrics: dict[str, float]
    notes: tuple[str, ...] = ()


class GateEvidence(Document):
    """What an engine must reproduce to prove that it serves an adapter (design 4).

    Sequences of prompt and response ids, and the trainer's log-prob of every token but the first of each, under three adapters.
    Stored with the adapter, so that an engine worker can run the gate alone after a restart.
    """

    sequences: tuple[tuple[int, ...], ...]
    amplification: float = 1.0
    """Factor of alpha under which `new` and `previous` were scored: small adapters are proved by their own weights, amplified."""
    new: tuple[tuple[float, ...], ...]
    """Under the adapter that must be served, version v+1."""
    previous: tuple[tuple[float, ...], ...]
    """Under version v."""
    initial: tuple[tuple[float, ...], ...]
    """Under version 0, the frozen base, which no amplification changes."""
    plain_new: tuple[tuple[float, ...], ...] = ()
    """Not amplified, as it is served. Empty where `amplification` is 1."""
    plain_previous: tuple[tuple[float, ...], ...] = ()

    @property
    def as_served(self) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
        """Log-probs under version v+1 and version v, neither amplified."""
        return (self.new, self.previous) if self.amplification == 1 else (self.plain_new, self.plain_previous)


class GateComparison(Document):
    """Δ engine against Δ trainer, relative to one reference adapter."""

    against: str
    tokens: int
    slope: float
    z: float
    residual: float
    """Share of Δ trainer's energy that Δ engine misses: |Δe − Δt|² / |Δt|²."""
    residual_bound: float
    trainer_rms: float
    """Root mean square of Δ trainer, nats per token: how far the adapter moved."""
    passed: bool
    reason: str = ""


class PublishReport(Document):
    """Proof that one engine process serves one adapter."""

    engine: str
    boot_id: str
    policy: str
    version: int
    passed: bool
    comparisons: tuple[GateComparison, ...] = ()
    engine_gap: float | None = None
    """Root mean square of engine − trainer log-prob under the new adapter, nats per token: arithmetic noise."""
    amplification: float = 1.0
    """Of the adapters that were compared."""
    served_share: float | None = None
    """Of the last step, how much the engine's own precision lets through: the slope without amplification."""
    name_gap: float | None = None
    """How far the served name lies from the same files loaded again, nats (rms); only where adapters were amplified."""
    note: str = ""
    seconds: float = 0.0


class EngineNotice(Document):
    """What an engine worker says about its engine; rewritten in place at `fleet/engines/<id>`."""

    engine: str
    url: str
    boot_id: str
    model_digest: Digest
    verified: dict[str, int] = {}
    """Policy name -> version: adapters that passed the gate in this boot."""
    updated: float
    """Unix seconds."""
    running: int = 0
    repeatable: bool = False


class CommitRow(Document):
    """One coordinate in the chain: exactly what was found there, nothing about how long it took."""

    group: int
    rollout: int
    parent: str
    tokens: Digest
    outcome: Outcome
    exact: str | None
    construction: Digest | None


class ForkOrigin(Document):
    """The commit of another run that a fork goes on from; by digest alone, so that equal forks have one chain."""

    step: int
    commit: Digest


class StepCommit(Document):
    """One link of the hash chain: its digest is the commit's name (design 2)."""

    step: int
    previous: Digest | None
    identity: Digest
    rows: tuple[CommitRow, ...]
    archive: Digest
    policy: PolicyRef
    previous_policy: PolicyRef | None
    initial_policy: PolicyRef
    origin: ForkOrigin | None = None
    """Of a fork's opening commit, which has no previous one. Not written where there is none: digests are older than forks."""

    @model_serializer(mode="wrap")
    def _without_absent_origin(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        if fields.get("origin") is None:
            fields.pop("origin", None)
        return fields


class RetiredBlobs(Document):
    """Blobs of one step that were dropped on purpose: absent, and neither lost nor damaged."""

    step: int
    reason: str
    """`retention`, or `light bundle` for what an imported run never had here."""
    blobs: tuple[Digest, ...]
    """In order of their digests."""


class StepReport(Document):
    """What people read about a step; not hashed into the chain, created once beside the commit."""

    step: int
    commit: Digest
    metrics: dict[str, float | None]
    best_score: float | None
    best_node: str | None
    notes: tuple[str, ...] = ()
    publish: tuple[PublishReport, ...] = ()
    seconds: dict[str, float] = Field(default_factory=dict)
    summary: StepSummary
