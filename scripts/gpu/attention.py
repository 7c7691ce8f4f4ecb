"""The trainer's attention kernels, alone: operations per second, forward and backward, for single sequences of some lengths.

    python -m scripts.gpu.attention --lengths 2048 8192 12288 16384 30720

`first` is the very first call at a length: cuDNN plans for each, others do not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any, get_args

import torch

from activities.errors import InputError
from activities.train.megatron.attention import Kernel, Segments, choose_kernel
from activities.train.megatron.options import AttentionKernel

_REPEATS = 4


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of one call, waited for to its end."""
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / repeats


def measure(kernel: Kernel, length: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> dict[str, Any]:
    """Operations are those of causal attention: half of all pairs, two products forward and five backward."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(length, h, dim, device=device, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    segments = Segments.of([length], device)
    upstream = torch.ones_like(q)

    def forward() -> torch.Tensor:
        return kernel(q, k, v, segments)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), upstream)

    first = seconds(both, device, 1)
    seconds(both, device, 1)
    ahead, whole = seconds(forward, device, _REPEATS), seconds(both, device, _REPEATS)
    operations = 2.0 * heads * dim * length**2
    return {
        "length": length,
        "forward_tflops": round(operations / ahead / 1e12, 3),
        "backward_tflops": round(2.5 * operations / max(whole - ahead, 1e-9) / 1e12, 3),
        "forward_ms": round(1e3 * ahead, 3),
        "backward_ms": round(1e3 * (whole - ahead), 3),
        "first_ms": round(1e3 * first, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 12288, 16384, 30720])
    parser.add_argument("--kernels", nargs="+", choices=get_args(AttentionKernel)[1:], default=["cudnn", "torch_varlen", "sdpa"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    wish = parser.parse_args()
    device = torch.device(wish.device)
    for name in wish.kernels:
        try:
            _, kernel = choose_kernel(name, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        except InputError as error:
            print(json.dumps({"kernel": name, "refused": str(error)}), flush=True)
            continue
        for length in wish.lengths:
            print(json.dumps({"kernel": name, **measure(kernel, length, wish.heads, wish.kv_heads, wish.dim, device)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
