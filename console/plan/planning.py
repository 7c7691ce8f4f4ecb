"""A request on some GPUs: where the pieces go, what fits, how long a step takes, and which setting to change where it does not fit.

Everything that is guessed (lengths of responses, how long programs run) is an assumption of the plan and shown with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from console.plan import formulas as f
from console.plan.hardware import Gpu
from console.plan.shapes import ModelShape
from workflows.contracts.request import RunRequest

EVIDENCE_TOKENS = 16_384
"""Of the publish gate: its evidence has at least half of that."""
ENGINE_SHARE = 0.85
"""engine_memory_fraction of an engine that has its GPUs for itself."""
SLOTS = 4
"""engine_lora_slots."""
SERIAL_SECONDS = 5.0
"""Of a step beside its phases: select, barrier, commit, and the orchestration of 2 activities a rollout (spec temporal 3.1)."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True)
class Assumptions:
    """What no request says."""

    prompt_tokens: float
    mean_tokens: float
    """Of a response."""
    judge_slots: int
    """Programs judged at once, in the whole fleet."""
    judge_seconds: float
    """A program runs, on average."""
    judge_limit_seconds: float


@dataclass(frozen=True)
class Machine:
    """GPUs and how they are divided."""

    gpu: Gpu
    gpus: int
    engines: int
    engine_tensor: int
    trainer_tensor: int
    trainer_data: int
    memory_fraction: float
    slots: int = SLOTS
    concurrency: int | None = None

    @property
    def shared(self) -> bool:
        """Engine and trainer live on the same GPUs."""
        return self.engines * self.engine_tensor + self.trainer_tensor * self.trainer_data > self.gpus


class TrainerPlan(_Part):
    gpus: int
    weights_gb: float
    adapter_gb: float
    """Adapter, gradient and Adam's moments."""
    activations_gb: float
    logits_gb: float
    peak_gb: float
    available_gb: float
    recompute: bool
    tokens: float
    """Of one step: prompts and responses."""
    tokens_per_second: float
    """Of all passes together."""


class EnginePlan(_Part):
    engines: int
    gpus: int
    weights_gb: float
    kv_gb: float
    kv_tokens: int
    rollouts_at_once: int
    """In one engine, as its memory allows."""
    tokens_per_second: float
    """Of responses, all engines together."""


class Phases(_Part):
    """Seconds of one step."""

    sample: float
    judge_alone: float
    """What judging takes with nothing else to wait for; most of it overlaps with sampling."""
    sample_and_judge: float
    base_log_probs: float
    """Of the frozen model; 0 where they are computed while programs are sampled and judged."""
    train: float
    publish: float
    other: float

    @property
    def step(self) -> float:
        return self.sample_and_judge + self.base_log_probs + self.train + self.publish + self.other


class Problem(_Part):
    """Something that does not fit, or is wasteful."""

    level: Literal["does not fit", "slow"]
    what: str
    change: str
    """The setting to change."""


class Plan(_Part):
    model: str
    parameters: int
    lora_parameters: int
    gpu: str
    gpus: int
    placement: str
    rollouts: int
    steps: int
    prompt_tokens: float
    mean_tokens: float
    engine: EnginePlan
    trainer: TrainerPlan | None
    """None with train=off."""
    phases: Phases
    step_seconds: float
    run_hours: float
    gpu_hours: float
    judge_waves: int
    judge_slots: int
    problems: tuple[Problem, ...] = ()
    fits: bool = Field(default=True)


def default_machine(gpu: Gpu, gpus: int, request: RunRequest, shape: ModelShape) -> Machine:
    """One GPU: engine and trainer share it. More: half of them sample, half train."""
    rank, longest = request.lora.rank, _longest(request)
    per_engine = _smallest(lambda tensor: f.kv_tokens(shape, gpu, ENGINE_SHARE, rank, SLOTS, tensor) >= 2 * longest)
    if gpus == 1:
        fraction = _shared_fraction(gpu, request, shape)
        return Machine(gpu, 1, 1, 1, 1, 1, fraction)
    if request.train == "off":
        return Machine(gpu, gpus, max(1, gpus // per_engine), per_engine, 1, 0, ENGINE_SHARE)
    training = max(1, gpus // 2)
    available = gpu.memory_bytes - f.CONTEXT_BYTES
    tensor = _smallest(lambda tensor: _trainer_bytes(request, shape, recompute=True, tensor=tensor).total <= available)
    tensor = min(tensor, 1 << int(math.log2(training)))
    per_engine = min(per_engine, gpus - training)
    return Machine(gpu, gpus, (gpus - training) // per_engine, per_engine, tensor, training // tensor, ENGINE_SHARE)


def _smallest(fits: Callable[[int], bool]) -> int:
    """GPUs that one engine or one copy of the trainer is spread over: as few as do."""
    return next((tensor for tensor in (1, 2, 4) if fits(tensor)), 8)


def _shared_fraction(gpu: Gpu, request: RunRequest, shape: ModelShape) -> float:
    """What the trainer leaves of a GPU, in twentieths."""
    if request.train == "off":
        return ENGINE_SHARE
    left = gpu.memory_bytes - _trainer_bytes(request, shape, recompute=True).total - 2 * f.CONTEXT_BYTES
    return min(ENGINE_SHARE, max(0.1, math.floor(20 * left / gpu.memory_bytes) / 20))


def _longest(request: RunRequest) -> int:
    return request.sampling.context_tokens


def _trainer_bytes(request: RunRequest, shape: ModelShape, *, recompute: bool, tensor: int = 1) -> f.TrainerBytes:
    return f.trainer_bytes(shape, request.lora.rank, _longest(request), recompute=recompute, tensor=tensor)


def make_plan(request: RunRequest, shape: ModelShape, machine: Machine, assumed: Assumptions) -> Plan:
    """Plan a run."""
    problems: list[Problem] = []
    engine, sample_seconds = _engine(request, shape, machine, assumed, problems)
    trainer, base_seconds, train_seconds = _trainer(request, shape, machine, assumed, problems)
    rollouts = request.search.groups * request.search.rollouts
    waves = math.ceil(rollouts / assumed.judge_slots)
    judge = rollouts / assumed.judge_slots * assumed.judge_seconds
    both = max(sample_seconds + assumed.judge_seconds, judge)
    if judge > sample_seconds:
        problems.append(
            Problem(
                level="slow",
                what=f"judging ({judge:,.0f} s in {waves} waves on {assumed.judge_slots} slots) takes longer than sampling "
                f"({sample_seconds:,.0f} s)",
                change=f"judge_slots, or more judge hosts ({_slots_to_keep_up(judge, sample_seconds, assumed, rollouts)}); "
                "or judge.wall_seconds down",
            )
        )
    phases = Phases(
        sample=sample_seconds,
        judge_alone=judge,
        sample_and_judge=both,
        base_log_probs=base_seconds,
        train=train_seconds,
        publish=_publish_seconds(request, shape, machine) if trainer else 0.0,
        other=SERIAL_SECONDS,
    )
    hours = phases.step * request.search.steps / 3600
    return Plan(
        model=shape.name,
        parameters=shape.parameters,
        lora_parameters=shape.lora_parameters(request.lora.rank),
        gpu=machine.gpu.name,
        gpus=machine.gpus,
        placement=_placement(machine, trainer is not None),
        rollouts=rollouts,
        steps=request.search.steps,
        prompt_tokens=assumed.prompt_tokens,
        mean_tokens=assumed.mean_tokens,
        engine=engine,
        trainer=trainer,
        phases=phases,
        step_seconds=phases.step,
        run_hours=hours,
        gpu_hours=hours * machine.gpus,
        judge_waves=waves,
        judge_slots=assumed.judge_slots,
        problems=tuple(problems),
        fits=not any(problem.level == "does not fit" for problem in problems),
    )


def _engine(
    request: RunRequest, shape: ModelShape, machine: Machine, assumed: Assumptions, problems: list[Problem]
) -> tuple[EnginePlan, float]:
    gpu, tensor = machine.gpu, machine.engine_tensor
    kv = f.kv_tokens(shape, gpu, machine.memory_fraction, request.lora.rank, machine.slots, tensor)
    if kv < _longest(request):
        problems.append(
            Problem(
                level="does not fit",
                what=f"an engine has room for {max(0, kv):,} tokens in {machine.memory_fraction:.0%} of {tensor} {gpu.name}, "
                f"and one response may have {_longest(request):,}",
                change="engine_memory_fraction up, more GPUs per engine in engine_gpus, or sampling.context_tokens down",
            )
        )
    if 0 < shape.positions < _longest(request):
        problems.append(
            Problem(
                level="does not fit",
                what=f"sampling.context_tokens={_longest(request):,} is beyond the model's {shape.positions:,} positions",
                change=f"sampling.context_tokens={shape.positions} or less",
            )
        )
    rows = math.ceil(request.search.groups * request.search.rollouts / machine.engines)
    prompts = min(rows, request.search.groups)
    load = f.Load(
        rows=rows,
        prompts=prompts,
        prompt_tokens=assumed.prompt_tokens,
        mean_tokens=assumed.mean_tokens,
        longest_tokens=request.sampling.max_new_tokens,
        concurrency=machine.concurrency,
    )
    found = f.sampling(shape, gpu, load, max(kv, 1), adapter=True, tensor=tensor)
    if kv >= _longest(request) and found.rows_at_once < rows / 2:
        problems.append(
            Problem(
                level="slow",
                what=f"an engine has KV memory for {found.rows_at_once:.0f} rollouts at once and is asked for {rows}",
                change="more engines (engines, engine_gpus), or engine_memory_fraction up",
            )
        )
    plan = EnginePlan(
        engines=machine.engines,
        gpus=machine.engines * tensor,
        weights_gb=f.BFLOAT16 * shape.parameters / tensor / 1e9,
        kv_gb=max(0, kv) * shape.kv_bytes() / 1e9,
        kv_tokens=max(0, kv),
        rollouts_at_once=int(found.rows_at_once),
        tokens_per_second=found.tokens_per_second * machine.engines,
    )
    return plan, found.seconds


def _trainer(
    request: RunRequest, shape: ModelShape, machine: Machine, assumed: Assumptions, problems: list[Problem]
) -> tuple[TrainerPlan | None, float, float]:
    """The plan, seconds of the frozen model's log-probs that nothing hides, and seconds of everything else in `train`."""
    if request.train == "off":
        return None, 0.0, 0.0
    gpu, tensor, data = machine.gpu, machine.trainer_tensor, machine.trainer_data
    # On a shared GPU the engine's own context and workspaces lie beside what its fraction covers.
    left = (1 - machine.memory_fraction) * gpu.memory_bytes - f.CONTEXT_BYTES if machine.shared else gpu.memory_bytes
    available = left - f.CONTEXT_BYTES
    kept = _trainer_bytes(request, shape, recompute=False, tensor=tensor)
    recompute = kept.total > available
    needed = _trainer_bytes(request, shape, recompute=True, tensor=tensor) if recompute else kept
    if needed.total > available:
        problems.append(
            Problem(
                level="does not fit",
                what=f"the trainer needs {needed.total / 1e9:.0f} GB with everything recomputed and has {available / 1e9:.0f} GB",
                change="more tensor parallel in the trainer, sampling.context_tokens down"
                + (", or engine_memory_fraction down" if machine.shared else ""),
            )
        )
    length = assumed.prompt_tokens + assumed.mean_tokens
    token = f.token_seconds(shape, gpu, length)
    speed = f.parallel_speed(tensor, data)
    tokens = request.search.groups * request.search.rollouts * length
    base = tokens * token.forward / speed
    both = tokens * (token.recomputed if recompute else token.kept) / speed
    evidence = 3 * EVIDENCE_TOKENS * token.forward / speed
    plan = TrainerPlan(
        gpus=tensor * data,
        weights_gb=needed.weights / 1e9,
        adapter_gb=needed.adapter / 1e9,
        activations_gb=needed.activations / 1e9,
        logits_gb=needed.logits / 1e9,
        peak_gb=needed.total / 1e9,
        available_gb=available / 1e9,
        recompute=recompute,
        tokens=tokens,
        tokens_per_second=tokens / (base + both + evidence),
    )
    # On GPUs of its own the trainer scores groups while others are sampled; on a shared one it would take turns with the engine.
    return plan, base if machine.shared else 0.0, both + evidence


def _publish_seconds(request: RunRequest, shape: ModelShape, machine: Machine) -> float:
    """Load the adapter, and score the gate's evidence under three versions."""
    token = f.token_seconds(shape, machine.gpu, 4096).forward * f.ADAPTER_FACTOR / f.parallel_speed(machine.engine_tensor)
    return f.adapter_file_bytes(shape, request.lora.rank) / f.LOAD_BYTES_PER_SECOND + 3 * EVIDENCE_TOKENS * token


def _slots_to_keep_up(judge: float, sample: float, assumed: Assumptions, rollouts: int) -> str:
    needed = math.ceil(judge / max(1.0, sample) * assumed.judge_slots)
    return f"{needed} slots would keep up" if needed < rollouts else "one slot for each rollout would still be slower"


def _placement(machine: Machine, trains: bool) -> str:
    engines = f"{machine.engines} engine{'s' if machine.engines > 1 else ''}"
    wide = f" over {machine.engine_tensor} GPUs each" if machine.engine_tensor > 1 else ""
    if not trains:
        return engines + wide
    trainer = f"trainer TP {machine.trainer_tensor} x DP {machine.trainer_data}"
    return f"{engines}{wide} and {trainer}" + (", sharing the GPU" if machine.shared else "")
