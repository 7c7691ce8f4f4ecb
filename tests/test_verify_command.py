"""`tttd verify`: files of every form, the best answer of a stored run, and a store that says something else than it proves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from activities.run_store import RunStore
from console.main import app
from console.output import FAILED, OK, USAGE, VERIFICATION_FAILED
from console.stored import best_answer
from tasks.registry import TaskSource
from tests import checker
from tests.console_world import TASK, World
from tests.constructions import FOLDER, read_files

SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "certificate.schema.json").read_text(encoding="utf-8"))
FILES = read_files(FOLDER)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A home whose store holds the run `small` with two steps, and `empty` without an answer."""
    world = World.make(tmp_path_factory.mktemp("verify") / "home")
    world.commit_steps(*world.open_run("small"), 2)
    world.open_run("empty", search={"groups": 2, "rollouts": 3, "steps": 2, "start": "empty"})
    return world


@pytest.fixture
def verify(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["verify", *arguments])

    return invoke


def written(folder: Path, content: Any) -> str:
    path = folder / "construction.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_a_file_is_certified_and_the_certificate_holds(verify: Any, tmp_path: Path) -> None:
    found = verify(written(tmp_path, FILES["cp26_certified_rational.json"]), "--json", "--out", "certificate.json")
    assert found.exit_code == OK, found.output
    document = json.loads(found.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert json.loads((tmp_path / "certificate.json").read_text()) == document
    assert document["digits"].startswith("2.6359830849176077831865")
    assert len(document["origin"]["file_sha256"]) == 64
    assert checker.main([str(tmp_path / "certificate.json")]) == 0
    again = verify("certificate.json")
    assert again.exit_code == OK
    assert f"exact         at least {document['digits']}" in again.stdout
    assert "325 x (x_i - x_j)^2 + (y_i - y_j)^2 >= (r_i + r_j)^2; tightest 6.49e-39 at 1, 7" in again.stdout


def test_repair_and_claim_are_told(verify: Any, tmp_path: Path) -> None:
    found = verify(written(tmp_path, FILES["cp26_reef_qwen3_8b.json"]))
    assert found.exit_code == OK
    assert "repaired      radii shrunk by 3.57e-15" in found.stdout
    assert "its claim     2.6359830849177777, not used" in found.stdout
    huge = verify(written(tmp_path, {"task": "ac1", "values": [1e6, 5e-324, 3.0]}))  # integers that no double holds
    assert huge.exit_code == OK, huge.output
    assert "exact         at most" in huge.stdout


def test_a_bare_answer_needs_a_task(verify: Any, tmp_path: Path) -> None:
    path = written(tmp_path, [0.5] * 10)
    assert verify(path, "--task", "erdos_min_overlap").exit_code == OK
    nameless = verify(path)
    assert nameless.exit_code == USAGE
    assert "names no task; give one with --task" in nameless.stderr
    unknown = verify(path, "--task", "nonsense")
    assert unknown.exit_code == USAGE
    assert "there are: " in unknown.stderr


def test_an_invalid_construction_ends_with_4(verify: Any, tmp_path: Path) -> None:
    content = {"task": TASK, "circles": [["1", "1", "2"]] * 26, "denominator": "2"}
    found = verify(written(tmp_path, content))
    assert found.exit_code == VERIFICATION_FAILED
    assert found.stdout == "not valid: the construction violates a constraint by 1; it must hold exactly\n"
    document = json.loads(verify(written(tmp_path, content), "--json", "--out", "none.json").stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert document["valid"] is False
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize("text", ["", "{}", "3", '{"scale": 1}'])
def test_a_file_without_a_construction_is_usage(text: str, verify: Any, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    found = verify("other.json", "--task", TASK)
    assert (found.exit_code, found.stdout) == (USAGE, "")
    assert "other.json: the file" in found.stderr


def test_two_tasks_are_refused(verify: Any, tmp_path: Path) -> None:
    found = verify(written(tmp_path, FILES["ac1_prev_human.json"]), "--task", "ac2")
    assert found.exit_code == USAGE
    assert "belongs to task ac1, and --task says ac2" in found.stderr


def test_what_is_not_there_is_usage(verify: Any) -> None:
    assert "there is no such file" in verify("nothing.json").stderr
    missing = verify("smal")
    assert missing.exit_code == USAGE
    assert "no run 'smal'" in missing.stderr
    assert verify("empty").exit_code == FAILED
    assert verify("small", "--task", "ac1").exit_code == USAGE


def test_a_run_is_verified_from_its_construction(verify: Any, world: World, tmp_path: Path) -> None:
    found = verify("small", "--json", "--out", "certificate.json")
    assert found.exit_code == OK, found.output
    document = json.loads(found.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    answer = best_answer(world.blobs, "small", TaskSource())
    assert (document["exact"], document["score"], document["task"]) == (answer.exact, answer.score, TASK)
    assert document["origin"] == {"run": "small", "step": 2, "commit": answer.commit, "file_sha256": None}
    assert checker.main([str(tmp_path / "certificate.json")]) == 0


def test_a_store_that_says_more_than_it_proves_is_found_out(verify: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody changed a score in the archive: the error names what is said and what is proved."""
    answer = best_answer(world.blobs, "small", TaskSource())
    for changes in ({"score": 2.7}, {"exact": "27/10"}):
        lie = answer.model_copy(update=changes)
        monkeypatch.setattr("console.stored.best_answer", lambda *_, lie=lie: lie)
        found = verify("small")
        assert found.exit_code == VERIFICATION_FAILED
        assert f"the store says sum of radii {lie.score!r} ({lie.exact})" in found.stderr
        assert f"its construction proves {answer.score!r} ({answer.exact})" in found.stderr


def test_a_construction_that_does_not_hold_is_found_out(verify: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = best_answer(world.blobs, "small", TaskSource())
    construction = json.loads(world.blobs.get(answer.construction or ""))
    construction["circles"][0][2] = construction["denominator"]
    digest = RunStore(world.blobs, "small").put(construction)
    lie = answer.model_copy(update={"construction": digest})
    monkeypatch.setattr("console.stored.best_answer", lambda *_: lie)
    found = verify("small")
    assert found.exit_code == VERIFICATION_FAILED
    assert f"construction {digest} is not valid" in found.stderr


def test_another_judge_than_the_runs_is_told(verify: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.certificate.judge_digest", lambda task: "f" * 64)
    found = verify("small")
    assert found.exit_code == OK
    assert "this is ffffffffffff" in found.stderr
