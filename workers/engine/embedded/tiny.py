"""Tiny random models and adapters on disk, for tests and smoke checks of whatever talks to an engine. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_tiny_model(
    folder: Path,
    kind: Literal["llama", "qwen2"] = "llama",
    *,
    vocabulary: int = 64,
    hidden: int = 32,
    layers: int = 2,
    context_tokens: int = 256,
    spread: float = 0.3,
    seed: int = 0,
    tokenizer: bool = True,
) -> Path:
    """Write a random model whose distributions are neither flat nor sure.

    Args:
        spread: standard deviation of the weights; larger ones make sharper distributions.
        tokenizer: also write one, whose tokens are the words t0, t1, ...; t1 is its end token.
    """
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if kind == "llama" else 2,
        "max_position_embeddings": context_tokens,
        "initializer_range": spread,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network: Any = LlamaForCausalLM(LlamaConfig(**shape)) if kind == "llama" else Qwen2ForCausalLM(Qwen2Config(**shape))
    network.save_pretrained(folder)
    if tokenizer:
        _word_tokenizer(vocabulary).save_pretrained(folder)
    return folder


def _word_tokenizer(vocabulary: int) -> Any:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", unk_token="t0")


def make_tiny_adapter(
    folder: Path, model: Path, *, seed: int = 1, modules: Sequence[str] = PROJECTIONS, size: float = 0.1, **settings: Any
) -> Path:
    """Write a random LoRA adapter for a model folder. `settings` go to PEFT's LoraConfig (r, lora_alpha, ...)."""
    network = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
    config = LoraConfig(target_modules=list(modules), **({"r": 4, "lora_alpha": 8} | settings))
    adapted = get_peft_model(network, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return folder
