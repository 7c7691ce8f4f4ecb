"""Baselines and polishing: simple solvers run as ordinary programs, and no answer leaves worse than it came."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from activities.errors import InputError
from activities.judge.sandbox import Sandbox, open_sandbox
from activities.judge.single import report
from activities.judge.solving import BASELINE_SECONDS, Solver, polish, solve
from console.cli.polish import polish_lines, polish_report
from console.main import app
from console.output import OK, USAGE, VERIFICATION_FAILED
from tasks.registry import Task, load_task, read_task
from tests.chain import make_task
from tests.test_tasks_starts import THREE, without_environment
from workflows.contracts.base import Outcome

ROOT = Path(__file__).parent.parent
CONSTRUCTIONS = ROOT / "tests" / "data" / "constructions"
SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "judge-verdict.schema.json").read_text())
PROBLEMS = ("erdos_min_overlap", "ac1", "ac2", "circle_packing_26", "circle_packing_32")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as opened:
        yield opened


def with_baseline(directory: Path, program: str | None) -> Task:
    """The packing of 3 circles of `tests/chain.py`, with a solver."""
    folder = make_task(directory)
    if program is not None:
        (folder / "solver.py").write_text(program)
        toml = folder / "task.toml"
        toml.write_text(toml.read_text().replace('entry = "run"', 'entry = "run"\nbaseline = "solver.py"'))
    return read_task(folder)


def construction_of(task: Task, answer: str = THREE) -> Any:
    grade = task.make_judge().grade(answer.encode())
    assert grade.valid, grade.reason
    return grade.construction


SCALED = """
def run(seed, budget_s):
    print(seed, budget_s)
    return parent[:, :2], {factor} * parent[:, 2], 9.0
"""


# Polishing ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("factor", ["0.5", "1.0", "1.25", "3.0"])
def test_polishing_keeps_the_better_of_the_two(factor: str, sandbox: Sandbox, tmp_path: Path) -> None:
    """Radii of 0.2, 0.2 and 0.1 next to the walls: times 1.25 they overlap nothing but leave the square, which is invalid."""
    task = with_baseline(tmp_path, SCALED.format(factor=factor))
    roomy = "[[[0.25, 0.25], [0.75, 0.75], [0.25, 0.75]], [0.2, 0.2, 0.1]]"
    given = construction_of(task, roomy)
    before = task.make_judge().verify(given)
    found = polish(task, Solver(seconds=2, sandbox=sandbox), given)
    assert found.before == before
    assert found.improved is (factor == "1.25")
    assert found.best.exact is not None
    assert before.exact is not None
    assert found.best.exact >= before.exact
    again = task.make_judge().verify(found.best.construction)
    assert (again.valid, again.exact) == (True, found.best.exact)
    lines = polish_lines(task, found)
    assert lines[0].startswith("improved" if found.improved else "no improvement")
    said = polish_report(task, found)
    assert said["improved"] is found.improved
    assert Fraction(said["before"]["exact"]) == before.exact
    assert said["construction"] == found.best.construction


def test_a_gain_that_rounding_hides_is_a_gain(sandbox: Sandbox, tmp_path: Path) -> None:
    """One radius larger by its last bit, 2^-55: the double of the sum is 0.5 as before, the exact value is not."""
    task = with_baseline(tmp_path, "def run():\n    parent[2, 2] += 2.0**-55\n    return parent[:, :2], parent[:, 2]\n")
    dyadic = "[[[0.25, 0.25], [0.75, 0.75], [0.25, 0.75]], [0.1875, 0.1875, 0.125]]"
    found = polish(task, Solver(seconds=2, sandbox=sandbox), construction_of(task, dyadic))
    assert found.after.grade is not None
    assert found.after.grade.score == found.before.score == 0.5
    assert found.improved
    assert found.best.exact == Fraction(1, 2) + Fraction(1, 2**55)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("def run(): raise ValueError('lost')", "crashed: ValueError: lost"),
        ("def run(): return 1", "invalid: the result must be"),
        ("def run(: pass", "crashed: SyntaxError"),
    ],
)
def test_a_solver_that_fails_improves_nothing(program: str, says: str, sandbox: Sandbox, tmp_path: Path) -> None:
    task = with_baseline(tmp_path, program)
    found = polish(task, Solver(seconds=2, sandbox=sandbox), construction_of(task))
    assert not found.improved
    assert found.best == found.before
    assert says in polish_lines(task, found)[0]
    assert polish_report(task, found)["after"] is None


def test_what_cannot_be_polished_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    task = with_baseline(tmp_path, SCALED.format(factor=1))
    with pytest.raises(InputError, match="not valid: not a stored packing"):
        polish(task, Solver(sandbox=sandbox), {"heights": []})
    bare = with_baseline(tmp_path / "bare", None)
    with pytest.raises(InputError, match=r"has no baseline; name a program file"):
        solve(bare, Solver(sandbox=sandbox))
    (task.folder / "solver.py").unlink()
    with pytest.raises(InputError, match=r"solver\.py cannot be read"):
        solve(task, Solver(sandbox=sandbox))


def test_an_optimal_packing_is_not_made_worse(sandbox: Sandbox, tmp_path: Path) -> None:
    """The solver starts from doubles of an answer whose exact value no double has, and cannot reach it again."""
    task = with_baseline(tmp_path, SCALED.format(factor=1))
    third = {"circles": [["1", "1", "1"], ["2", "2", "0"], ["0", "0", "0"]], "denominator": "3"}
    found = polish(task, Solver(seconds=2, sandbox=sandbox), third)
    assert not found.improved
    assert found.best.exact == Fraction(1, 3)
    assert found.after.outcome is Outcome.VALID


# Solving ------------------------------------------------------------------------------------------------------------------------
def test_the_solver_is_told_seed_and_time(sandbox: Sandbox, tmp_path: Path) -> None:
    program = f"def run(seed, budget_s):\n    print(seed, budget_s)\n    return {THREE}\n"
    judgement = solve(with_baseline(tmp_path, program), Solver(seconds=3, seed=12, sandbox=sandbox))
    assert judgement.run is not None
    assert judgement.run.stdout_tail == "12 3\n"
    assert judgement.outcome is Outcome.VALID


def test_default_time_is_a_minute_but_never_more_than_the_task_allows(tmp_path: Path) -> None:
    assert Solver().seconds_for(load_task("erdos_min_overlap")) == BASELINE_SECONDS == 60
    assert Solver().seconds_for(with_baseline(tmp_path, None)) == 5
    assert Solver(seconds=7).seconds_for(load_task("ac1")) == 7


def test_every_python_problem_has_a_baseline_that_takes_the_parents_construction() -> None:
    for name in PROBLEMS:
        task = load_task(name)
        assert f'globals().get("{task.construction_name}")' in (task.baseline_source or "")
        assert f"def {task.entry}(seed=0, budget_s=60.0):" in (task.baseline_source or "")


WORST = {"erdos_min_overlap": 0.4, "ac1": 1.7, "ac2": 0.75, "circle_packing_26": 2.0, "circle_packing_32": 2.2}
"""What a few seconds are sure to beat, even on a busy machine."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_few_seconds_give_a_valid_answer_that_further_seconds_do_not_spoil(name: str, sandbox: Sandbox, tmp_path: Path) -> None:
    task = without_environment(load_task(name), tmp_path)
    verdict = report(task, solve(task, Solver(seconds=10, sandbox=sandbox)))
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(verdict)))
    assert verdict["valid"], verdict["reason"] + verdict["error_tail"]
    assert task.sign * verdict["score"] > task.sign * WORST[name]
    found = polish(task, Solver(seconds=10, seed=1, sandbox=sandbox), verdict["construction"])
    assert found.after.outcome is Outcome.VALID, found.after.reason
    assert found.best.exact is not None
    assert task.sign * (found.best.exact - Fraction(verdict["exact"])) >= 0
    # It went on from what it was given: far better than a new beginning would be after rounding to doubles.
    assert found.after.grade is not None
    assert found.after.grade.score == pytest.approx(verdict["score"], rel=1e-2)
    assert task.sign * (found.after.grade.score or 0) > task.sign * verdict["score"] - 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["erdos_min_overlap", "ac1"])
def test_a_parent_that_is_too_long_for_the_solver_comes_back(name: str, sandbox: Sandbox, tmp_path: Path) -> None:
    task = without_environment(load_task(name), tmp_path)
    answer = json.dumps([0.25, 0.75] * 1000)
    found = polish(task, Solver(seconds=10, sandbox=sandbox), construction_of(task, answer))
    assert found.after.outcome is Outcome.VALID
    assert found.after.run is not None
    assert "takes at most 1500" in found.after.run.stdout_tail
    assert not found.improved


# The commands -------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def tttd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    monkeypatch.setenv("TTTD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return CliRunner()


def test_the_baseline_command_prints_a_verdict_and_writes_a_certificate(tttd: CliRunner, tmp_path: Path) -> None:
    with_baseline(tmp_path / "tasks", f"def run():\n    return {THREE}\n")
    arguments = ["baseline", "sizes", "--task-dir", str(tmp_path / "tasks"), "--seconds", "2", "--seed", "3", "--out", "c.json"]
    result = tttd.invoke(app, [*arguments, "--json"])
    assert result.exit_code == OK, result.stderr
    verdict = json.loads(result.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(verdict)
    assert verdict["score"] == pytest.approx(0.5)
    certificate = json.loads((tmp_path / "c.json").read_text())
    assert (certificate["exact"], certificate["construction"]) == (verdict["exact"], verdict["construction"])
    plain = tttd.invoke(app, arguments)
    assert "certified score" in plain.stdout


def test_a_baseline_that_fails_ends_with_its_reason(tttd: CliRunner, tmp_path: Path) -> None:
    with_baseline(tmp_path / "tasks", "def run():\n    return 1 / 0\n")
    result = tttd.invoke(app, ["baseline", "sizes", "--task-dir", str(tmp_path / "tasks")])
    assert result.exit_code == VERIFICATION_FAILED
    assert "ZeroDivisionError" in result.stdout
    result = tttd.invoke(app, ["baseline", "nothing"])
    assert result.exit_code == USAGE
    assert "no task 'nothing'" in result.stderr


@pytest.mark.parametrize(("factor", "word"), [("1.25", "improved"), ("0.5", "no improvement")])
def test_the_polish_command_takes_a_file(factor: str, word: str, tttd: CliRunner, tmp_path: Path) -> None:
    with_baseline(tmp_path / "tasks", SCALED.format(factor=factor))
    roomy = [[0.25, 0.25, 0.2], [0.75, 0.75, 0.2], [0.25, 0.75, 0.1]]
    (tmp_path / "mine.json").write_text(json.dumps({"task": "sizes", "circles": roomy}))
    arguments = ["polish", "mine.json", "--task-dir", str(tmp_path / "tasks"), "--seconds", "2"]
    result = tttd.invoke(app, [*arguments, "--out", "better.json"])
    assert result.exit_code == OK, result.stderr
    assert result.stdout.startswith(word)
    written = Fraction(json.loads((tmp_path / "better.json").read_text())["exact"])
    said = json.loads(tttd.invoke(app, [*arguments, "--json"]).stdout)
    assert written == max(Fraction(said["before"]["exact"]), Fraction(said["after"]["exact"]))


def test_the_polish_command_refuses_what_is_not_valid(tttd: CliRunner, tmp_path: Path) -> None:
    with_baseline(tmp_path / "tasks", SCALED.format(factor=1))
    (tmp_path / "bad.json").write_text(json.dumps({"task": "sizes", "circles": [[0.5, 0.5, 0.9]] * 3}))
    result = tttd.invoke(app, ["polish", "bad.json", "--task-dir", str(tmp_path / "tasks")])
    assert result.exit_code == VERIFICATION_FAILED
    assert "not valid" in result.stdout
    assert tttd.invoke(app, ["polish", "no-such-run"]).exit_code == USAGE
