"""Float32 arithmetic in a model whose frozen weights are of lower precision. Knows modules and parameters, not language models.

A bfloat16 number is a float32 number, so up-casting a weight loses nothing: what such a pass computes is what a model loaded in
float32 would. Each module's weights are up-cast when it is entered and given back when it is left, so that at any time only one
module's copy exists, and the weights themselves are never written to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


@contextmanager
def float32_arithmetic(model: torch.nn.Module) -> Iterator[None]:
    """Within it, forward passes of `model` without gradients are made in float32, with TF32 off; afterwards all is as it was.

    Only what a module reads through its own attributes is up-cast; who hands a weight to another module casts it. A model of
    float32 weights computes the same bits as without.
    """
    kept: dict[int, torch.Tensor] = {}

    def enter(module: torch.nn.Module, _: Any) -> None:
        for tensor in _own(module):
            kept[id(tensor)] = tensor.data
            # Not an in-place write: torch's write counter, which the base's fingerprint reads, stays.
            tensor.data = tensor.data.float()

    def leave(module: torch.nn.Module, *_: Any) -> None:
        for tensor in module.parameters(recurse=False):
            if id(tensor) in kept:
                tensor.data = kept.pop(id(tensor))

    with ExitStack() as stack:
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        for module in model.modules():
            if _own(module):
                stack.callback(module.register_forward_pre_hook(enter).remove)
                # After an exception, too: it may come from memory that is too small, and the next call must find the weights.
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
                stack.callback(leave, module)
        yield


class WholeHeads(TorchFunctionMode):
    """Within it, torch's attention is given as many key and value heads as queries.

    On a GPU only flash kernels share key/value heads between queries, and they have no float32. Left to share them, float32
    attention would fall back to the kernel that writes out all scores: gigabytes for one long sequence.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is scaled_dot_product_attention and kwargs.pop("enable_gqa", False):
            query, *shared = args[:3]
            args = (query, *(whole_heads(query, t) for t in shared), *args[3:])
        return func(*args, **kwargs)


def whole_heads(query: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Keys or values (batch, kv heads, tokens, dim), each head repeated for the heads of the query that share it."""
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], dim=1)


def _own(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """A module's own parameters below float32."""
    return [p for p in module.parameters(recurse=False) if p.dtype in (torch.bfloat16, torch.float16)]
