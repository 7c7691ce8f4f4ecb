"""Log-probs that cost nothing and still move with an adapter: the model that engine and trainer of the measurement agree on.

A token's log-prob depends on its id, its position and the adapter's strength, which is one number of its weights. Knows no HTTP
and no optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STEP = 0.01
"""Strength that one optimizer step adds: log-probs move by 0.006 nats (rms), as in a real step (docs/numerics.md)."""
_LEVEL, _SPREAD = -2.5, 0.25


def log_probs(tokens: Sequence[int], first: int, strength: float) -> Floats:
    """Log-probs in nats of the tokens from index `first` on (T), the same in every process; below 0 up to strength 2."""
    ids = np.asarray(tokens[first:], dtype=np.uint64)
    places = np.arange(first, len(tokens), dtype=np.uint64)
    mixed = (ids * np.uint64(2654435761) + places * np.uint64(40503) + np.uint64(12345)) & np.uint64(0xFFFFFFFF)
    level = _unit(mixed & np.uint64(0xFFFF))
    direction = _unit(mixed >> np.uint64(16))
    # float32, as engines compute: the JSON of a double that was a float32 is as long as theirs.
    return (_LEVEL + _SPREAD * level + strength * direction).astype(np.float32).astype(np.float64)


def strength_key(adapter: Mapping[str, NDArray[np.float32]]) -> str:
    """Name of the tensor whose first entry is the strength."""
    return min(key for key in adapter if ".lora_B." in key)


def strength_of(adapter: Mapping[str, NDArray[np.float32]]) -> float:
    """0 for version 0, whose B is zero; linear in B, as the effect of a small adapter is."""
    return float(adapter[strength_key(adapter)].flat[0])


def _unit(sixteen_bits: NDArray[np.uint64]) -> Floats:
    """0..65535 as -1..1."""
    return sixteen_bits.astype(np.float64) / 32767.5 - 1.0
