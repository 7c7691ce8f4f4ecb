"""Every formula and constant of `tttd plan`. All are documented here and nowhere else.

Calibrated on one H200 with Qwen3-8B's shape and rank-32 LoRA (`measured.py` holds the figures, `tttd plan --check` prints how far
the formulas lie from them). Units: bytes, seconds, tokens, FLOPs. P = weights that a token is multiplied with, L = layers,
h = hidden size, i = MLP size, q = heads x head size, s = length of a sequence.

Arithmetic of a token
    matrix      2 P FLOPs                                             at 40.4 % of the peak
    attention   2 L q s FLOPs, on average over a causal sequence      at 62.8 % of the peak
    forward     matrix + attention
    forward and backward, everything recomputed   3.3 matrix + 4.6 attention   (weights are frozen: no gradient of them)
    forward and backward, nothing recomputed      2.3 matrix + 3.6 attention

Memory of the trainer
    weights 2 bytes each, adapter, gradient and Adam's two moments 4 bytes each
    recomputed: one input of h values for each layer and token, and the working set of one layer: 10 h + 8 i values
    kept: half that working set for every layer and token
    logits of 1024 tokens at a time, in float32

Decoding, one token for each of n rows
    0.15 ms a layer, however few rows (launches, sampling, bookkeeping)
    weights and the rows' keys and values are read once                at 50 % of the memory's bandwidth
    everything 1.27 times as long with adapters
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from console.plan.hardware import Gpu
from console.plan.shapes import ModelShape

MATRIX_SHARE = 0.404
ATTENTION_SHARE = 0.628
RECOMPUTED_MATRIX, RECOMPUTED_ATTENTION = 3.3, 4.6
KEPT_MATRIX, KEPT_ATTENTION = 2.3, 3.6
WORKING_HIDDEN, WORKING_INTERMEDIATE = 10, 8
LOGITS_TOKENS = 1024
LAYER_SECONDS = 0.15e-3
BANDWIDTH_SHARE = 0.5
ADAPTER_FACTOR = 1.27
TENSOR_PARALLEL_SHARE = 0.9
"""What is left of the speed at each doubling of GPUs in one layer. Not measured."""
DATA_PARALLEL_SHARE = 0.97
"""Of perfect scaling, for batches that are balanced by tokens. Not measured."""
LOAD_BYTES_PER_SECOND = 1.25e9
"""A 175 MB adapter was loaded in 0.14 s."""
CONTEXT_BYTES = 3 << 30
"""A CUDA context, its libraries' workspaces, and what fragmentation wastes."""
BFLOAT16, FLOAT32 = 2, 4


# Arithmetic -----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TokenSeconds:
    """Of one token in a sequence of a given length, on one GPU."""

    matrix: float
    attention: float

    @property
    def forward(self) -> float:
        return self.matrix + self.attention

    @property
    def recomputed(self) -> float:
        """Forward and backward, every layer recomputed."""
        return RECOMPUTED_MATRIX * self.matrix + RECOMPUTED_ATTENTION * self.attention

    @property
    def kept(self) -> float:
        """Forward and backward, every activation kept."""
        return KEPT_MATRIX * self.matrix + KEPT_ATTENTION * self.attention


def token_seconds(shape: ModelShape, gpu: Gpu, length: float) -> TokenSeconds:
    """Args: length: tokens of the whole sequence."""
    matrix = 2 * shape.matrix_parameters / (MATRIX_SHARE * gpu.flops)
    attention = 2 * shape.layers * shape.query * length / (ATTENTION_SHARE * gpu.flops)
    return TokenSeconds(matrix, attention)


def parallel_speed(tensor: int, data: int = 1) -> float:
    """How many times faster than one GPU."""
    return float(tensor * TENSOR_PARALLEL_SHARE ** math.log2(tensor) * data * (DATA_PARALLEL_SHARE if data > 1 else 1.0))


# Memory of the trainer ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TrainerBytes:
    """On each GPU, by what it is for."""

    weights: float
    adapter: float
    """Adapter, gradient and Adam's moments."""
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.adapter + self.activations + self.logits


def trainer_bytes(
    shape: ModelShape, rank: int, tokens: int, *, recompute: bool, tensor: int = 1, optimizer: bool = True
) -> TrainerBytes:
    """Peak while a micro-batch of `tokens` goes forward and backward.

    Args:
        optimizer: without it, a mere pass: adapter and gradient in bfloat16, no moments.
    """
    layer = WORKING_HIDDEN * shape.hidden + WORKING_INTERMEDIATE * shape.intermediate
    token = shape.layers * shape.hidden + layer / tensor if recompute else shape.layers * layer / 2 / tensor
    lora = shape.lora_parameters(rank) / tensor
    return TrainerBytes(
        weights=BFLOAT16 * shape.parameters / tensor,
        adapter=lora * (4 * FLOAT32 if optimizer else 2 * BFLOAT16),
        activations=BFLOAT16 * token * tokens,
        logits=FLOAT32 * LOGITS_TOKENS * shape.vocabulary / tensor,
    )


# The engine -----------------------------------------------------------------------------------------------------------------
def kv_tokens(shape: ModelShape, gpu: Gpu, fraction: float, rank: int, slots: int, tensor: int = 1) -> int:
    """Tokens whose keys and values one engine can hold; below 0 if not even its weights fit."""
    static = fraction * gpu.memory_bytes * tensor
    adapters = slots * BFLOAT16 * shape.lora_parameters(rank)
    return int((static - BFLOAT16 * shape.parameters - adapters) // shape.kv_bytes())


def decode_seconds(shape: ModelShape, gpu: Gpu, rows: float, context: float, *, adapter: bool, tensor: int = 1) -> float:
    """One token more for each of `rows` rows of `context` tokens."""
    read = BFLOAT16 * shape.matrix_parameters + rows * context * shape.kv_bytes()
    seconds = LAYER_SECONDS * shape.layers + read / (BANDWIDTH_SHARE * gpu.bytes_per_second) / parallel_speed(tensor)
    return seconds * (ADAPTER_FACTOR if adapter else 1.0)


@dataclass(frozen=True)
class Load:
    """What one engine is to sample at once."""

    rows: int
    prompts: int
    """Different ones; siblings share theirs, which is read and held once."""
    prompt_tokens: float
    mean_tokens: float
    """Of the responses."""
    longest_tokens: int
    concurrency: int | None = None
    """Rows at once, if the engine is told to take no more."""


@dataclass(frozen=True)
class Sampling:
    """How an engine gets through its load."""

    prefill_seconds: float
    decode_seconds: float
    rows_at_once: float
    tokens_per_second: float
    """Of responses."""

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


def sampling(shape: ModelShape, gpu: Gpu, load: Load, kv: int, *, adapter: bool, tensor: int = 1) -> Sampling:
    """Rows are admitted as memory allows, and end one by one; the longest goes on to the end, with few others beside it."""
    own = load.mean_tokens + (0.0 if load.prompts < load.rows else load.prompt_tokens)
    shared = load.prompts * load.prompt_tokens if load.prompts < load.rows else 0.0
    fit = max(1.0, (kv - shared) / own)
    at_once = min(load.rows, fit, load.concurrency or load.rows)
    total = load.rows * load.mean_tokens
    steps = max(load.longest_tokens, total / at_once)
    context = load.prompt_tokens + load.mean_tokens / 2
    decode = steps * decode_seconds(shape, gpu, total / steps, context, adapter=adapter, tensor=tensor)
    read = load.prompts * load.prompt_tokens * token_seconds(shape, gpu, load.prompt_tokens).forward / parallel_speed(tensor)
    prefill = read * (ADAPTER_FACTOR if adapter else 1.0)
    return Sampling(prefill, decode, at_once, total / (prefill + decode))


def adapter_file_bytes(shape: ModelShape, rank: int) -> int:
    return BFLOAT16 * shape.lora_parameters(rank)
