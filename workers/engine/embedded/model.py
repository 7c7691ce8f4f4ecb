"""The base model: a local Hugging Face folder, its two kinds of forward pass, and its tokenizer if it has one.

Logits leave here as float32. Knows nothing of requests, adapters' names or sampling.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from workers.engine.embedded.adapters import LowRankHooks
from workers.engine.embedded.cache import RowCache

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_CHECK_IDS = (0, 1, 0)


class ModelError(ValueError):
    """The folder holds no model that this engine can serve; the message says why."""


class CausalModel:
    """A causal language model. Every method that computes is called by the compute thread only, in inference mode."""

    def __init__(self, network: Any, tokenizer: Any, folder: str) -> None:
        self.network = network
        self.tokenizer = tokenizer
        self.folder = folder
        self.config = network.config.get_text_config()
        self.device = network.device
        self.vocabulary: int = self.config.vocab_size
        self.context_tokens: int = self.config.max_position_embeddings
        self.layers: int = self.config.num_hidden_layers
        self.eos_ids = _eos_ids(network, tokenizer)
        self.hooks = LowRankHooks(network)
        self._decoder = network.base_model
        self._lm_head = network.get_output_embeddings()
        # transformers renamed the argument within version 5.
        names = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._finish_logits = _final_scaling(self.config)
        self._check_head()

    @torch.inference_mode()
    def hidden(self, rows: Sequence[Sequence[int]], cache: RowCache | None = None) -> torch.Tensor:
        """Final hidden states [rows, longest, size] of whole sequences.

        Rows are padded on the right: what follows a token never reaches it under causal attention, so no mask is needed.
        """
        longest = max(len(row) for row in rows)
        ids = torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], device=self.device)
        positions = torch.arange(longest, device=self.device)[None].expand(len(rows), -1)
        return self._run(ids, positions, None, cache)

    @torch.inference_mode()
    def next_logits(self, tokens_R: list[int], starts_R: list[int], cache: RowCache) -> torch.Tensor:
        """Logits [R, vocabulary] after one more token in each row of a cache.

        Args:
            tokens_R: the last token of each row.
            starts_R: the cache column where each row begins.
        """
        begins = torch.tensor(starts_R, device=self.device)[:, None] - cache.first
        ids = torch.tensor(tokens_R, device=self.device)[:, None]
        mask = None
        if max(starts_R) != cache.first:  # some row is shorter than the cache
            mask = torch.arange(cache.length + 1, device=self.device)[None] >= begins
        return self.logits(self._run(ids, cache.length - begins, mask, cache)[:, 0])

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits of any number of hidden states."""
        return self._finish_logits(self._lm_head(hidden).float())

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, cache: RowCache | None) -> torch.Tensor:
        arguments = {} if cache is None else {self._cache_argument: cache}
        output = self._decoder(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=cache is not None, **arguments)
        if cache is not None:
            cache.advance(ids.shape[1])
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    @torch.inference_mode()
    def _check_head(self) -> None:
        """Refuse architectures whose logits are not head(hidden): their log-probs would be wrong without anybody noticing."""
        ids = torch.tensor([list(_CHECK_IDS)], device=self.device)
        whole = self.network(input_ids=ids, use_cache=False).logits.float()
        ours = self.logits(self.hidden([_CHECK_IDS]))
        if not torch.allclose(whole, ours, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
            raise ModelError(f"{self.folder}: {type(self.network).__name__} scales its logits in a way this engine does not know")


def load_model(folder: Path, dtype: str = "float32", device: str = "cpu") -> CausalModel:
    """Load a folder with config.json and safetensors. Nothing is ever fetched.

    Raises:
        ModelError: no such folder, or no causal language model in it.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is no Hugging Face model folder: it holds no config.json")
    try:
        AutoConfig.from_pretrained(folder, local_files_only=True)
        network = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], local_files_only=True, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: {error}") from None
    network.to(device).eval().requires_grad_(False)
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True) if has_tokenizer else None
    return CausalModel(network, tokenizer, str(folder))


def _eos_ids(network: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a sequence: of the configuration, of the generation defaults, of the tokenizer (as SGLang)."""
    generation: GenerationConfig | None = getattr(network, "generation_config", None)
    found: set[int] = set()
    for source in (network.config.get_text_config(), generation, tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(found)


def _final_scaling(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What some architectures do to their logits after the head (Gemma's soft cap, Cohere's and Granite's factor)."""
    cap = getattr(config, "final_logit_softcapping", None)
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)

    def finish(logits: torch.Tensor) -> torch.Tensor:
        if factor != 1.0:
            logits = logits * factor
        return cap * torch.tanh(logits / cap) if cap else logits

    return finish
