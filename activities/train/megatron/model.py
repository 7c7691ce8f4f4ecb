"""The model inside a rank: Megatron's GPTModel with split LoRA and our attention, and its log-probs of packed sequences.

Megatron's layers are driven one by one, so that recomputation can be chosen for each layer and batch, and the vocabulary is
projected in chunks. Recomputation is torch's non-reentrant one: with Megatron's own, which is reentrant, a frozen embedding leaves
the first layer an input that requires no gradient, and its adapters silently get none. Knows nothing of optimizers or requests.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from activities.train.megatron.attention import Kernel, PackedAttention, Segments
from activities.train.megatron.lora import AdapterSwitch, Projection, SplitLora
from activities.train.megatron.memory import RecomputePlan
from activities.train.megatron.place import Place
from activities.train.megatron.rope import angles, inverse_frequencies
from activities.train.megatron.shape import ModelShape
from activities.train.megatron.sharding import HEAD, adapter_key
from activities.train.megatron.vocabulary import vocabulary_log_probs
from workflows.contracts.request import LoraSettings


class PackedModel(torch.nn.Module):
    """The frozen base with one adapter. Parameters other than LoRA's are uninitialised until they are read."""

    def __init__(
        self, shape: ModelShape, lora: LoraSettings, output_head: bool, place: Place, kernel: Kernel, logits_per_chunk: int
    ) -> None:
        super().__init__()
        self.shape = shape
        self.switch = AdapterSwitch()
        self._place = place
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._logits_per_chunk = logits_per_chunk
        self._frequencies = inverse_frequencies(shape.rope, shape.head_dim).to(place.device)
        self._plan = RecomputePlan()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kernels that we do not use
            self.gpt: Any = _gpt_model(shape, place)
        self._head: Any = self.gpt.output_layer
        self._adapt(lora, output_head, kernel)
        self.gpt.to(device=place.device)
        for name, parameter in self.gpt.named_parameters():
            if not _is_adapter(name):
                parameter.requires_grad_(False)
                parameter.data = parameter.data.to(place.dtype)
        self.gpt.eval()  # without dropout the two modes compute the same, and this one keeps less

    # Construction ---------------------------------------------------------------------------------------------------------
    def _adapt(self, lora: LoraSettings, output_head: bool, kernel: Kernel) -> None:
        """Put LoRA around every linear, and our attention in the place of Megatron's."""
        s, ranks = self.shape, self._place.tensor_ranks
        q, kv, ffn = s.heads * s.head_dim // ranks, s.kv_heads * s.head_dim // ranks, s.ffn // ranks

        def wrap(base: Any, projections: Sequence[Projection], groups: int = 1, by_inputs: bool = False) -> SplitLora:
            return SplitLora(
                base,
                projections,
                rank=lora.rank,
                scale=lora.alpha / lora.rank,
                by_inputs=by_inputs,
                groups=groups,
                switch=self.switch,
                group=self._group,
            )

        for i, layer in enumerate(self.gpt.decoder.layers):
            attention, mlp = layer.self_attention, layer.mlp
            of = f"model.layers.{i}.self_attn."
            fused = [Projection(f"{of}{p}_proj", n, s.hidden) for p, n in (("q", q), ("k", kv), ("v", kv))]
            attention.linear_qkv = wrap(attention.linear_qkv, fused, groups=s.kv_heads // ranks)
            attention.linear_proj = wrap(attention.linear_proj, [Projection(of + "o_proj", s.hidden, q)], by_inputs=True)
            if s.output_bias:
                attention.linear_proj.output_bias = torch.nn.Parameter(torch.empty(s.hidden))
            attention.core_attention = PackedAttention(kernel, self._place.dtype)
            of = f"model.layers.{i}.mlp."
            mlp.linear_fc1 = wrap(mlp.linear_fc1, [Projection(f"{of}{p}_proj", ffn, s.hidden) for p in ("gate", "up")])
            mlp.linear_fc2 = wrap(mlp.linear_fc2, [Projection(of + "down_proj", s.hidden, ffn)], by_inputs=True)
            mlp.forward = self._recomputable(i, mlp.forward)
        if output_head:
            self.gpt.output_layer = self._head = wrap(self._head, [Projection(HEAD, s.vocabulary // ranks, s.hidden)])

    def _recomputable(self, layer: int, forward: Any) -> Any:
        """An MLP's forward that is computed again in the backward pass, if the plan says so."""

        def run(*args: Any, **kwargs: Any) -> Any:
            plan = self._plan
            if torch.is_grad_enabled() and plan.full <= layer < plan.full + plan.mlp:
                return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            return forward(*args, **kwargs)

        return run

    # What there is --------------------------------------------------------------------------------------------------------
    def adapter(self) -> dict[str, torch.nn.Parameter]:
        """LoRA's parameters by PEFT's key, each this rank's part, sorted by key."""
        found: dict[str, torch.nn.Parameter] = {}
        for module in self.gpt.modules():
            if isinstance(module, SplitLora):
                for projection, a, b in zip(module.projections, module.a, module.b, strict=True):
                    found[adapter_key(projection.module, "A")] = a
                    found[adapter_key(projection.module, "B")] = b
        return dict(sorted(found.items()))

    def base(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter that is not LoRA's, by Megatron's name: as if its linears were not wrapped."""
        return ((name.replace(".base.", "."), p) for name, p in self.gpt.named_parameters() if not _is_adapter(name))

    # Log-probs ------------------------------------------------------------------------------------------------------------
    def log_probs(self, sequences: Sequence[torch.Tensor], firsts: Sequence[int], plan: RecomputePlan) -> torch.Tensor:
        """Log-probs of each sequence's tokens from index `first` on, joined: float32, the same on every tensor-parallel rank.

        Args:
            sequences: int64 token ids of each, on the device.
        """
        self._plan = plan
        lengths = [len(s) for s in sequences]
        hidden = self._hidden(torch.cat(list(sequences)), lengths, plan)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        picked = torch.cat([hidden[at + first - 1 : at + n - 1] for at, first, n in zip(starts, firsts, lengths, strict=True)])
        targets = torch.cat([s[first:] for s, first in zip(sequences, firsts, strict=True)])
        rows = max(1, self._logits_per_chunk * self._place.tensor_ranks // self.shape.vocabulary)
        chunks = list(zip(torch.split(picked, rows), torch.split(targets, rows), strict=True))
        if not torch.is_grad_enabled():
            return torch.cat([self._project(h, t) for h, t in chunks])
        return torch.cat([checkpoint(self._project, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in chunks])

    def _hidden(self, tokens: torch.Tensor, lengths: list[int], plan: RecomputePlan) -> torch.Tensor:
        """Last hidden states (tokens, hidden)."""
        # The tokens stand in Megatron's dimension of positions, the batch is 1. Its own `thd` format would make it compute the
        # rotary angles of every layer from lengths on the host; with angles for each packed position that is not needed.
        packed: Any = PackedSeqParams(qkv_format="sbhd")
        packed.segments = Segments.of(lengths, tokens.device)
        arguments = {
            "attention_mask": None,
            "rotary_pos_emb": angles(self._frequencies, lengths),
            "packed_seq_params": packed,
        }
        hidden = self.gpt.embedding(input_ids=tokens[None], position_ids=None)
        for i, layer in enumerate(self.gpt.decoder.layers):
            if torch.is_grad_enabled() and i < plan.full:
                hidden, _ = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False, **arguments)
            else:
                hidden, _ = layer(hidden, **arguments)
        normed: torch.Tensor = self.gpt.decoder.final_layernorm(hidden)
        return normed[:, 0]

    def _project(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # A tied head is handed the embedding's weight, which has the precision that the embedding trains in, not this pass's.
        weight = self.gpt.shared_embedding_or_output_weight().to(hidden.dtype) if self.shape.tied else None
        logits, _ = self._head(hidden[:, None], weight=weight)
        first = self._place.tensor_rank * (self.shape.vocabulary // self._place.tensor_ranks)
        return vocabulary_log_probs(logits[:, 0].float(), targets, first, self._group, self._place.tensor_ranks)


def _gpt_model(shape: ModelShape, place: Place) -> GPTModel:
    on_cpu = place.device.type == "cpu"
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=place.tensor_ranks,
        params_dtype=place.dtype,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        # Keeps fc1's outputs for the backward pass and not the gate, too; compiled on a GPU (see rank.py for a CPU).
        bias_activation_fusion=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    return GPTModel(
        config,
        spec,
        vocab_size=shape.vocabulary,
        max_sequence_length=1,  # of learned positions, of which there are none
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none",
    )


def _is_adapter(name: str) -> bool:
    return ".a." in name or ".b." in name
