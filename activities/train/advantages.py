"""Advantages of one group of sibling rollouts from their rewards. Source: spec algorithm 2.1.

Three estimators, all float64 and pure. Nothing here knows of tokens, of other groups, or that constant groups are not trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from activities.errors import InputError

Floats = NDArray[np.float64]
Method = Literal["adaptive_entropic", "mean_baseline", "entropic"]

TARGET_KL = math.log(2.0)
"""δ in nats: how far the reweighted group may lie from the uniform one."""
BISECTIONS = 60
BETA_LIMIT = 1e6
"""Doubling stops here, so β is at most 2**20: the best effort for groups whose KL cannot reach δ."""
Z_FLOOR = 1e-12


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of one group and the inverse temperature they were made with."""

    advantages: Floats
    """One per rollout (R)."""
    beta: float | None
    """None for `mean_baseline`, which has none."""


def group_advantages(rewards_R: ArrayLike, method: Method = "adaptive_entropic", *, beta: float = 2.0) -> GroupAdvantages:
    """Advantages of one group.

    Args:
        rewards_R: one finite reward per rollout.
        method: the estimator; `beta` is used by `entropic` alone.

    Raises:
        InputError: a reward is not finite, or two rollouts with `adaptive_entropic`, whose advantages would reach 1e12.
    """
    rewards = np.asarray(rewards_R, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0 or not np.isfinite(rewards).all():
        raise InputError(f"group rewards must be a non-empty list of finite numbers, got {rewards.tolist()!r}")
    if method == "mean_baseline":
        return GroupAdvantages(rewards - rewards.mean(), None)
    if method == "entropic":
        return GroupAdvantages(leave_one_out(rewards, beta), beta)
    if rewards.size == 2:
        raise InputError(
            "adaptive_entropic advantages need at least 3 rollouts per group, got 2: the KL of two rewards stays "
            "below ln 2, so β runs away and the better one gets 1e12. "
            "Raise search.rollouts, or set objective.advantage=mean_baseline."
        )
    solved = solve_beta(rewards)
    return GroupAdvantages(leave_one_out(rewards, solved), solved)


def solve_beta(rewards_R: Floats) -> float:
    """The β at which the exponentially tilted group lies ln 2 nats from the uniform one; 2**20 if none does, 0 for one rollout."""
    if rewards_R.size < 2:
        return 0.0
    high = 1.0
    while high < BETA_LIMIT and _tilt_kl(rewards_R, high) < TARGET_KL:
        high *= 2.0
    if _tilt_kl(rewards_R, high) < TARGET_KL:
        return high
    low = 0.0
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        if _tilt_kl(rewards_R, middle) < TARGET_KL:
            low = middle
        else:
            high = middle
    return high


def leave_one_out(rewards_R: Floats, beta: float) -> Floats:
    """Each rollout's exponential weight over the mean weight of its siblings, minus one. Zero for a single rollout."""
    if rewards_R.size < 2:
        return np.zeros_like(rewards_R)
    weights = np.exp(beta * (rewards_R - rewards_R.max()))
    siblings = (weights.sum() - weights) / (rewards_R.size - 1)
    return np.asarray(weights / (siblings + Z_FLOOR) - 1.0, dtype=np.float64)


def _tilt_kl(rewards_R: Floats, beta: float) -> float:
    """KL(q_β ‖ uniform) in nats."""
    logits = beta * (rewards_R - rewards_R.max())
    log_q = logits - np.log(np.exp(logits).sum())
    # exp underflows to 0 exactly where log_q is huge, so the product is 0, never nan.
    return float((np.exp(log_q) * (log_q + math.log(rewards_R.size))).sum())
