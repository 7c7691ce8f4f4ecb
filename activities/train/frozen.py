"""A digest of frozen weights that is cheap enough to take before and after each step. Knows tensors by name, not models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def fingerprint(base: Iterable[tuple[str, torch.Tensor]], whole_bytes: int = 256 << 20, samples: int = 4096) -> str:
    """sha256 over all tensors, if together they take no more than `whole_bytes`; else over `samples` evenly spaced values of each.

    torch counts in-place writes to each tensor, optimizer steps included; the counters are hashed too, so a write between the
    samples of a large model shows as well.
    """
    tensors = sorted(base, key=lambda item: item[0])
    whole = sum(t.numel() * t.element_size() for _, t in tensors) <= whole_bytes
    h = hashlib.sha256()
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if not whole:
            flat = flat[:: max(1, flat.numel() // samples)]
        h.update(f"{name} {tuple(tensor.shape)} {tensor._version}\n".encode())
        h.update(flat.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()
