"""What a program brings along besides its source: a helper, an interpreter, an input; and binaries in place of Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.judge.sandbox import Limits, Program, Sandbox, Status
from activities.judge.sandbox.backend import LocalSandbox
from activities.judge.sandbox.execution import Execution
from tests.sandboxes import BACKENDS, opened, value

LIMITS = Limits(wall_seconds=30)


@pytest.fixture(scope="module", params=BACKENDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with opened(request.param) as sandbox:
        yield sandbox


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that every user can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def test_a_helper_runs_first_in_the_programs_own_namespace(sandbox: Sandbox) -> None:
    helper = "base = np.arange(3) + start[0]\ndef twice(x): return 2 * x"
    source = "base = base + 1\ndef run(): return twice(base)"
    assert value(await sandbox.run(Program(source, helper=helper, constants={"start": [10.0]}), LIMITS)) == [22, 24, 26]


async def test_a_failing_helper_is_the_tasks_fault_and_names_its_line(sandbox: Sandbox) -> None:
    for helper in ("x = 1\nraise ValueError('bad table')", "x = 1\nimport nowhere", "x = 1\nraise SystemExit('bad table')"):
        outcome = await sandbox.run(Program("def run(): return 1", helper=helper), LIMITS)
        assert outcome.status is Status.SANDBOX_ERROR
        assert outcome.reason.startswith("the task's helper failed: line 2: ")
    syntax = await sandbox.run(Program("def run(): return 1", helper="def ("), LIMITS)
    assert "SyntaxError" in syntax.reason


async def test_a_helpers_frames_stay_out_of_the_programs_traceback(sandbox: Sandbox) -> None:
    helper = "def check(x):\n    raise ValueError('x must be positive')"
    outcome = await sandbox.run(Program("def run():\n    try: check(0)\n    finally: 1 / 0", helper=helper), LIMITS)
    assert outcome.status is Status.CRASHED
    assert "helper" not in outcome.stderr_tail
    assert "inside" not in outcome.stderr_tail
    assert "x must be positive" in outcome.stderr_tail
    assert outcome.stderr_tail.endswith("ZeroDivisionError: division by zero\n")
    assert outcome.stderr_tail.count('File "program.py"') == 2


async def test_a_program_can_pretend_no_failure_of_its_helper(sandbox: Sandbox) -> None:
    source = "import os\nos.write(3, b'Hit was the helper')\nos._exit(120)"
    outcome = await sandbox.run(Program(source, helper="x = 1"), LIMITS)
    assert outcome.status is Status.CRASHED


async def test_programs_run_with_the_interpreter_that_they_name(sandbox: Sandbox, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    (packages / "only_here.py").write_text("answer = 42")
    source = "import sys\nimport only_here\ndef run(): return [only_here.answer, int('numpy' in sys.modules)]"
    assert value(await sandbox.run(Program(source, python=python), LIMITS)) == [42, 0]
    outcome = await sandbox.run(Program("import numpy\ndef run(): return 1", python=python), LIMITS)
    assert "No module named 'numpy'" in outcome.stderr_tail
    outcome = await sandbox.run(Program(source), LIMITS)
    assert "No module named 'only_here'" in outcome.stderr_tail


async def test_an_interpreter_that_is_not_there_is_no_fault_of_the_program(sandbox: Sandbox) -> None:
    outcome = await sandbox.run(Program("def run(): return 1", python=Path("/nonexistent/python")), LIMITS)
    assert outcome.status is Status.SANDBOX_ERROR
    assert "/nonexistent/python" in outcome.reason


async def test_an_input_arrives_and_cannot_be_written(sandbox: Sandbox) -> None:
    source = """
import os, sys
def run():
    refused = 0
    for attempt in (lambda: os.write(0, b"x" * 4096), lambda: os.truncate(0, 1 << 20)):
        try: attempt()
        except OSError: refused += 1
    os.lseek(0, 0, 0)
    data = sys.stdin.buffer.read()
    return [len(data), data[0], data[-1], refused]
"""
    data = bytes(range(256)) * 4096
    assert value(await sandbox.run(Program(source, stdin=data), LIMITS)) == [1 << 20, 0, 255, 2]
    assert value(await sandbox.run(Program("import sys\ndef run(): return len(sys.stdin.read())"), LIMITS)) == 0


BINARY = """
#include <cstdio>
#include <unistd.h>
#include <sys/mman.h>
extern char **environ;
int main(int argc, char **argv) {
    int n = 0;
    if (scanf("%d", &n) != 1) return 3;
    char *const arguments[] = {argv[0], nullptr};
    int again = execve(argv[0], arguments, environ);
    int other = execve("/bin/true", arguments, environ);
    FILE *file = fopen("/usr/lib/os-release", "r");
    printf("%d %d %d %d %d", 2 * n, again, other, fork(), file != nullptr);
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_binary_is_become_once_and_reads_its_input(sandbox: Sandbox, folder: Path) -> None:
    assert isinstance(sandbox, LocalSandbox)
    (folder / "program.cpp").write_text(BINARY)
    subprocess.run(["g++", "-static", "-o", str(folder / "program"), str(folder / "program.cpp")], check=True)
    cancel = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        outcome = sandbox.run_blocking(Program("", stdin=b"21\n"), LIMITS, cancel, Execution(folder / "program"))
        assert outcome.status is Status.OK, outcome
        readable = 0 if sandbox.isolation.landlock_abi else 1
        assert outcome.result == f"42 -1 -1 -1 {readable}".encode()
        outcome = sandbox.run_blocking(Program("", stdin=b"x"), LIMITS, cancel, Execution(folder / "program"))
        assert (outcome.status, outcome.exit_code) == (Status.CRASHED, 3)
        outcome = sandbox.run_blocking(Program(""), LIMITS, cancel, Execution(folder / "nothing"))
        assert outcome.status is Status.SANDBOX_ERROR
    finally:
        os.close(cancel)
