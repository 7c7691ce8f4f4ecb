"""The corpus of hostile and legitimate programs against live canaries, behind an outer wall (``tests/attacks.py``)."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.attack_folders import Entry, entries_of, parts_of
from tests.attacks import behind_wall, wall_is_possible
from tests.legit_environment import legit_python, ordinary_python
from tests.sandboxes import opened

ATTACKS = Path(__file__).parent / "data" / "attacks"
HOSTILE = [entry.name for entry in entries_of(ATTACKS / "programs")]
LEGITIMATE = [entry.name for entry in entries_of(ATTACKS / "legit")]

JUDGES = [
    ("landlock", True, 1),
    ("bwrap", False, 1),
    ("bwrap", True, 16),
]
"""(backend, judging as an ordinary user, processes that hostile programs may have). Each takes minutes: other combinations are for
`python -m tests.attacks`."""

behind_a_wall = pytest.mark.skipif(
    not wall_is_possible(), reason="hostile programs run behind namespaces only, which take root and unshare"
)


@cache
def cases(part: str, backend: str, as_user: bool, processes: int) -> dict[str, dict[str, Any]]:
    """The whole part at once, since opening a judge takes longer than a program."""
    arguments = [str(ATTACKS / part), "--backend", backend, "--processes", str(processes)]
    if as_user:
        arguments.append("--as-user")
    if part == "legit":
        arguments += ["--environment", str(legit_python())]
    return {case["name"]: case for case in behind_wall(arguments, as_user)["cases"]}


def check(name: str, part: str, backend: str, as_user: bool, processes: int = 1) -> None:
    if as_user and ordinary_python() is None:
        pytest.skip("no Python of this version that an ordinary user could start")
    opened_once(backend)
    case = cases(part, backend, as_user, processes)[name]
    assert case["unexpected"] == "", case["stderr_tail"]
    assert case["known"] or case["escapes"] == []


@cache
def opened_once(backend: str) -> None:
    opened(backend).close_blocking()


@pytest.mark.slow
@behind_a_wall
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(("backend", "as_user", "processes"), JUDGES)
def test_contained(name: str, backend: str, as_user: bool, processes: int) -> None:
    check(name, "programs", backend, as_user, processes)


@pytest.mark.slow
@behind_a_wall
@pytest.mark.parametrize("name", LEGITIMATE)
@pytest.mark.parametrize(("backend", "as_user"), [("landlock", True), ("bwrap", False)])
def test_legitimate_programs_work(name: str, backend: str, as_user: bool) -> None:
    check(name, "legit", backend, as_user)


def test_a_folder_of_somebody_else_is_read_with_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "manifest.json").write_text('{"stat_secrets": {"file": "1.py", "expect": ["ok"], "why": "looks"}}')
    (tmp_path / "legit").mkdir()
    (tmp_path / "legit" / "pool.py").write_text("import multiprocessing\ndef run(): return 1")
    (tmp_path / "legit" / "sum.py").write_text("def run(workers=1): return sum([1])")
    (tmp_path / "cpp").mkdir()
    (tmp_path / "cpp" / "socket.cpp").write_text("int main() {}")
    assert [part.name for part in parts_of(tmp_path)] == ["programs", "legit", "cpp"]
    assert parts_of(tmp_path / "legit") == [tmp_path / "legit"]
    found: dict[str, Entry] = {entry.name: entry for part in parts_of(tmp_path) for entry in entries_of(part)}
    assert found["stat_secrets"].kind == "hostile"
    assert set(found["stat_secrets"].known) == {"landlock"}
    assert found["pool"].perhaps_refused
    assert found["sum"].refused == {}
    assert (found["socket"].kind, found["socket"].language) == ("hostile", "cpp17")


def test_every_program_of_the_corpus_is_in_its_manifest() -> None:
    for part in ("programs", "legit"):
        files = {path.name for path in (ATTACKS / part).glob("*.py")}
        assert {entry.path.name for entry in entries_of(ATTACKS / part)} == files


@pytest.mark.slow
@behind_a_wall
def test_an_unexpected_result_is_an_exit_code(tmp_path: Path) -> None:
    import subprocess

    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "one.py").write_text("def run(): return {'escaped': True}")
    (folder / "manifest.json").write_text('{"one": {"file": "one.py", "expect": ["ok"], "why": "says so"}}')
    command = [sys.executable, "-m", "tests.attacks", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, env={**os.environ})
    assert done.returncode == 1
    assert "ESCAPED" in done.stdout
    assert "0 of 1 as expected" in done.stdout
