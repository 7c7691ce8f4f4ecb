"""The Megatron back-end against the torch one: log-probs, gradients and adapters over consecutive steps, in real rank processes.

One group of ranks is started for each layout and then opens one model after the other. Tolerances are stated in docs/numerics.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from activities.blobs import Blobs, digest_of
from activities.errors import InputError
from activities.open.identity_adapter import make_initial_policy
from activities.records import GateEvidence
from activities.run_store import RunStore
from activities.train.backend import Floats, ScoredSequence, TrainerBackend, TrainerState
from activities.train.checkpoints import write_state
from activities.train.fake import FakeSearch, make_model
from activities.train.megatron.backend import MegatronBackend
from activities.train.megatron.options import MegatronOptions
from activities.train.megatron.processes import RankGroup, start_ranks
from activities.train.objective import loss_gradient
from activities.train.stepping import StepInputs, train_step
from activities.train.torch_backend import TorchBackend
from workers.engine.embedded.tiny import make_tiny_adapter
from workflows.contracts.request import LoraSettings, OptimizerSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LORA = LoraSettings(rank=4, alpha=8)
LOG_PROB_NATS = 1e-5
GRADIENT_SHARE = 2e-5
"""Of the largest value of each tensor."""
STEP_SHARE = 2e-3
"""Of the learning rate, which is about what Adam moves each value by in a step."""
LEARNING_RATE = 1e-3

LAYOUTS = {
    "one rank": MegatronOptions(tokens_per_micro_batch=96, logits_per_chunk=64 * 16),
    "tensor 2": MegatronOptions(tensor_parallel=2, tokens_per_micro_batch=96, logits_per_chunk=32 * 16, recompute="selective"),
    "data 2": MegatronOptions(data_parallel=2, tokens_per_micro_batch=96, logits_per_chunk=64 * 16, recompute="full"),
    "tensor 2 data 2": MegatronOptions(tensor_parallel=2, data_parallel=2, tokens_per_micro_batch=96),
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"changes": {"tie_word_embeddings": True}, "max_shard_size": "20KB"},
    "llama": {
        "changes": {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        }
    },
}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    ranks = start_ranks(LAYOUTS[request.param])
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, name, **how) for name, how in MODELS.items()}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def starts(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainerState]:
    """Adapters as PEFT itself writes them, B not zero."""
    root = tmp_path_factory.mktemp("adapters")
    made = {name: make_tiny_adapter(root / name, folder) for name, folder in folders.items()}
    return {name: TrainerState(safetensors.numpy.load_file(path / "adapter_model.safetensors")) for name, path in made.items()}


def sequences(seed: int, count: int = 9) -> list[ScoredSequence]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, 60, count)
    return [ScoredSequence(tuple(int(t) for t in rng.integers(0, 64, n)), int(rng.integers(1, n))) for n in lengths]


def derivatives(seed: int) -> Any:
    """Those of the real loss, for made-up advantages and sampling log-probs near the policy's."""

    def gradient_of(index: int, log_probs: Floats) -> Floats:
        rng = np.random.default_rng([seed, index])
        sampled = log_probs + 0.05 * rng.standard_normal(log_probs.size)
        mask = (rng.random(log_probs.size) < 0.9).astype(np.float64)
        return loss_gradient(log_probs, sampled, rng.standard_normal(log_probs.size), mask).gradient

    return gradient_of


def torch_gradients(backend: TorchBackend) -> dict[str, np.ndarray]:
    return {n.replace(".default", ""): p.grad.numpy() for n, p in backend.model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], share: float, unit: float | None = None) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=share * (unit or float(np.abs(value).max())), err_msg=key)


def assert_log_probs(found: list[Floats], expected: list[Floats]) -> None:
    assert [f.size for f in found] == [e.size for e in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=LOG_PROB_NATS)


@pytest.mark.parametrize("family", MODELS)
def test_three_steps_equal_those_of_torch_and_peft(
    group: RankGroup, family: str, folders: dict[str, Path], starts: dict[str, TrainerState]
) -> None:
    folder, start = folders[family], starts[family]
    ours, reference = MegatronBackend(folder, LORA, group=group), TorchBackend(folder, LORA)
    assert ours.adapter_names() == reference.adapter_names() == set(start.adapter)
    assert ours.trainable_names() == ours.adapter_names()
    ours.load(start)
    reference.load(start)
    fingerprint = ours.base_fingerprint()
    for step in range(3):
        batch = sequences(step)
        assert_log_probs(ours.log_probs(batch, adapter=False), reference.log_probs(batch, adapter=False))
        expected = reference.accumulate(batch, derivatives(step))
        assert_log_probs(ours.accumulate(batch, derivatives(step)), expected)
        assert_close(dict(ours.gradients()), torch_gradients(reference), GRADIENT_SHARE)
        assert ours.gradient_norm() == pytest.approx(reference.gradient_norm(), rel=1e-5)
        for backend in (ours, reference):
            backend.apply(OptimizerSettings(learning_rate=LEARNING_RATE))
        found, target = ours.state(), reference.state()
        assert found.steps == target.steps == step + 1
        assert_close(dict(found.adapter), dict(target.adapter), STEP_SHARE * (step + 1), LEARNING_RATE)
        assert_close(dict(found.exp_avg), dict(target.exp_avg), GRADIENT_SHARE * (step + 1))
        assert_log_probs(ours.log_probs(batch, adapter=True), reference.log_probs(batch, adapter=True))
    assert ours.base_fingerprint() == fingerprint
    layers = {"none": (0, 0), "selective": (0, 2), "full": (2, 0), "auto": (0, 0)}[group.options.recompute]
    ours.accumulate(sequences(9), derivatives(9))
    assert (ours.stats["layers_recomputed"], ours.stats["mlps_recomputed"]) == layers


@pytest.mark.parametrize("family", MODELS)
def test_the_adapter_survives_the_round_trip_bit_for_bit(
    group: RankGroup, family: str, folders: dict[str, Path], starts: dict[str, TrainerState], blobs: Blobs
) -> None:
    """Odd values included; and what is stored is what the torch back-end stores."""
    folder, start = folders[family], starts[family]
    rng = np.random.default_rng(0)
    odd = np.array([-0.0, np.float32(1e-45), np.finfo(np.float32).max, -np.float32(1e-38)], dtype=np.float32)

    def noise() -> dict[str, np.ndarray]:
        drawn = {k: rng.standard_normal(v.shape).astype(np.float32) for k, v in start.adapter.items()}
        for array in drawn.values():
            array.flat[:4] = odd
        return drawn

    state = TrainerState(noise(), noise(), noise(), 7)
    store, config = RunStore(blobs, "round-trip"), digest_of(b"{}")
    stored = []
    for backend in (MegatronBackend(folder, LORA, group=group), TorchBackend(folder, LORA)):
        backend.load(state)
        stored.append(write_state(store, backend.state(), config))
    assert stored[0] == stored[1] == write_state(store, state, config)


def test_going_back_to_an_earlier_state_and_forth(
    group: RankGroup, folders: dict[str, Path], starts: dict[str, TrainerState]
) -> None:
    """The ranks keep the states that they have told: a step from one of them is the step from the same state sent anew."""
    backend = MegatronBackend(folders["qwen2"], LORA, group=group)
    told = []

    def step_from(state: TrainerState, seed: int) -> TrainerState:
        backend.load(state)
        backend.accumulate(sequences(seed), derivatives(seed))
        backend.apply(OptimizerSettings(learning_rate=LEARNING_RATE))
        return backend.state()

    told.append(step_from(starts["qwen2"], 0))
    told.append(step_from(told[0], 1))
    kept = [step_from(state, 7) for state in (told[0], told[1], told[0])]
    copies = [TrainerState(dict(s.adapter), dict(s.exp_avg), dict(s.exp_avg_sq), s.steps) for s in told]
    sent = [step_from(state, 7) for state in (copies[0], copies[1], copies[0])]
    for one, other in zip(kept, sent, strict=True):
        assert one.steps == other.steps
        for name in ("adapter", "exp_avg", "exp_avg_sq"):
            for key, value in getattr(one, name).items():
                np.testing.assert_array_equal(getattr(other, name)[key], value, err_msg=f"{name} {key}")
    with pytest.raises(ValueError, match="read-only"):
        next(iter(told[0].adapter.values()))[...] = 0


def test_gradients_of_several_calls_add_up_and_loading_drops_them(
    group: RankGroup, folders: dict[str, Path], starts: dict[str, TrainerState]
) -> None:
    backend = MegatronBackend(folders["qwen2"], LORA, group=group)
    state = starts["qwen2"]
    backend.load(state)
    backend.accumulate(sequences(1), derivatives(1))
    once = backend.gradients()
    backend.accumulate(sequences(1), derivatives(1))
    for key, value in backend.gradients().items():
        np.testing.assert_array_equal(value, 2 * once[key], err_msg=key)
    backend.load(state)
    assert backend.gradients() == {}
    backend.accumulate([], derivatives(1))  # a grid without a token to train
    assert backend.gradient_norm() == 0
    assert backend.log_probs([], adapter=True) == []


def test_derivatives_are_asked_for_in_the_order_of_the_sequences(
    group: RankGroup, folders: dict[str, Path], starts: dict[str, TrainerState]
) -> None:
    backend = MegatronBackend(folders["llama"], LORA, group=group)
    backend.load(starts["llama"])
    asked: list[int] = []

    def gradient_of(index: int, log_probs: Floats) -> Floats:
        asked.append(index)
        return np.zeros_like(log_probs)

    backend.accumulate(sequences(2, count=12), gradient_of)
    assert asked == list(range(12))


def test_the_output_head_can_be_adapted(group: RankGroup, folders: dict[str, Path], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    folder = folders["qwen2"]
    adapter = make_tiny_adapter(tmp_path, folder, modules=modules)
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft = PeftModel.from_pretrained(network, adapter, is_trainable=True)
    ours = MegatronBackend(folder, LORA, dataclasses.replace(group.options, output_head=True), group)
    # PEFT stores the whole head beside an adapter of it.
    stored = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    ours.load(TrainerState({key: value for key, value in stored.items() if ".lora_" in key}))
    batch, expected = sequences(3), []
    for i, sequence in enumerate(batch):
        tokens = torch.tensor(sequence.tokens)
        every = torch.log_softmax(peft(input_ids=tokens[None]).logits[0].float(), -1)
        scored = every[torch.arange(len(tokens) - 1), tokens[1:]][sequence.first - 1 :]
        values = scored.detach().double().numpy()
        torch.autograd.backward(scored, torch.tensor(derivatives(3)(i, values), dtype=torch.float32))
        expected.append(values)
    assert_log_probs(ours.accumulate(batch, derivatives(3)), expected)
    gradients = {n.replace(".default", ""): p.grad.numpy() for n, p in peft.named_parameters() if p.grad is not None}
    assert "base_model.model.lm_head.lora_B.weight" in gradients
    assert_close(dict(ours.gradients()), gradients, GRADIENT_SHARE)


def test_a_whole_step_stores_what_torch_would(group: RankGroup, folders: dict[str, Path], blobs: Blobs) -> None:
    search = FakeSearch.open(blobs, folders["qwen3"], optimizer={"learning_rate": LEARNING_RATE})
    policy = make_initial_policy(search.store, search.spec, search.folder)
    batch = search.sample(1, policy)

    def step(backend: TrainerBackend) -> Any:
        clock = itertools.count()
        inputs = StepInputs(1, batch, policy)
        return train_step(search.store, search.spec, inputs, backend, resident=False, clock=lambda: float(next(clock)))

    lora = search.spec.request.lora
    ours, reference = step(MegatronBackend(search.folder, lora, group=group)), step(TorchBackend(search.folder, lora))
    assert ours.notes == reference.notes == ()
    assert ours.metrics.keys() == reference.metrics.keys()
    for name, value in reference.metrics.items():
        assert ours.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    found, target = (search.store.load(GateEvidence, record.gate) for record in (ours, reference))
    assert found.sequences == target.sequences
    for name in ("new", "previous", "initial"):
        assert_log_probs([np.array(a) for a in getattr(found, name)], [np.array(a) for a in getattr(target, name)])
    again = step(MegatronBackend(search.folder, lora, group=group))
    assert again == ours, "the same inputs give the same bytes"


def test_a_model_with_a_wrong_shape_is_refused_by_name(group: RankGroup, folders: dict[str, Path], tmp_path: Path) -> None:
    """Last in this file: an error in a rank ends the group."""
    copy = tmp_path / "copy"
    shutil.copytree(folders["qwen2"], copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(InputError, match=r"mlp\.gate_proj\.weight is \(64, 32\), its config\.json asks for \(128, 32\)"):
        MegatronBackend(copy, LORA, group=group)
    assert not group.alive
