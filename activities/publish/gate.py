"""The publish gate's mathematics: do engine log-probs change the way the trainer's do? Source: design 4.

One optimizer step moves a log-prob by 0.004 nats on average, while engine and trainer differ by up to 0.06 a token for reasons of
arithmetic, so no absolute gap proves anything. The test is paired: Δt = trainer(new) − trainer(reference) and Δe = the same in the
engine, on the same tokens. What the two arithmetics do to both terms alike drops out.

    slope     ⟨Δe, Δt⟩ / ⟨Δt, Δt⟩ must lie in 0.5..1.5 and more than 5 standard errors above 0. Nothing served, or the reference
              served under the new name, gives 0.
    residual  |Δe − Δt|² / |Δt|² must not exceed what arithmetic explains. Another run's adapter learned similar things and may well
              have a slope in range; it has a residual of its own. The bound is 4 σ² n / |Δt|², and at least 0.25. σ² is measured on
              the spot, from engine − trainer under the reference adapters. So an exact engine refuses strangers, and on a noisy one
              the bound opens until the slope decides alone.

Details decided here:
* Standard error: residuals are clustered in blocks of 64 consecutive tokens of a sequence, since noise in one place of a sequence
  spreads to its neighbours. Whole sequences would leave one cluster where one sequence fills the evidence.
* A token whose whole prefix was seen in an earlier sequence (siblings share their prompt) is the same measurement and counts once.
* The factor 4: two independent noises add up to 2 σ², opposed ones to 4 σ².
* σ is the larger one of those under version v and version 0, but at most twice that under version 0, which needs no adapter to be
  right: an engine that serves a wrong version v cannot loosen the test with it.
* Δt exactly 0 (a step without signal, or a learning rate of 0) has no direction to compare. Then Δe must be 0 within the noise.
* Small adapters are compared amplified (GateEvidence.amplification), since an engine in bfloat16 loses most of their effect. That
  proves that the engine applies these weights as the trainer does. Whether the served name, which is not amplified, is this adapter
  is a second question, asked of the engine alone: `compare_names`.

Pure numpy float64. Knows no engine, adapter or HTTP: arrays in, numbers and reasons out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from activities.records import GateComparison, GateEvidence

Floats = NDArray[np.float64]

SLOPE_LOW, SLOPE_HIGH = 0.5, 1.5
Z_NEEDED = 5.0
RESIDUAL_FLOOR = 0.25
NOISE_FACTOR = 4.0
NOISE_GROWTH = 2.0
BLOCK_TOKENS = 64
REPEAT_FACTOR = 2.0
"""One adapter under two names may differ by so many times what the engine differs from itself."""
Z_OF_SOMETHING = 3.0
"""Only for naming the cause of a refusal: a slope below this many standard errors counts as none."""
Z_LIMIT = 1e6
"""z of a perfect engine has no bound; JSON has no infinity."""
NOISE_FLOOR = 1e-5
"""Nats: float32 log-probs of one model by two programs differ by this much at least."""


@dataclass(frozen=True)
class EngineScores:
    """The engine's log-probs of every token but the first of each evidence sequence, under the three names."""

    new: tuple[Floats, ...]
    previous: tuple[Floats, ...]
    initial: tuple[Floats, ...]


@dataclass(frozen=True)
class GateResult:
    comparisons: tuple[GateComparison, ...]
    """Against `previous`, and against `initial` where that is another version."""
    engine_gap: float
    """Root mean square of engine − trainer under the new adapter, nats per token."""
    noise: float
    """σ: the same under the reference adapters, as the residual test takes it."""
    cause: str
    """What the numbers look like if the gate refuses; empty if it passes."""

    @property
    def passed(self) -> bool:
        return all(c.passed for c in self.comparisons)


@dataclass(frozen=True)
class Tokens:
    """Which tokens of the evidence count, and the cluster of each that does."""

    kept: NDArray[np.bool_]
    cluster: NDArray[np.int64]


def compare(evidence: GateEvidence, engine: EngineScores, *, first_version: bool) -> GateResult:
    """Run the gate.

    Args:
        first_version: version v is version 0 itself, so that one comparison says everything.

    Raises:
        ValueError: the engine's arrays do not have one number per token but the first, or the evidence is empty.
    """
    tokens = independent_tokens(evidence.sequences)
    if not tokens.kept.any():
        raise ValueError("gate evidence holds no token to compare")

    def flat(rows: Sequence[Sequence[float]] | tuple[Floats, ...]) -> Floats:
        return _flatten(rows, evidence.sequences)[tokens.kept]

    trainer = {name: flat(getattr(evidence, name)) for name in ("new", "previous", "initial")}
    served = {name: flat(getattr(engine, name)) for name in ("new", "previous", "initial")}
    at_start = _rms(served["initial"] - trainer["initial"])
    noise = min(max(at_start, _rms(served["previous"] - trainer["previous"])), NOISE_GROWTH * at_start)
    references = ("previous",) if first_version else ("previous", "initial")
    comparisons = tuple(
        _compare_one(name, served["new"] - served[name], trainer["new"] - trainer[name], tokens.cluster, noise)
        for name in references
    )
    gap = _rms(served["new"] - trainer["new"])
    return GateResult(comparisons, gap, noise, _cause(comparisons, noise, first_version))


@dataclass(frozen=True)
class Names:
    """The engine's log-probs of the evidence, nothing amplified: what a served name answers, and what it should answer like."""

    named: tuple[Floats, ...]
    fresh: tuple[Floats, ...]
    """The same files, loaded again under another name."""
    previous: tuple[Floats, ...]
    initial: tuple[Floats, ...]
    named_again: tuple[Floats, ...]
    """Scored after all others: how far the engine lies from itself, whatever else it has to do meanwhile."""
    previous_again: tuple[Floats, ...]


@dataclass(frozen=True)
class NameResult:
    gap: float
    """Between the two names, nats (rms)."""
    bound: float
    cause: str
    """Empty if the name is what it should be."""


def compare_names(evidence: GateEvidence, engine: Names, *, first_version: bool) -> NameResult:
    """Is what a name serves the same as these files freshly loaded?

    Refused if the two differ by more than the engine differs from itself, or if the name is nearer to an older version than to its
    own files. Where no difference shows at all, none is served: the versions are then one to this engine, and it is no mistake.
    """
    tokens = independent_tokens(evidence.sequences)

    def flat(rows: tuple[Floats, ...]) -> Floats:
        return _flatten(rows, evidence.sequences)[tokens.kept]

    named, fresh = flat(engine.named), flat(engine.fresh)
    itself = max(_rms(named - flat(engine.named_again)), _rms(flat(engine.previous) - flat(engine.previous_again)))
    gap, bound = _rms(named - fresh), max(NOISE_FLOOR, REPEAT_FACTOR * itself)
    older = {"no adapter is applied, or version 0 is served": flat(engine.initial)}
    if not first_version:
        older["the previous version is served"] = flat(engine.previous_again)
    nearer = [_mean_z(np.square(named - fresh) - np.square(named - rows), tokens.cluster) for rows in older.values()]
    if gap <= bound and max(nearer) <= Z_NEEDED:
        return NameResult(gap, bound, "")
    nearest = min(older, key=lambda what: _rms(named - older[what]))
    if _rms(named - older[nearest]) <= max(bound, gap / 2):
        return NameResult(gap, bound, f"looks like {nearest} under the new name")
    far = f"it lies {gap:.2g} nats (rms) from its own files loaded again, above {bound:.2g}"
    return NameResult(gap, bound, f"looks like another adapter under the new name: {far}")


def served_share(evidence: GateEvidence, named: tuple[Floats, ...], previous: tuple[Floats, ...]) -> float | None:
    """How much of the last step the engine serves, as its arithmetic is: the slope without amplification. None without a step."""
    tokens = independent_tokens(evidence.sequences)
    new, old = evidence.as_served
    trainer = _flatten(new, evidence.sequences)[tokens.kept] - _flatten(old, evidence.sequences)[tokens.kept]
    engine = _flatten(named, evidence.sequences)[tokens.kept] - _flatten(previous, evidence.sequences)[tokens.kept]
    energy = float(trainer @ trainer)
    return float(engine @ trainer) / energy if energy else None


def plain_gap(evidence: GateEvidence, named: tuple[Floats, ...]) -> float:
    """Engine − trainer under the new adapter as it is served, nats per token (rms)."""
    tokens = independent_tokens(evidence.sequences)
    return _rms((_flatten(named, evidence.sequences) - _flatten(evidence.as_served[0], evidence.sequences))[tokens.kept])


def _compare_one(against: str, engine: Floats, trainer: Floats, cluster: NDArray[np.int64], noise: float) -> GateComparison:
    """One reference: Δ engine against Δ trainer."""
    energy = float(trainer @ trainer)
    if energy == 0.0:
        return _compare_to_nothing(against, engine, noise)
    slope = float(engine @ trainer) / energy
    error = _slope_error(trainer, engine - slope * trainer, cluster, energy)
    z = float(np.clip(slope / error if error > 0 else np.sign(slope) * Z_LIMIT, -Z_LIMIT, Z_LIMIT))
    miss = engine - trainer
    residual = float(miss @ miss) / energy
    bound = max(RESIDUAL_FLOOR, NOISE_FACTOR * engine.size * max(noise, NOISE_FLOOR) ** 2 / energy)
    reasons = []
    if not SLOPE_LOW <= slope <= SLOPE_HIGH:
        reasons.append(f"slope {slope:.3f} outside {SLOPE_LOW}..{SLOPE_HIGH}")
    if z <= Z_NEEDED:
        reasons.append(f"z {z:.1f} not above {Z_NEEDED:g} (standard error {error:.3f})")
    if residual > bound:
        reasons.append(f"residual {residual:.3f} above {bound:.3f}")
    return GateComparison(
        against=against,
        tokens=engine.size,
        slope=slope,
        z=z,
        residual=residual,
        residual_bound=bound,
        trainer_rms=float(np.sqrt(energy / engine.size)),
        passed=not reasons,
        reason="; ".join(reasons),
    )


def _compare_to_nothing(against: str, engine: Floats, noise: float) -> GateComparison:
    """The adapter equals the reference: so must what the engine serves. `residual` is in nats² per token here, as Δt is 0."""
    residual = float(np.mean(np.square(engine)))
    bound = NOISE_FACTOR * max(noise, NOISE_FLOOR) ** 2
    passed = residual <= bound
    return GateComparison(
        against=against,
        tokens=engine.size,
        slope=0.0,
        z=0.0,
        residual=residual,
        residual_bound=bound,
        trainer_rms=0.0,
        passed=passed,
        reason="" if passed else f"the step changed nothing, yet the engine's log-probs moved by {residual**0.5:.2g} nats (rms)",
    )


def _slope_error(trainer: Floats, residual: Floats, cluster: NDArray[np.int64], energy: float) -> float:
    """Standard error of the slope through the origin, residuals correlated within clusters (the sandwich estimator)."""
    scores = np.bincount(cluster, weights=trainer * residual)
    clusters = int(np.count_nonzero(np.bincount(cluster)))
    correction = clusters / (clusters - 1) if clusters > 1 else 2.0
    return float(np.sqrt(correction * np.square(scores).sum()) / energy)


def _mean_z(values: Floats, cluster: NDArray[np.int64]) -> float:
    """Mean over its standard error, values correlated within clusters; 0 where all are zero."""
    error = _slope_error(np.ones_like(values), values - values.mean(), cluster, float(values.size))
    return float(values.mean() / error) if error > 0 else float(np.sign(values.mean()) * Z_LIMIT)


def _cause(comparisons: Sequence[GateComparison], noise: float, first_version: bool) -> str:
    """The likeliest explanation of a refusal, in words."""
    if all(c.passed for c in comparisons):
        return ""
    previous, initial = comparisons[0], comparisons[-1]
    if previous.trainer_rms == 0:
        return "looks like another adapter: the step changed nothing, what the engine serves did"
    if any(not c.passed and c.residual <= c.residual_bound and _standard_error(c) > 1 / Z_NEEDED for c in comparisons):
        return "the evidence is too weak for this engine's noise: the update is too small, or there are too few tokens"
    if _engine_rms(previous) > 2 * max(noise, NOISE_FLOOR) or previous.slope > SLOPE_LOW / 2:
        return "looks like another adapter, or one that the engine scales differently"
    if first_version:
        return f"looks like no adapter is applied, or version 0 is served under the new name (slope {previous.slope:.2f})"
    if initial.slope > SLOPE_LOW / 2 and initial.z > Z_OF_SOMETHING:
        return f"looks like the previous version is served under the new name (slope {previous.slope:.2f} against it)"
    return f"looks like no adapter is applied (slope {previous.slope:.2f}; {initial.slope:.2f} against the base)"


def _engine_rms(c: GateComparison) -> float:
    """Root mean square of Δe: |Δe|² = |Δe − Δt|² + 2⟨Δe, Δt⟩ − |Δt|²."""
    return float(np.sqrt(max(0.0, c.residual + 2 * c.slope - 1))) * c.trainer_rms


def _standard_error(c: GateComparison) -> float:
    return abs(c.slope / c.z) if c.z else 0.0


def _flatten(rows: Sequence[Sequence[float]] | tuple[Floats, ...], sequences: Sequence[Sequence[int]]) -> Floats:
    if [len(row) for row in rows] != [len(s) - 1 for s in sequences]:
        raise ValueError("one log-prob is needed for every token but the first of each sequence")
    values = np.concatenate([np.asarray(row, dtype=np.float64) for row in rows]) if rows else np.zeros(0)
    if not np.isfinite(values).all():
        raise ValueError("log-probs must be finite")
    return values


def independent_tokens(sequences: Sequence[Sequence[int]]) -> Tokens:
    """Keep each (prefix, token) once; number the blocks that the kept tokens lie in."""
    seen: set[int] = set()
    kept: list[bool] = []
    cluster: list[int] = []
    block = 0
    for sequence in sequences:
        prefix = hash((0, sequence[0]))
        for position, token in enumerate(sequence[1:]):
            prefix = hash((prefix, token))
            if position and position % BLOCK_TOKENS == 0:
                block += 1
            new = prefix not in seen
            seen.add(prefix)
            kept.append(new)
            if new:
                cluster.append(block)
        block += 1
    return Tokens(np.array(kept, dtype=np.bool_), np.array(cluster, dtype=np.int64))


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
