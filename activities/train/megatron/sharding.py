"""How adapter tensors, which are whole everywhere else, lie on tensor-parallel ranks. Pure; knows PEFT's names and numpy.

q k v gate up lm_head   split by outputs: every rank holds all of A, and its rows of B
o down                  split by inputs:  every rank holds its columns of A, and all of B
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from activities.train.megatron.shape import ModelShape
from workflows.contracts.request import LoraSettings

Array = NDArray[np.float32]

BY_INPUTS = ("o_proj", "down_proj")
HEAD = "lm_head"


def adapter_key(module: str, side: str) -> str:
    """PEFT's stored key: `module` is a path within the Hugging Face model, `side` A or B."""
    return f"base_model.model.{module}.lora_{side}.weight"


def modules(shape: ModelShape, output_head: bool) -> Iterator[tuple[str, int, int]]:
    """(path, outputs, inputs) of every adapted linear."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj", q, shape.hidden
        yield f"{prefix}.self_attn.k_proj", kv, shape.hidden
        yield f"{prefix}.self_attn.v_proj", kv, shape.hidden
        yield f"{prefix}.self_attn.o_proj", shape.hidden, q
        yield f"{prefix}.mlp.gate_proj", shape.ffn, shape.hidden
        yield f"{prefix}.mlp.up_proj", shape.ffn, shape.hidden
        yield f"{prefix}.mlp.down_proj", shape.hidden, shape.ffn
    if output_head:
        yield HEAD, shape.vocabulary, shape.hidden


def adapter_shapes(shape: ModelShape, lora: LoraSettings, output_head: bool = False) -> dict[str, tuple[int, int]]:
    """Whole shape of every adapter tensor by key, sorted by key."""
    found: dict[str, tuple[int, int]] = {}
    for module, outputs, inputs in modules(shape, output_head):
        found[adapter_key(module, "A")] = (lora.rank, inputs)
        found[adapter_key(module, "B")] = (outputs, lora.rank)
    return dict(sorted(found.items()))


def split_axis(key: str) -> int | None:
    """Axis along which a tensor is split over tensor-parallel ranks; None: every rank holds all of it."""
    by_inputs = key.split(".")[-3] in BY_INPUTS
    if ".lora_A." in key:
        return 1 if by_inputs else None
    return None if by_inputs else 0


def shard(key: str, array: Array, rank: int, ranks: int) -> Array:
    """A rank's part, contiguous."""
    axis = split_axis(key)
    if axis is None or ranks == 1:
        return np.ascontiguousarray(array)
    return np.ascontiguousarray(np.split(array, ranks, axis=axis)[rank])


def join(key: str, parts: Sequence[Array]) -> Array:
    """The whole tensor from the parts of all ranks, in their order."""
    axis = split_axis(key)
    return parts[0] if axis is None or len(parts) == 1 else np.concatenate(parts, axis=axis)
