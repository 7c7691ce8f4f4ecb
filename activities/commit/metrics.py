"""The numbers of one step: what each is called, what it means and in which unit. Source: spec algorithm 6.

One model a namespace; :meth:`StepMetrics.flat` is what a step's report stores, and docs/metrics.md is the same list for people.
Says nothing of how a number is found (``measuring.py``).

Numbers are over the whole grid. Those that begin with `kept_` are over the groups that carry a signal alone: a group whose rewards
are all equal has none and is not trained. Where no group carries one, the first counts as kept, as in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, get_args

from pydantic import BaseModel, ConfigDict

from activities.records import Document


@dataclass(frozen=True)
class Unit:
    """What a number counts or measures, for people."""

    name: str


Count = Annotated[int, Unit("count")]
Share = Annotated[float, Unit("share 0 to 1")]
Tokens = Annotated[float, Unit("tokens")]
Reward = Annotated[float, Unit("reward")]
Value = Annotated[float, Unit("value (higher is better)")]
Score = Annotated[float | None, Unit("the task's own unit")]
Nats = Annotated[float | None, Unit("nats per token")]
Number = Annotated[float | None, Unit("number")]
MaybeCount = Annotated[float | None, Unit("count")]
Seconds = Annotated[float | None, Unit("seconds")]


class SearchMetrics(Document):
    """The archive after the step, and the parents that it was searched from."""

    archive_size: Count
    """Nodes, seeds included."""
    archive_value_mean: Value
    """Of all nodes."""
    archive_value_std: Value
    """Of all nodes; standard deviation of the population, as everywhere here."""
    archive_value_min: Value
    """Worst node."""
    archive_value_max: Value
    """Best node."""
    best_score: Score
    """Best certified score of the run so far; null before the first."""
    children_kept: Count
    """Nodes that this step added and that are still there after top-k and cap."""
    total_visits: Count
    """T of PUCT: rollouts so far."""
    scale: Value
    """Spread of values that the bonus was scaled by when parents were selected."""
    parents: Count
    """Groups of the step (G)."""
    parents_distinct: Count
    """Different parents among them."""
    parents_expanded_fraction: Share
    """Of parents that had been expanded before."""
    parent_value_mean: Value
    """Of the parents, one for each group."""
    parent_value_min: Value
    """Worst parent."""
    parent_value_max: Value
    """Best parent."""
    parent_depth_mean: Annotated[float, Unit("generations")]
    """Ancestors of a parent; 0 for a seed."""


class RewardMetrics(Document):
    """What programs were paid: 0 unless valid."""

    mean: Reward
    """Mean of the grid. The best is another thing: `max`, and `search/best_score`."""
    min: Reward
    """Least of the grid."""
    max: Reward
    """Greatest of the grid."""
    std: Reward
    """Standard deviation over the grid."""
    zero_fraction: Share
    """Of rollouts that were paid exactly nothing."""
    kept_mean: Reward
    """As `mean`, of kept groups."""
    kept_min: Reward
    """As `min`, of kept groups."""
    kept_max: Reward
    """As `max`, of kept groups."""
    kept_std: Reward
    """As `std`, of kept groups."""
    groups_mixed_fraction: Share
    """Of groups with valid and failed programs; with the next two it makes 1."""
    groups_all_good_fraction: Share
    """Of groups in which every program is valid."""
    groups_all_bad_fraction: Share
    """Of groups in which none is."""
    groups_constant_fraction: Share
    """Of groups whose rewards are all exactly equal, valid or not: no signal."""
    groups_kept: Count
    """Groups that carry a signal, or 1."""


class SampleMetrics(Document):
    """Prompts and responses."""

    rollouts: Count
    """Of the grid (G x R)."""
    prompt_tokens_mean: Tokens
    """Of a prompt."""
    prompt_tokens_max: Tokens
    """Longest prompt."""
    prompt_shortened_fraction: Share
    """Of prompts from which output or code was cut, to make them fit."""
    response_tokens_mean: Tokens
    """Of a response, forced tokens included."""
    response_tokens_min: Tokens
    """Shortest response."""
    response_tokens_max: Tokens
    """Longest response."""
    response_tokens_sum: Tokens
    """Of all responses."""
    truncated_fraction: Share
    """Of responses that ended at a limit."""
    thinking_tokens_mean: Tokens
    """Of a response before its answer; 0 for models that do not think."""
    unanswered_fraction: Share
    """Of responses that never came from thinking to an answer."""
    forced_fraction: Share
    """Of responses whose thinking was closed by force (`sampling.thinking_tokens`)."""
    forced_tokens_sum: Tokens
    """Tokens that were forced, of all responses; never trained."""
    entropy: Nats
    """Minus the mean log-prob of sampled tokens under the policy that sampled; null if none was sampled."""
    kept_response_tokens_mean: Tokens
    """As `response_tokens_mean`, of kept groups."""
    kept_truncated_fraction: Share
    """As `truncated_fraction`, of kept groups."""
    kept_entropy: Nats
    """As `entropy`, of kept groups."""


class JudgeMetrics(Document):
    """What became of the programs. The first six make 1."""

    valid_fraction: Share
    """Certified."""
    invalid_fraction: Share
    """Ran, and returned something that is not an answer."""
    no_program_fraction: Share
    """The response held no complete program."""
    timed_out_fraction: Share
    """Ran out of wall time."""
    memory_fraction: Share
    """Ran out of memory."""
    crashed_fraction: Share
    """Ended with an error."""
    valid_and_new_fraction: Share
    """Of rollouts with a valid answer that the archive did not hold; equal ones of a step count once."""
    improved_fraction: Share
    """Of rollouts that are valid and better than their own parent."""
    kept_valid_fraction: Share
    """As `valid_fraction`, of kept groups."""


class TrainMetrics(Document):
    """The optimizer step, over the tokens it trained; absent with `train=off`. Null is what a back-end does not tell."""

    # A back-end may tell more than is documented here: a number is not worth a failed step.
    model_config = ConfigDict(extra="allow")

    loss: Number = None
    """Raw sum over trained tokens; its size says nothing by itself."""
    grad_norm: Number = None
    """Euclidean norm of the adapter's gradient."""
    kl_policy_base: Nats = None
    """Mean of log policy - log frozen base at sampling: how far the policy has moved."""
    gap_engine_trainer_mean: Nats = None
    """Mean of engine - trainer log-prob of the same tokens before the step; noise, about 1e-3, if the adapter is served."""
    gap_engine_trainer_rms: Nats = None
    """Root mean square of the same."""
    entropy: Nats = None
    """As `sample/kept_entropy`, of the tokens that were trained."""
    ratio_mean: Number = None
    """Mean importance ratio trainer / engine; 1 up to noise."""
    ratio_max: Number = None
    """Greatest importance ratio."""
    advantage_mean: Number = None
    """Of the rollouts of trained groups, before KL shaping."""
    advantage_min: Number = None
    """Least of these."""
    advantage_max: Number = None
    """Greatest of these."""
    advantage_std: Number = None
    """Standard deviation of these."""
    grid_advantage_mean: Number = None
    """Of all rollouts, those of groups without a signal counted as 0."""
    grid_advantage_min: Number = None
    """Least of these."""
    grid_advantage_max: Number = None
    """Greatest of these."""
    grid_advantage_std: Number = None
    """Standard deviation of these."""
    beta_mean: Number = None
    """Mean inverse temperature of the entropic advantages; null for `mean_baseline`."""
    tokens_trained: MaybeCount = None
    """Sampled tokens of trained groups; forced ones are not among them."""
    rollouts_trained: MaybeCount = None
    """Rollouts with at least one token in trained groups."""
    groups_trained: MaybeCount = None
    """Groups with a signal, or 1."""
    groups_constant: MaybeCount = None
    """Groups without a signal."""
    update_rms: Nats = None
    """How far the step moved log-probs, root mean square."""
    lora_b_norm: Number = None
    """Euclidean norm of all LoRA B matrices after the step."""
    gate_tokens: MaybeCount = None
    """Tokens of the evidence by which engines prove that they serve the new adapter."""


class PublishMetrics(Document):
    """The publish gate, over all engines; absent with `train=off`."""

    engines: Count
    """Engines that were given the new adapter."""
    gate_slope_min: Number
    """Least slope of engine against trainer, over engines and reference versions; near 1."""
    gate_slope_max: Number
    """Greatest of these."""
    gate_z_min: Annotated[float | None, Unit("standard errors")]
    """Weakest evidence that the slope is not 0."""
    gate_residual_max: Annotated[float | None, Unit("share")]
    """Greatest part of the trainer's change that an engine missed."""
    engine_gap_rms_max: Nats
    """Greatest root mean square of engine - trainer log-prob under the new adapter."""
    gate_amplification: Number
    """By how much adapters were amplified for the comparison; 1 from where their own effect is large enough."""
    served_share_min: Annotated[float | None, Unit("share")]
    """Least part of this step that an engine serves: in bfloat16 rounding loses much of a small first step (docs/numerics.md)."""


class TimeMetrics(Document):
    """Where the step's time went; null where it was not measured. The commit itself is not in it."""

    select_seconds: Seconds = None
    """Choosing parents, queueing included, as in the next four."""
    sample_judge_seconds: Seconds = None
    """Sampling and judging, which overlap."""
    barrier_seconds: Seconds = None
    """Collecting the complete grid."""
    train_seconds: Seconds = None
    """The train activity."""
    publish_seconds: Seconds = None
    """All engines."""
    train_load_seconds: Seconds = None
    """In the trainer: reading grid and checkpoint."""
    train_base_seconds: Seconds = None
    """In the trainer: log-probs of the frozen base."""
    train_gradient_seconds: Seconds = None
    """In the trainer: forward and backward."""
    train_evidence_seconds: Seconds = None
    """In the trainer: evidence for the gate."""
    train_store_seconds: Seconds = None
    """In the trainer: writing adapter and checkpoint."""
    publish_engine_seconds_max: Seconds = None
    """The slowest engine, from load to proof."""


class StepMetrics(Document):
    """All numbers of one step; a field's name is its namespace."""

    search: SearchMetrics
    reward: RewardMetrics
    sample: SampleMetrics
    judge: JudgeMetrics
    train: TrainMetrics | None = None
    publish: PublishMetrics | None = None
    time: TimeMetrics = TimeMetrics()

    def flat(self) -> dict[str, float | None]:
        """`namespace/name` -> number; namespaces that are absent have no names."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            f"{namespace}/{name}": None if value is None else float(value)
            for namespace, section in sections.items()
            if section is not None
            for name, value in section.model_dump().items()
        }


@dataclass(frozen=True)
class Described:
    """One name of the list."""

    name: str
    unit: str
    meaning: str


def describe() -> Iterator[Described]:
    """Every documented name, in order."""
    for namespace, field in StepMetrics.model_fields.items():
        annotation = field.annotation
        (section,) = [
            kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        for name, entry in section.model_fields.items():
            (unit,) = [part.name for part in entry.metadata if isinstance(part, Unit)]
            yield Described(f"{namespace}/{name}", unit, " ".join((entry.description or "").split()))
