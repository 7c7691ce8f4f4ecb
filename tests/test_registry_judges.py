"""Judges by name and by file: loading, what their digest covers, and errors that say where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.errors import TaskError
from tasks.function_judge import FunctionJudge
from tasks.judge_loading import judge_sources
from tasks.judges.circle_packing import CirclePacking
from tasks.registry import Task, judge_digest, load_task, read_task, task_digest, task_folders

TOML = """
[metadata.discovery]
judge = "{judge}"
judge_parameters = {{ {parameters} }}
entry = "run"
direction = "maximize"
score_name = "size"
helper = "helper.py"
default_start = "empty"
[metadata.discovery.limits]
wall_seconds = 5.0
[metadata.discovery.starts.empty]
[metadata.discovery.starts.made]
construction = "seeds/made.py:make"
"""


def write(folder: Path, judge: str = "tests/judge.py:score", parameters: str = "", **files: str) -> Task:
    """A task folder; `files` are contents by name, with __ for a slash."""
    contents = {
        "task.toml": TOML.format(judge=judge, parameters=parameters),
        "instruction.md": "Define run().",
        "helper.py": "",
        "tests/judge.py": "def score(result):\n    return 1.0\n",
        "seeds/made.py": "def make(rng, index):\n    return [index]\n",
        **{name.replace("__", "/") + ".py": text for name, text in files.items()},
    }
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read_task(folder)


# Loading ----------------------------------------------------------------------------------------------------------------------
def test_a_function_of_a_folder_is_a_judge_with_its_parameters(tmp_path: Path) -> None:
    source = "def score(result, scale, offset=0):\n    return scale * result + offset\n"
    judge = write(tmp_path / "one", parameters="scale = 3", tests__judge=source).make_judge()
    assert isinstance(judge, FunctionJudge)
    assert judge.grade(b"2").score == 6.0


def test_a_class_of_a_folder_or_of_a_module_is_taken_as_it_is(tmp_path: Path) -> None:
    source = "from tasks.judges.circle_packing import CirclePacking\n\nclass Mine(CirclePacking):\n    pass\n"
    own = write(tmp_path / "own", "tests/judge.py:Mine", "circles = 2", tests__judge=source).make_judge()
    assert isinstance(own, CirclePacking)
    named = write(tmp_path / "named", "tasks.judges.circle_packing:CirclePacking", "circles = 2").make_judge()
    assert type(named) is CirclePacking


def test_two_folders_with_the_same_names_do_not_meet(tmp_path: Path) -> None:
    source = "from .shared import VALUE\nfrom . import shared\n\ndef score(result):\n    return VALUE + shared.VALUE\n"
    scores = []
    for value in (1.0, 2.0):
        task = write(tmp_path / str(value), tests__judge=source, tests__shared=f"VALUE = {value}\n")
        scores.append(task.make_judge().grade(b"0").score)
    assert scores == [2.0, 4.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(result:\n", r"tests/judge\.py:1: SyntaxError"),
        ("import math\nimport no_such_package\n", r"tests/judge\.py:2: ModuleNotFoundError"),
        ("import math\n\nx = 1 / 0\n", r"tests/judge\.py:3: ZeroDivisionError"),
        ("from .shared import x\n", r"tests/shared\.py:2: NameError"),
        ("import shared\n", r"tests/judge\.py:1: ModuleNotFoundError: .*write `from \. import shared`"),
        ("def other(result):\n    return 1\n", "defines no score; it has other"),
        ("score = 7\n", "defines no score"),
        ("def score(result, need):\n    return 1\n", "need"),
        ("def score():\n    return 1\n", "too many positional"),
    ],
)
def test_a_judge_that_cannot_be_used_says_file_line_and_why(tmp_path: Path, source: str, message: str) -> None:
    task = write(tmp_path / "bad", tests__judge=source, tests__shared="\nx = undefined_name\n")
    with pytest.raises(TaskError, match=message) as caught:
        task.check_judge()
    assert "task bad: judge" in str(caught.value)


def test_a_judge_that_failed_to_load_can_be_mended(tmp_path: Path) -> None:
    task = write(tmp_path / "bad", tests__judge="raise RuntimeError('not yet')\n")
    with pytest.raises(TaskError, match="not yet"):
        task.check_judge()
    (task.folder / "tests" / "judge.py").write_text(
        "def score(result):\n    return 4.0\n# longer than before, so no cache is taken\n"
    )
    assert task.make_judge().grade(b"1").score == 4.0


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    task = write(tmp_path / "one", "tests/other.py:score")
    for action in (task.check_judge, lambda: judge_digest(task)):
        with pytest.raises(TaskError, match=r"there is no file .*tests/other\.py"):
            action()


# Digests ----------------------------------------------------------------------------------------------------------------------
def test_the_digest_needs_no_import_and_covers_what_lies_beside_the_judge(tmp_path: Path) -> None:
    task = write(tmp_path / "one", tests__judge="raise SystemExit('never run')\n", tests__deep__more="x = 1\n")
    digests = [judge_digest(task)]
    for change in ("tests/judge.py", "tests/deep/more.py"):
        (task.folder / change).write_text("y = 2\n")
        digests.append(judge_digest(task))
    (task.folder / "tests" / "points.json").write_text("[1]")  # what a judge reads decides as much as what it runs
    digests.append(judge_digest(task))
    assert len(set(digests)) == len(digests)


def test_the_digest_ignores_what_is_no_part_of_the_judge(tmp_path: Path) -> None:
    task = write(tmp_path / "one")
    before = judge_digest(task)
    (task.folder / "tests" / "__pycache__").mkdir()
    for name in ("tests/test.sh", "tests/Dockerfile", "tests/.hidden", "tests/__pycache__/judge.cpython-311.pyc", "notes.md"):
        (task.folder / name).write_bytes(b"whatever")
    assert judge_digest(task) == before


def test_the_digest_covers_parameters_and_what_programs_run_with(tmp_path: Path) -> None:
    plain = judge_digest(write(tmp_path / "a"))
    assert judge_digest(write(tmp_path / "b", parameters="x = 1")) != plain
    with_packages = write(tmp_path / "c")
    (with_packages.folder / "environment").mkdir()
    requirements = with_packages.folder / "environment" / "requirements.txt"
    requirements.write_text("numpy==2.4.6\n")
    first = judge_digest(with_packages)
    assert first != plain
    requirements.write_text("# a comment is no package\n  NumPy == 2.4.6\n")
    assert judge_digest(with_packages) == first
    requirements.write_text("numpy==2.4.5\n")
    assert judge_digest(with_packages) != first


def test_the_digest_follows_imports_within_tasks(tmp_path: Path) -> None:
    lazy = "def score(result):\n    from tasks.judges import autocorrelation\n    return 1.0\n"
    sources = judge_sources(write(tmp_path / "one", tests__judge=lazy).judge_reference)
    assert {"judge/tests/judge.py", "tasks/judges/autocorrelation.py", "tasks/judges/wire.py", "tasks/judging.py"} <= set(sources)
    assert "tasks/judges/erdos.py" not in sources
    built_in = judge_sources(load_task("circle_packing_26").judge_reference)
    assert {"tasks/judges/wire.py", "tasks/judging.py"} <= set(built_in)
    assert "tasks/registry.py" not in built_in


def test_the_task_digest_covers_helper_and_constructions(tmp_path: Path) -> None:
    task = write(tmp_path / "one")
    digests = [task_digest(task)]
    for name in ("helper.py", "seeds/made.py"):
        (task.folder / name).write_text("x = 1\n")
        digests.append(task_digest(task))
    assert len(set(digests)) == 3
    (task.folder / "seeds" / "made.py").unlink()
    with pytest.raises(TaskError, match=r"seeds/made\.py"):
        task_digest(task)


# Folders ----------------------------------------------------------------------------------------------------------------------
def test_a_directory_may_be_a_task_folder_itself(tmp_path: Path) -> None:
    folder = write(tmp_path / "one").folder
    assert load_task("one", [folder]).folder == folder
    assert load_task("one", [tmp_path]).folder == folder
    assert not any(path.name.startswith("_") for path in task_folders([tmp_path]))


def test_every_built_in_task_reads_and_has_its_judge() -> None:
    for folder in task_folders():
        task = read_task(folder)
        assert task.is_built_in
        task.check_judge()
        assert len(judge_digest(task)) == 64
