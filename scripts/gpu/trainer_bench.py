"""How fast a trainer back-end is: tokens per second of each pass, memory, and the share of what the hardware multiplies at best.

    python -m scripts.gpu.models random Qwen3-8B /tmp/qwen3-8b
    python -m scripts.gpu.trainer_bench --model /tmp/qwen3-8b --device cuda --lengths 8192 16384 30720 --out OUT.json

Megatron and plain transformers + PEFT get the same batch and adapter, one after the other, so that each has the GPU for itself. A
pass is timed as a step sees it: from the call to log-probs or gradients on the host's side. `all` is what a step does to every
token: the base's log-probs, then forward and backward. Its share counts useful arithmetic only, not what is computed again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from activities.train.backend import Floats, ScoredSequence, TrainerBackend, TrainerState
from activities.train.megatron.backend import MegatronBackend
from activities.train.megatron.options import AttentionKernel, MegatronOptions, Recompute
from activities.train.megatron.shape import ModelShape, read_shape
from activities.train.megatron.sharding import adapter_shapes
from activities.train.torch_backend import TorchBackend, TorchOptions
from scripts.gpu.lab import hardware, versions
from workflows.contracts.request import LoraSettings


@dataclass(frozen=True)
class Work:
    """Useful floating-point operations of one batch."""

    forward: float
    forward_backward: float

    @classmethod
    def of(cls, shape: ModelShape, batch: list[ScoredSequence]) -> Work:
        """Frozen linears cost two passes in all (forward, and the gradient of their input); attention three."""
        tokens = sum(len(s.tokens) for s in batch)
        embedding = shape.vocabulary * shape.hidden
        linear = 2.0 * tokens * (shape.parameters - embedding * (1 if shape.tied else 2))
        head = 2.0 * embedding * sum(s.scored for s in batch)
        attention = sum(2.0 * shape.layers * shape.heads * shape.head_dim * len(s.tokens) ** 2 for s in batch)
        return cls(linear + head + attention, 2 * (linear + head) + 3 * attention)


def matrix_ceiling(device: str, size: int, repeats: int = 20) -> float:
    """Operations per second of a plain square multiplication: bfloat16 on a GPU, float32 on a CPU."""
    on_gpu = device != "cpu"
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(4):
            a @ a
        if on_gpu:
            torch.cuda.synchronize(device)
        best = max(best, 4 * 2.0 * size**3 / (time.perf_counter() - began))
    del a
    if on_gpu:
        torch.cuda.empty_cache()
    return best


def make_batch(shape: ModelShape, length: int, sequences: int, prompt: int) -> list[ScoredSequence]:
    """Random tokens; log-probs are asked for from the end of the prompt on."""
    rng = np.random.default_rng(length)
    first = max(1, min(prompt, length // 2))
    return [ScoredSequence(tuple(rng.integers(0, shape.vocabulary, length).tolist()), first) for _ in range(sequences)]


def make_adapter(shape: ModelShape, lora: LoraSettings) -> TrainerState:
    """B is not zero, so that no gradient is."""
    rng = np.random.default_rng(0)
    return TrainerState({k: (0.01 * rng.standard_normal(s)).astype(np.float32) for k, s in adapter_shapes(shape, lora).items()})


def measure(
    backend: TrainerBackend, batch: list[ScoredSequence], peak: Callable[[], float | None]
) -> tuple[dict[str, Any], Floats]:
    """Seconds of each pass, peak memory of the second, and the log-probs found."""
    began = time.perf_counter()
    backend.log_probs(batch, adapter=False)
    forward = time.perf_counter() - began
    began = time.perf_counter()
    found = backend.accumulate(batch, lambda _, values: np.full_like(values, -1e-3))
    forward_backward = time.perf_counter() - began
    figures = {"forward_seconds": forward, "forward_backward_seconds": forward_backward, "peak_memory_bytes": peak()}
    return figures, np.concatenate(found)


def rates(figures: dict[str, Any], batch: list[ScoredSequence], work: Work, ceiling: float) -> dict[str, Any]:
    """Tokens per second and shares of the ceiling, prompts counted as tokens."""
    tokens = sum(len(s.tokens) for s in batch)
    passes = {
        "forward": (figures["forward_seconds"], work.forward),
        "forward_backward": (figures["forward_backward_seconds"], work.forward_backward),
        "all": (
            figures["forward_seconds"] + figures["forward_backward_seconds"],
            work.forward + work.forward_backward,
        ),
    }
    return {
        name: {"tokens_per_second": round(tokens / seconds, 1), "share_of_ceiling": round(operations / seconds / ceiling, 4)}
        for name, (seconds, operations) in passes.items()
    }


def make_backend(name: str, wish: argparse.Namespace, lora: LoraSettings) -> tuple[TrainerBackend, Callable[[], float | None]]:
    """The back-end and what reads its peak memory in bytes."""
    on_gpu = wish.device != "cpu"
    if name == "torch":
        options = TorchOptions(wish.threads, wish.device, on_gpu, wish.tokens_per_micro_batch, recompute=on_gpu)

        def torch_peak() -> float | None:
            if not on_gpu:
                return None
            most = float(torch.cuda.max_memory_allocated(wish.device))
            torch.cuda.reset_peak_memory_stats(wish.device)
            return most

        return TorchBackend(wish.model, lora, options), torch_peak
    backend = MegatronBackend(
        wish.model,
        lora,
        MegatronOptions(
            tensor_parallel=wish.tensor_parallel,
            data_parallel=wish.data_parallel,
            device=wish.device,
            threads=wish.threads,
            tokens_per_micro_batch=wish.tokens_per_micro_batch,
            logits_per_chunk=wish.logits_per_chunk,
            recompute=wish.recompute,
            attention=wish.attention,
        ),
    )
    return backend, lambda: backend.stats.get("peak_memory_bytes")


def bench(wish: argparse.Namespace) -> dict[str, Any]:
    """Every trainer at every length."""
    shape, lora = read_shape(wish.model), LoraSettings(rank=wish.rank, alpha=wish.rank)
    ceiling = matrix_ceiling(wish.device, wish.matrix)
    state = make_adapter(shape, lora)
    rows: list[dict[str, Any]] = []
    references: dict[int, Floats] = {}
    for name in wish.trainers:
        backend, peak = make_backend(name, wish, lora)
        devices = wish.tensor_parallel * wish.data_parallel if name == "megatron" else 1
        with closing(backend):
            backend.load(state)
            # A whole micro-batch: kernels are compiled and memory is taken at the first one.
            measure(backend, make_batch(shape, min(wish.tokens_per_micro_batch, *wish.lengths), 2, wish.prompt), peak)
            for length in wish.lengths:
                batch = make_batch(shape, length, wish.sequences, wish.prompt)
                figures, found = measure(backend, batch, peak)
                row = {"trainer": name, "length": length, "devices": devices, **figures}
                row |= rates(figures, batch, Work.of(shape, batch), ceiling * devices)
                row |= {"attention": backend.attention, **backend.stats} if isinstance(backend, MegatronBackend) else {}
                gap = np.abs(found - references.setdefault(length, found))
                row["gap_to_first_trainer"] = {"mean": float(gap.mean()), "max": float(gap.max())}
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
        del backend, peak
        if wish.device != "cpu":
            torch.cuda.empty_cache()
    return {"ceiling_tflops": round(ceiling / 1e12, 3), "parameters": shape.parameters, "rows": rows}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON document to write")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16_384, 30_720], help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a sequence that are not scored")
    parser.add_argument("--trainers", nargs="+", choices=["megatron", "torch"], default=["megatron", "torch"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--data-parallel", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens-per-micro-batch", type=int, default=16_384)
    parser.add_argument("--logits-per-chunk", type=int, default=1 << 28)
    parser.add_argument("--recompute", choices=get_args(Recompute), default="auto")
    parser.add_argument("--attention", choices=get_args(AttentionKernel), default="auto")
    parser.add_argument("--matrix", type=int, default=8192, help="size of the multiplication that sets the ceiling")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    wish = parse(arguments)
    document = {
        "command": " ".join(["python -m scripts.gpu.trainer_bench", *arguments]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware(),
        "versions": versions(),
        "results": bench(wish),
    }
    wish.out.parent.mkdir(parents=True, exist_ok=True)
    wish.out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(wish.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
