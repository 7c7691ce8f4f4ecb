"""Rotary angles of packed positions, with transformers' arithmetic. Knows no attention."""

from __future__ import annotations

import math

import torch

from activities.train.megatron.shape import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position, float32 (head_dim / 2), the operations in transformers' order so that they round alike."""
    powers = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**powers)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    wavelength = 2 * math.pi / plain
    longest = rope.original_context_tokens / rope.low_frequency_factor
    shortest = rope.original_context_tokens / rope.high_frequency_factor
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    span = rope.high_frequency_factor - rope.low_frequency_factor
    smooth = (rope.original_context_tokens / wavelength - rope.low_frequency_factor) / span
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(between, blended, stretched)


def angles(frequencies: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Angles of sequences packed one after the other, each from position 0: (tokens, 1, 1, head_dim), float32."""
    positions = torch.cat([torch.arange(n, device=frequencies.device, dtype=torch.float32) for n in lengths])
    half = torch.outer(positions, frequencies)
    return torch.cat([half, half], dim=-1)[:, None, None, :]
