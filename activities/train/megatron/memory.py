"""How much the backward pass must compute again so that activations fit into memory. Pure arithmetic over shapes.

Two things can be dropped in a layer: the inside of its MLP, which is most of what it keeps, or everything but the layer's input. As
few layers as memory asks for lose their MLP; if all of them are not enough, as few as needed lose everything. Knows nothing of
torch; how much is free is told to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from activities.train.megatron.options import Recompute
from activities.train.megatron.shape import ModelShape


@dataclass(frozen=True)
class RecomputePlan:
    """The first `full` layers are computed again whole, the next `mlp` ones in their MLP only, the rest not at all."""

    full: int = 0
    mlp: int = 0

    @property
    def granularity(self) -> Recompute:
        return "full" if self.full else "selective" if self.mlp else "none"


@dataclass(frozen=True)
class LayerBytes:
    """Activations that one layer keeps for its backward pass, for one token on one rank."""

    inside_mlp: int
    """fc1's outputs and their product: gone if the MLP is recomputed."""
    attention: int
    """Norms' inputs and outputs, q, k, v before and after norm and rotation, attention's output."""
    layer_input: int
    """All that is left if the layer is recomputed whole."""

    @property
    def all(self) -> int:
        return self.inside_mlp + self.attention + self.layer_input


def layer_bytes(shape: ModelShape, rank: int, tensor_parallel: int, bytes_per_value: int) -> LayerBytes:
    """Estimated from the operations of a layer. `rank` is LoRA's.

    Of each value that a backward pass reads: the frozen linears keep nothing, LoRA keeps their inputs.
    """
    q = shape.heads * shape.head_dim // tensor_parallel
    kv = shape.kv_heads * shape.head_dim // tensor_parallel
    ffn = shape.ffn // tensor_parallel
    normed = q + 2 * kv if shape.qk_norm else 0
    attention = 3 * shape.hidden + normed + 2 * q + 2 * kv + 5 * rank
    return LayerBytes(
        inside_mlp=bytes_per_value * (3 * ffn + 3 * rank),
        attention=bytes_per_value * attention + 8 * shape.heads // tensor_parallel,
        layer_input=bytes_per_value * shape.hidden,
    )


def activation_bytes(one: LayerBytes, layers: int, tokens: int, plan: RecomputePlan) -> int:
    """Peak of a backward pass: what is kept, one layer's worth that is being computed again, and one layer's gradients of it."""
    kept = layers * one.layer_input + (layers - plan.full) * one.attention + (layers - plan.full - plan.mlp) * one.inside_mlp
    again = one.all if plan.full else one.inside_mlp if plan.mlp else 0
    return tokens * (kept + again + one.all)


def choose(one: LayerBytes, layers: int, tokens: int, free_bytes: int | None, wish: Recompute = "auto") -> RecomputePlan:
    """The plan for micro-batches of up to `tokens` tokens.

    Args:
        free_bytes: memory for activations; None: no bound.
        wish: `none`, `selective` (every MLP) and `full` (every layer) are obeyed; `auto` recomputes as little as fits.
    """
    if wish != "auto":
        return {"none": RecomputePlan(), "selective": RecomputePlan(mlp=layers), "full": RecomputePlan(full=layers)}[wish]
    candidates = [RecomputePlan(mlp=n) for n in range(layers + 1)]
    candidates += [RecomputePlan(full=n, mlp=layers - n) for n in range(1, layers + 1)]
    if free_bytes is None:
        return candidates[0]
    # If nothing fits, the last one is tried: the estimate is not exact, and running out of memory says by itself what is missing.
    return next((plan for plan in candidates if activation_bytes(one, layers, tokens, plan) <= free_bytes), candidates[-1])
