"""The pure parts of the Megatron back-end: what is supported; how things are split, packed, recomputed and attended to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from activities.errors import InputError
from activities.train.fake import make_model
from activities.train.megatron.attention import LONG, PackedAttention, Segments, choose_kernel
from activities.train.megatron.lora import AddProduct
from activities.train.megatron.memory import LayerBytes, RecomputePlan, activation_bytes, choose, layer_bytes
from activities.train.megatron.options import MegatronOptions
from activities.train.megatron.packing import pack
from activities.train.megatron.rope import angles, inverse_frequencies
from activities.train.megatron.shape import ModelShape, Rope, check_layout, read_shape
from activities.train.megatron.sharding import adapter_shapes, join, shard, split_axis
from activities.train.megatron.vocabulary import vocabulary_log_probs
from activities.train.megatron.weights import HuggingFaceWeights
from activities.train.torch_backend import TorchBackend
from workflows.contracts.request import LoraSettings

QWEN3_8B = ModelShape(
    family="qwen3",
    layers=36,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=12288,
    vocabulary=151936,
    norm_epsilon=1e-6,
    tied=False,
    qkv_bias=False,
    output_bias=False,
    qk_norm=True,
    rope=Rope(1e6),
)


def config(folder: Path, **fields: Any) -> Path:
    base = {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
    }
    (folder / "config.json").write_text(json.dumps(base | fields))
    return folder


# What is supported --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "gpt_neox"}, "architecture 'gpt_neox'"),
        ({"model_type": "qwen3_moe"}, "architecture 'qwen3_moe'"),
        ({"model_type": "qwen3", "num_experts": 8}, "a mixture of experts"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "a sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "a sliding window"),
        ({"quantization_config": {"bits": 4}}, "a quantised base"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=f"{named}.*is not supported by the Megatron trainer"):
        read_shape(config(tmp_path, **fields))


def test_older_and_newer_configurations_say_the_same(tmp_path: Path) -> None:
    old = read_shape(config(tmp_path, rope_theta=1e6, rope_scaling=None))
    new = read_shape(config(tmp_path, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}))
    assert old == new
    assert old.rope == Rope(1e6)
    assert (old.qkv_bias, old.output_bias, old.qk_norm) == (True, False, False)
    assert read_shape(config(tmp_path, model_type="qwen3")).head_dim == 128


@pytest.mark.parametrize(
    ("ranks", "named"), [(3, r"attention heads \(32\), key/value heads \(8\)"), (16, r"key/value heads \(8\)")]
)
def test_tensor_ranks_that_do_not_divide_the_model_are_refused(ranks: int, named: str) -> None:
    with pytest.raises(InputError, match=named):
        check_layout(QWEN3_8B, ranks)
    check_layout(QWEN3_8B, 8)


@pytest.mark.parametrize("options", [{"device": "tpu"}, {"device": "cuda:x"}, {"tensor_parallel": 0}])
def test_meaningless_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        MegatronOptions(**options).check()
    MegatronOptions(device="cuda:1").check()
    assert MegatronOptions(device="cuda:1").gpu_of(2) == 3


# Splitting ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_adapter_names_and_shapes_are_those_of_peft(tmp_path: Path, family: Any) -> None:
    folder, lora = make_model(tmp_path, family), LoraSettings(rank=4, alpha=8)
    expected = {key: array.shape for key, array in TorchBackend(folder, lora).state().adapter.items()}
    assert adapter_shapes(read_shape(folder), lora) == expected


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_join_to_the_whole(ranks: int) -> None:
    rng = np.random.default_rng(0)
    for key, shape in adapter_shapes(QWEN3_8B, LoraSettings(rank=2, alpha=2), output_head=True).items():
        if ".layers.0." not in key and "lm_head" not in key:
            continue
        whole = rng.standard_normal(shape, dtype=np.float32)
        parts = [shard(key, whole, rank, ranks) for rank in range(ranks)]
        np.testing.assert_array_equal(join(key, parts), whole)
        axis = split_axis(key)
        assert all(p.size == whole.size // (1 if axis is None else ranks) for p in parts)
        # A projection that is split by its outputs has a whole A; one that is split by its inputs a whole B.
        assert (axis is None) == ((".lora_A." in key) != (".o_proj." in key or ".down_proj." in key))


def test_each_rank_reads_its_own_part_of_the_weights(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen2", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    shape = read_shape(folder)
    with HuggingFaceWeights(folder, shape, 0, 1) as weights:
        whole = dict(weights.tensors())
    halves = []
    for rank in (0, 1):
        with HuggingFaceWeights(folder, shape, rank, 2) as weights:
            halves.append(dict(weights.tensors()))
    qkv = "decoder.layers.1.self_attention.linear_qkv.weight"  # group of heads after group: ranks are halves
    assert torch.equal(torch.cat([h[qkv] for h in halves]), whole[qkv])
    fc2 = "decoder.layers.0.mlp.linear_fc2.weight"
    assert torch.equal(torch.cat([h[fc2] for h in halves], dim=1), whole[fc2])
    gate, up = whole["decoder.layers.0.mlp.linear_fc1.weight"].chunk(2)
    own_gate, own_up = halves[1]["decoder.layers.0.mlp.linear_fc1.weight"].chunk(2)
    assert torch.equal(own_gate, gate[32:])
    assert torch.equal(own_up, up[32:])


# Packing ------------------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(2, 200), max_size=60), st.integers(1, 300), st.integers(1, 5))
def test_packing_keeps_the_order_and_the_budget_and_balances(lengths: list[int], budget: int, ways: int) -> None:
    runs = pack(lengths, budget, ways)
    assert [i for run in runs for i in run] == list(range(len(lengths)))
    assert len(runs) % ways == 0
    totals = [sum(lengths[i] for i in run) for run in runs]
    assert all(total <= max(budget, max(lengths)) for total in totals)
    if lengths:
        # No cut into so many runs of consecutive sequences has a shorter longest run than mean + one sequence.
        assert max(totals) <= sum(lengths) / len(runs) + max(lengths)
    assert pack(lengths, budget, ways) == runs


def test_packing_uses_no_more_rounds_than_needed() -> None:
    assert pack([10] * 8, 40, 2) == [range(4), range(4, 8)]
    assert pack([10] * 9, 40, 2) == [range(3), range(3, 6), range(6, 9), range(9, 9)]
    assert pack([100, 30, 30], 40, 1) == [range(1), range(1, 3)]
    assert pack([5], 40, 2) == [range(1), range(1, 1)]


# Recomputation ------------------------------------------------------------------------------------------------------------
def test_recomputation_grows_as_memory_shrinks_and_fits() -> None:
    one = LayerBytes(inside_mlp=100, attention=60, layer_input=8)
    layers, tokens = 10, 1000
    plans = [choose(one, layers, tokens, free) for free in range(2_000_000, 0, -10_000)]
    assert plans[0] == RecomputePlan()
    assert plans[-1] == RecomputePlan(full=layers)
    work = [(p.full, p.mlp + p.full) for p in plans]
    assert work == sorted(work)
    for free, plan in zip(range(2_000_000, 0, -10_000), plans, strict=True):
        assert activation_bytes(one, layers, tokens, plan) <= free or plan.full == layers
    assert {p.granularity for p in plans} == {"none", "selective", "full"}


@pytest.mark.parametrize(
    ("wish", "plan"), [("none", RecomputePlan()), ("selective", RecomputePlan(mlp=5)), ("full", RecomputePlan(full=5))]
)
def test_a_named_granularity_is_obeyed(wish: Any, plan: RecomputePlan) -> None:
    assert choose(LayerBytes(1, 1, 1), 5, 10**12, 1, wish) == plan
    assert choose(LayerBytes(1, 1, 1), 5, 10**12, None) == RecomputePlan()


def test_eight_billion_parameters_on_one_large_gpu() -> None:
    """141 GB less the weights: 12k tokens keep everything, 30k tokens lose some MLPs, 100k tokens almost all."""
    assert 8.1e9 < QWEN3_8B.parameters < 8.3e9
    one = layer_bytes(QWEN3_8B, 32, 1, 2)
    free = 120 * 10**9
    assert choose(one, 36, 12_000, free) == RecomputePlan()
    assert choose(one, 36, 30_000, free).granularity == "selective"
    assert choose(one, 36, 100_000, free).granularity == "full"
    assert layer_bytes(QWEN3_8B, 32, 2, 2).inside_mlp < one.inside_mlp


# Rotary angles, attention, vocabulary ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_rotary_frequencies_are_those_of_transformers(tmp_path: Path, parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128, "rope_parameters": parameters}
    theirs: Any = LlamaRotaryEmbedding(LlamaConfig(**fields))
    rope = read_shape(config(tmp_path, model_type="llama", **fields)).rope
    assert torch.equal(inverse_frequencies(rope, 128), theirs.inv_freq)


def test_angles_start_anew_with_each_sequence() -> None:
    frequencies = inverse_frequencies(Rope(1e4), 8)
    found = angles(frequencies, [3, 2])
    assert found.shape == (5, 1, 1, 8)
    assert torch.equal(found[3:], found[:2])


def test_packed_attention_sees_its_own_sequence_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 1, heads, 8, generator=generator) for heads in (4, 2, 2))
    name, kernel = choose_kernel("auto", torch.device("cpu"), torch.float32)
    assert name == "sdpa"  # the others need a GPU

    class Packed:
        segments = Segments.of([4, 5], torch.device("cpu"))

    attention = PackedAttention(kernel, torch.float32)
    found = attention(q, k, v, None, packed_seq_params=Packed)
    keys, values = (t[:, 0].repeat_interleave(2, dim=1) for t in (k, v))
    for start, end in ((0, 4), (4, 9)):
        scores = torch.einsum("qhd,khd->hqk", q[start:end, 0], keys[start:end]) / 8**0.5
        scores = scores.masked_fill(torch.ones(end - start, end - start).triu(1).bool(), float("-inf"))
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values[start:end])
        torch.testing.assert_close(found[start:end, 0], expected.reshape(end - start, -1))


def test_a_kernel_is_given_no_queries_of_a_precision_that_it_was_not_tried_with() -> None:
    def kernel(q: torch.Tensor, *_: Any) -> torch.Tensor:
        assert q.dtype == torch.bfloat16
        return torch.zeros_like(q)

    class Packed:
        segments = Segments.of([5], torch.device("cpu"))

    attention = PackedAttention(kernel, torch.bfloat16)
    q = torch.ones(5, 1, 2, 8)
    assert not attention(q.bfloat16(), q.bfloat16(), q.bfloat16(), packed_seq_params=Packed).any()
    torch.testing.assert_close(attention(q, q, q, packed_seq_params=Packed), torch.ones(5, 1, 16))


@pytest.mark.parametrize("name", ["flash_attn", "transformer_engine", "cudnn", "torch_varlen"])
def test_a_named_kernel_that_does_not_run_here_is_refused(name: Any) -> None:
    with pytest.raises(InputError, match=f"attention kernel {name} does not run here"):
        choose_kernel(name, torch.device("cpu"), torch.float32)


def test_long_sequences_are_cut_out_and_the_others_stay_together() -> None:
    lengths = [5, 7, LONG, LONG + 1, 9, LONG - 1]
    assert [run.lengths for run in Segments.of(lengths, torch.device("cpu")).runs] == [[5, 7], [LONG], [LONG + 1], [9, LONG - 1]]
    assert Segments.of(lengths, torch.device("cpu")).runs[3].cumulative.tolist() == [0, 9, LONG + 8]


def test_adding_lora_in_place_has_the_gradients_of_adding_it() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, low, blocks = (
        torch.randn(*size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in ((5, 1, 3), (7, 3), (5, 2), (7, 2))
    )

    def in_place(*inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = AddProduct.apply(inputs[0] @ inputs[1].t(), inputs[2], inputs[3])  # type: ignore[no-untyped-call]
        return out

    expected = hidden @ weight.t() + (low @ blocks.t())[:, None]
    torch.testing.assert_close(in_place(hidden, weight, low, blocks), expected)
    assert torch.autograd.gradcheck(in_place, (hidden, weight, low, blocks))


def test_vocabulary_log_probs_and_their_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (10 * torch.randn(6, 17, generator=generator)).requires_grad_()
    targets = torch.randint(0, 17, (6,), generator=generator)
    weights = torch.randn(6, generator=generator)
    found = vocabulary_log_probs(logits * 1.0, targets, 0, None, 1)
    expected = torch.log_softmax(logits, -1)[torch.arange(6), targets]
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad((weights * scored).sum(), logits)[0] for scored in (found, expected))
    torch.testing.assert_close(ours, theirs)
