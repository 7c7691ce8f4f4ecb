"""The ablation report: every run and every seed in it, one budget for all, and runs shared with the learning experiment."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from scripts.learning.curves import CurvePoint, Experiment
from scripts.learning.fixed_parents import PolicyResult
from scripts.learning.runs import run_all, run_name
from scripts.learning.strategy_tables import VARIANTS, Ablation, report_of, write_results
from scripts.learning.tables import write_results as write_learning

SEEDS = (1, 2, 3)


def curve(seed: int, steps: int = 4, rollouts: int = 32) -> list[CurvePoint]:
    rng = random.Random(seed)
    best, points = 2.5, []
    for step in range(1, steps + 1):
        best = max(best, 2.5 + rng.random() / 10)
        points.append(CurvePoint(step, rollouts, 1 + rng.random(), rng.randrange(rollouts + 1), 3, 2, best, None, 7.0))
    return points


def ablations() -> list[Ablation]:
    return [
        Ablation(seed, train, curve(100 * seed + column), strategy)
        for seed in SEEDS
        for column, (strategy, train) in enumerate(VARIANTS)
    ]


def report(runs: list[Ablation]) -> str:
    return report_of(runs, "command", "machine")


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its header."""
    lines = [line for line in text.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_run_stands_in_every_table() -> None:
    runs = ablations()
    text = report(runs)
    expected = [[strategy, train, str(seed)] for strategy, train in VARIANTS for seed in SEEDS]
    for heading in ("Every run", "Grid mean per step", "Best so far per step", "Valid programs per step"):
        assert [row[:3] for row in rows(text, heading)] == expected, heading
    means = {tuple(row[:3]): row[3:] for row in rows(text, "Grid mean per step")}
    for run in runs:
        assert means[run.strategy, run.train, str(run.seed)] == [f"{p.mean_reward:.2f}" for p in run.curve]


def test_a_summary_row_is_the_end_of_its_run() -> None:
    text = report(ablations())
    found = {tuple(row[:3]): row[3:] for row in rows(text, "Every run")}
    for run in ablations():
        last = run.curve[1:]
        best = max(p.best for p in run.curve if p.best is not None)
        since = min(p.step for p in run.curve if p.best == best)
        mean, valid = sum(p.mean_reward for p in last) / 3, sum(p.valid for p in last) / 96
        assert found[run.strategy, run.train, str(run.seed)] == [f"{mean:.3f}", f"{valid:.0%}", f"{best:.6f}", str(since), "28"]


def test_comparisons_show_each_seed_and_count_signs() -> None:
    runs = ablations()
    end = {(a.strategy, a.train, a.seed): a for a in runs}
    compared = {row[0]: row[1:] for row in rows(report(runs), "Compared, seed by seed")}
    differences = [end["puct", "on", s].last_mean - end["best_of_n", "on", s].last_mean for s in SEEDS]
    shown = [float(cell.replace("−", "-")) for cell in compared["PUCT over no reuse, with training"][0].split(", ")]
    assert shown == pytest.approx(differences, abs=6e-4)
    assert compared["PUCT over no reuse, with training"][1] == f"{sum(d > 0 for d in differences)} of 3"
    assert len(compared) == 6


def test_one_seed_claims_nothing() -> None:
    text = report([a for a in ablations() if a.seed == 2])
    assert "There is one seed" in text
    assert "agree on a sign" not in text
    assert "all 3 seeds would still agree on a sign in 25% of all comparisons, and the table has 12" in report(ablations())


def test_runs_are_compared_over_the_steps_that_all_have() -> None:
    runs = ablations()
    longer = Ablation(runs[0].seed, runs[0].train, [*runs[0].curve, *curve(1, 1)], runs[0].strategy)
    text = report([longer, *runs[1:]])
    assert "some runs have more steps" in text
    assert all(len(row) == 3 + 4 for row in rows(text, "Grid mean per step"))
    assert "some runs have more steps" not in report(runs)


@pytest.mark.parametrize("other", [[], curve(1, rollouts=6)], ids=["no step", "another grid"])
def test_runs_of_another_budget_are_refused(tmp_path: Path, other: list[CurvePoint]) -> None:
    with pytest.raises(ValueError, match="runs of one budget"):
        write_results(tmp_path, [*ablations(), Ablation(9, "on", other, "puct")], "command", "machine")
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_any_valid_answer_is_drawn_with_gaps() -> None:
    nothing = [CurvePoint(step, 32, 0.0, 0, 0, 0, None, None, 1.0) for step in (1, 2, 3, 4)]
    text = report([*ablations()[1:], Ablation(1, "on", nothing, "puct")])
    assert ["puct", "on", "1", "0.000", "0%", "", "", "4"] in rows(text, "Every run")
    compared = {row[0]: row[1:] for row in rows(text, "Compared, seed by seed")}
    assert compared["training, with PUCT"][3].endswith(" of 2")


def test_numbers_and_picture_are_functions_of_the_curves(tmp_path: Path) -> None:
    runs = [a for a in ablations() if a.seed < 3]
    runs[0].curve.extend(curve(1, 1))
    for name in ("a", "b"):
        write_results(tmp_path / name, runs, "command", "machine")
    for file in ("README.md", "results.json", "curves.svg"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / "README.md").read_text() == report(runs)
    assert (tmp_path / "a" / "curves.svg").read_text().count("<svg") == 1
    numbers = json.loads((tmp_path / "a" / "results.json").read_text())["runs"]
    assert [(n["strategy"], n["train"], n["seed"], len(n["curve"])) for n in numbers] == [
        (a.strategy, a.train, a.seed, 5 if a is runs[0] else 4) for a in runs
    ]


def test_the_learning_report_keeps_its_shape(tmp_path: Path) -> None:
    runs = [Experiment(seed, train, curve(seed)) for seed in SEEDS for train in ("off", "on")]
    fixed = {(seed, label): PolicyResult(64, 1.2, 0.05, 40, 30, 5, 2.6) for seed in SEEDS for label in ("first", "last")}
    write_learning(tmp_path, runs, fixed, "command", "machine")
    text = (tmp_path / "README.md").read_text()
    assert "| 1 | first | 64 | 1.200 ± 0.050 | 62% | 47% | 8% | 2.60000 |" in text
    assert "| seed | train | 1 | 2 | 3 | 4 | last 3 |\n|---|---|---|---|---|---|---|\n| 1 | off | " in text
    assert "### Seed 3, train on\n\n| step | mean reward | valid | valid and new | improved over parent | best so far |" in text
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert set(numbers["runs"][0]) == {"seed", "train", "curve"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "curves.svg", "results.json"]


def test_runs_of_puct_are_those_of_the_learning_experiment() -> None:
    assert run_name(2, "off") == "learning-2-off"
    assert run_name(2, "off", "best_of_n") == "learning-2-off-best_of_n"
    names = {run_name(seed, train, strategy) for seed in SEEDS for strategy, train in VARIANTS}
    assert len(names) == len(SEEDS) * len(VARIANTS)


def test_a_run_that_cannot_start_ends_the_experiment_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTTD_HOME", "")  # set by run_all; so that it is taken back afterwards
    with pytest.raises(SystemExit, match=r"run learning-1-on in .* ended with status [1-9]"):
        run_all(tmp_path, {"learning-1-on": ["search.strategy=nonsense"]})
