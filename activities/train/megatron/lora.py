"""LoRA around Megatron's tensor-parallel linears, split as PEFT has it: each projection its own A and B, also in fused layers.

Megatron fuses q, k, v into one linear whose outputs are interleaved by group of heads, and gate, up into another. The As of a fused
layer are stacked into one matrix and the Bs into one block matrix, so that a layer costs two extra multiplications, however many
projections it holds; outside a block there are zeros, which add nothing. One A for all of them would be another adapter: it drifts
from PEFT's within steps.

Gradients of what every rank holds (A of a split-by-outputs layer, B of a split-by-inputs layer) are equal on all ranks because the
rank-sized activation between A and B is summed over them. Knows nothing of models or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch.nn.functional import pad


@dataclass
class AdapterSwitch:
    """One for a whole model: off, and it is the frozen base."""

    on: bool = True


@dataclass(frozen=True)
class Projection:
    """One projection's place on this rank."""

    module: str
    """Path within the Hugging Face model."""
    outputs: int
    inputs: int


class AddProduct(torch.autograd.Function):
    """out += low · blocksᵀ, in place: the widest tensors of a layer are neither copied here nor in the backward pass.

    Torch's own in-place addition would write through a view, and then copies the whole gradient.
    """

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, low: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        out.view(-1, out.shape[-1]).addmm_(low, blocks.t())
        ctx.mark_dirty(out)
        ctx.save_for_backward(low, blocks)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        low, blocks = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        return gradient, rows @ blocks, rows.t() @ low


class SplitLora(torch.nn.Module):
    """A Megatron linear with LoRA; called and answering as the linear itself.

    Args:
        base: Column- or RowParallelLinear, frozen.
        projections: what `base` fuses, in the order of its outputs.
        by_inputs: `base` is a RowParallelLinear.
        groups: number of blocks in which the outputs of the projections alternate.
        scale: alpha / rank.
        group: the tensor-parallel process group.
    """

    def __init__(
        self,
        base: torch.nn.Module,
        projections: Sequence[Projection],
        *,
        rank: int,
        scale: float,
        by_inputs: bool,
        groups: int,
        switch: AdapterSwitch,
        group: Any,
    ) -> None:
        super().__init__()
        self.base = base
        self.projections = tuple(projections)
        device = next(base.parameters()).device if any(True for _ in base.parameters()) else torch.device("cpu")
        self.a = torch.nn.ParameterList(torch.zeros(rank, p.inputs, device=device) for p in projections)
        self.b = torch.nn.ParameterList(torch.zeros(p.outputs, rank, device=device) for p in projections)
        self.output_bias: torch.nn.Parameter | None = None
        """Of a base that has one where Megatron has none (o_proj of a Llama with attention_bias)."""
        self._scale = scale
        self._rank = rank
        self._by_inputs = by_inputs
        self._groups = groups
        self._switch = switch
        self._group = group

    @property
    def weight(self) -> Any:
        """Of the base: some of Megatron's code looks at it."""
        return self.base.weight

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """hidden: (tokens, 1, inputs of this rank). Returns (tokens, 1, outputs of this rank), and the bias left to the caller."""
        out, bias = self.base(hidden, *args, **kwargs)
        if self._switch.on:
            flat = hidden.reshape(-1, hidden.shape[-1])
            low = torch.mm(flat, torch.cat(list(self.a)).to(flat.dtype).t())
            if self._by_inputs:
                low = reduce_from_tensor_model_parallel_region(low, group=self._group)
            else:
                low = copy_to_tensor_model_parallel_region(low, group=self._group)
            blocks = (self._scale * self._blocks()).to(flat.dtype)
            if self._by_inputs:
                # May be what another autograd function handed on as it was, which must not be written to.
                out = torch.addmm(out.reshape(-1, out.shape[-1]), low, blocks.t()).view(out.shape)
            else:
                out = AddProduct.apply(out, low, blocks)  # type: ignore[no-untyped-call]
        if self.output_bias is not None:
            out = out + self.output_bias
        return out, bias

    def _blocks(self) -> torch.Tensor:
        """(outputs, projections x rank): rows in the base's order, each projection's B in columns of its own."""
        if len(self.b) == 1:
            only: torch.Tensor = self.b[0]
            return only
        parts = []
        for i, b in enumerate(self.b):
            left, right = i * self._rank, (len(self.b) - 1 - i) * self._rank
            parts.append(pad(b.reshape(self._groups, -1, self._rank), (left, right)))
        return torch.cat(parts, dim=1).reshape(-1, len(self.b) * self._rank)
