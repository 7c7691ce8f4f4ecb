"""`tttd plan`: its formulas reproduce what was measured, and it says what does not fit and which setting to change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from activities.errors import InputError
from activities.models import linear_shapes
from console.plan import formulas as f
from console.plan.hardware import GPUS
from console.plan.measured import FIGURES, TOLERANCE, table
from console.plan.planning import Assumptions, Machine, Plan, default_machine, make_plan
from console.plan.shapes import KNOWN, known_shape, read_shape, shape_of
from workflows.contracts.request import RunRequest, parse_request

ROOT = Path(__file__).parent.parent
H200 = GPUS["H200"]
QWEN3_8B, CODER = KNOWN["Qwen/Qwen3-8B"], KNOWN["Qwen/Qwen2.5-Coder-0.5B-Instruct"]
ASSUMED = Assumptions(prompt_tokens=1000, mean_tokens=12_000, judge_slots=64, judge_seconds=60, judge_limit_seconds=120)


def paper(**changes: object) -> RunRequest:
    return parse_request({"task": "any", "profile": "paper"} | changes)


def planned(machine: Machine | None = None, gpus: int = 2, assumed: Assumptions = ASSUMED, **changes: object) -> Plan:
    request = paper(**changes)
    return make_plan(request, QWEN3_8B, machine or default_machine(H200, gpus, request, QWEN3_8B), assumed)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.what)
def test_formulas_lie_near_what_was_measured(figure: object) -> None:
    assert abs(figure.error) <= TOLERANCE, f"{figure.planned:,.1f} planned, {figure.measured:,.1f} measured"  # type: ignore[attr-defined]


def test_the_table_in_the_documentation_is_the_command_s() -> None:
    assert table() in (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-8B", 8.19), ("Qwen2.5-Coder-0.5B", 0.494), ("Qwen2.5-Coder-1.5B", 1.54), ("Qwen2.5-Coder-7B-Instruct", 7.62)],
)
def test_known_models_have_their_published_size(name: str, billions: float) -> None:
    shape = known_shape(name)
    assert shape is not None
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_shape_agrees_with_the_weights_on_disk() -> None:
    """The demo's proposer: what the plan counts for LoRA is what the weight files hold."""
    folder = ROOT / "tasks" / "proposers" / "packing"
    shape = read_shape(folder)
    assert shape.lora_parameters(8) == 8 * sum(out + into for out, into in linear_shapes(folder).values())


def test_what_is_no_dense_model_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"num_experts=128.*dense"):
        shape_of({"num_experts": 128}, "moe")
    with pytest.raises(InputError, match="num_attention_heads"):
        shape_of({}, "empty")


def test_the_published_setting_fits_on_two_gpus() -> None:
    plan = planned()
    assert plan.fits
    assert plan.trainer is not None
    assert plan.trainer.recompute, "32k tokens of kept activations are 160 GB"
    assert plan.trainer.peak_gb < plan.trainer.available_gb
    assert plan.phases.base_log_probs == 0, "scored while others sample"
    assert plan.gpu_hours == pytest.approx(2 * 50 * plan.step_seconds / 3600)


def test_one_gpu_is_shared_and_both_halves_fit() -> None:
    plan = planned(gpus=1)
    assert plan.fits
    assert plan.trainer is not None
    assert plan.phases.base_log_probs > 0, "it takes turns with sampling"
    taken = plan.engine.weights_gb + plan.engine.kv_gb + plan.trainer.peak_gb
    assert taken < H200.memory_bytes / 1e9


def test_a_full_engine_beside_a_trainer_does_not_fit_and_the_setting_is_named() -> None:
    request = paper()
    machine = replace(default_machine(H200, 1, request, QWEN3_8B), memory_fraction=0.85)
    plan = planned(machine)
    assert not plan.fits
    assert any("engine_memory_fraction down" in problem.change for problem in plan.problems)


def test_a_small_gpu_is_too_small_and_more_of_them_are_not() -> None:
    request, gpu = paper(), GPUS["RTX4090"]
    small = make_plan(request, QWEN3_8B, default_machine(gpu, 2, request, QWEN3_8B), ASSUMED)
    assert not small.fits
    changes = " ".join(problem.change for problem in small.problems)
    assert "engine_gpus" in changes
    assert "tensor parallel" in changes
    large = make_plan(request, QWEN3_8B, default_machine(gpu, 8, request, QWEN3_8B), ASSUMED)
    assert default_machine(gpu, 8, request, QWEN3_8B).engine_tensor > 1
    assert large.fits


def test_a_context_beyond_the_model_is_named() -> None:
    plan = planned(sampling={"context_tokens": 65_536})
    assert any("sampling.context_tokens=40960" in problem.change for problem in plan.problems)


def test_more_gpus_are_faster_and_slow_judges_are_named() -> None:
    two, eight = planned(gpus=2), planned(gpus=8)
    assert eight.phases.sample < two.phases.sample / 3
    assert eight.phases.train < two.phases.train / 3
    slow = planned(gpus=8, assumed=replace(ASSUMED, judge_slots=4))
    assert slow.phases.sample_and_judge == slow.phases.judge_alone
    assert any(problem.level == "slow" and "judge_slots" in problem.change for problem in slow.problems)


def test_without_training_all_gpus_sample() -> None:
    plan = planned(train="off")
    assert plan.trainer is None
    assert plan.engine.engines == 2
    assert (plan.phases.train, plan.phases.publish) == (0, 0)


def test_siblings_share_their_prompt() -> None:
    shared = f.sampling(QWEN3_8B, H200, f.Load(512, 8, 4096, 500, 500), 500_000, adapter=True)
    alone = f.sampling(QWEN3_8B, H200, f.Load(512, 512, 4096, 500, 500), 500_000, adapter=True)
    assert shared.prefill_seconds == pytest.approx(alone.prefill_seconds / 64)
    assert shared.rows_at_once > 4 * alone.rows_at_once


def test_longer_is_never_cheaper() -> None:
    times = [f.token_seconds(QWEN3_8B, H200, n) for n in (1000, 10_000, 100_000)]
    assert times[0].forward < times[1].forward < times[2].forward
    assert all(t.forward < t.kept < t.recomputed for t in times)
    peaks = [f.trainer_bytes(CODER, 32, n, recompute=r).total for n in (1000, 10_000) for r in (True, False)]
    assert peaks == sorted(peaks)
    halved = f.trainer_bytes(QWEN3_8B, 32, 8192, recompute=True, tensor=2)
    assert halved.weights == f.trainer_bytes(QWEN3_8B, 32, 8192, recompute=True).weights / 2


# The command ----------------------------------------------------------------------------------------------------------------
def tttd(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "console.main", "plan", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TTTD_")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=ROOT)


def test_the_command_plans_a_task_as_json() -> None:
    done = tttd("--task", "circle_packing_26", "--model", "Qwen2.5-Coder-0.5B", "--gpus", "1", "--json", "--mean-tokens", "400")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["model"], plan["gpus"], plan["rollouts"]) == ("Qwen/Qwen2.5-Coder-0.5B-Instruct", 1, 512)
    assert plan["mean_tokens"] == 400
    assert 200 < plan["prompt_tokens"] < 2000


def test_the_command_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv[1:] = ['plan']; import console.main as m\n"
        "try: m.app()\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'heavy imports'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "GPU-hours" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "H9000"], "--gpu 'H9000' is not one of H200"),
        (["--model", "nowhere/at-all"], "nowhere/at-all.*known without files are.*Qwen3-8B"),
        (["--task", "no_such_task"], "no task 'no_such_task'"),
        (["--set", "search.groups=0"], "search.groups"),
        (["--engines", "2"], "leave none to the trainer"),
        (["--config", "/nowhere/config.json"], "cannot be read as a model's config.json"),
    ],
)
def test_mistakes_are_named(arguments: list[str], says: str) -> None:
    import re

    done = tttd(*arguments)
    assert done.returncode == 2
    assert re.search(says, done.stderr), done.stderr


def test_a_config_file_is_enough_and_what_does_not_fit_ends_with_1(tmp_path: Path) -> None:
    config = {
        "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = tttd("--config", str(tmp_path / "config.json"), "--gpus", "2")
    assert done.returncode == 1, done.stderr
    assert "70.55 B parameters" in done.stdout
    assert "DOES NOT FIT" in done.stdout
