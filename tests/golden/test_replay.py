"""Every golden file replays without an unexplained difference, and the replay notices what it should."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.golden.__main__ import main
from tests.golden.archive import replay_scenario, replay_simulation
from tests.golden.documented import WHERE_WE_DIFFER
from tests.golden.objective import replay_adaptive, replay_shaping
from tests.golden.outcome import Case, UnknownFormat, summary_line
from tests.golden.programs import replay_program
from tests.golden.replay import replay_file
from tests.golden.verl import replay_verl

DATA = Path(__file__).parent.parent / "data" / "golden"
FILES = sorted(path for path in DATA.glob("*.json") if path.name.startswith(("puct_", "parse_", "advantages_", "verifiers")))
CASES = [case for path in FILES for case in replay_file(path)]


def golden(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case: Case) -> None:
    assert case.passed, "\n".join(summary_line(case))


def test_all_files_are_replayed() -> None:
    assert {path.name for path in FILES} >= {
        "puct_scenarios.json",
        "puct_simulations.json",
        "puct_open_ttt_verl.json",
        "parse_codeblocks.json",
        "parse_guidance.json",
        "verifiers.json",
        "advantages_adaptive_beta.json",
        "advantages_baselines.json",
        "advantages_kl_shaping.json",
    }


def test_table_of_differences_is_what_the_cases_show() -> None:
    shown: dict[str, set[str]] = defaultdict(set)
    for case in CASES:
        for kind in case.kinds:
            shown[kind].add(case.name)
    assert dict(shown) == {kind: set(entry.cases) for kind, entry in WHERE_WE_DIFFER.items() if entry.cases}


def changed(record: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with one value at a path replaced."""
    copied = copy.deepcopy(record)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    assert inner[path[-1]] != value
    inner[path[-1]] = value
    return copied


CHAIN = next(s for s in golden("puct_scenarios.json")["scenarios"] if s["name"] == "chain_backprop")
SHORT = next(s for s in golden("puct_scenarios.json")["scenarios"] if s["name"] == "siblings_not_blocked")
STABLE = ("results", "original_stable", "trace")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*STABLE, 0, "flush", "T"), 2),
        ((*STABLE, 1, "flush", "order"), ["root", "alt", "c2", "c1"]),
        ((*STABLE, 1, "flush", "n"), {"root": 3}),
        ((*STABLE, 1, "flush", "m"), {"root": 1.0, "c1": 1.0}),
        ((*STABLE, 2, "flush", "parents", "c3"), ["c2", "c1"]),
        ((*STABLE, 2, "flush", "parent_values", "c3"), [2.0, 1.0, 0.5]),
        ((*STABLE, 3, "scale"), 4.0 * (1 + 1e-8)),
        ((*STABLE, 3, "picks", 1, "id"), "root"),
        ((*STABLE, 3, "picks", 0, "n"), 1),
        ((*STABLE, 3, "picks", 0, "score"), 7.9814240),
        (("results", "original_G64", "trace", 3, "picks", 0, "bonus"), 1.3743685),
        (("config", "c"), 1.5),
        (("ops", 0, "child", "value"), 1.5),
    ],
)
def test_a_changed_scenario_fails(path: tuple[Any, ...], value: Any) -> None:
    assert not replay_scenario(changed(CHAIN, path, value)).passed


def test_fill_up_is_no_excuse_for_other_picks() -> None:
    assert replay_scenario(SHORT).passed
    assert not replay_scenario(changed(SHORT, (*STABLE, 1, "picks", 1, "id"), "a")).passed
    assert not replay_scenario(
        changed(SHORT, (*STABLE, 1, "picks"), SHORT["results"]["original_stable"]["trace"][1]["picks"][1:])
    ).passed


def test_a_changed_simulation_fails() -> None:
    run = golden("puct_simulations.json")["runs"][0]
    assert not replay_simulation(changed(run, ("log", 2, "after", "T"), 0)).passed
    assert not replay_simulation(
        changed(run, ("log", 3, "rollouts", 0, 0), "s0" if run["log"][3]["rollouts"][0][0] != "s0" else "s1")
    ).passed


def test_ties_are_no_excuse_for_other_values() -> None:
    run = next(r for r in golden("puct_simulations.json")["runs"] if r["argsort"] != "stable")
    assert replay_simulation(run).passed
    assert not replay_simulation(changed(run, ("log", 2, "original_select", "picks", 0, "P"), 0.5)).passed
    order = run["log"][3]["after"]["order"]
    assert not replay_simulation(changed(run, ("log", 3, "after", "order"), [*order[:-1], "n0"])).passed


def test_cap_ties_keep_the_later_node() -> None:
    """The case is not in these files; the specification states what the target does (1.5)."""
    seeds = [{"id": "s", "value": 0.0, "key": None}]
    rollouts = [{"op": "rollout", "parent": "s", "child": {"id": f"x{i}", "value": 1.0, "key": f"k{i}"}} for i in range(4)]
    flushed = {"order": ["s", "x2", "x3"], "n": {"s": 4}, "m": {"s": 1.0}, "T": 4}
    scenario = {
        "name": "cap_ties",
        "config": {"c": 1.0, "topk": 0, "cap": 3},
        "seeds": seeds,
        "ops": [*rollouts, {"op": "flush", "step": 1}],
        "results": {"original_stable": {"trace": [{"after_op": 4, "flush": flushed}]}},
    }
    case = replay_scenario(scenario)
    assert case.passed
    assert not case.differences


def test_empty_archive_is_a_documented_difference() -> None:
    trace = [{"after_op": 0, "select": 1, "scale": 1.0, "picks": []}]
    scenario = {
        "name": "empty_archive",
        "config": {"c": 1.0, "topk": 2, "cap": 3},
        "seeds": [],
        "ops": [{"op": "select", "num": 1}],
        "results": {"original_stable": {"trace": trace}},
    }
    assert replay_scenario(scenario).kinds == {"empty_archive"}


def test_a_changed_verl_scenario_fails() -> None:
    scenario = golden("puct_open_ttt_verl.json")["visits_count_groups_not_rollouts"]
    assert replay_verl("as recorded", scenario).passed
    for path, value in (
        (("trace", 3, "state", "T"), 2),
        (("trace", 3, "state", "m", "s"), -0.3),
        (("trace", 3, "state", "order"), ["s"]),
        (("trace", 4, "stats", "P"), 0.5),
    ):
        assert not replay_verl("changed", changed(scenario, path, value)).passed


def test_a_changed_objective_case_fails() -> None:
    ramp = next(
        c for c in golden("advantages_adaptive_beta.json")["cases"] if len(c["rewards"]) > 3 and c["reef_float64"]["beta"] < 10
    )
    assert replay_adaptive(ramp).passed
    assert not replay_adaptive(changed(ramp, ("reef_float64", "advantages", 0), 0.123)).passed
    assert not replay_adaptive(changed(ramp, ("original_float32", "advantages", 0), 0.123)).passed
    name, batch = next(iter(golden("advantages_kl_shaping.json").items()))
    assert not replay_shaping(name, changed(batch, ("kl_coef",), 0.11)).passed


PARSER = "original_python_only_no_separators"


def program_case(text: str, reference: str) -> Case:
    return replay_program("made", {"text": text, PARSER: reference, "nanodiscover": reference})


def test_documented_reading_of_programs_is_checked_not_excused() -> None:
    draft = "<think>\n```python\ndraft=1\n```\n</think>\n```python\na=1\n```"
    assert program_case(draft, "a=1").kinds == set()
    assert program_case("<think>\n```python\ndraft=1\n```\nhmm", "draft=1").kinds == {"thinking"}
    assert program_case("~~~python\na=1\n~~~", "").kinds == {"fence_line"}
    assert program_case("```python\na=1\n```python\nb=2\n```", "a=1").kinds == {"block_in_block"}
    assert not program_case("```python\na=1\n```", "b=2").passed
    assert not program_case("<think>x</think>\n```python\na=1\n```", "b=2").passed


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenarios = golden("puct_scenarios.json")
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({"scenarios": [changed(CHAIN, ("config", "c"), 3.0)]}))
    stranger = tmp_path / "stranger.json"
    stranger.write_text('{"erdos": {"constant": {"h_values": [1]}}}')
    assert main([str(DATA / "puct_scenarios.json")]) == 0
    assert f"{len(scenarios['scenarios'])} of {len(scenarios['scenarios'])} cases pass" in capsys.readouterr().out
    assert main([str(DATA / "puct_scenarios.json"), str(bad)]) == 1
    assert "FAIL  chain_backprop" in capsys.readouterr().out
    assert main([str(stranger)]) == 2
    assert "not a golden file" in capsys.readouterr().out
    with pytest.raises(UnknownFormat, match=r"missing\.json"):
        replay_file(tmp_path / "missing.json")
