"""Folders as Harbor tasks: the files it asks for, and an export that verifies by itself. `make harbor` runs the real Harbor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from console.harbor_rules import missing
from console.task_new import JUDGE_PACKAGES, TEMPLATE, export_for_harbor, new_task
from tasks.errors import TaskError
from tasks.registry import load_task, read_task, task_folders

FOLDERS = [*task_folders(), TEMPLATE]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_folder_has_what_harbor_asks_for(folder: Path) -> None:
    assert missing(folder) == []
    for script in ("tests/test.sh", "solution/solve.sh"):
        assert os.access(folder / script, os.X_OK)
        assert subprocess.run(["sh", "-n", folder / script], check=False).returncode == 0


def verify(exported: Path, program: Path, logs: Path) -> subprocess.CompletedProcess[str]:
    """tests/test.sh as the verifier's container runs it, but for the places: nothing of this checkout is on its path."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "TESTS_DIR": str(exported / "tests"),
        "PROGRAM": str(program),
        "LOGS_DIR": str(logs),
    }
    command = ["sh", exported / "tests" / "test.sh"]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=300, check=False)


def reward(logs: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((logs / "reward.json").read_text())
    return found


@pytest.fixture(scope="module")
def packing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_for_harbor(load_task("circle_packing_26"), tmp_path_factory.mktemp("harbor"))


def test_the_oracle_gets_the_certified_reward(packing: Path, tmp_path: Path) -> None:
    subprocess.run(["sh", packing / "solution" / "solve.sh"], env={**os.environ, "WORK_DIR": str(tmp_path)}, check=True)
    done = verify(packing, tmp_path / "solution.py", tmp_path / "logs")
    assert done.returncode == 0, done.stderr
    assert reward(tmp_path / "logs") == {"reward": 2.635983084917607, "valid": 1, "score": 2.635983084917607}
    assert (tmp_path / "logs" / "submission.py").read_text() == (tmp_path / "solution.py").read_text()


def test_an_invalid_program_and_none_at_all_get_the_reward_0_and_no_score(packing: Path, tmp_path: Path) -> None:
    (tmp_path / "solution.py").write_text("def run_packing():\n    return 1e9\n")
    assert verify(packing, tmp_path / "solution.py", tmp_path / "one").returncode == 0
    assert reward(tmp_path / "one") == {"reward": 0.0, "valid": 0}
    assert verify(packing, tmp_path / "nothing.py", tmp_path / "two").returncode == 0
    assert reward(tmp_path / "two") == {"reward": 0.0, "valid": 0}
    assert "nothing.py" in (tmp_path / "two" / "reason.txt").read_text()


def test_a_judge_that_fails_writes_no_reward(tmp_path: Path) -> None:
    folder = new_task("mine", tmp_path).folder
    (folder / "environment" / "requirements.txt").unlink()
    (folder / "tests" / "judge.py").write_text("def score(result):\n    return result[0].nothing\n")
    exported = export_for_harbor(read_task(folder), tmp_path / "harbor")
    (tmp_path / "solution.py").write_text("def run_packing():\n    return [1]\n")
    done = verify(exported, tmp_path / "solution.py", tmp_path / "logs")
    assert done.returncode == 1
    assert "no reward: task mine" in done.stderr
    assert "tests/judge.py:2: AttributeError" in done.stderr
    assert not (tmp_path / "logs" / "reward.json").exists()


def test_an_export_names_every_package_that_it_imports(packing: Path) -> None:
    """Whatever the verifier loads comes from the standard library, the export, or the pinned list."""
    question = (
        "import sys, json, importlib.metadata as m\n"
        "import activities.judge.harbor\n"
        "from tasks.registry import read_task\n"
        "from pathlib import Path\n"
        f"read_task(next(Path({str(packing / 'tests' / 'task')!r}).iterdir())).make_judge()\n"
        "owners = m.packages_distributions()\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(json.dumps(sorted({o for n in names for o in owners.get(n, [])})))\n"
        "print(sys.modules['activities'].__file__)\n"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(packing / "tests" / "tttd")}
    shown = subprocess.run(
        [sys.executable, "-P", "-c", question], env=environment, capture_output=True, text=True, check=True, cwd="/"
    )
    owners, home = shown.stdout.splitlines()
    assert Path(home).is_relative_to(packing)
    used = {name.lower().replace("_", "-") for name in json.loads(owners)} - {"tttd", "setuptools", "pip"}
    assert used <= set(JUDGE_PACKAGES), used - set(JUDGE_PACKAGES)
    pinned = {line.partition("==")[0] for line in (packing / "tests" / "tttd" / "requirements.txt").read_text().splitlines()}
    assert pinned == set(JUDGE_PACKAGES)


def test_an_export_replaces_nothing(packing: Path) -> None:
    with pytest.raises(TaskError, match="exists"):
        export_for_harbor(load_task("circle_packing_26"), packing.parent)
