"""What a user may ask for: the run request, with a default for everything but the task.

Every setting of a run exists exactly once, here. Science (all sections but `timeouts`, and all of it but `search.steps`) is part of
the run's identity; operational time-outs and the number of steps are not. Addresses, buckets and GPUs are deployment settings
(``workers/settings.py``) and never appear in a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError, model_validator

from workflows.contracts.base import Digest, Message, RunId
from workflows.contracts.profiles import PROFILES

JUDGE_OVERHEAD_SECONDS = 30.0
"""Of one attempt at judging, beyond the program's own time."""
_SHOWN_CHARACTERS = 80
"""Of a rejected value, in an error message."""


class _Section(Message):
    """Numbers are JSON numbers: `true` is not 1, and "8" is not 8."""

    model_config = ConfigDict(strict=True)


class SearchSettings(_Section):
    """How parents are chosen (spec algorithm 1; docs/strategies.md)."""

    strategy: Literal["puct", "best_of_n", "greedy", "epsilon_greedy"] = "puct"
    """`puct`: rank-prior PUCT with lineage blocking. `best_of_n`: always the seeds, nothing is reused. `greedy`: the best nodes.
    `epsilon_greedy`: the best nodes, now and then a random one."""
    groups: int = Field(default=8, ge=1, le=512)
    """Parents per step (G)."""
    rollouts: int = Field(default=64, ge=1, le=128)
    """Programs sampled from each parent (R). More than 128 pending activities slow a workflow down superlinearly."""
    steps: int = Field(default=50, ge=0, le=100_000)
    """Steps to run; not part of the identity, so a run can be extended."""
    exploration: float = Field(default=1.0, ge=0)
    """PUCT constant c; read by `puct` alone."""
    epsilon: float = Field(default=0.1, ge=0, le=1)
    """Probability, for each group, of a random parent; read by `epsilon_greedy` alone."""
    visit_unit: Literal["rollout", "expansion"] = "rollout"
    """One visit is a rollout (G = 1, as in every published implementation) or an expansion (G = R, the paper's words)."""
    children_per_parent: int = Field(default=2, ge=0)
    """Best children kept for each parent (top-k); 0 keeps all."""
    capacity: int = Field(default=1000, ge=1)
    """Nodes kept in the archive; seeds are kept beyond it."""
    start: str = Field(default="default", pattern=r"^[A-Za-z0-9_-]+$")
    """Which of the task's seed states opens the archive; `default` takes the task's own choice."""
    offer_construction: bool | None = None
    """Give the parent's construction to the child program as a global. None: as the task says (`offer_construction` in its
    task.toml), which is what the published searches of that problem did."""


class SamplingSettings(_Section):
    """How programs are sampled. While training, anything but temperature 1, top-p 1, top-k off would bias the importance ratio."""

    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1: off."""
    max_new_tokens: int = Field(default=26_000, ge=1)
    """Of a response, or of each of its two phases where thinking has a budget."""
    context_tokens: int = Field(default=32_768, ge=16)
    """Prompt and response together."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """`auto` takes the chat template as it is; `on` and `off` set its switch. A template that has none refuses them."""
    thinking_tokens: int | None = Field(default=None, ge=32)
    """Where thinking must end, counted from the beginning of the prompt, as in the paper (26 000 of 32 768): so the answer always
    has the same room, however long the prompt is. A response that still thinks there is made to close its thinking, in tokens that
    are never trained, and answers in what is left of the context. None: no such limit, one phase."""

    @model_validator(mode="after")
    def _thinking_fits(self) -> SamplingSettings:
        if self.thinking_tokens is not None and self.thinking == "off":
            raise ValueError(
                f"sampling.thinking_tokens={self.thinking_tokens} limits what sampling.thinking=off turns off; leave one out"
            )
        if self.thinking_tokens is not None and self.thinking_tokens >= self.context_tokens:
            raise ValueError(
                f"sampling.thinking_tokens={self.thinking_tokens} leaves no room for an answer in "
                f"sampling.context_tokens={self.context_tokens}; both count from the beginning of the prompt"
            )
        return self


class ObjectiveSettings(_Section):
    """What is optimised (spec algorithm 2)."""

    advantage: Literal["adaptive_entropic", "mean_baseline", "entropic"] = "adaptive_entropic"
    beta: float = Field(default=2.0, gt=0)
    """The constant β of `entropic`; `adaptive_entropic` solves for its own."""
    kl_coefficient: float = Field(default=0.1, ge=0)
    """λ of the centred token KL to the frozen base."""


class OptimizerSettings(_Section):
    """Adam, one step per search step, no clipping, no warm-up (spec algorithm 2.4)."""

    learning_rate: float = Field(default=4e-5, ge=0, le=1)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)


class LoraSettings(_Section):
    """The trained adapter: PEFT LoRA on q, k, v, o, gate, up and down, dropout 0, B = 0 at the start."""

    rank: int = Field(default=32, ge=1, le=512)
    alpha: int = Field(default=32, ge=1, le=1024)


class JudgeSettings(_Section):
    """Limits of one judged program; None takes the task's own."""

    wall_seconds: float | None = Field(default=None, gt=0, le=86_400)
    """Wall time told to the program; it is killed a little later."""
    cores: int | None = Field(default=None, ge=1, le=64)
    memory_bytes: int | None = Field(default=None, ge=64 << 20)


Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]
"""An operational wait: longer than a month is a slip, and far longer ones are no dates any more."""


class Timeouts(_Section):
    """Operational time-outs in seconds. Not part of the identity: raising one never starts another run."""

    sample_seconds: Seconds = 3600
    judge_seconds: Seconds = 1500
    """For one attempt, queueing for a sandbox slot inside the worker included."""
    train_seconds: Seconds = 7200
    publish_seconds: Seconds = 900
    control_seconds: Seconds = 300
    heartbeat_seconds: Seconds = 60
    """Silence after which a control, sample, train or engine worker counts as dead."""
    judge_heartbeat_seconds: Seconds = 30
    retry_seconds: Seconds = 2
    """First pause before a retry; it doubles up to 30 times this."""
    engine_wait_seconds: Seconds = 120
    """How long `publish` may wait in an engine's queue before the engines are listed anew."""


class ForkSettings(_Section):
    """Where a fork begins: after a committed step of another run, with its archive, its adapter and its optimizer state.

    The fork counts on from there: its first step is `step` + 1, and `search.steps` counts the steps up to `step` too.
    The commit's digest enters the identity; the other run's name does not.
    """

    run: RunId
    """The run to fork."""
    step: int = Field(ge=0, le=100_000)
    """Its last step that the fork has in common with it; 0 is its opening."""
    commit: Digest | None = None
    """Digest of that step's commit. None: filled in when the fork is opened. Given, it must be what the store has."""


class RunRequest(Message):
    """One run of one task. ``{"task": "circle_packing_26"}`` is a complete request."""

    task: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=100)
    """A folder of `tasks/`, or of a directory named in the deployment's settings."""
    profile: str = "laptop"
    """The preset that fills every field left out: see ``profiles.py``."""
    bundle: Digest | None = None
    """The task's folder as a blob of the store, so that the workers' hosts need not have it; `tttd run --task-dir` and the control
    worker fill it in. Not part of the identity, which covers what is in it."""
    name: RunId | None = None
    """Run id; by default TASK-IDENTITY8, so that the same request resumes the same run."""
    seed: int = Field(default=0, ge=0, lt=2**31, strict=True)
    model: str = Field(default="packing", min_length=1)
    """Name of a proposer in `tasks/proposers/`, or the path of a Hugging Face folder."""
    train: Literal["on", "off"] = "on"
    """`off`: the same search with the base model, the ablation that shows what training did."""
    decode: Literal["batched", "repeatable"] = "batched"
    """`repeatable` asks the embedded engine to decode each request alone, so that a seed fixes the whole chain."""
    search: SearchSettings = SearchSettings()
    sampling: SamplingSettings = SamplingSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    lora: LoraSettings = LoraSettings()
    judge: JudgeSettings = JudgeSettings()
    fork: ForkSettings | None = None
    """Begin after a step of another run instead of at the task's start."""
    timeouts: Timeouts = Timeouts()

    @model_validator(mode="after")
    def _settings_fit_together(self) -> RunRequest:
        if self.train == "on":
            s = self.sampling
            if (s.temperature, s.top_p, s.top_k) != (1.0, 1.0, -1):
                raise ValueError(
                    f"train=on needs sampling.temperature=1, top_p=1, top_k=-1, got {s.temperature}, {s.top_p}, {s.top_k}: "
                    "anything else biases the importance ratio. Set train=off to sample differently."
                )
            if self.search.rollouts < 3 and self.objective.advantage == "adaptive_entropic":
                raise ValueError(
                    f"search.rollouts={self.search.rollouts} is too few for adaptive_entropic advantages, which need at least 3 "
                    "(with 2 the advantage reaches 1e12). Raise it, or set objective.advantage=mean_baseline."
                )
        if self.search.capacity <= self.search.groups:
            raise ValueError(
                f"search.capacity={self.search.capacity} leaves no place beside search.groups={self.search.groups} seeds, which "
                "are never evicted: no answer would be kept. Raise search.capacity above search.groups."
            )
        wall, attempt = self.judge.wall_seconds, self.timeouts.judge_seconds
        if wall is not None and 1.1 * wall + JUDGE_OVERHEAD_SECONDS > attempt:
            raise ValueError(
                f"judge.wall_seconds={wall:g} does not fit into timeouts.judge_seconds={attempt:g}, which also has to cover "
                f"{JUDGE_OVERHEAD_SECONDS:g} s of start and a tenth of grace; raise timeouts.judge_seconds"
            )
        if self.sampling.max_new_tokens >= self.sampling.context_tokens:
            raise ValueError(
                f"sampling.max_new_tokens={self.sampling.max_new_tokens} leaves no room for a prompt in "
                f"sampling.context_tokens={self.sampling.context_tokens}"
            )
        return self


def parse_request(raw: object) -> RunRequest:
    """Validate a user's JSON: profile defaults first, then the user's fields over them.

    Raises:
        ValueError: names each bad field, what it was, and what is allowed.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f'the run\'s input must be a JSON object such as {{"task": "circle_packing_26"}}, got {_shown(raw)}')
    profile = raw.get("profile", "laptop")
    if not isinstance(profile, str) or profile not in PROFILES:
        raise ValueError(f"profile: {_shown(profile)} is not one of {', '.join(sorted(PROFILES))}")
    try:
        return RunRequest.model_validate(_merged(PROFILES[profile], raw))
    except ValidationError as error:
        raise ValueError(_explain(error)) from None


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        below = out.get(key)
        out[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return out


def _explain(error: ValidationError) -> str:
    """Pydantic's errors as sentences: where, what is wrong, what was given, and the allowed names for an unknown field."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "request"
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown field; allowed here: {', '.join(sorted(_fields_at(item['loc'][:-1])))}")
        elif item["type"] == "missing":
            lines.append(f'{where}: required, for example {{"task": "circle_packing_26"}}')
        elif item["type"] == "value_error":
            lines.append(item["msg"].removeprefix("Value error, "))
        elif item["type"] == "model_type":
            fields = ", ".join(sorted(_fields_at(item["loc"])))
            lines.append(f"{where}: must be a JSON object with any of {fields}, got {_shown(item['input'])}")
        else:
            lines.append(f"{where}: {item['msg']}, got {_shown(item['input'])}")
    return "; ".join(lines)


def _shown(value: object) -> str:
    """A value for an error message; a long one only by its beginning."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def _fields_at(path: tuple[int | str, ...]) -> list[str]:
    model: Any = RunRequest
    for part in path:
        model = model.model_fields[str(part)].annotation
        model = next((choice for choice in get_args(model) if choice is not type(None)), model)  # of an optional section
    return list(model.model_fields)
