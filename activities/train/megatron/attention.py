"""Causal attention of packed sequences: each token sees its own sequence only. Stands in for Megatron's core attention.

Kernels that take packed sequences as they are (flash-attn, Transformer Engine, torch's own variable-length attention) are used if
they run here; else torch's SDPA, one sequence after the other. cuDNN's takes single sequences, and for long ones is nearly twice as
fast as torch's own (docs/trainers.md): these go to it one by one, the others together. Knows nothing of Megatron but the call that
it answers.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from activities.errors import InputError
from activities.train.megatron.options import AttentionKernel
from activities.train.precision import whole_heads

LONG = 2048
"""Tokens from which on cuDNN's kernel gets a sequence to itself; shorter ones are too small to fill a GPU alone."""
_CUDNN_STEP = 512
"""Sequences are padded to multiples of it: cuDNN plans anew for every length, which takes tenths of a second."""


@dataclass(frozen=True)
class Segments:
    """Lengths of the sequences of one packed micro-batch."""

    lengths: list[int]
    cumulative: torch.Tensor
    """int32 (sequences + 1), on the device."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        return cls(list(lengths), ends.to(device=device, dtype=torch.int32))

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def runs(self) -> list[Segments]:
        """Cut so that each long sequence is alone and the others stay together, in order."""
        found: list[list[int]] = []
        for length in self.lengths:
            if found and max(length, found[-1][0]) < LONG:
                found[-1].append(length)
            else:
                found.append([length])
        return [Segments.of(lengths, self.cumulative.device) for lengths in found]


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments], torch.Tensor]
"""(q: tokens x heads x dim, k and v: tokens x kv heads x dim) -> tokens x heads x dim."""


class PackedAttention(torch.nn.Module):
    """Answers the call of Megatron's `Attention.forward`; its `packed_seq_params` carries our :class:`Segments`.

    Args:
        kernel: for queries of `dtype`, with which it was tried out. Others take torch's SDPA: flash kernels have no float32.
    """

    def __init__(self, kernel: Kernel, dtype: torch.dtype) -> None:
        super().__init__()
        self._kernel = kernel
        self._dtype = dtype

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> torch.Tensor:
        """q, k, v: (tokens, 1, heads, dim). Returns (tokens, 1, heads x dim)."""
        attend = self._kernel if query.dtype == self._dtype else _sdpa
        out = attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed_seq_params.segments)
        return out.reshape(out.shape[0], 1, -1)


def choose_kernel(wish: AttentionKernel, device: torch.device, dtype: torch.dtype) -> tuple[AttentionKernel, Kernel]:
    """The kernel to use, and its name.

    Raises:
        InputError: a named kernel does not run here; says why.
    """
    if wish == "sdpa":
        return "sdpa", _sdpa
    makers: dict[AttentionKernel, Callable[[], Kernel]] = {
        "transformer_engine": _transformer_engine,
        "cudnn": _cudnn,
        "flash_attn": _flash_attn,
        "torch_varlen": _torch_varlen,
    }
    for name, make in makers.items():
        if wish not in ("auto", name):
            continue
        try:
            kernel = make()
            _try_out(kernel, device, dtype)
        except Exception as error:  # whatever such a library raises where it cannot run
            if wish == name:
                raise InputError(f"attention kernel {name} does not run here on {device} with {dtype}: {error}") from error
        else:
            return name, kernel
    return "sdpa", _sdpa


def _try_out(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> None:
    """Forward and backward over two short sequences and a long one with grouped heads, compared with SDPA.

    Raises:
        RuntimeError: the results differ.
    """
    segments = Segments.of([70, 58, LONG + 2], device)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        tokens = sum(segments.lengths)
        return torch.randn(tokens, heads, 64, generator=generator).to(device=device, dtype=dtype).requires_grad_()

    inputs = [draw(4), draw(2), draw(2)]
    results = []
    for attend in (kernel, _sdpa):
        out = attend(inputs[0], inputs[1], inputs[2], segments)
        results.append([out, *torch.autograd.grad(out.float().sum(), inputs)])
    for ours, reference in zip(*results, strict=True):
        if not torch.allclose(ours.float(), reference.float(), atol=0.05, rtol=0.05):
            raise RuntimeError("its result differs from torch's scaled_dot_product_attention")


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
    parts = []
    for one_q, one_k, one_v in zip(*(torch.split(t, segments.lengths) for t in (q, k, v)), strict=True):
        query, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (one_q, one_k, one_v))
        if q.dtype == torch.float32:
            keys, values = (whole_heads(query, t) for t in (keys, values))  # see WholeHeads
        grouped = query.shape[1] != keys.shape[1]
        out = scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=grouped)
        parts.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _flash_attn() -> Kernel:
    from flash_attn import flash_attn_varlen_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
        ends, longest = segments.cumulative, segments.longest
        out: torch.Tensor = flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)
        return out

    return attend


def _transformer_engine() -> Kernel:
    if importlib.util.find_spec("transformer_engine") is None:
        raise ImportError("Transformer Engine is not installed")
    from transformer_engine.pytorch import DotProductAttention

    made: dict[tuple[int, int, int], Any] = {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
        shape = (q.shape[1], k.shape[1], q.shape[2])
        if shape not in made:
            made[shape] = DotProductAttention(
                shape[0], shape[2], num_gqa_groups=shape[1], qkv_format="thd", attn_mask_type="padding_causal"
            )
        ends, longest = segments.cumulative, segments.longest
        out: torch.Tensor = made[shape](q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest)
        return out.reshape(q.shape)

    return attend


def _cudnn() -> Kernel:
    packed = _torch_varlen()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
        runs = segments.runs
        cut = [sum(run.lengths) for run in runs]
        parts = zip(*(torch.split(t, cut) for t in (q, k, v)), runs, strict=True)
        found = [packed(a, b, c, run) if run.longest < LONG else cudnn_alone(a, b, c) for a, b, c, run in parts]
        return torch.cat(found) if len(found) > 1 else found[0]

    return attend


def cudnn_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """cuDNN's attention for one sequence, by torch's SDPA."""
    # Padding stands at the right, where no real token sees it.
    more = -len(q) % _CUDNN_STEP
    query, keys, values = (pad(t, (0, 0, 0, 0, 0, more)).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)[: len(q)]


def _torch_varlen() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    accepted = inspect.signature(varlen_attn).parameters
    # torch 2.10 had `is_causal`; later a window that reaches back without end and not forward says the same.
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in accepted else {"window_size": (-1, 0)}
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in accepted else {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
        ends, longest = segments.cumulative, segments.longest
        out: Any = varlen_attn(q, k, v, ends, ends, longest, longest, **causal, **grouped)
        result: torch.Tensor = out
        return result

    return attend
