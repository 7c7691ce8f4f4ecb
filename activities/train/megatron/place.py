"""Where a rank stands. Knows nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """One rank among those of a trainer."""

    rank: int
    tensor_rank: int
    """Which part of the model it holds."""
    tensor_ranks: int
    device: torch.device
    dtype: torch.dtype
    """Of base weights and activations."""

    @property
    def speaks(self) -> bool:
        """Of the ranks that hold one copy of the model, and so know the same log-probs, the first reports them."""
        return self.tensor_rank == 0
