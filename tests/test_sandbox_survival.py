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

ROOT = Path(__file__).parent.parent

JUDGE = """
import asyncio
from activities.judge.sandbox import Limits, Program, open_sandbox
source = "import os, time\\ndef run():\\n    print(os.getpid(), flush=True)\\n    time.sleep(120)"
sandbox = open_sandbox()
print("open", sandbox.isolation, flush=True)
asyncio.run(sandbox.run(Program(source), Limits(wall_seconds=100)))
"""

USER_JUDGE = """
import asyncio, os
from activities.judge.sandbox import Limits, Program, open_sandbox
sandbox = open_sandbox()
async def main():
    limits = Limits(wall_seconds=1, grace_seconds=0.5, memory_bytes=256 << 20)
    uid, spin, memory = "return __import__('os').getuid()", "while True: pass", "return bytearray(1 << 40)"
    for source in (f"def run():\\n    {body}" for body in (uid, spin, memory)):
        outcome = await sandbox.run(Program(source), limits)
        print(outcome.status, outcome.result)
asyncio.run(main())
print(sandbox.isolation)
"""


def children_of(pid: int) -> list[int]:
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        found += [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
    return found


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
def test_a_killed_judge_leaves_no_program(signal_number: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    judge = subprocess.Popen([sys.executable, "-c", JUDGE], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert judge.stdout is not None
        assert judge.stdout.readline().startswith("open landlock")
        assert until(lambda: bool(children_of(judge.pid)))
        (program,) = children_of(judge.pid)
        # Inside the sandbox: it has its own session and, as root, its own uid.
        assert until(lambda: "Seccomp:\t2" in Path(f"/proc/{program}/status").read_text())
        os.kill(judge.pid, signal_number)
        judge.wait(20)
        assert until(lambda: not is_running(program))
    finally:
        judge.kill()
        judge.wait()


def ordinary_python() -> str | None:
    """An interpreter of this version that an ordinary user can start."""
    from activities.judge.sandbox.landlock import unreachable

    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [sys.executable, *(f"{folder}/{name}" for folder in ("/usr/bin", "/usr/local/bin"))]
    return next((c for c in candidates if os.path.exists(c) and not unreachable([c])), None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; an ordinary user's run is this test everywhere")
def test_an_ordinary_user_gets_the_same_sandbox() -> None:
    python = ordinary_python()
    if python is None or shutil.which("setpriv") is None:
        pytest.skip("no Python of this version that another user can start, or no setpriv")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    environment = {"PATH": os.environ["PATH"], "HOME": "/", "PYTHONPATH": os.pathsep.join([str(ROOT), *packages])}
    command = ["setpriv", "--reuid", "64100", "--regid", "64100", "--clear-groups", python, "-B", "-c", USER_JUDGE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["ok b'64100'", "timeout None", "memory None"]
    assert lines[3].startswith("landlock abi")
    assert lines[3].endswith("uid own")
