"""The trainer bench at tiny size on a CPU: the command that a GPU machine runs, its arithmetic and its document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from activities.train.backend import ScoredSequence
from activities.train.fake import make_model
from activities.train.megatron.shape import read_shape
from scripts.gpu.trainer_bench import Work, main


def test_operations_are_counted_by_hand(tmp_path: Path) -> None:
    shape = read_shape(make_model(tmp_path, "qwen2"))
    one_layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64  # q and o, k and v, the three of the MLP
    linear, head, attention = 2 * 10 * 2 * one_layer, 2 * 64 * 32 * 7, 2 * 2 * 32 * 10**2
    work = Work.of(shape, [ScoredSequence(tuple(range(10)), 3)])
    assert work.forward == linear + head + attention
    assert work.forward_backward == 2 * (linear + head) + 3 * attention


@pytest.mark.slow
def test_both_trainers_are_measured_on_the_same_batch(tmp_path: Path) -> None:
    model, out = make_model(tmp_path / "model", "qwen3"), tmp_path / "results" / "bench.json"
    wish = f"--model {model} --out {out} --device cpu --lengths 96 160 --sequences 2 --prompt 32 --rank 4 --matrix 64"
    assert main([*wish.split(), "--tokens-per-micro-batch", "192", "--logits-per-chunk", "4096", "--recompute", "full"]) == 0
    document = json.loads(out.read_text())
    assert document["command"].startswith("python -m scripts.gpu.trainer_bench --model")
    rows = document["results"]["rows"]
    assert [(row["trainer"], row["length"]) for row in rows] == [
        (trainer, length) for trainer in ("megatron", "torch") for length in (96, 160)
    ]
    for row in rows:
        tokens = 2 * row["length"]
        assert row["forward"]["tokens_per_second"] == pytest.approx(tokens / row["forward_seconds"], rel=1e-3)
        seconds = row["forward_seconds"] + row["forward_backward_seconds"]
        assert row["all"]["tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-3)
        assert row["all"]["share_of_ceiling"] > 0
        assert row["gap_to_first_trainer"]["max"] < 1e-4
    assert rows[0]["layers_recomputed"] == 2
