"""A rank whose memory turns out too small recomputes more, and nothing but the speed changes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from activities.train.megatron.compute import RankTrainer
from activities.train.megatron.memory import RecomputePlan
from activities.train.megatron.options import MegatronOptions
from activities.train.megatron.place import Place
from activities.train.megatron.wire import Floats, Packed
from tests.test_megatron_parts import QWEN3_8B
from workflows.contracts.request import LoraSettings

LAYERS = QWEN3_8B.layers
CPU = Place(rank=0, tensor_rank=0, tensor_ranks=1, device=torch.device("cpu"), dtype=torch.float32)
BATCHES = [Packed(n, (np.arange(3 + n, dtype=np.int64),), (1,)) for n in range(3)]


class SmallModel:
    """Log-probs are weight x token; memory suffices from a plan with so many whole layers and MLPs recomputed on."""

    shape = QWEN3_8B

    def __init__(self, full: int, mlp: int, *, breaks_in: str) -> None:
        self.weight = torch.nn.Parameter(torch.tensor([0.5]))
        self.untouched = torch.nn.Parameter(torch.tensor([1.0]))
        self.enough = (full, mlp)
        self.breaks_in = breaks_in
        self.plans: list[RecomputePlan] = []
        self._last: weakref.ref[torch.Tensor] | None = None

    def adapter(self) -> dict[str, torch.nn.Parameter]:
        return {"untouched": self.untouched, "weight": self.weight}

    def log_probs(self, sequences: Sequence[torch.Tensor], firsts: Sequence[int], plan: RecomputePlan) -> torch.Tensor:
        self.plans.append(plan)
        assert self._last is None or self._last() is None, "the failed pass still holds its activations"
        scored = self.weight * torch.cat([s[first:].float() for s, first in zip(sequences, firsts, strict=True)])
        if (plan.full, plan.mlp) >= self.enough or plan.full == LAYERS:
            return scored
        if self.breaks_in == "forward":
            raise torch.OutOfMemoryError("forward")
        # The first half of the backward pass has left its gradients when the second half finds no memory.
        broken: torch.Tensor = scored + Breaks.apply(self.weight)  # type: ignore[no-untyped-call]
        self._last = weakref.ref(broken)
        return broken


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("backward")


def accumulate(model: Any, options: MegatronOptions, batches: Sequence[Packed] = BATCHES) -> tuple[RankTrainer, list[int]]:
    trainer = RankTrainer(model, LoraSettings(), options, CPU, None, None)
    asked: list[int] = []

    def derivatives(number: int, scored: tuple[Floats, ...]) -> Floats:
        asked.append(number)
        return np.ones(sum(map(len, scored)))

    trainer.accumulate(batches, 5, derivatives, lambda _: None)
    return trainer, asked


@pytest.mark.parametrize("breaks_in", ["forward", "backward"])
@pytest.mark.parametrize("enough", [(0, 0), (0, LAYERS), (LAYERS, 0)])
def test_gradients_are_those_of_enough_memory(breaks_in: str, enough: tuple[int, int]) -> None:
    trainer, asked = accumulate(SmallModel(*enough, breaks_in=breaks_in), MegatronOptions())
    expected = float(sum(batch.tokens[0][1:].sum() for batch in BATCHES))
    found = trainer.gradients()
    assert float(found["weight"][0]) == expected
    assert float(found["untouched"][0]) == 0
    assert asked == [0, 1, 2]  # derivatives of a micro-batch are asked for once, however often it is tried
    assert trainer.stats["out_of_memory"] == {(0, 0): 0, (0, LAYERS): 1, (LAYERS, 0): 2}[enough]


def test_what_memory_allowed_is_kept_for_the_micro_batches_after_it() -> None:
    model = SmallModel(0, LAYERS, breaks_in="forward")
    accumulate(model, MegatronOptions())
    assert model.plans == [RecomputePlan(), *[RecomputePlan(mlp=LAYERS)] * 3]


@pytest.mark.parametrize("options", [MegatronOptions(recompute="none"), MegatronOptions(tensor_parallel=2)])
def test_a_rank_that_may_not_choose_says_what_to_change(options: MegatronOptions) -> None:
    model = SmallModel(LAYERS, 0, breaks_in="forward")
    trainer = RankTrainer(model, LoraSettings(), options, CPU, None, None)  # type: ignore[arg-type]
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError, match=r"5 tokens at once do not fit.*TTTD_TRAIN_TOKENS_PER_MICRO_BATCH.*CUDA out"):
        trainer._recompute_more(BATCHES[2], RecomputePlan(), error)


def test_there_is_an_end_to_recomputing_more() -> None:
    class NeverEnough(SmallModel):
        def log_probs(self, sequences: Sequence[torch.Tensor], firsts: Sequence[int], plan: RecomputePlan) -> torch.Tensor:
            self.plans.append(plan)
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = NeverEnough(0, 0, breaks_in="forward")
    with pytest.raises(torch.OutOfMemoryError, match=f"with {LAYERS} of {LAYERS} layers"):
        accumulate(model, MegatronOptions())
    assert model.plans == [RecomputePlan(), RecomputePlan(mlp=LAYERS), RecomputePlan(full=LAYERS)]
