"""The Megatron back-end in bfloat16, asked for float32 log-probs: those of a float32 torch model with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activities.train.backend import Floats, ScoredSequence, TrainerState
from activities.train.evidence import collect
from activities.train.fake import Family, make_model
from activities.train.megatron.backend import MegatronBackend
from activities.train.megatron.options import MegatronOptions
from activities.train.megatron.processes import RankGroup, start_ranks
from activities.train.torch_backend import TorchBackend
from workflows.contracts.request import LoraSettings, OptimizerSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LORA = LoraSettings(rank=4, alpha=8)
MODELS: dict[Family, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False, "attention_bias": True},
}


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "tensor 2"])
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    options = MegatronOptions(tensor_parallel=request.param, bfloat16=True, tokens_per_micro_batch=96, logits_per_chunk=64 * 16)
    ranks = start_ranks(options)
    yield ranks
    ranks.stop()


def float32_reference(folder: Path) -> TorchBackend:
    """Base weights rounded to bfloat16, as the ranks hold them."""
    backend = TorchBackend(folder, LORA)
    with torch.no_grad():
        for name, parameter in backend.model.named_parameters():
            if "lora_" not in name:
                parameter.copy_(parameter.bfloat16())
    return backend


def sequences(count: int = 7) -> list[ScoredSequence]:
    rng = np.random.default_rng(3)
    return [ScoredSequence(tuple(int(t) for t in rng.integers(0, 64, n)), 1) for n in rng.integers(8, 60, count)]


def largest(one: list[Floats], other: list[Floats]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("family", MODELS)
def test_evidence_equals_that_of_a_float32_model_and_leaves_the_base_alone(
    group: RankGroup, family: Family, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", family, changes=MODELS[family])
    ours, reference = MegatronBackend(folder, LORA, group=group), float32_reference(folder)
    rng = np.random.default_rng(0)
    before = TrainerState(
        {key: (0.1 * rng.standard_normal(value.shape)).astype(np.float32) for key, value in reference.state().adapter.items()}
    )
    ours.load(before)
    fingerprint = ours.base_fingerprint()
    rounded = ours.accumulate(sequences(), lambda i, values: np.random.default_rng(i).standard_normal(values.size))
    ours.apply(OptimizerSettings(learning_rate=4e-5))
    after = ours.state()

    found, expected = collect(ours, before, after, sequences()).plain, collect(reference, before, after, sequences()).plain
    for name in ("new", "previous", "initial"):
        assert largest(getattr(found, name), getattr(expected, name)) < 1e-5
    assert largest(rounded, expected.previous) > 1e-3
    assert ours.base_fingerprint() == fingerprint
    ours.load(before)
    assert largest(ours.log_probs(sequences(), adapter=True), rounded) == 0.0
