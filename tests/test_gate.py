"""The publish gate's decisions: adapters of real optimizer steps, scored exactly and with a bfloat16 engine's noise."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from activities.blobs import Blobs, LocalStore
from activities.open.identity_adapter import make_initial_policy
from activities.publish.gate import BLOCK_TOKENS, EngineScores, GateResult, compare
from activities.records import GateEvidence
from activities.train.backend import ScoredSequence
from activities.train.checkpoints import read_state
from activities.train.evidence import amplify
from activities.train.fake import FakeSearch, make_model
from activities.train.torch_backend import TorchBackend
from activities.train.training import Trainer
from workflows.contracts.base import PolicyRef

BFLOAT16_NOISE = 0.06
"""Nats per token between a bfloat16 engine and its trainer, as measured."""
STEPS, SEEDS = 3, 3


@dataclass
class History:
    """One run's versions 0..3."""

    search: FakeSearch
    policies: list[PolicyRef]

    def evidence(self, version: int) -> GateEvidence:
        gate = self.policies[version].gate
        assert gate is not None
        return self.search.store.load(GateEvidence, gate)

    def score(self, evidence: GateEvidence, policy: PolicyRef, noise: float, seed: int) -> tuple[np.ndarray, ...]:
        """The engine: the trainer's own arithmetic plus independent noise in every call."""
        self.search.backend.load(amplify(read_state(self.search.store, policy.checkpoint), evidence.amplification))
        rows = self.search.backend.log_probs([ScoredSequence(s, 1) for s in evidence.sequences], adapter=True)
        rng = np.random.default_rng(seed)
        return tuple(row + noise * rng.standard_normal(row.size) for row in rows)


def train_run(store: Blobs, model: Path, rate: float, seed: int) -> History:
    search = FakeSearch.open(store, model, run_id=f"run-{rate}-{seed}", optimizer={"learning_rate": rate})
    counter = itertools.count()
    trainer = Trainer(store, lambda _: model, TorchBackend, lambda: float(next(counter)))
    policies = [make_initial_policy(search.store, search.spec, model)]
    for step in range(1, STEPS + 1):
        batch = search.sample(step, policies[-1], groups=4, rollouts=12, response_tokens=24, seed=seed)
        policies.append(trainer.train(search.request(step, batch, policies[-1])).policy)
    return History(search, policies)


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[float, int], History]:
    """Runs of one model and one problem that differ in their sampling alone: they learn similar things."""
    root = tmp_path_factory.mktemp("gate")
    store, model = Blobs(LocalStore(root / "store")), make_model(root / "model")
    return {(rate, seed): train_run(store, model, rate, seed) for rate in (3e-3, 4e-5) for seed in range(SEEDS)}


def judge(
    history: History,
    version: int,
    served: PolicyRef,
    *,
    noise: float = 0.0,
    previous: PolicyRef | None = None,
    initial: PolicyRef | None = None,
) -> GateResult:
    """The gate's view of an engine that answers with `served` under the new name."""
    evidence, policies = history.evidence(version), history.policies
    scores = [
        history.score(evidence, policy, noise, seed)
        for seed, policy in enumerate((served, previous or policies[version - 1], initial or policies[0]))
    ]
    if version == 1:
        scores[2] = scores[1]  # one name, scored once
    return compare(evidence, EngineScores(*scores), first_version=version == 1)


RATES = pytest.mark.parametrize("rate", [3e-3, 4e-5])
VERSIONS = pytest.mark.parametrize("version", [1, 2, 3])


@RATES
@VERSIONS
@pytest.mark.slow
def test_the_right_adapter_passes(histories: dict[tuple[float, int], History], rate: float, version: int) -> None:
    history = histories[rate, 0]
    result = judge(history, version, history.policies[version], noise=1e-6)
    assert result.passed, result
    assert result.cause == ""
    assert len(result.comparisons) == (1 if version == 1 else 2)
    for comparison in result.comparisons:
        assert comparison.slope == pytest.approx(1.0, abs=0.02)
        assert comparison.residual < 0.01


@VERSIONS
@pytest.mark.slow
def test_the_right_adapter_passes_on_a_noisy_engine(histories: dict[tuple[float, int], History], version: int) -> None:
    history = histories[3e-3, 0]
    result = judge(history, version, history.policies[version], noise=BFLOAT16_NOISE)
    assert result.passed, result
    assert result.noise == pytest.approx(BFLOAT16_NOISE, rel=0.1)
    assert result.engine_gap == pytest.approx(BFLOAT16_NOISE, rel=0.1)


@RATES
@VERSIONS
@pytest.mark.parametrize("noise", [0.0, 1e-6, BFLOAT16_NOISE])
@pytest.mark.slow
def test_no_adapter_is_refused(histories: dict[tuple[float, int], History], rate: float, version: int, noise: float) -> None:
    """The engine answers with the base model under every name."""
    history = histories[rate, 0]
    result = judge(history, version, history.policies[0], previous=history.policies[0], noise=noise)
    assert not result.passed
    if noise < 1e-3 or rate == 3e-3:
        assert "no adapter is applied" in result.cause


@RATES
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("noise", [0.0, 1e-6, BFLOAT16_NOISE])
@pytest.mark.slow
def test_the_previous_version_under_the_new_name_is_refused(
    histories: dict[tuple[float, int], History], rate: float, version: int, noise: float
) -> None:
    history = histories[rate, 0]
    result = judge(history, version, history.policies[version - 1], noise=noise)
    assert not result.passed
    if noise < 1e-3 or rate == 3e-3:
        assert "previous version is served" in result.cause


@RATES
@VERSIONS
@pytest.mark.parametrize("other", range(1, SEEDS))
@pytest.mark.parametrize("everywhere", [False, True], ids=["new only", "every name"])
@pytest.mark.slow
def test_another_runs_adapter_is_refused(
    histories: dict[tuple[float, int], History], rate: float, version: int, other: int, everywhere: bool
) -> None:
    """Also when the engine serves that run's versions under all of our names, so that its changes look like steps."""
    history, stranger = histories[rate, 0], histories[rate, other]
    previous = stranger.policies[version - 1] if everywhere else None
    result = judge(history, version, stranger.policies[version], previous=previous, noise=1e-6)
    assert not result.passed
    assert any("residual" in c.reason for c in result.comparisons)


@RATES
@pytest.mark.slow
def test_an_adapter_served_at_twice_its_strength_is_refused(histories: dict[tuple[float, int], History], rate: float) -> None:
    """A server that scales LoRA by alpha instead of alpha / rank passes every test of presence."""
    history = histories[rate, 0]
    evidence = history.evidence(1)
    base, new = np.array(evidence.previous, dtype=object), np.array(evidence.new, dtype=object)
    doubled = tuple(np.array(b) + 2 * (np.array(n) - np.array(b)) for b, n in zip(base, new, strict=True))
    rows = tuple(np.array(b) for b in evidence.previous)
    result = compare(evidence, EngineScores(doubled, rows, rows), first_version=True)
    assert not result.passed
    assert "slope 2.000 outside" in result.comparisons[0].reason
    assert "scales differently" in result.cause


# The design's numbers, synthetic ------------------------------------------------------------------------------------------
def synthetic(seed: int, tokens: int = 16_000, mean_change: float = 0.004) -> tuple[GateEvidence, np.random.Generator]:
    """Evidence of a large model: heavy-tailed changes of 0.004 nats on average, in sequences of 1000 distinct tokens."""
    rng = np.random.default_rng(seed)
    rows, sequences, before = [], [], []
    for s in range(tokens // 1000):
        sequences.append(tuple(range(1_000_000 * s, 1_000_000 * s + 1000)))
        before.append(-rng.exponential(0.5, 999))
        rows.append(before[-1] + rng.laplace(0, mean_change, 999))
    old = tuple(tuple(r.tolist()) for r in before)
    return GateEvidence(sequences=tuple(sequences), new=tuple(tuple(r.tolist()) for r in rows), previous=old, initial=old), rng


def noisy(rows: tuple[tuple[float, ...], ...], rng: np.random.Generator, sigma: float) -> tuple[np.ndarray, ...]:
    return tuple(np.array(r) + sigma * rng.standard_normal(len(r)) for r in rows)


def test_one_step_of_a_large_model_shows_through_bfloat16_noise() -> None:
    accepted = refused = 0
    for seed in range(10):
        evidence, rng = synthetic(seed)
        before = noisy(evidence.previous, rng, BFLOAT16_NOISE)
        right = EngineScores(noisy(evidence.new, rng, BFLOAT16_NOISE), before, before)
        accepted += compare(evidence, right, first_version=True).passed
        absent = EngineScores(noisy(evidence.previous, rng, BFLOAT16_NOISE), before, before)
        refused += not compare(evidence, absent, first_version=True).passed
    assert (accepted, refused) == (10, 10)


def test_the_reported_error_is_the_spread_of_the_slope() -> None:
    """z is only worth something if slope / z is what repeated noise scatters the slope by, also with noise correlated in blocks."""
    slopes, errors = [], []
    for seed in range(40):
        evidence, rng = synthetic(1, tokens=6000)
        rng = np.random.default_rng(seed)

        def block_noise(row: tuple[float, ...], rng: np.random.Generator = rng) -> np.ndarray:
            shared = np.repeat(rng.standard_normal(len(row) // BLOCK_TOKENS + 1), BLOCK_TOKENS)[: len(row)]
            return np.array(row) + 0.03 * shared + 0.03 * rng.standard_normal(len(row))

        before = tuple(block_noise(r) for r in evidence.previous)
        result = compare(evidence, EngineScores(tuple(block_noise(r) for r in evidence.new), before, before), first_version=True)
        slopes.append(result.comparisons[0].slope)
        errors.append(result.comparisons[0].slope / result.comparisons[0].z)
    assert np.mean(slopes) == pytest.approx(1.0, abs=0.05)
    assert np.std(slopes) == pytest.approx(np.mean(errors), rel=0.3)


def test_too_little_evidence_is_refused_as_such() -> None:
    evidence, rng = synthetic(0, tokens=1000, mean_change=0.002)
    before = noisy(evidence.previous, rng, BFLOAT16_NOISE)
    result = compare(evidence, EngineScores(noisy(evidence.new, rng, BFLOAT16_NOISE), before, before), first_version=True)
    assert not result.passed
    assert "too weak" in result.cause


def test_an_engine_with_a_wrong_previous_version_cannot_widen_the_bound() -> None:
    evidence, rng = synthetic(3)
    far = tuple(np.array(r) + 1.0 for r in evidence.previous)
    initial = noisy(evidence.initial, rng, 1e-4)
    result = compare(evidence, EngineScores(far, far, initial), first_version=False)
    assert result.noise <= 2.1e-4
    assert not result.passed


# A step that changed nothing ----------------------------------------------------------------------------------------------
def still() -> GateEvidence:
    evidence, _ = synthetic(0, tokens=2000)
    return evidence.model_copy(update={"new": evidence.previous})


@pytest.mark.parametrize("noise", [0.0, 1e-6, BFLOAT16_NOISE])
def test_a_step_that_changed_nothing_must_show_nothing(noise: float) -> None:
    evidence, rng = still(), np.random.default_rng(1)
    before = noisy(evidence.previous, rng, noise)
    right = compare(evidence, EngineScores(noisy(evidence.new, rng, noise), before, before), first_version=True)
    assert right.passed
    moved = noisy(noisy(evidence.new, rng, noise), rng, max(0.2, 10 * noise))
    wrong = compare(evidence, EngineScores(moved, before, before), first_version=True)
    assert not wrong.passed
    assert "the step changed nothing" in wrong.cause


# Which tokens count -------------------------------------------------------------------------------------------------------
def test_a_shared_prompt_counts_once() -> None:
    prompt = (1, 2, 3, 4)
    sequences = ((*prompt, 5, 6), (*prompt, 7, 8), (*prompt, 5, 9))
    rows = tuple((-1.0,) * 5 for _ in sequences)
    new = tuple((-1.1, -0.9, -1.2, -0.8, -1.3) for _ in sequences)
    evidence = GateEvidence(sequences=sequences, new=new, previous=rows, initial=rows)
    arrays = tuple(np.array(r) for r in rows)
    result = compare(evidence, EngineScores(tuple(np.array(r) for r in new), arrays, arrays), first_version=True)
    assert result.comparisons[0].tokens == 3 + 2 + 2 + 1


@pytest.mark.parametrize("damage", ["short", "nan"])
def test_incomplete_scores_are_an_error(damage: str) -> None:
    evidence, _ = synthetic(0, tokens=1000)
    good = tuple(np.array(r) for r in evidence.previous)
    bad = (good[0][:-1],) if damage == "short" else (np.where(np.arange(999) == 5, np.nan, good[0]),)
    with pytest.raises(ValueError, match=r"one log-prob is needed|must be finite"):
        compare(evidence, EngineScores(bad, good, good), first_version=True)
