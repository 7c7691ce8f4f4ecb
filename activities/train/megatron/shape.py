"""What a Hugging Face folder's config.json says about a model, and whether the Megatron back-end can train it.

Reads JSON only. Knows nothing of torch, megatron or weights. What is not supported is refused by name, with what is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from activities.errors import InputError

Family = Literal["llama", "qwen2", "qwen3"]
SUPPORTED = "dense Llama, Qwen2 (also Qwen2.5) and Qwen3 models"

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10_000.0},
    "qwen2": {"rope_theta": 10_000.0},
    "qwen3": {"rope_theta": 10_000.0, "head_dim": 128},
}
"""What transformers assumes where a config.json is silent."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder."""

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    norm_epsilon: float
    tied: bool
    """The output head is the embedding matrix."""
    qkv_bias: bool
    output_bias: bool
    """A bias on o_proj."""
    qk_norm: bool
    rope: Rope

    @property
    def parameters(self) -> int:
        """Number of weights, norms left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + embeddings


def read_shape(folder: Path) -> ModelShape:
    """The shape of a model folder.

    Raises:
        InputError: another architecture, or a feature that is not supported; names it.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = config.get("model_type")
    if family not in _DEFAULTS:
        raise InputError(
            f"model {folder}: architecture {family!r} is not supported by the Megatron trainer; it trains {SUPPORTED}. "
            "Use TTTD_TRAINER_KIND=torch for others"
        )
    if refused := _refusal(config):
        raise InputError(f"model {folder}: {refused} is not supported by the Megatron trainer, which trains {SUPPORTED}")
    config = _DEFAULTS[family] | {key: value for key, value in config.items() if value is not None}
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    biased = bool(config.get("attention_bias", False)) and family != "qwen2"
    return ModelShape(
        family=family,
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads", heads)),
        head_dim=int(config.get("head_dim", hidden // heads)),
        ffn=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=biased or family == "qwen2",
        output_bias=biased,
        qk_norm=family == "qwen3",
        rope=_rope(config, folder),
    )


def check_layout(shape: ModelShape, tensor_parallel: int) -> None:
    """Refuse a number of tensor-parallel ranks that does not divide the model.

    Raises:
        InputError: names what is not divisible.
    """
    parts = {
        "attention heads": shape.heads,
        "key/value heads": shape.kv_heads,
        "MLP width": shape.ffn,
        "vocabulary": shape.vocabulary,
    }
    if bad := [f"{what} ({size})" for what, size in parts.items() if size % tensor_parallel]:
        raise InputError(
            f"tensor parallel {tensor_parallel} does not divide the model's {', '.join(bad)}; padding and shared key/value heads "
            "are not supported: choose a divisor, and use data parallel for the remaining GPUs"
        )


def _refusal(config: Mapping[str, Any]) -> str | None:
    experts = next((k for k in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(k)), None)
    if experts:
        return f"a mixture of experts ({experts}={config[experts]})"
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        return f"a sliding window ({config.get('sliding_window')} tokens)"
    if config.get("quantization_config"):
        return "a quantised base"
    if config.get("mlp_bias"):
        return "mlp_bias=true"
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        return f"activation {activation!r}"
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        return f"partial_rotary_factor={config['partial_rotary_factor']}"
    return None


def _rope(config: Mapping[str, Any], folder: Path) -> Rope:
    # transformers 5 writes rope_parameters; before that there were rope_theta and rope_scaling.
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(settings.get("rope_theta") or config["rope_theta"])
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", factor=float(settings["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            "llama3",
            factor=float(settings["factor"]),
            low_frequency_factor=float(settings["low_freq_factor"]),
            high_frequency_factor=float(settings["high_freq_factor"]),
            original_context_tokens=int(settings["original_max_position_embeddings"]),
        )
    raise InputError(
        f"model {folder}: rope scaling {kind!r} is not supported by the Megatron trainer; supported are default, linear and llama3"
    )
