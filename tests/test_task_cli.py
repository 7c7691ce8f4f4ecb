"""`tttd task`, and what runs do about a task's folder and environment before they start."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from activities.blobs import digest_of
from activities.judge.sandbox import Sandbox, open_sandbox
from console.cli.session import Session, check_environment
from console.harbor_rules import missing
from console.launch import ask
from console.output import Failure
from console.task_check import Checked, Finding, breach, program_checks, static_checks
from console.task_new import new_task
from tasks.bundles import pack
from tasks.environments import DEFAULT_DIRECTORY
from tasks.errors import TaskError
from tasks.registry import Task, load_task, read_task, task_folders
from tests.console_world import SETTINGS, World
from workers.settings import Settings


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path / "home")


def tttd(world: World, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TTTD_", "TEMPORAL_"))}
    command = [sys.executable, "-m", "console.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=kept | world.environment | environment)


# list, show, new, build ---------------------------------------------------------------------------------------------------------
def test_list_shows_built_in_tasks_and_a_users_own(world: World, tmp_path: Path) -> None:
    folder = new_task("mine", tmp_path / "made").folder
    (tmp_path / "made" / "broken").mkdir()
    (tmp_path / "made" / "broken" / "task.toml").write_text("[metadata")
    shown = tttd(world, "task", "list", "--task-dir", str(tmp_path / "made"))
    assert shown.returncode == 0, shown.stderr
    lines = {line.split()[0]: line for line in shown.stdout.splitlines()}
    assert lines["circle_packing_26"].split()[1:3] == ["maximize", "2.63598308492"]
    assert lines["circle_packing_26"].endswith("built in")
    assert lines["mine"].endswith(str(folder))
    assert "MALFORMED" in lines["broken"]
    rows = json.loads(tttd(world, "task", "list", "--json").stdout)
    assert [row["name"] for row in rows] == sorted(folder.name for folder in task_folders())


def test_show_says_what_a_search_reads(world: World) -> None:
    shown = json.loads(tttd(world, "task", "show", "circle_packing_26", "--json").stdout)
    assert shown["direction"] == "maximize sum of radii"
    assert len(shown["judge digest"]) == 64
    assert any(start.startswith("grid (default): seeds/grid.py") for start in shown["starts"])
    assert "run_packing()" in shown["statement"]


def test_new_makes_a_folder_with_its_name_filled_in(world: World, tmp_path: Path) -> None:
    made = tttd(world, "task", "new", "My_task", "--dir", str(tmp_path))
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "My_task"
    assert made.stdout.strip() == str(folder)
    assert 'name = "local/my-task"' in (folder / "task.toml").read_text()
    texts = [file.read_text() for file in folder.rglob("*") if file.is_file()]
    assert not [text for text in texts if "new-task" in text]
    assert missing(folder) == []
    with pytest.raises(TaskError, match="exists"):
        new_task("My_task", tmp_path)
    for name in ("../outside", "", "-x", "a b"):
        with pytest.raises(TaskError, match="letters, digits"):
            new_task(name, tmp_path)


def test_build_refuses_what_is_not_pinned_and_has_nothing_to_do_without_a_list(world: World, tmp_path: Path) -> None:
    folder = new_task("mine", tmp_path).folder
    (folder / "environment" / "requirements.txt").write_text("numpy>=2\n")
    refused = tttd(world, "task", "build", str(folder))
    assert refused.returncode != 0
    assert "requirements.txt:1: 'numpy>=2' is not pinned" in refused.stderr
    (folder / "environment" / "requirements.txt").unlink()
    done = tttd(world, "task", "build", str(folder))
    assert (done.returncode, done.stdout) == (0, "")
    assert tttd(world, "task", "build").returncode == 2


# check --------------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as opened:
        yield opened


def findings(task: Task, sandbox: Sandbox, seconds: float = 3.0) -> Iterator[Finding]:
    """As `tttd task check` makes them, one by one."""
    static = list(static_checks(task, DEFAULT_DIRECTORY))
    yield from static
    if not any(finding.verdict == "failed" for finding in static):
        yield from program_checks(Checked(task, sandbox, DEFAULT_DIRECTORY, seconds))


def finding(name: str, task: Task, sandbox: Sandbox) -> Finding:
    """The one of this name; nothing after it is checked."""
    return next(found for found in findings(task, sandbox) if found.name == name)


def quick_task(folder: Path) -> Path:
    """The template without its baseline and its packages, whose checks take seconds."""
    made = new_task("mine", folder).folder
    (made / "environment" / "requirements.txt").unlink()
    file = made / "task.toml"
    file.write_text(file.read_text().replace('baseline = "solution/baseline.py"', ""))
    return made


@pytest.mark.slow
def test_the_template_is_complete(tmp_path: Path, sandbox: Sandbox) -> None:
    found = {finding.name: finding for finding in findings(new_task("mine", tmp_path), sandbox)}
    assert {name for name, finding in found.items() if finding.verdict != "ok"} == set()
    assert {"start seed", "start empty", "baseline", "hostile results", "hostile programs", "attack huge_radii.py"} <= set(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["circle_packing_26", "erdos_min_overlap", "ac1"])
def test_built_in_tasks_pass_their_checks(name: str, sandbox: Sandbox) -> None:
    found = {finding.name: finding.detail for finding in findings(load_task(name), sandbox) if finding.verdict != "ok"}
    assert found == {}


SCORE = "def score(result):\n    {}\n"


@pytest.mark.parametrize(
    ("judge", "check", "message"),
    [
        ("return float(result[0][0][0])", "hostile results", r"at tests/judge\.py:2: "),
        ("return result[2] if isinstance(result, list) and len(result) == 3 else 0.0", "hostile results", "better than best_known"),
        ("import random; return random.random()", "judge repeats", "was graded"),
        ("return (1.0, [2]) if len(str(result)) > 9 else 3.0", "judge repeats", "is verified as 3.0"),
        ("raise ValueError('never good')", "start seed", "invalid: never good"),
        ("return -1.0", "start seed", "negative"),
        ("return 1 / 0", "start seed", r"tests/judge\.py:2: ZeroDivisionError"),
    ],
)
def test_check_finds_a_bad_judge(tmp_path: Path, sandbox: Sandbox, judge: str, check: str, message: str) -> None:
    folder = quick_task(tmp_path)
    (folder / "tests" / "judge.py").write_text(SCORE.format(judge))
    found = finding(check, read_task(folder), sandbox)
    assert found.verdict == "failed"
    assert found.hint
    assert re.search(message, found.detail), found


@pytest.mark.parametrize(
    ("file", "text", "check", "message"),
    [
        ("instruction.md", "", "statement", "empty"),
        ("instruction.md", "Return something good.", "statement", "does not mention run_packing"),
        ("environment/requirements.txt", "numpy\n", "environment", "not pinned"),
        ("environment/requirements.txt", "no-such-package==1.0\n", "environment", "tttd task build mine"),
        ("tests/judge.py", "def score(result:\n", "judge", "tests/judge.py:1"),
        ("seeds/start.py", "def run():\n    return 1\n", "start seed", "run_packing"),
        ("tests/test.sh", "pip install numpy==2.4.6\n", "harbor", "when verifying"),
        ("environment/Dockerfile", "FROM python\nCOPY tests/test.sh /x\nRUN pip install numpy\n", "harbor", "give python a tag"),
    ],
)
def test_check_finds_what_is_wrong_with_a_folder(
    tmp_path: Path, sandbox: Sandbox, file: str, text: str, check: str, message: str
) -> None:
    folder = quick_task(tmp_path)
    (folder / file).write_text(text)
    found = finding(check, read_task(folder), sandbox)
    assert found.verdict != "ok"
    assert found.hint
    assert message in found.detail


def test_an_attack_that_wins_is_reported(tmp_path: Path, sandbox: Sandbox) -> None:
    folder = quick_task(tmp_path)
    (folder / "tests" / "judge.py").write_text(
        "def score(result):\n    return float(result) if isinstance(result, float) else 1.0\n"
    )
    (folder / "attacks" / "winner.py").write_text("def run_packing():\n    return 2.9\n")
    checked = Checked(read_task(folder), sandbox, DEFAULT_DIRECTORY)
    source = (folder / "attacks" / "winner.py").read_text()
    assert "2.9" in (breach(checked, source) or "")
    assert breach(checked, "def run_packing():\n    return 'no'\n") is None


def test_check_exits_1_with_the_place_and_the_remedy(world: World, tmp_path: Path) -> None:
    folder = new_task("mine", tmp_path).folder
    file = folder / "task.toml"
    file.write_text(file.read_text().replace('direction = "maximize"', 'direction = "up"'))
    shown = tttd(world, "task", "check", str(folder))
    assert shown.returncode == 1
    assert "FAILED   schema" in shown.stdout
    assert "direction" in shown.stdout
    answer = json.loads(tttd(world, "task", "check", str(folder), "--json").stdout)
    assert (answer["ok"], [check["name"] for check in answer["checks"]]) == (False, ["schema"])


# Runs ---------------------------------------------------------------------------------------------------------------------------
def test_a_run_of_an_outside_task_carries_its_bundle(world: World, tmp_path: Path) -> None:
    folder = new_task("mine", tmp_path / "made").folder
    settings = world.settings.model_copy(update={"task_dirs": (tmp_path / "made",)})
    raw: dict[str, Any] = {"task": "mine", **SETTINGS}
    asked = ask(raw, settings)
    assert asked.bundle == pack(folder)
    assert asked.raw["bundle"] == asked.spec.bundle == asked.request.bundle == digest_of(pack(folder))
    (folder / "README.md").write_text("words")  # another bundle, the same problem
    again = ask(raw, settings)
    assert again.spec.bundle != asked.spec.bundle
    assert again.spec.identity == asked.spec.identity
    assert ask({"task": "circle_packing_26", **SETTINGS}, settings).bundle is None


def test_a_run_whose_environment_is_missing_is_refused_before_it_starts(world: World, tmp_path: Path) -> None:
    settings: Settings = world.settings.model_copy(update={"environments": tmp_path / "none"})
    asked = ask({"task": "circle_packing_26", **SETTINGS}, settings)
    with pytest.raises(Failure, match="run `tttd task build circle_packing_26`"):
        check_environment(Session(settings, world.blobs), asked)
    none = {"TTTD_ENVIRONMENTS": str(tmp_path / "none")}
    shutil.copy(load_task("circle_packing_26").folder / "seeds" / "grid.py", tmp_path / "grid.py")
    judged = tttd(world, "judge", "circle_packing_26", str(tmp_path / "grid.py"), **none)
    assert judged.returncode == 2
    assert "tttd task build circle_packing_26" in judged.stderr
    started = tttd(world, "run", "circle_packing_26", "--set", "model=tiny", "--set", "train=off", **none)
    assert started.returncode == 2
    assert "tttd task build circle_packing_26" in started.stderr
    assert "starting services" not in started.stderr


def test_a_task_dir_that_is_none_is_a_usage_error(world: World, tmp_path: Path) -> None:
    shown = tttd(world, "run", "mine", "--task-dir", str(tmp_path / "nowhere"))
    assert shown.returncode == 2
    assert "there is no such directory" in shown.stderr


def test_a_dry_run_prints_an_input_that_works_elsewhere(world: World, tmp_path: Path) -> None:
    folder = new_task("mine", tmp_path / "made").folder
    shown = tttd(world, "run", "mine", "--task-dir", str(tmp_path / "made"), "--set", "model=tiny", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    bundle = json.loads(shown.stdout)["input"]["bundle"]
    assert world.blobs.get(bundle) == pack(folder)
