"""The gate's evidence: what an engine must reproduce to prove that it serves the adapter that was just trained (design 4).

Chooses sequences of the grid and scores them under three adapters. Knows nothing of how an engine's answers are compared with that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from activities.records import GateEvidence
from activities.train.backend import ScoredSequence, TrainerBackend, TrainerState
from activities.train.checkpoints import b_norm
from activities.train.grid import Grid

Floats = NDArray[np.float64]

FEWEST_TOKENS, MOST_TOKENS = 2048, 16_384
"""Prompts included. Evidence grows by doubling from the one to the other, as long as the grid has more."""
ASSUMED_NOISE = 0.06
"""Nats per token between a bfloat16 engine and its trainer, the noisiest that was measured."""
SLOPE_ERROR = 0.05
"""Standard error of the gate's slope that is enough; the gate needs 0.2."""


@dataclass
class Evidence:
    """Sequences and the trainer's log-probs of them, one array per sequence."""

    sequences: list[ScoredSequence] = field(default_factory=list)
    new: list[Floats] = field(default_factory=list)
    previous: list[Floats] = field(default_factory=list)
    initial: list[Floats] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(s.scored for s in self.sequences)

    @property
    def update_rms(self) -> float:
        """How far the step moved the policy: root mean square of the change of log-prob, nats per token."""
        return _distance(self.new, self.previous) / math.sqrt(max(1, self.tokens))

    @property
    def is_enough(self) -> bool:
        """A bfloat16 engine's noise would leave the slope uncertain by no more than SLOPE_ERROR, against both references."""
        least = min(_distance(self.new, self.previous), _distance(self.new, self.initial))
        return least * SLOPE_ERROR >= math.sqrt(2) * ASSUMED_NOISE

    def document(self) -> GateEvidence:
        return GateEvidence(
            sequences=tuple(s.tokens for s in self.sequences),
            new=tuple(tuple(a.tolist()) for a in self.new),
            previous=tuple(tuple(a.tolist()) for a in self.previous),
            initial=tuple(tuple(a.tolist()) for a in self.initial),
        )


def collect(backend: TrainerBackend, before: TrainerState, after: TrainerState, sequences: Sequence[ScoredSequence]) -> Evidence:
    """Score sequences before and after the step and with the adapter off, as many as the size of the step asks for.

    The back-end holds `after` at the end, as it did at the start. The passes are made in float32 also where training is in
    bfloat16: its rounding moves a log-prob by more than a small step does, and noise in the trainer's own change of log-probs
    lowers the gate's slope (docs/numerics.md). All three passes over a stage are cut into the same micro-batches, so that what
    rounding is left is alike.
    """
    evidence = Evidence()
    for stage in _stages(sequences):
        backend.load(before)
        previous = backend.log_probs(stage, adapter=True, in_float32=True)
        # With B = 0 the adapter adds exact zeros: the previous policy is the frozen base, bit for bit.
        adapted = b_norm(before.adapter) > 0
        initial = backend.log_probs(stage, adapter=False, in_float32=True) if adapted else previous
        backend.load(after)
        evidence.sequences += stage
        evidence.new += backend.log_probs(stage, adapter=True, in_float32=True)
        evidence.previous += previous
        evidence.initial += initial
        if evidence.is_enough:
            break
    return evidence


def choose_sequences(grid: Grid, limit: int = MOST_TOKENS) -> list[ScoredSequence]:
    """Whole sequences up to `limit` tokens: the first rollout of every group, then the second of every group, and so on.

    In this order few sequences span many prompts. Where even one sequence is longer than the limit, the beginning of the first is
    taken: in a causal model a prefix has the same log-probs.
    """
    ordered = sorted(grid.rollouts, key=lambda r: (r.at.rollout, r.at.group))
    candidates = [rollout.tokens for rollout in ordered if len(rollout.tokens) > 1]
    chosen: list[ScoredSequence] = []
    room = limit
    for tokens in candidates:
        if len(tokens) <= room:
            chosen.append(ScoredSequence(tokens, 1))
            room -= len(tokens)
    if not chosen and candidates:
        chosen.append(ScoredSequence(candidates[0][:limit], 1))
    return chosen


def _stages(sequences: Sequence[ScoredSequence]) -> Iterator[list[ScoredSequence]]:
    """Cut so that the total reaches FEWEST_TOKENS, then twice, four times as many, and so on."""
    stage: list[ScoredSequence] = []
    total, target = 0, FEWEST_TOKENS
    for sequence in sequences:
        stage.append(sequence)
        total += len(sequence.tokens)
        if total >= target:
            yield stage
            stage, target = [], 2 * total
    if stage:
        yield stage


def _distance(one: Sequence[Floats], other: Sequence[Floats]) -> float:
    """Euclidean distance over all tokens, nats."""
    return math.sqrt(sum(float(np.square(a - b).sum()) for a, b in zip(one, other, strict=True)))
