"""The torch back-end: transformers + PEFT on CPU or one GPU.

float32 on the CPU; on a GPU the base may be bfloat16 while adapter, moments and log-probs stay float32. Deterministic on the CPU
for a fixed number of threads. The base model is loaded once and stays in memory; the frozen reference is the same model with the
adapter switched off, so there is no second copy. Knows nothing of rewards, steps or the object store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint

from activities.errors import CorruptBlob, InputError
from activities.models import PROJECTIONS
from activities.train.adam import Moments, adam_step
from activities.train.backend import (
    Floats,
    GradientOf,
    ScoredSequence,
    Tensors,
    TrainerBackend,
    TrainerState,
    micro_batches,
)
from activities.train.frozen import fingerprint
from activities.train.precision import WholeHeads, float32_arithmetic
from workflows.contracts.request import LoraSettings, OptimizerSettings

_ADAPTER = "default"
"""PEFT's name for the one adapter inside the process; it is not part of stored keys."""
_LOGITS_PER_CHUNK = 1 << 25
"""Logits alive at once (128 MiB in float32): the vocabulary is projected for so many tokens at a time."""
_WHOLE_DIGEST_BYTES = 256 << 20
"""Bases up to this size are hashed in full; larger ones by samples of each tensor and by torch's write counters."""
_SAMPLES_PER_TENSOR = 4096


@dataclass(frozen=True)
class TorchOptions:
    """How to compute; none of it is science, though other values round differently."""

    threads: int = 1
    """CPU threads. The promise of equal bits holds for equal numbers of threads."""
    device: str = "cpu"
    bfloat16: bool = False
    """Base weights and activations in bfloat16; for GPUs."""
    tokens_per_micro_batch: int = 2048
    recompute: bool = False
    """Drop activations and compute them again in the backward pass: long sequences on a GPU need it."""


class TorchBackend(TrainerBackend):
    """See :class:`TrainerBackend`. `folder` is a Hugging Face folder of a dense Llama, Qwen2 or Qwen3 model."""

    def __init__(self, folder: Path, lora: LoraSettings, options: TorchOptions | None = None) -> None:
        self._options = options or TorchOptions()
        torch.set_num_threads(self._options.threads)
        if not self._options.bfloat16:
            torch.set_float32_matmul_precision("highest")  # some images turn TF32 on for everybody; float32 shall mean it
        self._device = torch.device(self._options.device)
        self._model = _load_model(folder, lora, self._options)
        self._causal: Any = self._model.get_base_model()
        named = dict(self._model.named_parameters())
        # Sorted by key: the order of Adam's sums and of the stored state does not depend on the module tree.
        self._adapter = {key: named[name] for key, name in sorted((_key(n), n) for n in named if _is_lora(n))}
        self._moments: Moments = {}
        self._steps = 0

    @property
    def model(self) -> Any:
        """The PEFT model itself, for a caller that samples from it; writing to it breaks the state."""
        return self._model

    # State ----------------------------------------------------------------------------------------------------------------
    def load(self, state: TrainerState) -> None:
        self._check(state.adapter, "adapter")
        if state.exp_avg or state.exp_avg_sq:
            self._check(state.exp_avg, "Adam's first moments")
            self._check(state.exp_avg_sq, "Adam's second moments")
        with torch.no_grad():
            for key, parameter in self._adapter.items():
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(state.adapter[key])))
                parameter.grad = None
        self._moments = {
            key: (self._tensor(state.exp_avg[key]), self._tensor(state.exp_avg_sq[key])) for key in sorted(state.exp_avg)
        }
        self._steps = state.steps

    def state(self) -> TrainerState:
        return TrainerState(
            adapter={key: _array(p) for key, p in self._adapter.items()},
            exp_avg={key: _array(m) for key, (m, _) in self._moments.items()},
            exp_avg_sq={key: _array(v) for key, (_, v) in self._moments.items()},
            steps=self._steps,
        )

    def _tensor(self, array: NDArray[np.float32]) -> torch.Tensor:
        return torch.tensor(array, dtype=torch.float32, device=self._device)

    def _check(self, tensors: Tensors, what: str) -> None:
        expected = {key: tuple(p.shape) for key, p in self._adapter.items()}
        found = {key: tuple(t.shape) for key, t in tensors.items()}
        if wrong := sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k)):
            shown = ", ".join(f"{k}: {found.get(k, 'missing')} instead of {expected.get(k, 'nothing')}" for k in wrong[:3])
            raise CorruptBlob(f"{what} of the checkpoint does not fit this model and LoRA rank in {len(wrong)} tensors: {shown}")

    # Log-probs and gradients ----------------------------------------------------------------------------------------------
    def log_probs(self, sequences: Sequence[ScoredSequence], *, adapter: bool, in_float32: bool = False) -> list[Floats]:
        out: list[Floats] = []
        off: AbstractContextManager[Any] = nullcontext() if adapter else self._model.disable_adapter()
        precision: AbstractContextManager[None] = float32_arithmetic(self._model) if in_float32 else nullcontext()
        heads: AbstractContextManager[Any] = WholeHeads() if in_float32 else nullcontext()
        with off, precision, heads, torch.no_grad():
            for part in self._parts(sequences):
                out.extend(_floats(t) for t in self._forward(part))
        return out

    def accumulate(self, sequences: Sequence[ScoredSequence], gradient_of: GradientOf) -> list[Floats]:
        out: list[Floats] = []
        for part in self._parts(sequences):
            scored = self._forward(part)
            values = [_floats(t) for t in scored]
            gradients = [gradient_of(len(out) + i, value) for i, value in enumerate(values)]
            flat = np.concatenate(gradients) if gradients else np.zeros(0)
            joined = torch.cat(scored)
            joined.backward(torch.tensor(flat, dtype=joined.dtype, device=joined.device))  # type: ignore[no-untyped-call]
            out.extend(values)
        return out

    def _parts(self, sequences: Sequence[ScoredSequence]) -> Iterator[list[ScoredSequence]]:
        for part in micro_batches([len(s.tokens) for s in sequences], self._options.tokens_per_micro_batch):
            yield [sequences[i] for i in part]

    def _forward(self, part: Sequence[ScoredSequence]) -> list[torch.Tensor]:
        """Log-probs of each sequence's scored tokens, float32."""
        # Padding stands at the right of causal sequences, where no real token can see it: no attention mask is needed, and
        # attention takes its fast causal path.
        width = max(len(s.tokens) for s in part)
        ids = torch.zeros((len(part), width), dtype=torch.long)
        for row, sequence in enumerate(part):
            ids[row, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
        hidden = self._causal.base_model(input_ids=ids.to(self._device), use_cache=False).last_hidden_state
        picked = torch.cat([hidden[row, s.first - 1 : len(s.tokens) - 1] for row, s in enumerate(part)])
        targets = torch.cat([torch.tensor(s.tokens[s.first :]) for s in part]).to(self._device)
        return list(torch.split(self._project(picked, targets), [s.scored for s in part]))

    def _project(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Log-prob of each target, the vocabulary in chunks of tokens so that the logits never exist all at once."""
        head: Callable[[torch.Tensor], torch.Tensor] = self._causal.get_output_embeddings()

        def chunk_log_probs(h: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            logits = head(h).float()
            return logits.gather(1, t[:, None]).squeeze(1) - torch.logsumexp(logits, dim=1)

        rows = max(1, _LOGITS_PER_CHUNK // self._causal.config.vocab_size)
        chunks = list(zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            return torch.cat([chunk_log_probs(h, t) for h, t in chunks])
        return torch.cat([checkpoint(chunk_log_probs, h, t, use_reentrant=False) for h, t in chunks])

    # Optimizer ------------------------------------------------------------------------------------------------------------
    def gradient_norm(self) -> float:
        total = 0.0
        for parameter in self._adapter.values():
            if parameter.grad is not None:
                total += float(parameter.grad.double().pow(2).sum())
        return float(total**0.5)

    def apply(self, optimizer: OptimizerSettings) -> None:
        self._moments = adam_step(self._adapter, self._moments, self._steps, optimizer)
        self._steps += 1

    # What must hold -------------------------------------------------------------------------------------------------------
    def trainable_names(self) -> frozenset[str]:
        return frozenset(_key(name) for name, p in self._model.named_parameters() if p.requires_grad)

    def adapter_names(self) -> frozenset[str]:
        return frozenset(self._adapter)

    def base_fingerprint(self) -> str:
        base = [(name, t) for name, t in self._model.state_dict(keep_vars=True).items() if not _is_lora(name)]
        return fingerprint(base, _WHOLE_DIGEST_BYTES, _SAMPLES_PER_TENSOR)


def _load_model(folder: Path, lora: LoraSettings, options: TorchOptions) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if options.bfloat16 else torch.float32
    causal: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False, attn_implementation="sdpa"
    )
    if causal.get_output_embeddings() is None or causal.base_model is causal:
        raise InputError(f"model {folder}: {type(causal).__name__} is no causal language model with an output head")
    for field in ("attention_dropout", "resid_pdrop", "hidden_dropout"):
        if hasattr(causal.config, field):
            setattr(causal.config, field, 0.0)
    for module in causal.modules():  # attention layers copy the value when they are built
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=list(PROJECTIONS),
        bias="none",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(causal, config, adapter_name=_ADAPTER)
    model.to(torch.device(options.device))
    if options.recompute:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Recomputation is only done in training mode; without dropout the two modes compute the same.
    model.train(options.recompute)
    return model


def _is_lora(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _key(name: str) -> str:
    """PEFT's stored key of a parameter of the live model."""
    return name.replace(f".lora_A.{_ADAPTER}.", ".lora_A.").replace(f".lora_B.{_ADAPTER}.", ".lora_B.")


def _array(tensor: torch.Tensor) -> NDArray[np.float32]:
    return np.array(tensor.detach().float().cpu().numpy(), dtype=np.float32, copy=True)


def _floats(tensor: torch.Tensor) -> Floats:
    return np.array(tensor.detach().double().cpu().numpy(), dtype=np.float64)
