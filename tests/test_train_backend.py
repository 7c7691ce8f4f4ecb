"""The torch back-end: log-probs, gradients and Adam against straightforward torch, and what must never change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from activities.errors import CorruptBlob
from activities.train import torch_backend
from activities.train.adam import adam_step
from activities.train.backend import ScoredSequence, TrainerState, micro_batches
from activities.train.fake import Family, make_model
from activities.train.torch_backend import TorchBackend, TorchOptions
from workflows.contracts.request import LoraSettings, OptimizerSettings

LORA = LoraSettings(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"qwen2": make_model(root / "qwen2", "qwen2"), "llama": make_model(root / "llama", "llama")}


def moved(backend: TorchBackend, seed: int = 0) -> TrainerState:
    """A state whose B is not zero, so that adapter on and off differ."""
    rng = np.random.default_rng(seed)
    shapes = {k: v.shape for k, v in backend.state().adapter.items()}
    return TrainerState({k: (0.1 * rng.standard_normal(s)).astype(np.float32) for k, s in shapes.items()})


def sequences(count: int = 5, seed: int = 1) -> list[ScoredSequence]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, 30, count)
    return [ScoredSequence(tuple(int(t) for t in rng.integers(0, 64, n)), int(n) // 3) for n in lengths]


def reference(backend: TorchBackend, sequence: ScoredSequence) -> torch.Tensor:
    """One sequence alone through the whole model: no padding, no chunks."""
    logits = backend.model(input_ids=torch.tensor([sequence.tokens]), use_cache=False).logits[0].float()
    targets = torch.tensor(sequence.tokens)
    return torch.log_softmax(logits, -1)[torch.arange(len(targets) - 1), targets[1:]][sequence.first - 1 :]


def coefficients(index: int, size: int) -> np.ndarray:
    return np.random.default_rng(index).standard_normal(size)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("adapter", [True, False])
def test_log_probs_equal_the_plain_model(folders: dict[Family, Path], family: Family, adapter: bool) -> None:
    backend = TorchBackend(folders[family], LORA)
    backend.load(moved(backend))
    with torch.no_grad():
        if adapter:
            expected = [reference(backend, s).numpy() for s in sequences()]
        else:
            with backend.model.disable_adapter():
                expected = [reference(backend, s).numpy() for s in sequences()]
    for found, target in zip(backend.log_probs(sequences(), adapter=adapter), expected, strict=True):
        np.testing.assert_allclose(found, target, atol=2e-6)


def test_adapter_off_is_the_base_and_leaves_the_adapter_trainable(folders: dict[Family, Path]) -> None:
    backend = TorchBackend(folders["qwen2"], LORA)
    on = backend.log_probs(sequences(), adapter=True)
    backend.load(moved(backend))
    off = backend.log_probs(sequences(), adapter=False)
    for a, b in zip(on, off, strict=True):  # the fresh adapter has B = 0: it adds exact zeros
        np.testing.assert_array_equal(a, b)
    assert backend.trainable_names() == backend.adapter_names()


def gradients(backend: TorchBackend) -> dict[str, np.ndarray]:
    return {n: p.grad.numpy().copy() for n, p in backend.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("budget", [1, 40, 100_000])
def test_gradients_are_those_of_the_summed_loss_in_any_micro_batches(folders: dict[Family, Path], budget: int) -> None:
    backend = TorchBackend(folders["qwen2"], LORA, TorchOptions(tokens_per_micro_batch=budget))
    backend.load(moved(backend))
    loss = sum(
        (torch.tensor(coefficients(i, s.scored), dtype=torch.float32) * reference(backend, s)).sum()
        for i, s in enumerate(sequences())
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    expected = gradients(backend)
    backend.load(moved(backend))  # drops them
    backend.accumulate(sequences(), lambda i, lp: coefficients(i, lp.size))
    found = gradients(backend)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=2e-5, err_msg=name)
    assert backend.gradient_norm() == pytest.approx(sum((g.astype(float) ** 2).sum() for g in found.values()) ** 0.5)


def test_vocabulary_chunks_and_recomputation_change_nothing(folders: dict[Family, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TorchBackend(folders["qwen2"], LORA)
    whole.load(moved(whole))
    expected = whole.accumulate(sequences(), lambda i, lp: coefficients(i, lp.size))
    monkeypatch.setattr(torch_backend, "_LOGITS_PER_CHUNK", 64 * 7)
    chunked = TorchBackend(folders["qwen2"], LORA, TorchOptions(recompute=True))
    chunked.load(moved(chunked))
    found = chunked.accumulate(sequences(), lambda i, lp: coefficients(i, lp.size))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    for name, gradient in gradients(whole).items():
        np.testing.assert_allclose(gradients(chunked)[name], gradient, rtol=1e-4, atol=2e-5)


def test_adam_is_adam(folders: dict[Family, Path]) -> None:
    """Two steps against the textbook, moments stored and loaded in between."""
    settings = OptimizerSettings(learning_rate=1e-3, beta1=0.9, beta2=0.95, epsilon=1e-8)
    backend = TorchBackend(folders["qwen2"], LORA)
    state = moved(backend)
    values = {k: v.astype(np.float64) for k, v in state.adapter.items()}
    m = {k: np.zeros_like(v) for k, v in values.items()}
    v2 = {k: np.zeros_like(v) for k, v in values.items()}
    for step in (1, 2):
        backend.load(state)
        backend.accumulate(sequences(seed=step), lambda i, lp: coefficients(i, lp.size))
        for name, gradient in gradients(backend).items():
            key = name.replace(".default", "")
            m[key] = 0.9 * m[key] + 0.1 * gradient
            v2[key] = 0.95 * v2[key] + 0.05 * gradient.astype(np.float64) ** 2
            corrected = np.sqrt(v2[key] / (1 - 0.95**step)) + 1e-8
            values[key] -= 1e-3 * (m[key] / (1 - 0.9**step)) / corrected
        backend.apply(settings)
        state = backend.state()
        assert state.steps == step
    for key, value in values.items():
        np.testing.assert_allclose(state.adapter[key], value, atol=2e-6, err_msg=key)
        np.testing.assert_allclose(state.exp_avg[key], m[key], rtol=1e-4, atol=1e-6)


def test_adam_makes_a_step_of_rounding() -> None:
    """Why trainers that agree to rounding in a gradient may not in the next one: the size of a gradient does not matter to Adam."""
    optimizer, moved = OptimizerSettings(learning_rate=1e-3), []
    for rounding in (1e-6, -1e-6):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([1.0, rounding])
        adam_step({"p": parameter}, {}, 0, optimizer)
        moved.append(parameter.detach())
    assert moved[0][0] == moved[1][0]
    assert float(moved[0][1] - moved[1][1]) == pytest.approx(-2e-3, rel=0.05)


def test_base_fingerprint_stays_in_a_step_and_sees_one_changed_weight(
    folders: dict[Family, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for sampled in (False, True):
        if sampled:
            monkeypatch.setattr(torch_backend, "_WHOLE_DIGEST_BYTES", 0)
            monkeypatch.setattr(torch_backend, "_SAMPLES_PER_TENSOR", 2)
        backend = TorchBackend(folders["llama"], LORA)
        before = backend.base_fingerprint()
        backend.accumulate(sequences(), lambda i, lp: coefficients(i, lp.size))
        backend.apply(OptimizerSettings(learning_rate=1e-2))
        assert backend.base_fingerprint() == before
        with torch.no_grad():
            weight = next(p for n, p in backend.model.named_parameters() if n.endswith("gate_proj.base_layer.weight"))
            weight[3, 5] += 1e-3
        assert backend.base_fingerprint() != before


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop(next(iter(t))),
        lambda t: t.update({next(iter(t)): np.zeros((1, 1), np.float32)}),
        lambda t: t.update({"base_model.model.lm_head.lora_A.weight": np.zeros((4, 32), np.float32)}),
    ],
    ids=["missing", "shape", "extra"],
)
def test_an_adapter_of_another_shape_is_refused(
    folders: dict[Family, Path], change: Callable[[dict[str, np.ndarray]], None]
) -> None:
    backend = TorchBackend(folders["qwen2"], LORA)
    tensors = dict(backend.state().adapter)
    change(tensors)
    with pytest.raises(CorruptBlob, match="does not fit this model and LoRA rank in 1 tensors"):
        backend.load(TrainerState(tensors))


def test_micro_batches_keep_the_order_and_the_budget() -> None:
    lengths = [5, 9, 3, 3, 3, 40, 2]
    parts = list(micro_batches(lengths, 20))
    assert [i for part in parts for i in part] == list(range(len(lengths)))
    for part in parts:
        padded = len(part) * max(lengths[i] for i in part)
        assert padded <= 20 or len(part) == 1
    assert list(micro_batches([], 20)) == []


@pytest.mark.parametrize("first", [0, 3, 4])
def test_only_predicted_tokens_can_be_scored(first: int) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        ScoredSequence((1, 2, 3), first)
