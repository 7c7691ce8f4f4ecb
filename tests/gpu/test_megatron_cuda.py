"""The Megatron back-end on GPUs against the torch one: float32 to rounding, bfloat16 to the tolerances of docs/numerics.md.

python -m scripts.gpu.experiment parity --out OUT --tests tests/gpu/test_megatron_cuda.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activities.train.backend import Floats, ScoredSequence, TrainerState
from activities.train.fake import make_model
from activities.train.megatron.attention import Segments, choose_kernel
from activities.train.megatron.backend import MegatronBackend
from activities.train.megatron.options import MegatronOptions
from activities.train.megatron.processes import RankGroup, start_ranks
from activities.train.megatron.shape import read_shape
from activities.train.megatron.sharding import adapter_shapes
from activities.train.torch_backend import TorchBackend, TorchOptions
from workflows.contracts.request import LoraSettings, OptimizerSettings

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(GPUS == 0, reason="needs a GPU")]

LORA = LoraSettings(rank=8, alpha=16)
LEARNING_RATE = 1e-3
LAYOUTS = [(t, d) for t, d in itertools.product((1, 2), (1, 2)) if t * d <= max(1, GPUS)]
FAMILIES: tuple[Any, ...] = ("qwen2", "qwen3", "llama")


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"tensor {layout[0]} data {layout[1]}")
def layout(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "bfloat16"])
def group(request: pytest.FixtureRequest, layout: tuple[int, int]) -> Iterator[RankGroup]:
    options = MegatronOptions(*layout, device="cuda", bfloat16=request.param, tokens_per_micro_batch=1024)
    ranks = start_ranks(options)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    # Narrower weights than a tiny model's: with 512 wide ones logits would be so large that bfloat16 says nothing.
    changes = {"initializer_range": 0.04, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    return {
        family: make_model(root / family, family, hidden=512, vocabulary=2048, layers=4, changes=changes) for family in FAMILIES
    }


def batch(seed: int) -> list[ScoredSequence]:
    rng = np.random.default_rng(seed)
    return [ScoredSequence(tuple(rng.integers(0, 2048, n).tolist()), 40) for n in rng.integers(100, 700, 8)]


def derivatives(index: int, log_probs: Floats) -> Floats:
    return np.random.default_rng(index).standard_normal(log_probs.size)


def _step(backend: MegatronBackend, state: TrainerState, sequences: list[ScoredSequence]) -> TrainerState:
    """One step of a trajectory of its own."""
    backend.load(state)
    backend.accumulate(sequences, derivatives)
    backend.apply(OptimizerSettings(learning_rate=LEARNING_RATE))
    return backend.state()


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float((one.ravel() @ other.ravel()) / (np.linalg.norm(one) * np.linalg.norm(other)))


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_those_of_torch(group: RankGroup, family: str, folders: dict[str, Path]) -> None:
    low = group.options.low_precision
    folder, rng = folders[family], np.random.default_rng(0)
    shapes = adapter_shapes(read_shape(folder), LORA)
    start = TrainerState({k: (0.03 * rng.standard_normal(s)).astype(np.float32) for k, s in shapes.items()})
    ours = MegatronBackend(folder, LORA, group=group)
    reference = TorchBackend(folder, LORA, TorchOptions(device="cuda", tokens_per_micro_batch=1024))  # float32
    ours.load(start)
    reference.load(start)
    trajectory = start
    for step in range(3):
        sequences = batch(step)
        # From the reference's state each time: where a gradient is zero but for rounding, Adam's step has the sign of the rounding
        # and the size of any other, and gradients after it are those of another adapter (docs/numerics.md).
        trajectory = _step(ours, trajectory, sequences)
        ours.load(reference.state())
        expected = np.concatenate(reference.accumulate(sequences, derivatives))
        gap = np.abs(np.concatenate(ours.accumulate(sequences, derivatives)) - expected)
        gradients = {
            n.replace(".default", ""): p.grad.cpu().numpy() for n, p in reference.model.named_parameters() if p.grad is not None
        }
        found = ours.gradients()
        print(f"{family} step {step}: gap mean {gap.mean():.2e} max {gap.max():.2e}, attention {ours.attention}")
        if low:
            assert gap.mean() < 0.05
            assert min(cosine(found[key], value) for key, value in gradients.items()) > 0.98
        else:
            assert gap.max() < 1e-3
            for key, value in gradients.items():
                np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-3 * np.abs(value).max(), err_msg=key)
        reference.apply(OptimizerSettings(learning_rate=LEARNING_RATE))
    moved = np.concatenate([(trajectory.adapter[key] - value).ravel() for key, value in start.adapter.items()])
    target = np.concatenate([(reference.state().adapter[key] - value).ravel() for key, value in start.adapter.items()])
    assert cosine(moved, target) > (0.9 if low else 0.99)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing_but_memory(folders: dict[str, Path], recompute: Any) -> None:
    sequences, rng = batch(5), np.random.default_rng(0)
    shapes = adapter_shapes(read_shape(folders["qwen3"]), LORA)
    start = TrainerState({k: (0.03 * rng.standard_normal(s)).astype(np.float32) for k, s in shapes.items()})
    found, peaks = [], []
    for how in ("none", recompute):
        options = MegatronOptions(device="cuda", tokens_per_micro_batch=8192, recompute=how, logits_per_chunk=1 << 20)
        backend = MegatronBackend(folders["qwen3"], LORA, options)
        try:
            backend.load(start)
            backend.accumulate(sequences, derivatives)
            peaks.append(backend.stats["peak_memory_bytes"])
            found.append(backend.gradients())
        finally:
            backend.close()
    assert peaks[1] < peaks[0]
    for key, value in found[0].items():
        np.testing.assert_allclose(found[1][key], value, rtol=0, atol=0.02 * np.abs(value).max(), err_msg=key)


@pytest.mark.parametrize("name", ["cudnn", "torch_varlen"])
@pytest.mark.parametrize("lengths", [[3000], [700, 2048, 60, 61, 5000]], ids=["one", "mixed"])
def test_a_kernel_for_packed_sequences_equals_one_sequence_after_the_other(name: Any, lengths: list[int]) -> None:
    device = torch.device("cuda")
    _, kernel = choose_kernel(name, device, torch.bfloat16)
    _, reference = choose_kernel("sdpa", device, torch.float32)
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(sum(lengths), heads, 128, generator=generator).to(device) for heads in (16, 4, 4, 16)]
    results = []
    for attend, dtype in ((kernel, torch.bfloat16), (reference, torch.float32)):
        inputs = [t.to(torch.bfloat16).to(dtype).requires_grad_() for t in draws[:3]]
        out = attend(inputs[0], inputs[1], inputs[2], Segments.of(lengths, device))
        results.append([out, *torch.autograd.grad(out, inputs, draws[3].to(torch.bfloat16).to(dtype))])
    for what, ours, theirs in zip(("out", "q", "k", "v"), *results, strict=True):
        gap = float((ours.float() - theirs).norm() / theirs.norm())
        print(f"{name} {what}: relative gap {gap:.1e}")
        assert gap < 0.01, what
