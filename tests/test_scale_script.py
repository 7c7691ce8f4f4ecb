"""The measurement of what orchestration costs: its parts that do nothing, its definitions, and the command at a tiny size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from activities.blobs import Blobs, LocalStore, MissingKey
from activities.train.backend import ScoredSequence, TrainerState
from scripts.scale.arithmetic import log_probs, strength_of
from scripts.scale.counting import CountingStore
from scripts.scale.engine import NoOpEngine
from scripts.scale.records import Measurement, Requests, Step, cpu_ms, orchestration_ms, read, requests_per_rollout, wall_ms, write
from scripts.scale.tables import tables
from scripts.scale.trainer import NoOpBackend
from workers.settings import BUILT_IN_PROPOSERS
from workflows.contracts.request import LoraSettings, OptimizerSettings

ROOT = Path(__file__).parent.parent


def test_log_probs_move_with_strength_alone_and_are_log_probs() -> None:
    tokens = list(range(700)) * 3
    frozen, moved = log_probs(tokens, 1, 0.0), log_probs(tokens, 1, 0.5)
    assert frozen.shape == (len(tokens) - 1,)
    assert max(frozen.max(), moved.max(), log_probs(tokens, 1, 2.0).max()) < 0, "amplified adapters included"
    assert np.allclose(log_probs(tokens, 1000, 0.5), moved[999:]), "the same wherever the scoring begins"
    one, two = log_probs(tokens, 1, 0.25) - frozen, moved - frozen
    assert np.allclose(two, 2 * one, atol=1e-6)
    assert np.sqrt(np.mean(np.square(two))) == pytest.approx(0.5 / 3**0.5, rel=0.05)


def test_the_back_end_takes_steps_that_the_engine_would_see() -> None:
    backend = NoOpBackend(Path("nowhere"), LoraSettings(rank=1))
    key = "base_model.model.q_proj.lora_B.weight"
    start = {key: np.zeros((2, 1), np.float32), key.replace("lora_B", "lora_A"): np.ones((1, 2), np.float32)}
    backend.load(TrainerState(adapter=start))
    sequence = ScoredSequence(tuple(range(40)), 10)
    (before,) = backend.log_probs([sequence], adapter=True)
    assert (before == backend.log_probs([sequence], adapter=False)[0]).all(), "B = 0 is the frozen base"
    backend.accumulate([sequence, sequence], lambda i, values: np.full_like(values, i + 1.0))
    assert backend.gradient_norm() == pytest.approx((30 * 1 + 30 * 4) ** 0.5)
    backend.apply(OptimizerSettings())
    after = backend.state()
    assert after.steps == 1
    assert after.exp_avg.keys() == after.adapter.keys() == start.keys()
    assert strength_of(start) == 0, "what was loaded is a copy"
    assert (backend.log_probs([sequence], adapter=True)[0] == log_probs(sequence.tokens, 10, strength_of(after.adapter))).all()
    assert (backend.log_probs([sequence], adapter=True)[0] != before).any()


def test_every_answer_is_a_program_of_its_own_that_rises_with_the_version() -> None:
    engine = NoOpEngine(BUILT_IN_PROPOSERS / "packing", 64)
    engine._adapters = {"12345678-v0003-abc": ("", 0.03)}
    params = {"max_new_tokens": 64, "sampling_seed": 2**30, "stop_token_ids": [1]}
    answer = engine._answer([5, 6, 7], "12345678-v0003-abc", params, scored=False)
    other = engine._answer([5, 6, 7], "12345678-v0003-abc", params | {"sampling_seed": 1}, scored=False)
    assert answer["text"].endswith("\n```python\ndef run():\n    return 3.500000000\n```")
    assert other["text"].endswith("return 3.000000000\n```")
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) == 64
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    scored = engine._answer([5, 6, 7], None, params | {"max_new_tokens": 0}, scored=True)
    assert [entry[1] for entry in scored["meta_info"]["input_token_logprobs"]] == [5, 6, 7]
    assert scored["output_ids"] == []


def test_requests_to_the_store_are_counted_by_method_and_sort(tmp_path: Path) -> None:
    store = CountingStore(LocalStore(tmp_path))
    digest = Blobs(store).put(b"12345")
    assert Blobs(store).get(digest) == b"12345"
    assert store.create("runs/r/open", b"x")
    assert not store.create("runs/r/open", b"y")
    with pytest.raises(MissingKey):
        store.get("fleet/engines/a")
    assert list(store.keys("runs/")) == ["runs/r/open"]
    counts = {name: (c.calls, c.bytes) for name, c in store.counts().items()}
    assert counts == {
        "get blob": (2, 5),  # `put` looks first
        "create blob": (1, 5),
        "create entry": (2, 2),
        "get fleet": (1, 0),
        "list entry": (1, 0),
    }


def _step(number: int, wall: float, cpu: float) -> Step:
    return Step(
        step=number,
        wall_seconds=wall,
        between_seconds=0.5,
        phase_seconds={"select": 0.5, "commit": wall - 0.5},
        work_seconds={"engine": 1.0, "trainer": 0.25, "judge": 0.25},
        cpu_seconds={"control": cpu},
        memory_bytes={"control": 100 << 20},
        open_files={"control": 10},
        threads={"control": 5},
        other_cpu_seconds=1.0,
        load=1.0,
        requests={"judge": {"create entry": Requests(calls=4, bytes=40, seconds=0.1)}},
        histories={},
        document_bytes={"archive": 1024},
        database_bytes=1 << 20,
        archive_nodes=3,
    )


def test_the_numbers_are_what_the_definitions_say(tmp_path: Path) -> None:
    m = Measurement(
        command="", hardware="", began="", groups=2, rollouts=2, train=True, response_tokens=64, judge_slots=1,
        judge_microseconds=1.0, opening_seconds=1.0, steps=(_step(1, 9.0, 1.0), _step(2, 3.0, 0.5), _step(3, 5.0, 0.25)),
    )  # fmt: skip
    assert wall_ms(m, m.steps[1]) == pytest.approx(875)
    assert orchestration_ms(m, m.steps[1]) == pytest.approx(500)
    assert cpu_ms(m, m.steps[1:], "control") == pytest.approx(93.75)
    assert requests_per_rollout(m, m.steps) == {"judge": {"create entry": pytest.approx(1.0)}}
    write(m, tmp_path / "out" / "m.json")
    assert read(tmp_path / "out" / "m.json") == m
    text = "\n".join(tables([m]))
    assert "| orchestration, ms per rollout (median; least to most) | 750.0; 500.0 to 1000.0 |" in text


@pytest.mark.slow
def test_the_command_measures_a_tiny_run(tmp_path: Path) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    size = ["--groups", "2", "--rollouts", "4", "--steps", "2"]
    command = [sys.executable, "-m", "scripts.scale", *size, "--home", str(home), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    m = read(out / "2x4x2.json")
    assert m.finished
    assert [s.step for s in m.steps] == [1, 2]
    for step in m.steps:
        assert step.requests["sample"]["create entry"].calls == 8, "each rollout is stored once"
        assert step.requests["judge"]["create entry"].calls == 8
        assert {"engine process", "temporal", "control", "sample", "judge", "train", "engine"} == step.memory_bytes.keys()
        assert {"train", "publish"} <= step.phase_seconds.keys(), "the gate was passed"
        assert step.histories["RolloutGroup"].executions == 2
        assert step.histories["RolloutGroup"].events_most > 4 * 6
    assert m.steps[0].archive_nodes < m.steps[1].archive_nodes, "answers are valid and new"
    assert m.workflow_tasks_lost == 0
    assert m.retried is not None
    assert m.retried.keys() == {"control", "sample", "judge", "train", "engine"}
    assert m.run_history
    assert m.store is not None
    assert m.store.files > 2 * 8 * 5
    assert not home.exists()
    again = subprocess.run(
        [sys.executable, "-m", "scripts.scale.tables", str(out / "2x4x2.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "## 2 x 4 for 2 steps" in again.stdout
    assert again.stdout.strip() in done.stdout


def test_the_command_begins_with_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.scale", "--home", str(tmp_path)]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert "is there already" in refused.stderr
