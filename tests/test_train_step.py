"""One optimizer step end to end on a tiny model: what it stores, that it is a pure function, and that it happens once."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from activities.blobs import Blobs
from activities.errors import IncompleteGrid, InputError, TrainCheckFailed, TrainConflict
from activities.open.identity_adapter import make_initial_policy
from activities.publish.placing import materialise
from activities.records import AdapterManifest, Batch, Checkpoint, GateEvidence, TrainRecord
from activities.train import evidence, stepping, training
from activities.train.backend import ScoredSequence, TrainerState
from activities.train.checkpoints import read_state, write_state
from activities.train.evidence import choose_sequences, collect
from activities.train.fake import FakeSearch, make_model
from activities.train.grid import Grid, GridRollout, load_grid
from activities.train.scoring import base_log_probs
from activities.train.stepping import StepInputs, train_step
from activities.train.torch_backend import TorchBackend
from activities.train.training import Trainer
from workflows.contracts.base import Coordinate, Digest, PolicyRef

LEARNING = {"optimizer": {"learning_rate": 3e-3}}


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "qwen2")


@pytest.fixture
def search(blobs: Blobs, model: Path) -> FakeSearch:
    return FakeSearch.open(blobs, model, **LEARNING)


@pytest.fixture
def initial(search: FakeSearch) -> PolicyRef:
    return make_initial_policy(search.store, search.spec, search.folder)


def ticks() -> Any:
    counter = itertools.count()
    return lambda: float(next(counter))


def trainer(search: FakeSearch) -> Trainer:
    return Trainer(search.store.blobs, lambda _: search.folder, TorchBackend, ticks())


def step(search: FakeSearch, number: int, batch: Digest, policy: PolicyRef, backend: TorchBackend | None = None) -> TrainRecord:
    return train_step(
        search.store,
        search.spec,
        StepInputs(number, batch, policy),
        backend or TorchBackend(search.folder, search.spec.request.lora),
        resident=False,
        clock=ticks(),
    )


def weights(search: FakeSearch, adapter: Digest) -> dict[str, np.ndarray]:
    manifest = search.store.load(AdapterManifest, adapter)
    return safetensors.numpy.load(search.store.blobs.get(manifest.weights))


def changed(search: FakeSearch, batch: Digest, changes: dict[int, dict[str, Any]], policy: PolicyRef) -> Digest:
    """The batch with some rows' rollouts stored anew: `reward`, or fields of the rollout record."""
    document = search.store.load(Batch, batch)
    rollouts = [r for g in load_grid(search.store, batch, document.step, policy).groups for r in g]
    search.backend.load(read_state(search.store, policy.checkpoint))
    rows = list(document.rows)
    for i, fields in changes.items():
        old, kept = rollouts[i], dict(fields)
        reward = kept.pop("reward", old.reward)
        response = kept.pop("response", old.response)
        rows[i] = search.row(old.at, policy, old.prompt, response, reward, kept)
    return search.store.put(document.model_copy(update={"rows": tuple(rows)}))


# What a step makes --------------------------------------------------------------------------------------------------------
def test_peft_loads_the_adapter_and_finds_the_same_log_probs(blobs: Blobs, any_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    search = FakeSearch.open(blobs, any_model, **LEARNING)
    policy = make_initial_policy(search.store, search.spec, any_model)
    record = step(search, 1, search.sample(1, policy), policy)
    directory = materialise(blobs, record.adapter, tmp_path / "adapters", "a-v0001")
    config = json.loads((directory / "adapter_config.json").read_text())
    assert search.spec.model_digest in config["base_model_name_or_path"]

    base = AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float32)
    served = PeftModel.from_pretrained(base, directory)
    evidence = search.store.load(GateEvidence, record.gate)
    with torch.no_grad():
        for tokens, new in zip(evidence.sequences, evidence.as_served[0], strict=True):
            logits = served(input_ids=torch.tensor([tokens])).logits[0]
            found = torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
            np.testing.assert_allclose(found.numpy(), new, atol=5e-6)


def test_the_step_moves_the_adapter_towards_reward_and_nothing_else(search: FakeSearch, initial: PolicyRef) -> None:
    batch = search.sample(1, initial, groups=4, rollouts=6)
    backend = TorchBackend(search.folder, search.spec.request.lora)
    base = {n: p.detach().clone() for n, p in backend.model.named_parameters() if ".lora_" not in n}
    record = step(search, 1, batch, initial, backend)
    for name, parameter in backend.model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, base[name]), name
    before, after = weights(search, initial.adapter), weights(search, record.adapter)
    assert before.keys() == after.keys()
    for key in before:
        if ".lora_B." in key:
            assert (after[key] != 0).any(), key
        else:  # B = 0 leaves A without a gradient in the first step
            np.testing.assert_array_equal(after[key], before[key])
    # The step follows the gradient: rollouts with positive advantage have become likelier than those with negative.
    grid = load_grid(search.store, batch, 1, initial)
    shaped = stepping.shape_batch(grid, search.spec.request.objective, lambda r: base_log_probs(search.store, backend, 1, r))
    gained = backend.log_probs([stepping.scored(r) for r in shaped.rollouts], adapter=True)
    gain = sum(float((a * (n - r.log_probs)).sum()) for a, n, r in zip(shaped.advantages, gained, shaped.rollouts, strict=True))
    assert gain > 0


def test_record_checkpoint_and_evidence_belong_together(search: FakeSearch, initial: PolicyRef) -> None:
    batch = search.sample(1, initial)
    record = step(search, 1, batch, initial)
    checkpoint = search.store.load(Checkpoint, record.checkpoint)
    assert (checkpoint.step, checkpoint.adapter) == (1, record.adapter)
    assert (record.step, record.base, record.batch) == (1, initial.checkpoint, batch)
    evidence = search.store.load(GateEvidence, record.gate)
    assert evidence.previous == evidence.initial  # version 0 is the base
    assert evidence.new != evidence.previous
    metrics = record.metrics
    assert all(np.isfinite(v) for v in metrics.values())
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["gap_engine_trainer_rms"] < 1e-5
    assert metrics["kl_policy_base"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["grad_norm"] > 0
    assert metrics["update_rms"] > 1e-4
    assert metrics["tokens_trained"] == sum(len(r.response) for r in load_grid(search.store, batch, 1, initial).rollouts)
    assert metrics["seconds_gradient"] == 1.0
    assert record.notes == ()


def test_identical_calls_give_identical_bytes(search: FakeSearch, initial: PolicyRef) -> None:
    batch = search.sample(1, initial)
    first, second = step(search, 1, batch, initial), step(search, 1, batch, initial)
    assert first == second


def test_resume_from_a_checkpoint_equals_going_on_in_memory(search: FakeSearch, initial: PolicyRef) -> None:
    """Three steps by one trainer that keeps its state, and by a fresh one for each step."""
    one, policy, digests = trainer(search), initial, []
    batches = []
    for number in (1, 2, 3):
        batches.append(search.sample(number, policy))
        policy = one.train(search.request(number, batches[-1], policy)).policy
        digests.append((policy.checkpoint, policy.gate))
    other = FakeSearch.open(search.store.blobs, search.folder, run_id="other", **LEARNING)
    policy = initial
    for number, batch in enumerate(batches, start=1):
        policy = trainer(other).train(other.request(number, batch, policy)).policy
        assert (policy.checkpoint, policy.gate) == digests[number - 1]


# Grids without signal -----------------------------------------------------------------------------------------------------
def test_a_grid_of_constant_groups_says_that_there_is_no_signal(search: FakeSearch, initial: PolicyRef) -> None:
    batch = search.sample(1, initial, reward=lambda *_: 0.0)
    record = step(search, 1, batch, initial)
    assert any(note.startswith("no signal: the rewards are constant within each of the 2 groups") for note in record.notes)
    assert record.metrics["groups_constant"] == 2
    assert record.metrics["groups_trained"] == 1


def test_constant_groups_without_kl_give_a_zero_gradient_and_an_unmoved_adapter(blobs: Blobs, model: Path) -> None:
    search = FakeSearch.open(blobs, model, objective={"kl_coefficient": 0.0, "advantage": "mean_baseline"}, **LEARNING)
    policy = make_initial_policy(search.store, search.spec, model)
    record = step(search, 1, search.sample(1, policy, reward=lambda *_: 1.5), policy)
    assert record.metrics["grad_norm"] == 0
    assert record.metrics["update_rms"] == 0
    before, after = weights(search, policy.adapter), weights(search, record.adapter)
    for key in before:
        np.testing.assert_array_equal(after[key], before[key])
    assert search.store.load(Checkpoint, record.checkpoint).step == 1


def test_only_the_group_with_a_signal_is_trained(search: FakeSearch, initial: PolicyRef) -> None:
    batch = search.sample(1, initial, groups=2, rollouts=4)
    both = step(search, 1, batch, initial)
    constant = changed(search, batch, {i: {"reward": 0.5} for i in range(4)}, initial)
    one = step(search, 1, constant, initial)
    assert (one.metrics["groups_constant"], one.metrics["groups_trained"]) == (1, 1)
    assert one.metrics["tokens_trained"] < both.metrics["tokens_trained"]
    assert one.notes == ()


def test_empty_responses_count_in_the_group_and_train_no_token(search: FakeSearch, initial: PolicyRef) -> None:
    batch = changed(search, search.sample(1, initial), {0: {"response": (), "reward": 0.0}}, initial)
    record = step(search, 1, batch, initial)
    assert any("1 rollouts have no response token" in note for note in record.notes)
    assert record.metrics["rollouts_trained"] == 7


def test_forced_tokens_are_not_trained(search: FakeSearch, initial: PolicyRef) -> None:
    """A masked token's recorded log-prob of 0 neither enters ratio, gap and KL, nor changes the step."""
    batch = search.sample(1, initial)
    rollouts = load_grid(search.store, batch, 1, initial).rollouts
    size = len(rollouts[2].response)
    mask = tuple(0 if t in (1, 3) else 1 for t in range(size))
    steps = []
    for recorded in (0.0, -7.0):
        log_probs = tuple(recorded if not m else float(p) for m, p in zip(mask, rollouts[2].log_probs, strict=True))
        masked = changed(search, batch, {2: {"mask": mask, "log_probs": log_probs}}, initial)
        steps.append(step(search, 1, masked, initial))
    assert steps[0].adapter == steps[1].adapter
    assert steps[0].metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert steps[0].metrics["tokens_trained"] == sum(len(r.response) for r in rollouts) - 2
    assert steps[0].adapter != step(search, 1, batch, initial).adapter


def test_rollouts_of_another_policy_are_noticed(search: FakeSearch, initial: PolicyRef) -> None:
    batch = search.sample(1, initial)
    rollouts = load_grid(search.store, batch, 1, initial).rollouts
    shifted = {i: {"log_probs": tuple(r.log_probs + 0.05)} for i, r in enumerate(rollouts)}
    record = step(search, 1, changed(search, batch, shifted, initial), initial)
    assert record.metrics["gap_engine_trainer_mean"] == pytest.approx(0.05, abs=1e-4)
    assert any("differ from the trainer's by +0.05" in note for note in record.notes)


# What is refused ----------------------------------------------------------------------------------------------------------
def test_a_batch_of_another_step_or_policy_is_refused(search: FakeSearch, initial: PolicyRef) -> None:
    batch = search.sample(1, initial)
    with pytest.raises(IncompleteGrid, match="batch is of step 1 under policy version 0, to be trained is step 2"):
        step(search, 2, batch, initial)
    with pytest.raises(IncompleteGrid, match="sampled from"):
        step(search, 1, batch, initial.model_copy(update={"name": "somebody-else"}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask": (1,)}, "1 mask for"),
        ({"log_probs": (-1.0, -2.0)}, "2 log_probs for"),
        ({"at": Coordinate(step=1, group=9, rollout=9)}, "group 9"),
    ],
)
def test_records_that_contradict_themselves_are_refused(
    search: FakeSearch, initial: PolicyRef, fields: dict[str, Any], message: str
) -> None:
    batch = changed(search, search.sample(1, initial), {1: fields}, initial)
    with pytest.raises(InputError, match=message):
        step(search, 1, batch, initial)


def test_groups_of_unequal_size_are_refused(search: FakeSearch, initial: PolicyRef) -> None:
    document = search.store.load(Batch, search.sample(1, initial))
    batch = search.store.put(document.model_copy(update={"rows": document.rows[:-1]}))
    with pytest.raises(IncompleteGrid, match=r"groups of \[3, 4\] rollouts"):
        step(search, 1, batch, initial)


class MeddlingBackend(TorchBackend):
    """Writes one base weight while it steps."""

    def apply(self, optimizer: Any) -> None:
        super().apply(optimizer)
        with torch.no_grad():
            next(p for n, p in self.model.named_parameters() if ".lora_" not in n).view(-1)[0] += 1


class StuckBackend(TorchBackend):
    """Takes no step."""

    def apply(self, optimizer: Any) -> None:
        super().apply(optimizer.model_copy(update={"learning_rate": 0.0}))


class DeafBackend(TorchBackend):
    """Loses its gradients."""

    def accumulate(self, sequences: Any, gradient_of: Any) -> Any:
        return super().accumulate(sequences, lambda i, lp: 0.0 * gradient_of(i, lp))


class OverflowingBackend(TorchBackend):
    def accumulate(self, sequences: Any, gradient_of: Any) -> Any:
        return super().accumulate(sequences, lambda i, lp: np.inf * gradient_of(i, lp))


class WideBackend(TorchBackend):
    """Trains more than the adapter."""

    def load(self, state: Any) -> None:
        super().load(state)
        next(p for n, p in self.model.named_parameters() if "norm" in n).requires_grad_(True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (MeddlingBackend, "frozen base weights changed"),
        (StuckBackend, "no lora_B moved"),
        (DeafBackend, "gradient norm 0 although"),
        (OverflowingBackend, "gradient norm (nan|inf)"),
        (WideBackend, "trainable must be the adapter"),
    ],
)
def test_a_step_that_went_wrong_stores_no_record(
    search: FakeSearch, initial: PolicyRef, kind: type[TorchBackend], message: str
) -> None:
    batch = search.sample(1, initial)
    broken = Trainer(search.store.blobs, lambda _: search.folder, kind, ticks())
    with pytest.raises(TrainCheckFailed, match=message):
        broken.train(search.request(1, batch, initial))
    assert search.store.find(search.store.step_key(1, "train")) is None


def test_an_adapter_of_another_rank_is_refused(search: FakeSearch, initial: PolicyRef) -> None:
    batch = search.sample(1, initial)
    other = search.spec.model_copy(
        update={"request": search.spec.request.model_copy(update={"lora": search.spec.request.lora.model_copy(update={"rank": 8})})}
    )
    with pytest.raises(InputError, match="r 4 instead of 8"):
        train_step(
            search.store,
            other,
            StepInputs(1, batch, initial),
            TorchBackend(search.folder, other.request.lora),
            resident=False,
            clock=ticks(),
        )


def test_another_model_than_the_runs_is_refused(search: FakeSearch, initial: PolicyRef, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=5)
    wrong = Trainer(search.store.blobs, lambda _: other, TorchBackend, ticks())
    with pytest.raises(InputError, match="was opened with"):
        wrong.train(search.request(1, search.sample(1, initial), initial))


# Once ---------------------------------------------------------------------------------------------------------------------
def test_a_step_is_trained_once_and_named_by_its_content(search: FakeSearch, initial: PolicyRef) -> None:
    request = search.request(1, search.sample(1, initial), initial)
    first = trainer(search).train(request)

    def never(*_: Any) -> TorchBackend:
        raise AssertionError("the model was loaded for a step that is done")

    again = Trainer(search.store.blobs, lambda _: search.folder, never, ticks()).train(request)
    assert again == first
    assert first.policy.version == 1
    assert first.policy.name == f"{search.spec.identity[:8]}-v0001-{first.policy.adapter[:12]}"
    assert first.kl == search.store.load(TrainRecord, first.record).metrics["kl_policy_base"]


def test_other_inputs_for_a_trained_step_are_a_conflict(search: FakeSearch, initial: PolicyRef) -> None:
    one = trainer(search)
    one.train(search.request(1, search.sample(1, initial), initial))
    with pytest.raises(TrainConflict, match="Two histories share this run id"):
        one.train(search.request(1, search.sample(1, initial, seed=1), initial))


def test_the_loser_of_a_race_returns_the_winners_record(
    search: FakeSearch, initial: PolicyRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainers compute the same step; the second one's record differs in its seconds and must be thrown away."""
    request = search.request(1, search.sample(1, initial), initial)
    real = stepping.train_step
    winner: list[Any] = []
    calls = 0

    def overtaken(*args: Any, **kwargs: Any) -> TrainRecord:
        nonlocal calls
        calls += 1
        mine = float(calls)
        record = real(*args, **kwargs)
        if calls == 1:  # the other trainer's own call goes straight through
            winner.append(trainer(search).train(request))
        return record.model_copy(update={"metrics": {**record.metrics, "seconds_load": mine}})

    monkeypatch.setattr(training, "train_step", overtaken)
    loser = trainer(search)
    answer = loser.train(request)
    assert answer == winner[0]
    assert search.store.load(TrainRecord, answer.record).metrics["seconds_load"] == 2.0
    # Both made the same checkpoint, so the loser may go on from memory; its next step must equal a fresh trainer's.
    monkeypatch.setattr(training, "train_step", real)
    second = search.request(2, search.sample(2, answer.policy), answer.policy)
    fresh = step(search, 2, second.batch, answer.policy)
    assert loser.train(second).policy.checkpoint == fresh.checkpoint


def test_a_failed_step_leaves_nothing_to_go_on_from(
    search: FakeSearch, initial: PolicyRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash after the optimizer step: the state in memory is half a step ahead and must be loaded anew."""
    one = trainer(search)
    policy = one.train(search.request(1, search.sample(1, initial), initial)).policy
    request = search.request(2, search.sample(2, policy), policy)

    def crash(*_: Any) -> Iterator[None]:
        raise OSError("disk full")

    monkeypatch.setattr(stepping, "write_state", crash)
    with pytest.raises(OSError, match="disk full"):
        one.train(request)
    monkeypatch.undo()
    assert one.train(request).policy.checkpoint == step(search, 2, request.batch, policy).checkpoint


def test_the_checkpoint_is_written_while_evidence_is_made(
    search: FakeSearch, initial: PolicyRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, scored = threading.Event(), threading.Event()
    met = []

    def write(*arguments: Any) -> Any:
        began.set()
        met.append(scored.wait(10))
        return write_state(*arguments)

    def score(*arguments: Any) -> Any:
        met.append(began.wait(10))
        scored.set()
        return collect(*arguments)

    monkeypatch.setattr(stepping, "write_state", write)
    monkeypatch.setattr(stepping, "collect", score)
    step(search, 1, search.sample(1, initial), initial)
    assert met == [True, True]


def test_one_step_at_a_time(search: FakeSearch, initial: PolicyRef) -> None:
    """Two requests for one step in one process: the second waits and finds the record instead of computing beside the first."""
    one = trainer(search)
    request = search.request(1, search.sample(1, initial), initial)
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(one.train(request))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 2
    assert answers[0] == answers[1]


# Evidence -----------------------------------------------------------------------------------------------------------------
def test_evidence_spans_the_groups_and_keeps_sequences_whole() -> None:
    def rollout(group: int, number: int, size: int) -> GridRollout:
        at = Coordinate(step=1, group=group, rollout=number)
        return GridRollout(at, "0" * 64, (1, 2), tuple(range(3, 1 + size)), np.zeros(size - 2), np.ones(size - 2), 0.0)

    grid = Grid(tuple(tuple(rollout(g, r, 10 * (r + 1)) for r in range(3)) for g in range(2)))
    chosen = choose_sequences(grid, limit=65)
    assert [len(s.tokens) for s in chosen] == [10, 10, 20, 20]
    assert choose_sequences(grid, limit=7) == [ScoredSequence(grid.groups[0][0].tokens[:7], 1)]


@pytest.mark.parametrize(("scale", "stages"), [(1e-4, 3), (10.0, 1)])
def test_evidence_grows_until_the_step_shows_through_noise(
    search: FakeSearch, initial: PolicyRef, monkeypatch: pytest.MonkeyPatch, scale: float, stages: int
) -> None:
    """A small step takes all that there is, a large one the first stage; the back-end ends with the new state either way."""
    monkeypatch.setattr(evidence, "FEWEST_TOKENS", 60)
    backend = search.backend
    before = read_state(search.store, initial.checkpoint)
    rng = np.random.default_rng(0)
    after = TrainerState(
        {k: v + np.float32(scale) * rng.standard_normal(v.shape).astype(np.float32) for k, v in before.adapter.items()}
    )
    backend.load(after)
    sequences = [ScoredSequence(tuple(int(t) for t in rng.integers(0, 64, 20)), 1) for _ in range(12)]
    found = collect(backend, before, after, sequences)
    assert len(found.sequences) == {1: 3, 3: 12}[stages]
    for key, value in backend.state().adapter.items():
        np.testing.assert_array_equal(value, after.adapter[key])
    for new, tokens in zip(found.plain.new, found.sequences, strict=True):
        np.testing.assert_allclose(new, backend.log_probs([tokens], adapter=True)[0], atol=1e-4)
    assert found.update_rms > 0
    assert found.amplified.is_enough == (stages == 1)
    assert found.amplification == (64 if stages == 3 else 1)
    # Against a trained reference the base is scored by itself.
    reverse = collect(backend, after, before, sequences)
    for found_row, row in zip(reverse.plain.initial, reverse.plain.new, strict=True):
        np.testing.assert_array_equal(found_row, row)


@pytest.mark.parametrize(("drift", "factor"), [(0.0, 1), (1e-6, 64), (0.03, 16), (0.1249, 4), (0.125, 2), (0.25, 1), (3.0, 1)])
def test_amplification_brings_small_adapters_to_where_bfloat16_serves_them(drift: float, factor: float) -> None:
    assert evidence.amplification(drift) == factor
