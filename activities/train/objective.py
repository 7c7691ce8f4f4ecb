"""What one step minimises: which groups are trained, each token's advantage, the loss and its exact gradient.
Source: spec algorithm 2.2, 2.3 and 4.

Pure numpy float64. Knows no model: log-probs come in as arrays, and what goes out is the derivative of the loss with respect to
them, which every back-end feeds to its own backward pass. So the objective exists once, whatever computes the log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GroupChoice:
    """Which groups carry a signal."""

    kept: tuple[int, ...]
    """Positions of the groups that are trained, in order."""
    constant: int
    """Groups whose rewards are all exactly equal."""
    collapsed: bool
    """Every group is constant; group 0 is kept all the same, with the KL shaping as its only gradient."""


@dataclass(frozen=True)
class TokenKl:
    """Per-token distance of the sampling policy from the frozen base."""

    mean: float
    """D: mean of log π_rollout − log π_base over every trained token of the batch, nats per token."""
    difference: tuple[Floats, ...]
    """d per sequence (T), 0 where masked."""


@dataclass(frozen=True)
class LossGradient:
    """Loss of one sequence and its derivative with respect to each token's log-prob (T)."""

    loss: float
    gradient: Floats
    """dL/d log π_θ per token (T)."""
    ratio: Floats
    """π_θ / π_rollout; 1 where masked."""


def choose_groups(rewards_G: Sequence[Sequence[float]]) -> GroupChoice:
    """Drop the groups whose rewards are all equal, bit for bit; keep group 0 where that would leave none."""
    kept = tuple(g for g, rewards in enumerate(rewards_G) if any(r != rewards[0] for r in rewards))
    constant = len(rewards_G) - len(kept)
    return GroupChoice(kept or (0,), constant, collapsed=not kept)


def token_kl(rollout_T: Sequence[Floats], base_T: Sequence[Floats], mask_T: Sequence[Floats]) -> TokenKl:
    """d_t = μ_t (log π_rollout − log π_base), and its mean over all tokens that were sampled.

    Args:
        rollout_T: log-probs captured at sampling, one array per sequence.
        base_T: log-probs of the same tokens with the adapter off.
        mask_T: 1 for sampled tokens, 0 for forced ones.
    """
    difference = tuple(
        np.where(mask > 0, rollout - base, 0.0) for rollout, base, mask in zip(rollout_T, base_T, mask_T, strict=True)
    )
    tokens = sum(float(mask.sum()) for mask in mask_T)
    total = sum(float(d.sum()) for d in difference)
    return TokenKl(total / tokens if tokens else 0.0, difference)


def shape(advantage: float, difference_T: Floats, mask_T: Floats, mean: float, coefficient: float) -> Floats:
    """A_t = A + λ μ_t (D − d_t): a redistribution that sums to zero over the batch's sampled tokens."""
    return np.asarray(advantage + coefficient * mask_T * (mean - difference_T), dtype=np.float64)


def loss_gradient(log_probs_T: Floats, rollout_T: Floats, advantages_T: Floats, mask_T: Floats) -> LossGradient:
    """L = −Σ exp(log π_θ − log π_rollout) A over sampled tokens: un-clipped, a raw sum; and dL/d log π_θ = −ratio · A.

    Forced tokens are left out altogether: the policy did not choose them, and their recorded log-prob of 0 is no probability.
    """
    sampled = mask_T > 0
    ratio = np.exp(np.where(sampled, log_probs_T - rollout_T, 0.0))
    gradient = np.where(sampled, -ratio * advantages_T, 0.0)
    return LossGradient(float(gradient.sum()), gradient, ratio)
