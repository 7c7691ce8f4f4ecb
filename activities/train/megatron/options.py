"""How the Megatron back-end computes. None of it is science, though other values round differently. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from activities.errors import InputError

Recompute = Literal["auto", "none", "selective", "full"]
AttentionKernel = Literal["auto", "transformer_engine", "cudnn", "flash_attn", "torch_varlen", "sdpa"]
"""In the order in which `auto` tries them."""


@dataclass(frozen=True)
class MegatronOptions:
    """Deployment of one trainer: `tensor_parallel` x `data_parallel` rank processes on one host."""

    tensor_parallel: int = 1
    """Ranks that share one copy of the model."""
    data_parallel: int = 1
    """Copies of the model, each working on its share of the tokens."""
    device: str = "cpu"
    """`cpu`, `cuda`, or `cuda:N`: rank r then takes GPU N + r."""
    threads: int = 1
    """CPU threads of each rank."""
    bfloat16: bool | None = None
    """Base weights and activations in bfloat16; None: on a GPU. Adapter, moments and log-probs are float32 in any case."""
    tokens_per_micro_batch: int = 2048
    """Packed tokens that go through the model at once; a longer sequence gets a micro-batch of its own."""
    logits_per_chunk: int = 1 << 25
    """Logits alive at once on a rank (128 MiB in float32): the vocabulary is projected for so many tokens at a time."""
    recompute: Recompute = "auto"
    """What the backward pass computes again; `auto` as little as memory allows."""
    memory_bytes: int | None = None
    """Memory for activations on each rank; None: what the GPU has free, and no bound on a CPU."""
    attention: AttentionKernel = "auto"
    """`auto` takes the first of transformer_engine, cudnn, flash_attn, torch_varlen that runs here, else sdpa."""
    output_head: bool = False
    """Adapt the output head, too. The adapters that come in must then have lora_A and lora_B for `lm_head`."""
    start_seconds: float = 1800.0
    """Longest silence while ranks start and read weights."""
    stall_seconds: float = 600.0
    """Longest silence of all ranks in the middle of work; after it they count as hung, are killed, and the attempt fails."""
    folder: Path | None = None
    """Where ranks keep their logs and their meeting point; None: a temporary directory."""

    @property
    def processes(self) -> int:
        return self.tensor_parallel * self.data_parallel

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def low_precision(self) -> bool:
        return self.on_gpu if self.bfloat16 is None else self.bfloat16

    def gpu_of(self, rank: int) -> int:
        """Index of a rank's GPU."""
        return int(self.device.partition(":")[2] or 0) + rank

    def check(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            InputError: names the option.
        """
        if self.device != "cpu" and not (self.device == "cuda" or self.device.removeprefix("cuda:").isdigit()):
            raise InputError(f"trainer device {self.device!r}: use cpu, cuda or cuda:N")
        for name in ("tensor_parallel", "data_parallel", "threads", "tokens_per_micro_batch", "logits_per_chunk"):
            if (value := getattr(self, name)) < 1:
                raise InputError(f"Megatron trainer: {name} is {value}, must be at least 1")
