"""GPUs as far as plans depend on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, by its data sheet."""

    name: str
    memory_bytes: int
    """As a program may use it."""
    bytes_per_second: float
    """Memory bandwidth."""
    flops: float
    """Dense bfloat16 matrix products."""


_GIB = 1 << 30
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", 139 * _GIB, 4.8e12, 989e12),
        Gpu("H100", 79 * _GIB, 3.35e12, 989e12),
        Gpu("B200", 178 * _GIB, 8.0e12, 2250e12),
        Gpu("A100", 79 * _GIB, 2.04e12, 312e12),
        Gpu("L40S", 44 * _GIB, 0.864e12, 362e12),
        Gpu("RTX4090", 23 * _GIB, 1.01e12, 165e12),
    )
}
"""Only H200 was measured; the others are scaled by their data sheets."""
