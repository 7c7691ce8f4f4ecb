"""Nothing survives: a judge killed without warning takes its programs along; and an ordinary user's judge is as safe as root's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from activities.judge.sandbox import proc
from tests.legit_environment import ordinary_python, packages
from tests.sandboxes import BACKENDS, opened

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent

JUDGE = (
    """
import asyncio, sys
from activities.judge.sandbox import Limits, Program, SandboxSettings, open_sandbox
backend, processes = sys.argv[1], int(sys.argv[2])
source = """
    + repr(
        """
import os, sys, time
def run(processes):
    for _ in range(processes - 1):
        if os.fork() == 0: break
    time.sleep(120)
"""
    )
    + """
sandbox = open_sandbox(SandboxSettings(backend=backend))
print("open", sandbox.isolation, flush=True)
program = Program(source, arguments={"processes": processes})
asyncio.run(sandbox.run(program, Limits(wall_seconds=100, processes=processes)))
"""
)

USER_JUDGE = """
import asyncio, os, sys
from activities.judge.sandbox import Limits, Program, SandboxSettings, open_sandbox
sandbox = open_sandbox(SandboxSettings(backend=sys.argv[1]))
async def main():
    limits = Limits(wall_seconds=1, grace_seconds=0.5, memory_bytes=256 << 20)
    uid, spin, memory = "return __import__('os').getuid()", "while True: pass", "return bytearray(1 << 40)"
    for source in (f"def run():\\n    {body}" for body in (uid, spin, memory)):
        outcome = await sandbox.run(Program(source), limits)
        print(outcome.status, outcome.result)
asyncio.run(main())
print(sandbox.isolation)
"""


def descendants_in_a_sandbox(pid: int) -> list[int]:
    """Those of a judge's descendants that have closed their sandbox, which bubblewrap's own processes have not."""
    return [p for p in proc.descendants(pid) if "Seccomp:\t2" in _status(p)]


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(("backend", "processes"), [("landlock", 1), ("bwrap", 1), ("bwrap", 3)])
def test_a_killed_judge_leaves_no_program(backend: str, processes: int, signal_number: int) -> None:
    opened(backend).close_blocking()
    command = [sys.executable, "-c", JUDGE, backend, str(processes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    judge = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert judge.stdout is not None
        assert judge.stdout.readline().startswith(f"open {backend}")
        assert until(lambda: len(descendants_in_a_sandbox(judge.pid)) == processes)
        family = proc.descendants(judge.pid)
        assert len(family) == processes + (2 if backend == "bwrap" else 0)
        os.kill(judge.pid, signal_number)
        judge.wait(20)
        assert until(lambda: not any(is_running(pid) for pid in family))
    finally:
        judge.kill()
        judge.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; an ordinary user's run is this test everywhere")
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ordinary_user_gets_the_same_sandbox(backend: str) -> None:
    opened(backend).close_blocking()
    python = ordinary_python()
    if python is None or shutil.which("setpriv") is None:
        pytest.skip("no Python of this version that another user can start, or no setpriv")
    environment = {"PATH": os.environ["PATH"], "HOME": "/", "PYTHONPATH": os.pathsep.join([str(ROOT), *packages()])}
    command = ["setpriv", "--reuid", "64100", "--regid", "64100", "--clear-groups", python, "-B", "-c", USER_JUDGE, backend]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["ok b'64100'", "timeout None", "memory None"]
    assert lines[3].startswith(f"{backend} abi")
    assert lines[3].endswith("uid own")
