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

FEWEST_TOKENS, MOST_TOKENS = 1024, 16_384
"""Prompts included. Evidence grows by doubling from the one to the other, as long as the grid has more."""
ASSUMED_NOISE = 0.06
"""Nats per token between a bfloat16 engine and its trainer, the noisiest that was measured."""
SLOPE_ERROR = 0.05
"""Standard error of the gate's slope that is enough; the gate needs 0.2."""
DRIFT_WANTED = 0.25
"""Nats per token (rms) between new policy and base from which on a bfloat16 engine serves an adapter nearly whole."""
MOST_AMPLIFIED = 64.0


@dataclass
class Scores:
    """The trainer's log-probs, one array per sequence, under three adapters."""

    new: list[Floats] = field(default_factory=list)
    previous: list[Floats] = field(default_factory=list)
    initial: list[Floats] = field(default_factory=list)

    def extend(self, more: Scores) -> None:
        self.new += more.new
        self.previous += more.previous
        self.initial += more.initial

    @property
    def tokens(self) -> int:
        return sum(row.size for row in self.new)

    @property
    def update_rms(self) -> float:
        """How far the step moved the policy: root mean square of the change of log-prob, nats per token."""
        return _distance(self.new, self.previous) / math.sqrt(max(1, self.tokens))

    @property
    def drift_rms(self) -> float:
        """How far all steps together did, from the frozen base."""
        return _distance(self.new, self.initial) / math.sqrt(max(1, self.tokens))

    @property
    def is_enough(self) -> bool:
        """A bfloat16 engine's noise would leave the slope uncertain by no more than SLOPE_ERROR, against both references."""
        least = min(_distance(self.new, self.previous), _distance(self.new, self.initial))
        return least * SLOPE_ERROR >= math.sqrt(2) * ASSUMED_NOISE


@dataclass
class Evidence:
    """Sequences and their scores, plain and as they will be compared."""

    sequences: list[ScoredSequence] = field(default_factory=list)
    plain: Scores = field(default_factory=Scores)
    amplification: float = 1.0
    amplified: Scores = field(default_factory=Scores)
    """Equal to `plain` where the amplification is 1."""

    @property
    def tokens(self) -> int:
        return self.plain.tokens

    @property
    def update_rms(self) -> float:
        return self.plain.update_rms

    def document(self) -> GateEvidence:
        plain = self.plain if self.amplification != 1 else Scores()
        return GateEvidence(
            sequences=tuple(s.tokens for s in self.sequences),
            amplification=self.amplification,
            new=_rows(self.amplified.new),
            previous=_rows(self.amplified.previous),
            initial=_rows(self.amplified.initial),
            plain_new=_rows(plain.new),
            plain_previous=_rows(plain.previous),
        )


def collect(backend: TrainerBackend, before: TrainerState, after: TrainerState, sequences: Sequence[ScoredSequence]) -> Evidence:
    """Score sequences before and after the step and with the adapter off, as many as the size of the step asks for.

    The back-end holds `after` at the end, as it did at the start. The passes are made in float32 also where training is in
    bfloat16: its rounding moves a log-prob by more than a small step does, and noise in the trainer's own change of log-probs
    lowers the gate's slope. An engine in bfloat16 loses most of a small adapter's effect, so such a one is scored amplified as well
    (docs/numerics.md). All passes over a stage are cut into the same micro-batches, so that what rounding is left is alike.
    """
    evidence = Evidence()
    for stage in _stages(sequences):
        plain = _score(backend, before, after, stage, 1.0, None)
        if not evidence.sequences:
            evidence.amplification = amplification(plain.drift_rms)
        factor = evidence.amplification
        evidence.sequences += stage
        evidence.plain.extend(plain)
        evidence.amplified.extend(plain if factor == 1 else _score(backend, before, after, stage, factor, plain.initial))
        if evidence.amplified.is_enough:
            break
    if evidence.amplification != 1:
        backend.load(after)
    return evidence


def amplification(drift_rms: float) -> float:
    """The factor of alpha, a power of two, that brings an adapter's effect to DRIFT_WANTED; 1 where it has that, or has none."""
    if drift_rms == 0 or drift_rms >= DRIFT_WANTED:
        return 1.0
    return min(MOST_AMPLIFIED, 2.0 ** math.ceil(math.log2(DRIFT_WANTED / drift_rms)))


def amplify(state: TrainerState, factor: float) -> TrainerState:
    """The adapter with every B times the factor, which is what alpha times the factor computes. Without Adam's moments."""
    scaled = {key: value * np.float32(factor) if ".lora_B." in key else value for key, value in state.adapter.items()}
    return TrainerState(adapter=scaled, steps=state.steps)


def _score(
    backend: TrainerBackend,
    before: TrainerState,
    after: TrainerState,
    stage: Sequence[ScoredSequence],
    factor: float,
    initial: list[Floats] | None,
) -> Scores:
    """The log-probs of a stage; those under the base are made where they are not given."""

    def under(state: TrainerState) -> list[Floats]:
        backend.load(state if factor == 1 else amplify(state, factor))
        return backend.log_probs(stage, adapter=True, in_float32=True)

    previous = under(before)
    if initial is None:
        # With B = 0 the adapter adds exact zeros: the previous policy is the frozen base, bit for bit.
        adapted = b_norm(before.adapter) > 0
        initial = backend.log_probs(stage, adapter=False, in_float32=True) if adapted else previous
    return Scores(under(after), previous, initial)


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


def _rows(arrays: Sequence[Floats]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(a.tolist()) for a in arrays)


def _distance(one: Sequence[Floats], other: Sequence[Floats]) -> float:
    """Euclidean distance over all tokens, nats."""
    return math.sqrt(sum(float(np.square(a - b).sum()) for a, b in zip(one, other, strict=True)))
