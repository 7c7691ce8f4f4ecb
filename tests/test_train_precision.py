"""The gate's evidence where training is in bfloat16: made in float32 from the same weights, which it leaves as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from activities.publish.gate import EngineScores, GateResult, compare, served_share
from activities.records import GateEvidence
from activities.train.backend import Floats, ScoredSequence, TrainerState
from activities.train.evidence import amplify, collect
from activities.train.fake import make_model
from activities.train.precision import WholeHeads
from activities.train.torch_backend import TorchBackend, TorchOptions
from workflows.contracts.request import LoraSettings, OptimizerSettings

LORA = LoraSettings(rank=8, alpha=16)
LOW = TorchOptions(bfloat16=True)
FAMILIES = pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])  # llama's head is tied to its embedding here


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    families = ("qwen2", "qwen3", "llama")
    return {family: make_model(root / family, family, hidden=64, layers=4) for family in families}  # type: ignore[arg-type]


def in_float32_with_weights_of(low: TorchBackend, folder: Path) -> TorchBackend:
    """A float32 back-end whose base weights are the bfloat16 ones of another."""
    high = TorchBackend(folder, LORA)
    weights = dict(low.model.named_parameters())
    with torch.no_grad():
        for name, parameter in high.model.named_parameters():
            parameter.copy_(weights[name])
    return high


def sequences(count: int, length: int = 100) -> list[ScoredSequence]:
    rng = np.random.default_rng(1)
    return [ScoredSequence(tuple(int(t) for t in rng.integers(0, 64, length)), 1) for _ in range(count)]


def one_step(backend: TorchBackend, rate: float) -> tuple[TrainerState, TrainerState]:
    """An adapter that has learned something, and the same after one more step."""
    rng = np.random.default_rng(0)
    scale = {"A": 0.1, "B": 0.02}
    before = TrainerState(
        {
            key: (scale["A" if ".lora_A." in key else "B"] * rng.standard_normal(value.shape)).astype(np.float32)
            for key, value in backend.state().adapter.items()
        }
    )
    backend.load(before)
    backend.accumulate(sequences(8), lambda i, values: np.random.default_rng(i).standard_normal(values.size))
    backend.apply(OptimizerSettings(learning_rate=rate))
    return before, backend.state()


def largest(one: list[Floats], other: list[Floats]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def change(new: list[Floats], reference: list[Floats]) -> list[Floats]:
    return [a - b for a, b in zip(new, reference, strict=True)]


@FAMILIES
def test_evidence_of_a_bfloat16_trainer_is_that_of_a_float32_one(folders: dict[str, Path], family: str) -> None:
    low = TorchBackend(folders[family], LORA, LOW)
    high = in_float32_with_weights_of(low, folders[family])
    before, after = one_step(low, 4e-5)
    batch = sequences(6)
    found, expected = collect(low, before, after, batch).plain, collect(high, before, after, batch).plain
    assert largest(change(found.new, found.previous), change(expected.new, expected.previous)) < 1e-5
    assert largest(change(found.new, found.initial), change(expected.new, expected.initial)) < 1e-5

    rounded = low.log_probs(batch, adapter=True)
    low.load(before)
    noise = largest(change(rounded, low.log_probs(batch, adapter=True)), change(expected.new, expected.previous))
    assert noise > 1e-2  # more than the step itself moves most tokens
    assert expected.update_rms < 1e-2


@FAMILIES
def test_a_float32_pass_leaves_a_bfloat16_model_as_it_was(folders: dict[str, Path], family: str) -> None:
    low = TorchBackend(folders[family], LORA, LOW)
    one_step(low, 1e-3)
    weights = {name: (p.dtype, p.data_ptr(), p.detach().clone()) for name, p in low.model.named_parameters()}
    fingerprint, rounded = low.base_fingerprint(), low.log_probs(sequences(3), adapter=True)
    exact = low.log_probs(sequences(3), adapter=True, in_float32=True)
    assert largest(exact, rounded) > 1e-3
    assert low.base_fingerprint() == fingerprint
    for name, parameter in low.model.named_parameters():
        dtype, address, values = weights[name]
        assert (parameter.dtype, parameter.data_ptr()) == (dtype, address)
        assert torch.equal(parameter, values)
    assert largest(low.log_probs(sequences(3), adapter=True), rounded) == 0.0


def test_a_float32_pass_that_fails_leaves_all_as_it_was(folders: dict[str, Path]) -> None:
    low = TorchBackend(folders["llama"], LORA, LOW)
    fingerprint, rounded = low.base_fingerprint(), low.log_probs(sequences(2), adapter=False)
    linear = next(m for n, m in low.model.named_modules() if n.endswith("layers.1.mlp.up_proj.base_layer"))

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    handle = linear.register_forward_hook(fail)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(MemoryError, match="no room"):
            low.log_probs(sequences(2), adapter=False, in_float32=True)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
        handle.remove()
    assert low.base_fingerprint() == fingerprint
    assert {p.dtype for n, p in low.model.named_parameters() if "lora" not in n} == {torch.bfloat16}
    assert largest(low.log_probs(sequences(2), adapter=False), rounded) == 0.0


def test_a_float32_trainer_answers_the_same_bits_either_way(folders: dict[str, Path]) -> None:
    backend = TorchBackend(folders["qwen2"], LORA)
    one_step(backend, 1e-3)
    batch = sequences(3)
    assert largest(backend.log_probs(batch, adapter=True), backend.log_probs(batch, adapter=True, in_float32=True)) == 0.0


def test_float32_attention_is_not_asked_to_share_heads(folders: dict[str, Path]) -> None:
    """Where it is, torch takes a GPU kernel whose memory grows with the square of a sequence."""
    q, k, v = (torch.randn(1, heads, 7, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    asked: list[tuple[torch.Size, bool]] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is scaled_dot_product_attention:
                asked.append((args[1].shape, bool((kwargs or {}).get("enable_gqa"))))
            return func(*args, **(kwargs or {}))

    low = TorchBackend(folders["qwen2"], LORA, LOW)
    with Watch():
        low.log_probs(sequences(1), adapter=False)
        low.log_probs(sequences(1), adapter=False, in_float32=True)
    few, many = torch.Size([1, 2, 100, 16]), torch.Size([1, 4, 100, 16])
    assert asked == [(few, True)] * 4 + [(many, False)] * 4

    asked.clear()
    shared = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with Watch(), WholeHeads():
        whole = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert asked == [(q.shape, False)]
    torch.testing.assert_close(whole, shared)


@pytest.mark.slow
def test_the_gate_knows_an_honest_small_step_on_a_bfloat16_engine_by_float32_evidence_alone(folders: dict[str, Path]) -> None:
    low = TorchBackend(folders["qwen2"], LORA, LOW)
    before, after = one_step(low, 1e-4)
    evidence = collect(low, before, after, sequences(120)).document()
    rows = [ScoredSequence(tokens, 1) for tokens in evidence.sequences]
    # The engine: bfloat16 like the trainer, adapter included, but other kernels and batches.
    engine = TorchBackend(folders["qwen2"], LORA, TorchOptions(bfloat16=True, tokens_per_micro_batch=1))
    engine.model.get_base_model().set_attn_implementation("eager")

    def scores(backend: TorchBackend) -> tuple[list[Floats], list[Floats], list[Floats]]:
        found = []
        for state in (after, before):
            rounded = {k: torch.from_numpy(v.copy()).bfloat16().float().numpy() for k, v in state.adapter.items()}
            backend.load(state if backend is low else TrainerState(rounded))
            found.append(backend.log_probs(rows, adapter=True))
        return found[0], found[1], backend.log_probs(rows, adapter=False)

    served = EngineScores(*(tuple(rows) for rows in scores(engine)))

    def judge(document: GateEvidence) -> GateResult:
        return compare(document, served, first_version=False)

    assert judge(evidence).passed
    assert judge(evidence).comparisons[0].slope > 0.7
    own = dict(zip(("new", "previous", "initial"), scores(low), strict=True))
    noisy = judge(evidence.model_copy(update={name: tuple(tuple(r.tolist()) for r in rows) for name, rows in own.items()}))
    assert not noisy.passed
    assert noisy.comparisons[0].slope < 0.3


@pytest.mark.slow
def test_a_first_step_that_bfloat16_does_not_serve_is_proved_amplified(folders: dict[str, Path]) -> None:
    """From B = 0, an engine in bfloat16 adds a small adapter's output to rounded activations, and loses most of it."""
    low = TorchBackend(folders["qwen2"], LORA, LOW)
    before = low.state()
    assert not any(v.any() for k, v in before.adapter.items() if ".lora_B." in k)
    low.accumulate(sequences(8), lambda i, values: np.random.default_rng(i).standard_normal(values.size))
    low.apply(OptimizerSettings(learning_rate=4e-5))
    after = low.state()
    evidence = collect(low, before, after, sequences(120)).document()
    rows = [ScoredSequence(tokens, 1) for tokens in evidence.sequences]
    engine = TorchBackend(folders["qwen2"], LORA, TorchOptions(bfloat16=True, tokens_per_micro_batch=1))
    engine.model.get_base_model().set_attn_implementation("eager")

    def serve(state: TrainerState, factor: float) -> tuple[Floats, ...]:
        rounded = {k: torch.from_numpy(v.copy()).bfloat16().float().numpy() for k, v in state.adapter.items()}
        engine.load(amplify(TrainerState(rounded), factor))
        return tuple(engine.log_probs(rows, adapter=True))

    base = tuple(engine.log_probs(rows, adapter=False))
    share = served_share(evidence, serve(after, 1.0), base)
    assert share is not None
    assert share < 0.5, "nothing is lost here: this engine is no example"
    assert evidence.amplification > 1
    proof = compare(evidence, EngineScores(serve(after, evidence.amplification), base, base), first_version=True)
    assert proof.passed, proof
    assert proof.comparisons[0].slope > 0.8
    halved = compare(evidence, EngineScores(serve(after, evidence.amplification / 2), base, base), first_version=True)
    assert not halved.passed
