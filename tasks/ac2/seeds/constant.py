"""Roots of a search: one random constant, repeated (spec tasks 6e and 7e). Its ratio is 2/3 whatever its length."""

from __future__ import annotations

import random


def constant(rng: random.Random, index: int) -> list[float]:
    """1000 to 8000 equal heights."""
    return [rng.uniform(0.1, 1.0)] * rng.randint(1000, 8000)
