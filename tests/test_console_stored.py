"""What the console reads from the store alone: best answers, degraded status, and commands that need no server."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from activities.errors import InputError
from activities.records import StepCommit
from activities.run_store import RunStore
from console.launch import ask, continuation, fresh_names, is_finished, stored_run, with_free_name
from console.main import app
from console.status import StatusReport
from console.stored import best_answer, find_run, run_ids, write_best
from tasks.registry import TaskSource
from tests.console_world import SETTINGS, TASK, World
from workflows.contracts.request import parse_request

STEPS = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A home whose store holds the run `small` with two steps, and `empty` with an opening commit only."""
    world = World.make(tmp_path_factory.mktemp("console") / "home")
    world.commit_steps(*world.open_run("small"), STEPS)
    world.open_run("empty", search={**SETTINGS["search"], "start": "empty"})  # type: ignore[dict-item]
    return world


@pytest.fixture
def tttd(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    """The command line in that home, with no Temporal server at its address."""
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_CONFIG_FILE", "TEMPORAL_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TTTD_TEMPORAL_PORT", "1")
    monkeypatch.chdir(tmp_path)
    return CliRunner()


def test_best_answer_comes_from_the_chain(world: World) -> None:
    answer = best_answer(world.blobs, "small", TaskSource())
    store = RunStore(world.blobs, "small")
    head = store.load(StepCommit, answer.commit)
    assert (answer.step, answer.found_step, head.step) == (2, 2, 2)
    assert answer.commit == store.commit_digest(2)
    assert answer.node == "s000002-g01-r01"
    row = next(row for row in head.rows if (row.group, row.rollout) == (1, 1))
    assert answer.exact == row.exact
    assert answer.construction == row.construction
    assert answer.exact is not None
    exact = Fraction(answer.exact)
    assert Fraction(answer.score) <= exact < Fraction(answer.score) + Fraction(1, 10**14)
    assert answer.exact_digits is not None
    assert answer.exact_digits.startswith(str(answer.score)[:10])
    assert "step 2 group 1 rollout 1" in answer.program
    assert (answer.score_name, answer.best_known, answer.policy_version) == ("sum of radii", 2.6359830849176076, 0)


def test_the_seed_is_the_best_answer_before_the_first_step(world: World) -> None:
    world.open_run("opened")
    answer = best_answer(world.blobs, "opened", TaskSource())
    assert (answer.found_step, answer.step) == (0, 0)
    assert answer.exact is not None
    assert float(Fraction(answer.exact)) == pytest.approx(25 * 0.09 + 0.02)
    assert "run_packing" in answer.program


def test_no_answer_and_no_run_are_told_apart(world: World) -> None:
    with pytest.raises(InputError, match="run empty has no certified answer yet: none of its programs up to step 0 was valid"):
        best_answer(world.blobs, "empty", TaskSource())
    with pytest.raises(InputError, match=r"no run 'smal' in file:.*; runs there: .*small"):
        best_answer(world.blobs, "smal", TaskSource())


def test_runs_of_the_store_are_listed(world: World) -> None:
    assert {"empty", "small"} <= set(run_ids(world.blobs))
    assert find_run(world.blobs, "nothing") is None


def test_best_is_written_with_its_certificate(world: World, tmp_path: Path) -> None:
    answer = best_answer(world.blobs, "small", TaskSource())
    program = write_best(answer, tmp_path)
    assert program == tmp_path / "runs" / "small" / "best.py"
    assert program.read_text(encoding="utf-8") == answer.program
    certificate = json.loads((program.parent / "best.json").read_text(encoding="utf-8"))
    assert certificate["exact"] == answer.exact
    assert "program" not in certificate


def test_cli_best_prints_the_program_alone_on_stdout(tttd: CliRunner, world: World, tmp_path: Path) -> None:
    shown = tttd.invoke(app, ["best", "small"])
    assert shown.exit_code == 0
    assert shown.stdout == best_answer(world.blobs, "small", TaskSource()).program
    assert f"{best_answer(world.blobs, 'small', TaskSource()).score:.17g}" in shown.stderr
    target = tmp_path / "out.py"
    written = tttd.invoke(app, ["best", "small", "-o", str(target)])
    assert target.read_text(encoding="utf-8") == shown.stdout
    assert "chain" in written.stdout
    assert json.loads(tttd.invoke(app, ["best", "small", "--json"]).stdout)["found_step"] == 2


def test_cli_best_of_an_unknown_run_fails_with_a_sentence(tttd: CliRunner) -> None:
    shown = tttd.invoke(app, ["best", "nothing"])
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert shown.stderr.startswith("tttd: no run 'nothing'")
    assert "Traceback" not in shown.stderr


def test_cli_status_falls_back_to_the_store(tttd: CliRunner) -> None:
    shown = tttd.invoke(app, ["status", "small", "--json"])
    assert shown.exit_code == 0, shown.stderr
    run = StatusReport.model_validate_json(shown.stdout)
    assert not run.services.reachable
    assert "tttd up" in (run.services.problem or "")
    assert (run.problem or "").startswith(run.services.problem or "none")
    assert "runs go on by themselves when the server is back" in (run.problem or "")
    assert (run.source, run.state, run.step, run.steps, len(run.recent)) == ("store", "completed", 2, 2, 2)
    assert run.best_score == pytest.approx(25 * 0.0951 + 0.02)
    plain = tttd.invoke(app, ["status", "small"])
    assert "step 2/2 · best 2.3975 (+" in plain.stdout
    everything = tttd.invoke(app, ["status"])
    assert everything.exit_code == 0
    assert "small" in everything.stdout
    assert tttd.invoke(app, ["status", "nothing"]).exit_code == 1


def test_cli_run_of_a_finished_run_prints_its_result_without_services(tttd: CliRunner, world: World) -> None:
    arguments = ["run", TASK, "--name", "small", "--set", "train=off", "--set", "model=tiny"]
    arguments += ["--set", "search.groups=2", "--set", "search.rollouts=3", "--set", "search.steps=2"]
    shown = tttd.invoke(app, arguments)
    assert shown.exit_code == 0, shown.stderr
    assert "has all 2 steps" in shown.stderr
    answer = best_answer(world.blobs, "small", TaskSource())
    assert answer.commit in shown.stdout
    assert (world.home / "runs" / "small" / "best.py").read_text(encoding="utf-8") == answer.program
    result = json.loads(tttd.invoke(app, [*arguments, "--json"]).stdout)
    assert (result["state"], result["step"], result["best"]["exact"]) == ("completed", 2, answer.exact)


def test_cli_run_refuses_a_name_with_other_science(tttd: CliRunner) -> None:
    shown = tttd.invoke(app, ["run", TASK, "--name", "small", "--set", "train=off", "--set", "model=tiny", "--set", "seed=5"])
    assert shown.exit_code == 1
    assert "seed: 0 -> 5" in shown.stderr


def test_asked_run_id_is_task_and_identity(world: World) -> None:
    asked = ask({"task": TASK, **SETTINGS}, world.settings)
    assert asked.run_id == f"{TASK}-{asked.spec.identity[:8]}"
    longer = ask({"task": TASK, **SETTINGS, "search": {**SETTINGS["search"], "steps": 9}}, world.settings)  # type: ignore[dict-item]
    assert longer.run_id == asked.run_id
    assert stored_run(world.blobs, asked) is None
    named = asked.named("small")
    assert is_finished(stored_run(world.blobs, named), 2)
    assert not is_finished(stored_run(world.blobs, named), 3)


async def test_new_takes_the_first_free_name(world: World) -> None:
    names = fresh_names("a")
    assert [next(names) for _ in range(3)] == ["a", "a-2", "a-3"]
    asked = ask({"task": TASK, "name": "small", **SETTINGS}, world.settings)
    free = await with_free_name(asked, world.blobs, None)
    assert (free.run_id, free.raw["name"]) == ("small-2", "small-2")


def test_continuation_says_what_the_profile_does_not(world: World) -> None:
    spec = find_run(world.blobs, "small")
    assert spec is not None
    assert spec.spec is not None
    raw = continuation(spec.spec, 7)
    assert raw == {
        "task": TASK,
        "profile": "laptop",
        "train": "off",
        "model": "tiny",
        "search": {"groups": 2, "rollouts": 3, "steps": 7},
    }
    again = parse_request(raw)
    assert again.model_copy(update={"search": again.search.model_copy(update={"steps": 2})}) == spec.spec.request
