"""Reads a Hugging Face folder's weights into the layouts of Megatron's linears, each rank its own part only.

    linear_qkv   for every group of heads: the queries of the group, its key, its value
    linear_fc1   gate, then up
    linear_proj, linear_fc2   columns of o_proj, down_proj

Slices are read from the files directly, so no rank ever holds a whole tensor that is split. Knows safetensors and torch only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from activities.errors import InputError
from activities.train.megatron.shape import ModelShape


class HuggingFaceWeights:
    """Slices of a folder's tensors for one tensor-parallel rank. Use as a context manager."""

    def __init__(self, folder: Path, shape: ModelShape, rank: int, ranks: int) -> None:
        self._folder = folder
        self._shape = shape
        self._rank = rank
        self._ranks = ranks
        self._open = ExitStack()
        self._files: dict[Path, Any] = {}
        self._places = _places(folder)

    def __enter__(self) -> HuggingFaceWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name of a parameter of our model, its part on this rank), in the order of the layers.

        Raises:
            InputError: a tensor is missing or has another shape than the configuration says.
        """
        s = self._shape
        yield "embedding.word_embeddings.weight", self._rows("model.embed_tokens.weight", (s.vocabulary, s.hidden))
        for layer in range(s.layers):
            yield from self._layer(layer)
        yield "decoder.final_layernorm.weight", self._whole("model.norm.weight", (s.hidden,))
        if not s.tied:
            yield "output_layer.weight", self._rows("lm_head.weight", (s.vocabulary, s.hidden))

    def _layer(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        s = self._shape
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        attention = theirs + "self_attn."
        yield ours + "input_layernorm.weight", self._whole(theirs + "input_layernorm.weight", (s.hidden,))
        yield (
            ours + "self_attention.linear_qkv.weight",
            self._interleave(
                [self._rows(f"{attention}{p}_proj.weight", (n, s.hidden)) for p, n in (("q", q), ("k", kv), ("v", kv))]
            ),
        )
        if s.qkv_bias:
            yield (
                ours + "self_attention.linear_qkv.bias",
                self._interleave([self._rows(f"{attention}{p}_proj.bias", (n,)) for p, n in (("q", q), ("k", kv), ("v", kv))]),
            )
        if s.qk_norm:
            yield ours + "self_attention.q_layernorm.weight", self._whole(attention + "q_norm.weight", (s.head_dim,))
            yield ours + "self_attention.k_layernorm.weight", self._whole(attention + "k_norm.weight", (s.head_dim,))
        yield ours + "self_attention.linear_proj.weight", self._columns(attention + "o_proj.weight", (s.hidden, q))
        if s.output_bias:
            yield ours + "self_attention.linear_proj.output_bias", self._whole(attention + "o_proj.bias", (s.hidden,))
        yield ours + "pre_mlp_layernorm.weight", self._whole(theirs + "post_attention_layernorm.weight", (s.hidden,))
        halves = [self._rows(f"{theirs}mlp.{p}_proj.weight", (s.ffn, s.hidden)) for p in ("gate", "up")]
        yield ours + "mlp.linear_fc1.weight", torch.cat(halves)
        yield ours + "mlp.linear_fc2.weight", self._columns(theirs + "mlp.down_proj.weight", (s.hidden, s.ffn))

    def _interleave(self, q_k_v: list[torch.Tensor]) -> torch.Tensor:
        groups = self._shape.kv_heads // self._ranks
        blocks = [part.reshape(groups, -1, *part.shape[1:]) for part in q_k_v]
        return torch.cat(blocks, dim=1).reshape(-1, *q_k_v[0].shape[1:])

    def _rows(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._read(name, shape, lambda t: t[self._part(shape[0])])

    def _columns(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._read(name, shape, lambda t: t[:, self._part(shape[1])])

    def _whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._read(name, shape, lambda t: t[:])

    def _part(self, size: int) -> slice:
        each = size // self._ranks
        return slice(self._rank * each, (self._rank + 1) * each)

    def _read(self, name: str, shape: tuple[int, ...], cut: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        file = self._places.get(name)
        if file is None:
            raise InputError(f"model {self._folder}: no tensor {name}; its files are not those of a {self._shape.family} model")
        if file not in self._files:
            self._files[file] = self._open.enter_context(safe_open(file, framework="pt"))
        stored = self._files[file].get_slice(name)
        if (found := tuple(stored.get_shape())) != shape:
            raise InputError(f"model {self._folder}: tensor {name} is {found}, its config.json asks for {shape}")
        return cut(stored)


def _places(folder: Path) -> dict[str, Path]:
    """File of every tensor: from the index, or from the files' headers."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in names.items()}
    places: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            places.update(dict.fromkeys(opened.keys(), file))
    return places
