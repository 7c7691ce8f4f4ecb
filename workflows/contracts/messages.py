"""Inputs and outputs of workflows and activities. References, small numbers and enums only; bytes stay in the object store."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from workflows.contracts.base import Coordinate, Digest, Head, Message, Outcome, PolicyRef, RunId, RunRef
from workflows.contracts.request import RunRequest, Timeouts

RunState = Literal["opening", "running", "paused", "blocked", "stopped", "completed"]


# Activities ---------------------------------------------------------------------------------------------------------------
class PrepareRequest(Message):
    run_id: RunId
    """From the workflow id."""
    request: RunRequest


class Prepared(Message):
    run: RunRef
    judge_seed: bool
    """The run begins with a program whose value nobody has certified yet."""


class JudgeSeedRequest(Message):
    run: RunRef


class OpenRequest(Message):
    run: RunRef


class Opened(Message):
    head: Head
    task: str
    model: str
    """Short name of the model, for search attributes."""
    score_name: str
    best_known: float | None
    higher_is_better: bool
    recent: tuple[StepSummary, ...] = ()
    """Summaries of the last committed steps, when a run is resumed."""


class SelectRequest(Message):
    run: RunRef
    step: int
    archive: Digest


class Selected(Message):
    plan: Digest
    groups: int
    note: str = ""


class SampleRequest(Message):
    run: RunRef
    at: Coordinate
    plan: Digest
    policy: PolicyRef


class Sampled(Message):
    rollout: Digest
    response_tokens: int
    has_program: bool


class JudgeRequest(Message):
    run: RunRef
    at: Coordinate
    plan: Digest
    rollout: Digest


class Judged(Message):
    verdict: Digest
    outcome: Outcome
    score: float | None
    reward: float


class AssembleRequest(Message):
    run: RunRef
    step: int
    plan: Digest
    policy: PolicyRef


class Assembled(Message):
    batch: Digest
    rollouts: int
    valid: int
    mean_reward: float
    best_score: float | None


class TrainRequest(Message):
    run: RunRef
    step: int
    batch: Digest
    policy: PolicyRef


class ScoreBaseRequest(Message):
    """The rollouts of one group, to be scored under the frozen base while judges still work on them."""

    run: RunRef
    step: int
    group: int
    rollouts: tuple[Digest, ...]
    """By rollout number."""


class BaseScored(Message):
    record: Digest
    tokens: int
    """Response tokens scored."""


class Trained(Message):
    record: Digest
    policy: PolicyRef
    kl: float | None
    grad_norm: float | None
    notes: tuple[str, ...] = ()


class ListEnginesRequest(Message):
    run: RunRef


class Engines(Message):
    engines: tuple[str, ...]
    """Ids of the engines that serve the run's model; each has its own task queue."""


class PublishRequest(Message):
    run: RunRef
    engine: str
    policy: PolicyRef
    previous: PolicyRef | None
    """Version served before; None for version 0."""
    initial: PolicyRef


class Published(Message):
    report: Digest
    engine: str
    boot_id: str
    passed: bool


class CommitRequest(Message):
    run: RunRef
    step: int
    head: Head
    """The commit to build on."""
    plan: Digest
    batch: Digest
    policy: PolicyRef
    """Policy after the step: the new version, or the old one when train=off."""
    train_record: Digest | None = None
    publish_reports: tuple[Digest, ...] = ()
    seconds: dict[str, float] = Field(default_factory=dict)
    """Workflow time by phase."""


class Committed(Message):
    head: Head
    summary: StepSummary


class StepSummary(Message):
    """One committed step in numbers: what `status` and `watch` print."""

    step: int
    rollouts: int
    valid: int
    valid_and_new: int
    """Valid, with a construction that was not in the archive before."""
    improved: int
    """Valid and better than their own parent."""
    mean_reward: float
    """Of the whole grid, invalid counted as 0. Not the best."""
    step_best: float | None
    """Best certified score of this grid."""
    best: float | None
    """Best certified score of the whole run."""
    previous_best: float | None
    kl: float | None
    gap: float | None
    """Root mean square of engine − trainer log-prob on the sampled tokens."""
    policy_version: int
    """Version after the step."""
    seconds: dict[str, float] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()


# Workflows ----------------------------------------------------------------------------------------------------------------
class GroupInput(Message):
    run: RunRef
    step: int
    group: int
    rollouts: int
    plan: Digest
    policy: PolicyRef
    higher_is_better: bool = True
    score_base: bool = False
    """Score the group under the frozen base as soon as it is sampled. False in histories from before it existed."""
    timeouts: Timeouts


class GroupProgress(Message):
    """Answer of a group's status query."""

    group: int
    rollouts: int
    sampled: int
    judged: int
    valid: int
    best_score: float | None
    mean_reward: float | None
    """Of the rollouts judged so far; None before the first."""


class GroupResult(Message):
    group: int
    valid: int
    best_score: float | None
    mean_reward: float


class StepInput(Message):
    run: RunRef
    step: int
    head: Head
    rollouts: int
    train: bool
    higher_is_better: bool = True
    timeouts: Timeouts


class StepResult(Message):
    head: Head
    summary: StepSummary


class RunProgress(Message):
    """What a run carries from one execution to the next (continue-as-new), besides the user's request."""

    run: RunRef
    head: Head
    steps: int
    """Steps asked for in total; `extend` raises it."""
    paused: bool = False
    best_known: float | None = None
    score_name: str = "score"
    higher_is_better: bool = True
    task: str = ""
    model: str = ""
    recent: tuple[StepSummary, ...] = ()
    """The last steps, for the status query."""


class RunResult(Message):
    """Result of a DiscoveryRun."""

    run_id: str
    state: RunState
    step: int
    best_score: float | None
    commit: Digest
    """Hash of the whole chain up to here."""
    policy: str


# Updates and queries ------------------------------------------------------------------------------------------------------
class ExtendArguments(Message):
    steps: int = Field(ge=1, le=100_000)
    """Steps to add to the total."""


class Phase(Message):
    """What a run is doing now, and since when."""

    name: str
    since: str
    """ISO 8601, workflow time."""
    detail: str = ""


class StepStatus(Message):
    """Answer of a step's status query."""

    step: int
    groups: int
    rollouts: int
    phase: Phase


class RunStatus(Message):
    """Answer of the status query."""

    run_id: str | None
    task: str
    state: RunState
    step: int
    """Last committed step."""
    steps: int
    best_score: float | None
    best_known: float | None
    score_name: str
    higher_is_better: bool = True
    policy_version: int
    commit: Digest | None
    pause_requested: bool = False
    phase: Phase
    error: str | None = None
    """Why the run is blocked, and what to do."""
    recent: tuple[StepSummary, ...] = ()


Opened.model_rebuild()
Committed.model_rebuild()
