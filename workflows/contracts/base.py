"""The base of every message, and the small types that messages share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints


class Message(BaseModel):
    """Immutable, and an unknown field is an error: a misspelt setting must not be ignored silently.

    Numbers are finite: JSON has no other ones, and an infinite setting could neither be hashed nor waited for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""Lower-case hex sha256 of the stored bytes; also the key of a blob in the object store."""

RunId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$")]


class Outcome(StrEnum):
    """How one rollout ended. Outcome, not score, decides what is trained and what is retried."""

    VALID = "valid"
    """The judge certified a value."""
    INVALID = "invalid"
    """The program ran and returned something that is not an answer."""
    NO_PROGRAM = "no_program"
    """The response held no complete program."""
    TIMED_OUT = "timed_out"
    MEMORY = "memory"
    CRASHED = "crashed"
    JUDGE_ERROR = "judge_error"
    """Infrastructure: retried, never rewarded, never trained."""
    ENGINE_ERROR = "engine_error"
    """Infrastructure: retried, never rewarded, never trained."""

    @property
    def is_result(self) -> bool:
        """True for what the policy is responsible for: reward 0 unless valid, trained, visit counted."""
        return self not in (Outcome.JUDGE_ERROR, Outcome.ENGINE_ERROR)


class Coordinate(Message):
    """Where one rollout stands in the run. Steps count from 1; step 0 holds the opening commit and the judged seed program."""

    step: int = Field(ge=0)
    group: int = Field(ge=0)
    rollout: int = Field(ge=0)

    def __str__(self) -> str:
        return f"step {self.step} group {self.group} rollout {self.rollout}"


class RunRef(Message):
    """What every activity needs to find a run's documents."""

    run_id: RunId
    identity: Digest
    spec: Digest
    """Blob of the resolved RunSpec."""


class PolicyRef(Message):
    """One published version of the trained adapter. Version 0 is the identity adapter (B = 0)."""

    version: int = Field(ge=0)
    name: str
    """The name that engines serve it under: unique to (run, version, content), never reused."""
    checkpoint: Digest
    """Blob of the Checkpoint manifest: adapter and optimizer state."""
    adapter: Digest
    """Blob of the AdapterManifest: a PEFT directory."""
    gate: Digest | None = None
    """Blob of the GateEvidence that `train` stored beside the adapter; None for version 0."""


class Head(Message):
    """The last committed step: all that is needed to go on from there."""

    step: int = Field(ge=0)
    commit: Digest
    archive: Digest
    policy: PolicyRef
    previous_policy: PolicyRef | None = None
    """The version served before `policy`; the publish gate compares the two."""
    initial_policy: PolicyRef
    """Version 0, the frozen base as engines serve it."""
    best: float | None = None
    """Best certified score so far, in the task's own unit."""
