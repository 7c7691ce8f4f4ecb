"""What a trainer back-end must do. The mathematics stays outside: a back-end never sees a reward or an advantage.

A back-end holds one frozen base model and one LoRA adapter with its Adam moments. It answers "log-probs of these tokens, with and
without the adapter", runs a backward pass from derivatives that it is handed, and takes one optimizer step. State goes in and out
as plain float32 arrays under PEFT's own names, so that a checkpoint written by one back-end is read by every other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workflows.contracts.request import OptimizerSettings

Floats = NDArray[np.float64]
Tensors = Mapping[str, NDArray[np.float32]]
"""Adapter-shaped arrays by PEFT key.

``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`` is rank x in, ``...lora_B.weight`` out x rank.
"""

GradientOf = Callable[[int, Floats], Floats]
"""(position of the sequence in the call, its log-probs T) -> derivative of the loss with respect to each of them (T)."""


@dataclass(frozen=True)
class ScoredSequence:
    """Token ids, and from which of them on log-probs are wanted."""

    tokens: tuple[int, ...]
    first: int
    """Index of the first token to score, at least 1: nothing predicts token 0."""

    def __post_init__(self) -> None:
        if not 1 <= self.first < len(self.tokens):
            raise ValueError(f"first={self.first} must lie in 1..{len(self.tokens) - 1} for {len(self.tokens)} tokens")

    @property
    def scored(self) -> int:
        """Number of log-probs that this sequence yields."""
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class TrainerState:
    """All that changes in training."""

    adapter: Tensors
    exp_avg: Tensors = field(default_factory=dict)
    """Adam's first moments; empty before the first step."""
    exp_avg_sq: Tensors = field(default_factory=dict)
    steps: int = 0
    """Optimizer steps taken."""


class TrainerBackend(ABC):
    """One base model with one adapter. Not thread-safe. A step calls load, log_probs and accumulate, apply, state."""

    @abstractmethod
    def load(self, state: TrainerState) -> None:
        """Replace adapter and moments, and drop accumulated gradients.

        Raises:
            CorruptBlob: keys or shapes are not those of this model and rank; names them.
        """

    @abstractmethod
    def state(self) -> TrainerState:
        """Copies of adapter and moments as they are now."""

    @abstractmethod
    def log_probs(self, sequences: Sequence[ScoredSequence], *, adapter: bool, in_float32: bool = False) -> list[Floats]:
        """Log-probs in nats of every scored token, at temperature 1.

        Args:
            adapter: False: those of the frozen base.
            in_float32: float32 arithmetic from the same weights, whatever precision the back-end trains in. It takes several
                times as long; a back-end that trains in float32 answers the same bits either way.
        """

    @abstractmethod
    def accumulate(self, sequences: Sequence[ScoredSequence], gradient_of: GradientOf) -> list[Floats]:
        """Forward and backward in micro-batches, adding to the adapter's gradients. Returns the log-probs of the forward pass.

        `gradient_of` is called once per sequence, in order. The sum over micro-batches is the gradient of the whole batch:
        nothing is averaged.
        """

    @abstractmethod
    def gradient_norm(self) -> float:
        """L2 norm of the accumulated gradient over the whole adapter, summed in float64."""

    @abstractmethod
    def apply(self, optimizer: OptimizerSettings) -> None:
        """One Adam step with the accumulated gradients, which are dropped. No clipping, no decay, constant rate."""

    @abstractmethod
    def trainable_names(self) -> frozenset[str]:
        """PEFT keys of every parameter that a backward pass would give a gradient, adapter or not."""

    @abstractmethod
    def adapter_names(self) -> frozenset[str]:
        """PEFT keys of the adapter."""

    @abstractmethod
    def base_fingerprint(self) -> str:
        """Changes when a base weight changes. Cheap enough to be taken before and after each step."""

    def close(self) -> None:
        """Give back what it holds outside this process. It can be used again after a `load`."""
        return


def micro_batches(lengths: Sequence[int], token_budget: int) -> Iterator[range]:
    """Cut sequences, in their order, into runs whose padded size (count x longest) stays within the budget.

    A sequence longer than the budget gets a micro-batch of its own. The order is that of the grid, never of lengths or arrival,
    so that the same grid is always summed in the same order.
    """
    start, longest = 0, 0
    for i, length in enumerate(lengths):
        if i > start and (i + 1 - start) * max(longest, length) > token_budget:
            yield range(start, i)
            start, longest = i, 0
        longest = max(longest, length)
    if lengths:
        yield range(start, len(lengths))
