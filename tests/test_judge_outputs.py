"""Hostile and honest answers through the real sandbox and the real judge: each gets the verdict that it must get (spec tasks 1)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from activities.judge.sandbox import Sandbox, open_sandbox
from activities.judge.single import judge_file
from console.main import app
from console.output import OK, VERIFICATION_FAILED
from tasks.registry import load_task
from tests.test_tasks_starts import without_environment

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "attacks" / "outputs.json").read_text())
CASES = {f"{case['task']} {case['name']}": case for case in DATA["cases"]}
TASKS = ("circle_packing_26", "circle_packing_32", "erdos_min_overlap", "ac1", "ac2")

RENAMED = "\nconstruct_function = propose_candidate\n"
"""The programs of the first inequality, as the second one calls them."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as opened:
        yield opened


@pytest.fixture(scope="module")
def task_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real tasks, whose programs run in this interpreter: it has NumPy, which is all that these programs import."""
    directory = tmp_path_factory.mktemp("tasks")
    for name in TASKS:
        without_environment(load_task(name), directory)
    return directory


def judged(task: str, source: str, sandbox: Sandbox, task_directory: Path, folder: Path) -> dict[str, Any]:
    program = folder / "program.py"
    program.write_text(source)
    return judge_file(task, program, sandbox=sandbox, wall_seconds=20, task_directories=(task_directory,))


def check_invalid(report: dict[str, Any]) -> None:
    assert not report["valid"], report
    assert (report["score"], report["exact"], report["value"], report["reward"]) == (None, None, None, 0.0)
    assert report["reason"]


def check_valid(report: dict[str, Any], low: float, high: float) -> None:
    assert report["valid"], report
    assert low <= report["score"] <= high
    if load_task(report["task"]).direction == "maximize":
        assert report["reward"] == report["value"] == report["score"]
    else:
        assert (report["reward"], report["value"]) == (1 / report["score"], -report["score"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_answer_gets_its_verdict(name: str, sandbox: Sandbox, task_directory: Path, tmp_path: Path) -> None:
    case = CASES[name]
    report = judged(case["task"], DATA["preludes"][case["task"]] + case["program"], sandbox, task_directory, tmp_path)
    if case["expect"] is None:
        check_invalid(report)
    elif case["expect"] != "any":
        check_valid(report, *case["expect"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["task"] == "ac1"])
def test_the_second_inequality_takes_and_refuses_the_same(
    name: str, sandbox: Sandbox, task_directory: Path, tmp_path: Path
) -> None:
    case = CASES[name]
    report = judged("ac2", case["program"] + RENAMED, sandbox, task_directory, tmp_path)
    if case["expect"] is None:
        check_invalid(report)
    else:
        check_valid(report, 0, 2 / 3)  # constants are worth 2/3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["circle_packing_26 honest lists", "circle_packing_26 honest float32", "circle_packing_26 27"])
def test_another_number_of_circles_is_another_task(name: str, sandbox: Sandbox, task_directory: Path, tmp_path: Path) -> None:
    case = CASES[name]
    report = judged("circle_packing_32", DATA["preludes"][case["task"]] + case["program"], sandbox, task_directory, tmp_path)
    check_invalid(report)
    assert "exactly 32" in report["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["erdos_min_overlap reported low", "erdos_min_overlap nan", "ac1 honest const", "ac1 zeros"])
def test_the_command_says_the_same(name: str, task_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    program = tmp_path / "program.py"
    program.write_text(DATA["preludes"][case["task"]] + case["program"])
    monkeypatch.setenv("TTTD_HOME", str(tmp_path / "home"))
    found = CliRunner().invoke(app, ["judge", case["task"], str(program), "--task-dir", str(task_directory), "--json"])
    report = json.loads(found.stdout)
    if case["expect"] is None:
        assert found.exit_code == VERIFICATION_FAILED
        check_invalid(report)
    else:
        assert found.exit_code == OK
        check_valid(report, *case["expect"])
