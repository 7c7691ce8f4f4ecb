"""One optimizer step as a pure function: checkpoint, batch and spec in; adapter, checkpoint, evidence and record out.

The same inputs give the same adapter, checkpoint and evidence, byte for byte (float32 on the CPU, fixed number of threads); only
the record's seconds differ. Knows nothing of Temporal, engines, or who may already have done this step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from activities.errors import TrainCheckFailed
from activities.records import RunSpec, TrainRecord
from activities.run_store import RunStore
from activities.train.advantages import group_advantages
from activities.train.backend import ScoredSequence, TrainerBackend
from activities.train.checkpoints import b_norm, read_config, read_state, write_state
from activities.train.evidence import choose_sequences, collect
from activities.train.grid import Grid, GridRollout, load_grid
from activities.train.objective import GroupChoice, choose_groups, loss_gradient, shape, token_kl
from activities.train.scoring import base_log_probs
from workflows.contracts.base import Digest, PolicyRef
from workflows.contracts.request import ObjectiveSettings

Floats = NDArray[np.float64]

GAP_LIMIT = 0.01
"""Mean engine − trainer log-prob beyond which a note is made. On-policy it is half the squared noise: 0.002 in bfloat16."""


@dataclass(frozen=True)
class StepInputs:
    """What a step is a function of, besides the run's spec."""

    step: int
    batch: Digest
    policy: PolicyRef
    """The policy that sampled the batch; its checkpoint is the base of the step."""


@dataclass(frozen=True)
class ShapedBatch:
    """What is trained: parallel lists, one entry per sequence with at least one response token."""

    rollouts: list[GridRollout]
    advantages: list[Floats]
    """Per token (T), KL shaping included."""
    choice: GroupChoice
    kl: float
    trajectory_advantages: Floats
    """Per rollout of the trained groups, before shaping."""
    betas: list[float]
    empty: int
    """Trained rollouts without a response token."""

    @property
    def tokens(self) -> int:
        """Sampled tokens, the ones that have a gradient."""
        return int(sum(r.mask.sum() for r in self.rollouts))

    @property
    def has_signal(self) -> bool:
        """Some sampled token has an advantage that rewards gave it."""
        if self.choice.collapsed:
            return False
        return any(bool((a[r.mask > 0] != 0).any()) for a, r in zip(self.advantages, self.rollouts, strict=True))


@dataclass
class _Clock:
    """Seconds by phase, and the phase for whoever asks."""

    now: Callable[[], float]
    progress: Callable[[str], None]
    seconds: dict[str, float]
    _phase: str = ""
    _since: float = 0.0

    def enter(self, phase: str) -> None:
        time = self.now()
        if self._phase:
            self.seconds[f"seconds_{self._phase}"] = round(time - self._since, 3)
        self._phase, self._since = phase, time
        self.progress(phase)


def train_step(
    store: RunStore,
    spec: RunSpec,
    inputs: StepInputs,
    backend: TrainerBackend,
    *,
    resident: bool,
    clock: Callable[[], float],
    progress: Callable[[str], None] = lambda _: None,
) -> TrainRecord:
    """Train once and store everything but the record, which is the caller's to claim.

    Args:
        resident: the back-end holds the state of `inputs.policy.checkpoint` already.
        clock: seconds, monotonic; only differences are used.

    Raises:
        IncompleteGrid, InputError, CorruptBlob: see `load_grid`, `read_config` and `read_state`.
        TrainCheckFailed: something that must hold after a step does not; nothing has been claimed.
    """
    request = spec.request
    times = _Clock(clock, progress, {})
    times.enter("load")
    grid = load_grid(store, inputs.batch, inputs.step, inputs.policy)
    config = read_config(store, inputs.policy.checkpoint, request.lora)
    if not resident:
        backend.load(read_state(store, inputs.policy.checkpoint))
    before = backend.state()
    fingerprint = _check_frozen(backend, inputs)

    times.enter("base")
    batch = shape_batch(grid, request.objective, lambda rollouts: base_log_probs(store, backend, inputs.step, rollouts))
    times.enter("gradient")
    metrics = _accumulate(backend, batch)
    metrics["grad_norm"] = _check_gradient(backend.gradient_norm(), batch, inputs)
    backend.apply(request.optimizer)

    after = backend.state()
    moved = any((after.adapter[k] != v).any() for k, v in before.adapter.items() if ".lora_B." in k)
    if not moved and batch.has_signal and request.optimizer.learning_rate > 0:
        raise TrainCheckFailed(
            f"step {inputs.step}: the grid has a signal, but no lora_B moved; the optimizer did not see the adapter"
        )
    if backend.base_fingerprint() != fingerprint:
        raise TrainCheckFailed(f"step {inputs.step}: the frozen base weights changed during the step; restart the train worker")

    times.enter("evidence")
    # Written meanwhile: nothing points to it before the record is claimed, and what takes seconds here is serving that waits.
    with ThreadPoolExecutor(1, thread_name_prefix="write-state") as writer:
        written = writer.submit(write_state, store, after, config)
        evidence = collect(backend, before, after, choose_sequences(grid))
        times.enter("store")
        checkpoint, adapter = written.result()
    gate = store.put(evidence.document())
    times.enter("done")
    return TrainRecord(
        step=inputs.step,
        base=inputs.policy.checkpoint,
        batch=inputs.batch,
        checkpoint=checkpoint,
        adapter=adapter,
        gate=gate,
        metrics={
            **metrics,
            "update_rms": evidence.update_rms,
            "gate_tokens": float(evidence.tokens),
            "lora_b_norm": b_norm(after.adapter),
            **times.seconds,
        },
        notes=tuple(_notes(batch, metrics, len(grid.groups))),
    )


def shape_batch(grid: Grid, objective: ObjectiveSettings, base: Callable[[Sequence[GridRollout]], list[Floats]]) -> ShapedBatch:
    """Choose groups, solve their advantages and spread the KL over their tokens (spec algorithm 2.1, 2.2).

    Args:
        base: log-probs under the frozen base of the response tokens of whole groups; empty for an empty response.
    """
    choice = choose_groups([[r.reward for r in group] for group in grid.groups])
    solved = [
        (group, group_advantages([r.reward for r in group], objective.advantage, beta=objective.beta))
        for group in (grid.groups[g] for g in choice.kept)
    ]
    pairs = [(r, float(a)) for group, found in solved for r, a in zip(group, found.advantages, strict=True)]
    scores = base([rollout for rollout, _ in pairs])
    trained = [(rollout, advantage, row) for (rollout, advantage), row in zip(pairs, scores, strict=True) if rollout.response]
    rollouts = [rollout for rollout, _, _ in trained]
    masks = [r.mask for r in rollouts]
    kl = token_kl([r.log_probs for r in rollouts], [row for _, _, row in trained], masks)
    shaped = [
        shape(advantage, difference, rollout.mask, kl.mean, objective.kl_coefficient)
        for (rollout, advantage, _), difference in zip(trained, kl.difference, strict=True)
    ]
    return ShapedBatch(
        rollouts=rollouts,
        advantages=shaped,
        choice=choice,
        kl=kl.mean,
        trajectory_advantages=np.array([advantage for _, advantage in pairs]),
        betas=[found.beta for _, found in solved if found.beta is not None],
        empty=len(pairs) - len(trained),
    )


def scored(rollout: GridRollout) -> ScoredSequence:
    """The rollout's response tokens, predicted from everything before them."""
    return ScoredSequence(rollout.tokens, len(rollout.prompt))


def _accumulate(backend: TrainerBackend, batch: ShapedBatch) -> dict[str, float]:
    """The whole batch's gradient, and what the forward pass tells."""
    losses: list[float] = []
    ratios: list[Floats] = []

    def gradient_of(index: int, log_probs: Floats) -> Floats:
        rollout = batch.rollouts[index]
        found = loss_gradient(log_probs, rollout.log_probs, batch.advantages[index], rollout.mask)
        losses.append(found.loss)
        ratios.append(found.ratio[rollout.mask > 0])
        return found.gradient

    trainer = backend.accumulate([scored(r) for r in batch.rollouts], gradient_of)
    engine = [r.log_probs[r.mask > 0] for r in batch.rollouts]
    sampled = _joined(engine)
    gap = sampled - _joined([t[r.mask > 0] for t, r in zip(trainer, batch.rollouts, strict=True)])
    ratio = _joined(ratios)
    advantages = batch.trajectory_advantages
    metrics = {
        "loss": float(sum(losses)),
        "kl_policy_base": batch.kl,
        "gap_engine_trainer_mean": float(gap.mean()) if gap.size else 0.0,
        "gap_engine_trainer_rms": float(np.sqrt(np.mean(np.square(gap)))) if gap.size else 0.0,
        "entropy": float(-sampled.mean()) if sampled.size else 0.0,
        "ratio_mean": float(ratio.mean()) if ratio.size else 1.0,
        "ratio_max": float(ratio.max()) if ratio.size else 1.0,
        "advantage_mean": float(advantages.mean()),
        "advantage_min": float(advantages.min()),
        "advantage_max": float(advantages.max()),
        "advantage_std": float(advantages.std()),
        "tokens_trained": float(batch.tokens),
        "rollouts_trained": float(len(batch.rollouts)),
        "groups_constant": float(batch.choice.constant),
        "groups_trained": float(len(batch.choice.kept)),
    }
    return metrics | ({"beta_mean": float(np.mean(batch.betas))} if batch.betas else {})


def _joined(arrays: Sequence[Floats]) -> Floats:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _check_frozen(backend: TrainerBackend, inputs: StepInputs) -> str:
    if extra := backend.trainable_names() ^ backend.adapter_names():
        raise TrainCheckFailed(
            f"step {inputs.step}: trainable must be the adapter and nothing else; differs in {sorted(extra)[:3]}"
        )
    return backend.base_fingerprint()


def _check_gradient(norm: float, batch: ShapedBatch, inputs: StepInputs) -> float:
    if not np.isfinite(norm):
        raise TrainCheckFailed(
            f"step {inputs.step}: gradient norm {norm}; a log-prob or ratio overflowed. "
            "Do the engine and the trainer hold the same policy?"
        )
    if norm == 0 and batch.has_signal:
        raise TrainCheckFailed(
            f"step {inputs.step}: gradient norm 0 although the rewards of {len(batch.choice.kept)} groups differ"
        )
    return norm


def _notes(batch: ShapedBatch, metrics: dict[str, float], groups: int) -> list[str]:
    notes = []
    if batch.choice.collapsed:
        notes.append(
            f"no signal: the rewards are constant within each of the {groups} groups, so only the KL shaping of group 0 was "
            "trained. If this repeats, the run has collapsed: fork it from an earlier commit with a lower learning rate."
        )
    if batch.tokens == 0:
        notes.append("no signal: the trained groups hold no sampled token, so the gradient is zero.")
    if batch.empty:
        notes.append(f"{batch.empty} rollouts have no response token; they count in their group's advantages only.")
    if abs(metrics["gap_engine_trainer_mean"]) > GAP_LIMIT:
        notes.append(
            f"the engine's log-probs differ from the trainer's by {metrics['gap_engine_trainer_mean']:+.4f} nats per token "
            f"on average, above {GAP_LIMIT}: were these rollouts sampled from the adapter that is trained here?"
        )
    return notes
