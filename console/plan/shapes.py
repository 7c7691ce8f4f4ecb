"""A dense model's sizes, as far as memory and time depend on them. Reads a config.json, never weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.errors import InputError

_NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "kv_lora_rank")


@dataclass(frozen=True)
class ModelShape:
    """Sizes in numbers of values; one token unless said otherwise."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """Input embedding and output head are one tensor."""
    positions: int
    """Longest context."""

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def matrix_parameters(self) -> int:
        """Weights that every token is multiplied with: projections and the output head."""
        attention = self.hidden * (2 * self.query + 2 * self.kv)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.matrix_parameters + (0 if self.tied else self.vocabulary * self.hidden) + self.layers * 2 * self.hidden

    def lora_parameters(self, rank: int) -> int:
        """A and B of q, k, v, o, gate, up and down in every layer."""
        attention = 2 * (self.hidden + self.query) + 2 * (self.hidden + self.kv)
        return rank * self.layers * (attention + 3 * (self.hidden + self.intermediate))

    def kv_bytes(self) -> int:
        """Of one token in the KV cache, bfloat16."""
        return 2 * self.layers * self.kv * 2


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Sizes from a config.json.

    Raises:
        InputError: not a dense Llama, Qwen2 or Qwen3 configuration; names what is missing or not supported.
    """
    if found := [key for key in _NOT_DENSE if config.get(key)]:
        raise InputError(
            f"model {name}: {found[0]}={config[found[0]]} is no dense model; supported are dense Llama, Qwen2 and Qwen3"
        )
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return ModelShape(
            name=name,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            positions=int(config.get("max_position_embeddings") or 0),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"model {name}: its config.json has no usable {error}; is it a Hugging Face causal LM?") from None


def read_shape(file: Path) -> ModelShape:
    """Sizes of a model's folder or config.json.

    Raises:
        InputError: it cannot be read, or is no dense model.
    """
    path = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a model's config.json: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} holds no JSON object")
    return shape_of(config, path.parent.name)


def _known(
    name: str, layers: int, hidden: int, intermediate: int, heads: tuple[int, int, int], tied: bool, **more: int
) -> ModelShape:
    vocabulary, positions = more.get("vocabulary", 151_936), more.get("positions", 32_768)
    return ModelShape(name, layers, hidden, intermediate, heads[0], heads[1], heads[2], vocabulary, tied, positions)


_QWEN3 = {"positions": 40_960}
_LARGE = {"vocabulary": 152_064}
_TABLE = (
    _known("Qwen/Qwen2.5-Coder-0.5B-Instruct", 24, 896, 4864, (14, 2, 64), True),
    _known("Qwen/Qwen2.5-Coder-1.5B-Instruct", 28, 1536, 8960, (12, 2, 128), True),
    _known("Qwen/Qwen2.5-Coder-3B-Instruct", 36, 2048, 11_008, (16, 2, 128), True),
    _known("Qwen/Qwen2.5-Coder-7B-Instruct", 28, 3584, 18_944, (28, 4, 128), False, **_LARGE),
    _known("Qwen/Qwen2.5-Coder-14B-Instruct", 48, 5120, 13_824, (40, 8, 128), False, **_LARGE),
    _known("Qwen/Qwen2.5-Coder-32B-Instruct", 64, 5120, 27_648, (40, 8, 128), False, **_LARGE),
    _known("Qwen/Qwen3-0.6B", 28, 1024, 3072, (16, 8, 128), True, **_QWEN3),
    _known("Qwen/Qwen3-1.7B", 28, 2048, 6144, (16, 8, 128), True, **_QWEN3),
    _known("Qwen/Qwen3-4B", 36, 2560, 9728, (32, 8, 128), True, **_QWEN3),
    _known("Qwen/Qwen3-8B", 36, 4096, 12_288, (32, 8, 128), False, **_QWEN3),
    _known("Qwen/Qwen3-14B", 40, 5120, 17_408, (40, 8, 128), False, **_QWEN3),
    _known("Qwen/Qwen3-32B", 64, 5120, 25_600, (64, 8, 128), False, **_QWEN3),
)
KNOWN: dict[str, ModelShape] = {shape.name: shape for shape in _TABLE}
"""Models that can be planned for by name, without their files. Source: their published config.json."""


def known_shape(name: str) -> ModelShape | None:
    """A known model by its full name or by the last part of it, with or without `-Instruct`."""
    for known, shape in KNOWN.items():
        short = known.rpartition("/")[2]
        if name.lower() in (known.lower(), short.lower(), short.lower().removesuffix("-instruct")):
            return shape
    return None
