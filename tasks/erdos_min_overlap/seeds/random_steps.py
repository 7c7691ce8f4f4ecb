"""Roots of a search: small random step functions around 1/2 (spec tasks 3e)."""

from __future__ import annotations

import random


def random_steps(rng: random.Random, index: int) -> list[float]:
    """40 to 99 heights: 1/2 plus noise in [-0.4, 0.4] without its mean, cut to [0, 1] for the few draws that leave it."""
    noise = [rng.uniform(-0.4, 0.4) for _ in range(rng.randint(40, 99))]
    mean = sum(noise) / len(noise)
    return [min(1.0, max(0.0, 0.5 + x - mean)) for x in noise]
