"""Hostile C++ programs, at compile time and at run time, against live canaries; and what is left of a judge that is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from activities.judge.sandbox import SandboxSettings, SandboxUnavailable, open_sandbox
from activities.judge.sandbox.cpp_toolchain import installed
from tests.attacks import behind_wall, wall_is_possible
from tests.legit_environment import ordinary_python

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "data" / "attacks" / "cpp"
NAMES = list(json.loads((FOLDER / "manifest.json").read_text()))
SETUPS = [("landlock", "ordinary user"), ("bwrap", "root")]
"""The other two are for `python -m tests.attacks`."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(installed() is None, reason="needs g++")]

Cases = dict[str, dict[str, Any]]


def test_every_program_is_listed() -> None:
    listed = {entry["file"] for entry in json.loads((FOLDER / "manifest.json").read_text()).values()}
    assert listed == {path.name for path in FOLDER.glob("*.cpp")}


def usable(backend: str) -> bool:
    try:
        with open_sandbox(SandboxSettings(backend=backend)):  # type: ignore[arg-type]
            return True
    except SandboxUnavailable:
        return False


@pytest.fixture(scope="module", params=SETUPS, ids=[f"{backend}, {user}" for backend, user in SETUPS])
def cases(request: pytest.FixtureRequest) -> Cases:
    backend, user = request.param
    if not wall_is_possible():
        pytest.skip("hostile programs run behind namespaces only, which take root and unshare")
    if not usable(backend):
        pytest.skip(f"no backend {backend} here")
    if user != "root" and ordinary_python() is None:
        pytest.skip("no Python of this version that an ordinary user can start")
    arguments = [str(FOLDER), "--backend", backend, *(["--as-user"] if user != "root" else [])]
    return {case["name"]: case for case in behind_wall(arguments, as_user=user != "root")["cases"]}


@pytest.mark.parametrize("name", NAMES)
def test_contained(name: str, cases: Cases) -> None:
    case = cases[name]
    assert (case["unexpected"], case["escapes"]) == ("", [])


SLOW = """
constexpr long f(long n) { long s = 0; for (long i = 0; i < n; i++) s += i; return s; }
""" + "".join(f"static_assert(f(200000 + {i}) != 1);\n" for i in range(500))

JUDGE = f"""
import asyncio, sys
from activities.judge.sandbox import Limits, Program, SandboxSettings, open_sandbox
sandbox = open_sandbox(SandboxSettings(backend=sys.argv[1]))
source = {SLOW!r} + "int main() {{}}" if sys.argv[2] == "cc1plus" else "#include <unistd.h>\\nint main() {{ sleep(100); }}"
asyncio.run(sandbox.run(Program(source, language="cpp17"), Limits(wall_seconds=100)))
"""


def descendants(pid: int) -> dict[int, str]:
    """Living processes below one, by number, with their commands."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            state, parent = text.rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
                names[int(entry.name)] = text[text.index("(") + 1 : text.rindex(")")]
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return {number: names[number] for number in found - {pid}}


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("what", ["cc1plus", "sleeping"])
@pytest.mark.parametrize("backend", ["landlock", "bwrap"])
def test_a_killed_judge_leaves_neither_compiler_nor_program(backend: str, what: str) -> None:
    if not usable(backend):
        pytest.skip(f"no backend {backend} here")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    judge = subprocess.Popen([sys.executable, "-c", JUDGE, backend, what], env=environment)
    try:
        # The kernel names a process after the first 15 characters of its file: a binary's is its digest.
        wanted = "cc1plus" if what == "cc1plus" else ""

        def is_there() -> bool:
            names = descendants(judge.pid).values()
            return any(name == wanted if wanted else len(name) == 15 and not name.strip("0123456789abcdef") for name in names)

        assert until(is_there)
        left = descendants(judge.pid)
        judge.kill()
        judge.wait()
        assert until(lambda: not any(alive(pid, name) for pid, name in left.items()), 5.0)
    finally:
        judge.kill()
        judge.wait()


def alive(pid: int, name: str) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return f"({name})" in text and text.rpartition(")")[2].split()[0] != "Z"
