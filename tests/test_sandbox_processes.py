"""Programs of several processes, in the backend that can hold them: what works, and that their totals are kept."""

from __future__ import annotations

import os
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from activities.judge.sandbox import Limits, Program, Sandbox, Status
from tests.sandboxes import opened, value

LIMITS = Limits(wall_seconds=60, processes=4, memory_bytes=512 << 20)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with opened("bwrap") as sandbox:
        yield sandbox


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
async def test_pools_work_however_they_start_their_processes(method: str, sandbox: Sandbox) -> None:
    # A spawned process imports the program anew: it must find the helper's names, the constants and np there.
    source = f"""
import multiprocessing
def f(i): return [i * FACTOR, float(np.sum(parent)), int(__name__ == "program")]
def run():
    with multiprocessing.get_context({method!r}).Pool(2) as pool: return pool.map(f, range(3))
"""
    program = Program(source, helper="FACTOR = 10", constants={"parent": [0.5, 1.0]})
    assert value(await sandbox.run(program, LIMITS)) == [[0, 1.5, 1], [10, 1.5, 1], [20, 1.5, 1]]


async def test_a_private_tmp_does_not_hide_an_interpreter_below_the_hosts(sandbox: Sandbox) -> None:
    """A clone in /tmp has its environment there; nothing else of the host's /tmp is to be seen."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        venv.create(folder, with_pip=False)
        Path(folder, "secret.txt").write_text("not for programs")
        source = """
import os, sys
def run(): return [float(sys.prefix == FOLDER), float(os.path.exists(FOLDER + "/secret.txt")), float(len(os.listdir("/tmp")))]
"""
        program = Program(source, helper=f"FOLDER = {folder!r}", python=Path(folder, "bin", "python"))
        assert value(await sandbox.run(program, LIMITS)) == [1, 0, 1]


@pytest.mark.slow
async def test_scipy_finds_its_workers(sandbox: Sandbox) -> None:
    source = """
from scipy.optimize import differential_evolution
def f(x): return float((x ** 2).sum())
def run():
    return differential_evolution(f, [(-1, 1)] * 2, workers=2, updating="deferred", maxiter=5, rng=1).fun
"""
    assert value(await sandbox.run(Program(source), replace(LIMITS, memory_bytes=2 << 30))) < 0.1


async def test_shared_memory_subprocesses_and_temporary_files_work(sandbox: Sandbox) -> None:
    source = """
import os, subprocess, sys, tempfile
from multiprocessing import shared_memory
def run():
    block = shared_memory.SharedMemory(create=True, size=1 << 20)
    block.buf[0] = 7
    first = block.buf[0]
    block.close(); block.unlink()
    printed = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, check=True).stdout
    shell = subprocess.run(["/bin/sh", "-c", "echo 8 > eight; cat eight"], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        open(os.path.join(folder, "file"), "w").write("x" * 1000)
        size = os.path.getsize(os.path.join(folder, "file"))
    return [first, int(printed), int(shell), size]
"""
    assert value(await sandbox.run(Program(source), LIMITS)) == [7, 42, 8, 1000]


async def test_only_the_process_that_was_started_answers(sandbox: Sandbox) -> None:
    # A child that falls out of run() returns a value, too.
    source = "import os, time\ndef run():\n    child = os.fork()\n    if child: os.waitpid(child, 0)\n    return 1 if child else 2"
    outcome = await sandbox.run(Program(source), LIMITS)
    assert value(outcome) == 1
    orphan = "import os, time\ndef run():\n    if os.fork() == 0: time.sleep(60)\n    return 1"
    outcome = await sandbox.run(Program(orphan), LIMITS)
    assert value(outcome) == 1
    assert outcome.wall_seconds < 30


async def test_memory_is_limited_in_total(sandbox: Sandbox) -> None:
    source = """
import os, time
def run():
    for _ in range(3):
        if os.fork() == 0:
            block = b"x" * (300 << 20)
            time.sleep(60)
            os._exit(0)
    time.sleep(60)
"""
    outcome = await sandbox.run(Program(source), LIMITS)
    assert (outcome.status, outcome.reason) == (Status.MEMORY, "memory of all processes")
    assert outcome.peak_memory_bytes is not None
    assert outcome.peak_memory_bytes > 512 << 20


async def test_memory_that_processes_share_counts_once(sandbox: Sandbox) -> None:
    source = """
import os, time
def run():
    block = bytearray(b"x" * (300 << 20))
    children = [os.fork() for _ in range(2)]
    if 0 in children:
        time.sleep(1.0)
        os._exit(0)
    for child in children: os.waitpid(child, 0)
    return len(block)
"""
    outcome = await sandbox.run(Program(source), replace(LIMITS, memory_bytes=700 << 20))
    assert value(outcome) == 300 << 20


@pytest.mark.slow
async def test_cpu_time_is_limited_and_counted_in_total(sandbox: Sandbox) -> None:
    source = """
import os, time
def run(seconds=0.4):
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            while time.process_time() < seconds: pass
            os._exit(0)
        children.append(child)
    for child in children: os.waitpid(child, 0)
    return 1
"""
    outcome = await sandbox.run(Program(source), LIMITS)
    assert value(outcome) == 1
    assert outcome.cpu_seconds is not None
    assert 1.2 <= outcome.cpu_seconds < 3
    outcome = await sandbox.run(Program(source.replace("0.4", "60")), replace(LIMITS, cpu_seconds=1))
    assert (outcome.status, outcome.reason) == (Status.TIMEOUT, "cpu")
    assert outcome.cpu_seconds is not None
    assert outcome.cpu_seconds < 10


async def test_files_are_counted_even_after_the_end(sandbox: Sandbox) -> None:
    source = "import os\ndef run(count):\n    for i in range(count): open(f'f{i}', 'w').close()\n    os._exit(0)"
    outcome = await sandbox.run(Program(source, arguments={"count": 12_000}), LIMITS)
    assert (outcome.status, outcome.reason) == (Status.MEMORY, "too many files")
    outcome = await sandbox.run(Program(source, arguments={"count": 100}), LIMITS)
    assert outcome.status is Status.INVALID_OUTPUT


async def test_the_number_of_processes_is_limited(sandbox: Sandbox) -> None:
    source = """
import os, time
def run():
    count = 0
    try:
        for _ in range(500):
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            count += 1
    except BlockingIOError:
        pass
    return count
"""
    found = value(await sandbox.run(Program(source), replace(LIMITS, threads=16)))
    assert 3 < found < 32


async def test_scratch_space_is_private_sized_and_gone_afterwards(sandbox: Sandbox) -> None:
    source = """
import os
def run():
    before = os.listdir("/tmp")
    written = 0
    try:
        with open("file", "wb") as file:
            for _ in range(64): written += file.write(b"x" * (1 << 20)); file.flush()
    except OSError: pass
    try: os.fork()
    except PermissionError: pass
    else: written = -1
    return [int("file" in before), written >> 20, int(os.path.exists("/dev/shm/other"))]
"""
    limits = Limits(wall_seconds=30, scratch_bytes=8 << 20)
    for _ in range(2):
        found = value(await sandbox.run(Program(source), limits))
        assert found[0] == 0
        assert 7 <= found[1] <= 8
    assert not os.path.exists("/tmp/file")


async def test_a_family_is_dead_when_its_run_is_over(sandbox: Sandbox) -> None:
    source = """
import os, time
def run():
    for _ in range(3):
        if os.fork() == 0:
            try: os.setsid()
            except PermissionError: pass
            time.sleep(97.25)
    time.sleep(60)
"""
    outcome = await sandbox.run(Program(source), replace(LIMITS, wall_seconds=0.5, grace_seconds=0.1))
    assert (outcome.status, outcome.reason) == (Status.TIMEOUT, "wall")
    uids = set(range(60_000, 60_256)) if os.geteuid() == 0 else set()
    left = [pid for pid in os.listdir("/proc") if pid.isdigit() and _uid(pid) in uids and _parent(pid) == os.getpid()]
    assert left == []


def _uid(pid: str) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return -1


async def test_a_backend_without_processes_says_so_and_not_that_the_program_is_wrong() -> None:
    with opened("landlock") as sandbox:
        assert sandbox.isolation.processes == 1
        outcome = await sandbox.run(Program("def run(): return 1"), LIMITS)
    assert outcome.status is Status.SANDBOX_ERROR
    assert "bubblewrap" in outcome.reason
