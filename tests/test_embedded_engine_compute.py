"""Scoring and decoding against plain transformers + PEFT, without HTTP: numbers, batches, seeds, rows that come and go."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from scipy import stats
from transformers import AutoModelForCausalLM

from workers.engine.embedded.adapters import Adapter, read_adapter
from workers.engine.embedded.cache import RowCache
from workers.engine.embedded.decoding import DecodeSession
from workers.engine.embedded.jobs import Job
from workers.engine.embedded.model import CausalModel, load_model
from workers.engine.embedded.sampling import Choice, Draws
from workers.engine.embedded.scoring import batches, score
from workers.engine.embedded.tiny import make_tiny_adapter, make_tiny_model

torch.set_num_threads(1)

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "attention": {"modules": ("q_proj", "v_proj"), "r": 8, "lora_alpha": 4},
    "rslora": {"use_rslora": True, "r": 3, "lora_alpha": 5},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 32}, "seed": 9},
    "head": {"modules": ("lm_head", "down_proj"), "layers_to_transform": None},
}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load_model(folder)


def job(prompt: Sequence[int], *, new: int = 0, seed: int = 0, adapter: Adapter | None = None, score_from: int = -1) -> Job:
    return Job(
        prompt=list(prompt),
        choice=Choice(),
        draws=Draws(seed),
        max_new_tokens=new,
        stop_ids=frozenset(),
        adapter=adapter,
        alone=False,
        score_from=score_from,
        on_done=lambda _: None,
    )


def decode(model: CausalModel, jobs: list[Job], adapter: Adapter | None = None) -> None:
    session = DecodeSession(model, adapter, 64)
    session.admit(jobs)
    while session.jobs:
        session.step()


def random_prompts(count: int, low: int = 2, high: int = 40, seed: int = 0) -> list[list[int]]:
    r = random.Random(seed)
    return [[r.randrange(64) for _ in range(r.randint(low, high))] for _ in range(count)]


def reference(folder: Path, adapter: Path | None, ids: Sequence[int]) -> torch.Tensor:
    """Log-probs of every token but the first, from a forward pass of the sequence alone."""
    network: Any = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        network = PeftModel.from_pretrained(network, adapter)
    with torch.no_grad():
        logits = network.eval()(input_ids=torch.tensor([list(ids)])).logits[0]
    return torch.log_softmax(logits.float(), -1)[:-1].gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0]


@pytest.mark.parametrize("kind", ADAPTERS)
def test_log_probs_equal_transformers_with_peft(kind: str, folder: Path, model: CausalModel, tmp_path: Path) -> None:
    path = make_tiny_adapter(tmp_path / kind, folder, **ADAPTERS[kind])
    adapter = read_adapter(kind, path, model.hooks.linears)
    prompts = random_prompts(6)
    sampled = [job(p, new=12, seed=i, adapter=adapter) for i, p in enumerate(prompts)]
    decode(model, sampled, adapter)
    scored = [job([*s.prompt, *s.output_ids], adapter=adapter, score_from=0) for s in sampled]
    score(model, scored)
    for one, whole in zip(sampled, scored, strict=True):
        wanted = reference(folder, path, whole.prompt).numpy()
        assert np.abs(np.array(whole.input_log_probs) - wanted).max() < 1e-5
        assert np.abs(np.array(one.output_log_probs) - wanted[-12:]).max() < 1e-5
    base = reference(folder, None, scored[0].prompt).numpy()
    assert np.abs(np.array(scored[0].input_log_probs) - base).max() > 1e-2  # the adapter does something


ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", "bfloat16", 0.05),
        pytest.param("cuda", "bfloat16", 0.05, marks=ON_A_GPU),
        pytest.param("cuda", "float32", 1e-4, marks=ON_A_GPU),
    ],
)
def test_other_precisions_and_devices_agree_with_peft(
    device: str, dtype: str, tolerance: float, folder: Path, tmp_path: Path
) -> None:
    path = make_tiny_adapter(tmp_path / "a", folder)
    model = load_model(folder, dtype, device)
    adapter = read_adapter("a", path, model.hooks.linears)
    sampled = [job(p, new=10, seed=i, adapter=adapter) for i, p in enumerate(random_prompts(4))]
    decode(model, sampled, adapter)
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    network = PeftModel.from_pretrained(network, path).eval()
    for one in sampled:
        ids = torch.tensor([[*one.prompt, *one.output_ids]], device=device)
        with torch.no_grad():
            logits = network(input_ids=ids).logits[0, -11:-1].float()
        wanted = torch.log_softmax(logits, -1).gather(1, ids[0, -10:, None])[:, 0].cpu().numpy()
        assert np.abs(np.array(one.output_log_probs) - wanted).max() < tolerance


def test_the_base_model_is_untouched_by_adapters(folder: Path, model: CausalModel, tmp_path: Path) -> None:
    adapter = read_adapter("a", make_tiny_adapter(tmp_path / "a", folder), model.hooks.linears)
    (prompt,) = random_prompts(1)
    before, with_adapter, after = (job(prompt, score_from=0, adapter=a) for a in (None, adapter, None))
    for one in (before, with_adapter, after):
        score(model, [one])
    assert before.input_log_probs == after.input_log_probs
    assert before.input_log_probs != with_adapter.input_log_probs


def test_padding_and_neighbours_change_nothing_beyond_rounding(model: CausalModel) -> None:
    prompts = random_prompts(9, low=1, high=60, seed=4)
    together = [job(p, new=20, seed=i) for i, p in enumerate(prompts)]
    decode(model, together)
    for i, prompt in enumerate(prompts):
        alone = job(prompt, new=20, seed=i)
        decode(model, [alone])
        assert alone.output_ids == together[i].output_ids
        assert np.allclose(alone.output_log_probs, together[i].output_log_probs, atol=1e-5)


def test_seeds_decide_whatever_the_batch(model: CausalModel) -> None:
    (prompt,) = random_prompts(1, seed=8)
    alone = [job(prompt, new=16, seed=s) for s in (1, 2)]
    for one in alone:
        decode(model, [one])
    crowd = [job(p, new=16, seed=100 + i) for i, p in enumerate(random_prompts(5, seed=9))]
    again = [job(prompt, new=16, seed=s) for s in (2, 1)]
    decode(model, [again[0], *crowd, again[1]])
    assert [again[1].output_ids, again[0].output_ids] == [one.output_ids for one in alone]
    assert alone[0].output_ids != alone[1].output_ids


def test_rows_join_and_leave_a_running_session(model: CausalModel) -> None:
    """Late, longer and shorter newcomers, rows of every length, a cancelled row: each result is that of the row alone."""
    prompts = random_prompts(12, low=1, high=120, seed=5)
    lengths = [3, 40, 7, 22, 1, 60, 9, 30, 12, 5, 18, 50]
    jobs = [job(p, new=n, seed=i) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
    session = DecodeSession(model, None, 64)
    waiting, finished = list(jobs), []
    finished += session.admit(waiting[:3])
    del waiting[:3]
    cancelled = job([1, 2, 3], new=50)
    session.admit([cancelled])
    while session.jobs or waiting:
        finished += session.step()
        if len(cancelled.output_ids) > 5:
            cancelled.cancelled = True
        if waiting and len(finished) % 2 == 1:
            finished += session.admit([waiting.pop(), waiting.pop()] if len(waiting) > 1 else [waiting.pop()])
        elif not session.jobs and waiting:
            finished += session.admit([waiting.pop()])
    assert len(finished) == len(jobs)
    assert cancelled.finish is None
    assert len(cancelled.output_ids) < 10
    for i, one in enumerate(jobs):
        alone = job(prompts[i], new=lengths[i], seed=i)
        decode(model, [alone])
        assert one.output_ids == alone.output_ids
        assert np.allclose(one.output_log_probs, alone.output_log_probs, atol=1e-5)


def test_an_emptied_session_starts_afresh(model: CausalModel) -> None:
    session = DecodeSession(model, None, 8)
    long, short = job(range(40), new=5, seed=1), job([7, 8], new=5, seed=2)
    for one in (long, short):
        session.admit([one])
        while session.jobs:
            session.step()
    alone = job([7, 8], new=5, seed=2)
    decode(model, [alone])
    assert (short.output_ids, short.output_log_probs) == (alone.output_ids, alone.output_log_probs)


def test_stop_tokens_and_lengths(model: CausalModel) -> None:
    free = job([5, 6], new=30, seed=3)
    decode(model, [free])
    stop = free.output_ids[10]
    first = free.output_ids.index(stop)
    stopped = job([5, 6], new=30, seed=3)
    stopped.stop_ids = frozenset({stop})
    decode(model, [stopped])
    assert stopped.output_ids == free.output_ids[: first + 1]
    assert (free.finish.matched, free.finish.length) == (None, 30)
    assert stopped.finish.matched == stop
    # At the last allowed token the length limit speaks first, as in SGLang.
    limit = job([5, 6], new=first + 1, seed=3)
    limit.stop_ids = frozenset({stop})
    decode(model, [limit])
    assert limit.finish.matched is None


def test_first_token_frequencies_match_the_model(tmp_path: Path) -> None:
    model = load_model(make_tiny_model(tmp_path / "m", vocabulary=16, spread=0.2))
    count = 3000
    jobs = [job([3, 1, 4], new=2, seed=s) for s in range(count)]
    session = DecodeSession(model, None, count)
    session.admit(jobs)
    counts = np.bincount([j.output_ids[0] for j in jobs], minlength=16)
    hidden = model.hidden([[3, 1, 4]])
    expected = torch.softmax(model.logits(hidden[0, -1]), -1).double().numpy() * count
    assert expected.min() > 5
    assert stats.chisquare(counts, expected / expected.sum() * count).pvalue > 1e-3


def test_one_new_token_is_sampled_from_the_scoring_pass(model: CausalModel) -> None:
    prompts = random_prompts(4, seed=2)
    scored = [job(p, new=1, seed=i, score_from=0) for i, p in enumerate(prompts)]
    score(model, scored)
    for i, one in enumerate(scored):
        decoded = job(prompts[i], new=2, seed=i)
        decode(model, [decoded])
        assert one.output_ids == decoded.output_ids[:1]
        assert one.output_log_probs == pytest.approx(decoded.output_log_probs[:1], abs=1e-5)
        assert len(one.input_log_probs) == len(prompts[i]) - 1


def test_scoring_passes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.embedded.scoring.FORWARD_TOKENS", 100)
    jobs = [job([0] * length, score_from=0) for length in (30, 10, 90, 20, 250, 40)]
    passes = list(batches(jobs))
    assert sorted(len(j.prompt) for b in passes for j in b) == [10, 20, 30, 40, 90, 250]
    assert all(len(b) == 1 or len(b) * max(len(j.prompt) for j in b) <= 100 for b in passes)
    for one in jobs:
        one.alone = True
    assert [len(b) for b in batches(jobs)] == [1] * 6


def test_numbers_that_are_not_finite_fail_their_own_job_only(model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = type(model).logits

    def poisoned(self: CausalModel, hidden: torch.Tensor) -> torch.Tensor:
        logits = honest(self, hidden)
        logits[0] = float("nan")
        return logits

    monkeypatch.setattr(type(model), "logits", poisoned)
    jobs = [job([1, 2], new=5, seed=1), job([3, 4, 5], new=5, seed=2)]
    session = DecodeSession(model, None, 8)
    assert session.admit(jobs) == jobs[:1]
    assert "not finite" not in str(jobs[1].error)
    assert jobs[0].error is not None
    assert list(session.jobs) == jobs[1:]


def test_a_dropped_cache_is_freed_at_once() -> None:
    """A reference cycle would keep a batch's keys and values until Python's collector runs: gigabytes after an hour."""
    gc.collect()
    gc.disable()
    try:
        cache = RowCache(rows=2, layers=1)
        keys = torch.zeros(2, 1, 3, 4)
        cache.update(keys, keys, 0)
        layer = weakref.ref(cache.layers[0])
        assert cache.layers[0].key_buffer is not None
        del cache
        assert layer() is None
    finally:
        gc.enable()
