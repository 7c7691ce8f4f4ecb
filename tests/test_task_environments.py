"""Environments of judged programs: what a list may say, one place for equal lists, and built once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tasks import environments
from tasks.environments import PYTHON, Environment, build, parse, python_of
from tasks.errors import EnvironmentMissing, TaskError
from tasks.registry import read_task, task_folders

FILE = Path("mine/environment/requirements.txt")


def pins(text: str) -> tuple[str, ...]:
    environment = parse(text, FILE)
    return () if environment is None else environment.pins


def test_equal_lists_are_one_environment() -> None:
    one = parse("numpy==2.4.6\nscipy == 1.17.1\n", FILE)
    other = parse("# what programs import\nSciPy==1.17.1   # newest\n\nNumPy==2.4.6\n", FILE)
    assert one == other
    assert one is not None
    assert f"python {PYTHON}" in one.science
    another = parse("numpy==2.4.6\n", FILE)
    assert another is not None
    assert another.digest != one.digest


def test_what_a_pin_may_have() -> None:
    hashes = "--hash=sha256:" + "a" * 64
    text = f"Jinja2[i18n] == 3.1.6 ; python_version < '4'\nzope.interface==8.0 \\\n    {hashes} \\\n    {hashes}\n"
    assert pins(text) == ("jinja2[i18n]==3.1.6 ; python_version < '4'", f"zope-interface==8.0 {hashes} {hashes}")
    assert pins("# nothing\n\n") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("numpy\n", r"requirements\.txt:1: 'numpy' is not pinned"),
        ("# one\nnumpy==2.4.6\nscipy>=1.0\n", r"requirements\.txt:3: 'scipy>=1\.0' is not pinned"),
        ("numpy==2.*\n", "not pinned"),
        ("numpy==2.4.6, !=2.5\n", "not pinned"),
        ("-r other.txt\n", "not pinned"),
        ("--index-url https://example.org/simple\n", "not pinned"),
        ("git+https://example.org/x.git\n", "not pinned"),
        ("./local.whl\n", "not pinned"),
        ("numpy @ https://example.org/numpy.whl\n", "not pinned"),
        ("numpy==2.4.6\nNumPy==2.4.5\n", r"requirements\.txt:2: numpy is pinned twice"),
    ],
)
def test_what_is_not_pinned_is_refused_by_line(text: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        parse(text, FILE)


def test_built_in_tasks_share_few_environments() -> None:
    found = {task.environment.digest for task in map(read_task, task_folders()) if task.environment is not None}
    assert 1 <= len(found) <= 2


def test_a_missing_environment_says_which_command_builds_it(tmp_path: Path) -> None:
    environment = parse("numpy==2.4.6\n", FILE)
    with pytest.raises(EnvironmentMissing, match=r"numpy==2\.4\.6.*run `tttd task build mine`"):
        python_of(environment, tmp_path, "tttd task build mine")
    assert python_of(None, tmp_path, "") is None


def wheel_of_nothing(tmp_path: Path) -> Path:
    """A wheel made here, so that no index is asked."""
    import zipfile

    folder = tmp_path / "wheels"
    folder.mkdir()
    information = "tttd_nothing-1.0.dist-info"
    files = {
        "tttd_nothing.py": "VALUE = 7\n",
        f"{information}/METADATA": "Metadata-Version: 2.1\nName: tttd-nothing\nVersion: 1.0\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / "tttd_nothing-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr(f"{information}/RECORD", "".join(f"{name},,\n" for name in (*files, f"{information}/RECORD")))
    return folder


def test_an_environment_is_built_once_for_all_and_can_be_read_by_everyone(tmp_path: Path) -> None:
    wheels = wheel_of_nothing(tmp_path)
    environment = Environment(("tttd-nothing==1.0",))
    place, found = tmp_path / "environments", []
    before = os.umask(0o077)
    try:
        arguments = ("--no-index", "--find-links", str(wheels))
        threads = [threading.Thread(target=lambda: found.append(build(environment, place, arguments))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        os.umask(before)
    assert len(set(found)) == 1
    python = found[0]
    assert python == environment.python(place)
    assert subprocess.check_output([python, "-c", "import tttd_nothing; print(tttd_nothing.VALUE)"], text=True) == "7\n"
    assert list(environment.place(place).rglob("tttd_nothing*.pyc")), "programs cannot write caches, so they must be there"
    everything = (place, *place.rglob("*"))
    shut = [path for path in everything if not path.is_symlink() and not path.stat().st_mode & 0o004 and path.suffix != ".lock"]
    assert shut == []
    (wheels / "tttd_nothing-1.0-py3-none-any.whl").unlink()
    assert build(environment, place, arguments) == python


def test_a_build_that_fails_or_was_killed_leaves_nothing_that_counts(tmp_path: Path) -> None:
    environment = Environment(("tttd-nothing==1.0",))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match="tttd-nothing"):
        build(environment, tmp_path / "environments", ("--no-index", "--find-links", str(tmp_path / "empty")))
    assert environment.python(tmp_path / "environments") is None
    half = environment.place(tmp_path / "environments")
    (half / "bin").mkdir(parents=True)
    (half / "bin" / "python").symlink_to(sys.executable)
    assert environment.python(tmp_path / "environments") is None
    built = build(environment, tmp_path / "environments", ("--no-index", "--find-links", str(wheel_of_nothing(tmp_path))))
    assert environment.python(tmp_path / "environments") == built


def test_an_interpreter_without_pip_lends_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment made without pip can still build: the new environment then brings its own."""
    commands: list[list[str]] = []
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(environments, "_run", lambda command, place: (commands.append(command), (place).mkdir(exist_ok=True)))
    monkeypatch.setattr(environments.subprocess, "run", lambda *_, **__: None)
    environment = Environment(("tttd-nothing==1.0",))
    build(environment, tmp_path)
    assert "--without-pip" not in commands[0]
    assert commands[1][:3] == [str(environment.place(tmp_path) / "bin" / "python"), "-m", "pip"]
