"""One run in each backend: statuses, limits, measurements, what the program finds around it, cancellation."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest

from activities.judge.sandbox import Limits, Program, Sandbox, Status
from tests.sandboxes import BACKENDS, opened, value

SHORT = Limits(wall_seconds=0.3, grace_seconds=0.2)
LONG = Limits(wall_seconds=30)


@pytest.fixture(scope="module", params=BACKENDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with opened(request.param) as sandbox:
        yield sandbox


async def test_a_value_comes_back_with_its_measurements(sandbox: Sandbox) -> None:
    source = """
import time
def run():
    end = time.process_time() + 0.7
    while time.process_time() < end: pass
    return [1, 2.5]
"""
    outcome = await sandbox.run(Program(source), LONG)
    assert value(outcome) == [1, 2.5]
    assert (outcome.exit_code, outcome.signal, outcome.reason) == (0, None, "")
    assert outcome.cpu_seconds is not None
    assert outcome.cpu_seconds >= 0.7
    assert outcome.wall_seconds >= 0.7
    assert outcome.wait_seconds is not None
    assert outcome.wait_seconds >= 0
    assert outcome.peak_memory_bytes is not None
    assert 4 << 20 < outcome.peak_memory_bytes < 200 << 20
    assert outcome.isolation == sandbox.isolation


async def test_peak_memory_is_what_was_touched(sandbox: Sandbox) -> None:
    # Held for a while: where this process is itself larger than that, only samples of the living program tell.
    source = "import time\ndef run():\n    block = b'x' * (700 << 20)\n    time.sleep(1.5)\n    return len(block)"
    outcome = await sandbox.run(Program(source), LONG)
    assert value(outcome) == 700 << 20
    assert outcome.peak_memory_bytes is not None
    assert 700 << 20 < outcome.peak_memory_bytes < 900 << 20


async def test_arguments_and_constants_arrive(sandbox: Sandbox) -> None:
    source = """
def run(seed, budget_s):
    assert type(parent) is np.ndarray and parent.dtype == np.float64
    return [seed, budget_s, parent]
"""
    program = Program(source, arguments={"seed": 7, "budget_s": 1.5, "other": 0}, constants={"parent": [[0.1, 1 / 3]]})
    assert value(await sandbox.run(program, LONG)) == [7, 1.5, [[0.1, 1 / 3]]]


async def test_np_is_there_without_an_import_and_absent_where_nobody_says_so(sandbox: Sandbox) -> None:
    assert value(await sandbox.run(Program("def run(): return np.arange(3)"), LONG)) == [0, 1, 2]
    source = "import sys\ndef run(): return int('numpy' in sys.modules)"
    assert value(await sandbox.run(Program(source), LONG)) == 0


async def test_the_program_is_a_module_of_its_own_name(sandbox: Sandbox) -> None:
    source = """
import sys
if __name__ == '__main__': raise SystemExit('run as a script')
class C: pass
def run(): return int(C.__module__ in sys.modules)
"""
    assert value(await sandbox.run(Program(source), LONG)) == 1


async def test_the_environment_is_clean_and_the_threads_are_capped(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    source = """
import os, sys
def run():
    for name in sorted(os.environ): print(name, os.environ[name])
    print(sys.argv, os.getcwd(), sys.flags.no_user_site, sys.flags.safe_path, sys.dont_write_bytecode, hash("a"))
    return [int(f) for f in range(64) if not _closed(f)]
def _closed(f):
    try: os.fstat(f)
    except OSError: return True
"""
    first = await sandbox.run(Program(source), Limits(wall_seconds=30, cores=2))
    second = await sandbox.run(Program(source), Limits(wall_seconds=30, cores=2))
    assert value(first) == [0, 1, 2, 3]
    lines = first.stdout_tail.splitlines()
    assert "OPENBLAS_NUM_THREADS 2" in lines
    assert "HOME /nonexistent" in lines
    assert {"LANG C.UTF-8", "TZ UTC", "PYTHONHASHSEED 0"} <= set(lines)
    assert not [line for line in lines if "JUDGE" in line or "secret" in line]
    assert "/ 1 True True" in lines[-1]
    assert first.stdout_tail == second.stdout_tail  # the same hashes in every run


@pytest.mark.parametrize(
    ("source", "status", "reason"),
    [
        ("def run(): return 1 / 0", Status.CRASHED, "exit 1"),
        ("def run(: pass", Status.CRASHED, "exit 1"),
        ("x = 1", Status.CRASHED, "exit 1"),
        ("def run(): raise SystemExit(3)", Status.CRASHED, "exit 3"),
        ("def run(): raise SystemExit('sorry')", Status.CRASHED, "exit 1"),
        ("def run(): raise SystemExit", Status.INVALID_OUTPUT, "no result was returned"),
        ("import os\ndef run(): os._exit(0)", Status.INVALID_OUTPUT, "no result was returned"),
        ("import os\ndef run(): os.abort()", Status.CRASHED, "signal 6"),
        ("import ctypes\ndef run(): ctypes.string_at(0)", Status.CRASHED, "signal 11"),
        ("def run(): return 'text'", Status.INVALID_OUTPUT, "the return value holds a str"),
        ("def run(): return bytearray(1 << 40)", Status.MEMORY, "MemoryError"),
        ("def run(): return [b'x' * (1 << 20) for _ in range(1 << 20)]", Status.MEMORY, "MemoryError"),
        ("def run(): return [0.5] * (1 << 20)", Status.OUTPUT_TOO_LARGE, "result"),
        ("import os\ndef run():\n    while True: os.write(3, b'1' * 65536)", Status.OUTPUT_TOO_LARGE, "result"),
        ("import os\ndef run():\n    while True: os.write(2, b'1' * 65536)", Status.OUTPUT_TOO_LARGE, "log"),
        ("import time\ndef run(): time.sleep(60)", Status.TIMEOUT, "wall"),
        ("def run():\n    while True: pass", Status.TIMEOUT, "wall"),
        ("import os, signal\ndef run(): os.kill(os.getpid(), signal.SIGSTOP)", Status.TIMEOUT, "wall"),
        ("import os, time\ndef run():\n    os.closerange(0, 64)\n    time.sleep(60)", Status.TIMEOUT, "wall"),
    ],
)
async def test_each_end_has_its_status(source: str, status: Status, reason: str, sandbox: Sandbox) -> None:
    limits = Limits(wall_seconds=1, grace_seconds=0.5, memory_bytes=256 << 20, result_bytes=1 << 20, log_bytes=1 << 20)
    outcome = await sandbox.run(Program(source), limits)
    assert outcome.status is status
    assert outcome.reason.startswith(reason)
    assert outcome.result is None
    assert outcome.wall_seconds < 10


@pytest.mark.slow
async def test_cpu_time_is_limited_apart_from_wall_time(sandbox: Sandbox) -> None:
    for handler in ("", "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"):
        source = f"{handler}def run():\n    while True: pass"
        outcome = await sandbox.run(Program(source), Limits(wall_seconds=30, cpu_seconds=1))
        assert (outcome.status, outcome.reason) == (Status.TIMEOUT, "cpu")


@pytest.mark.parametrize(
    "frame",
    [b"Sbroken", b"G", b"J[1e999]", b'J{"a":1}', b"J[1,", b"Jnull", b"J", b"\x00", b"Rbecause \x1b[2J of\nthis", b"Mplease", b"L"],
)
async def test_no_forged_frame_scores_or_asks_for_a_retry(frame: bytes, sandbox: Sandbox) -> None:
    for exit_code in (0, 77, 120):
        source = f"import os\ndef run():\n    os.write(3, {frame!r})\n    os._exit({exit_code})"
        outcome = await sandbox.run(Program(source), LONG)
        assert outcome.status not in (Status.OK, Status.SANDBOX_ERROR)
        assert outcome.result is None
        assert outcome.reason.isprintable()


async def test_logs_are_tails_that_no_terminal_can_misread(sandbox: Sandbox) -> None:
    source = r"""
import os, sys
def run():
    print("start" + "x" * 100_000)
    print("\x1b[2J\x07\r\x00é‮😀\tend")
    os.write(2, b"\xff\xfe\xed\xa0\x80 broken\n")
    return 1
"""
    limits = Limits(wall_seconds=30, log_tail_bytes=1000)
    outcome = await sandbox.run(Program(source), limits)
    assert value(outcome) == 1
    assert outcome.stdout_bytes > 100_000
    assert len(outcome.stdout_tail) < 1200
    assert outcome.stdout_tail.endswith("\\x1b[2J\\x07\\r\\x00é\\u202e😀\tend\n")
    assert outcome.stderr_tail == "\\xff\\xfe\\xed\\xa0\\x80 broken\n"


async def test_a_traceback_names_the_program_and_not_the_sandbox(sandbox: Sandbox) -> None:
    outcome = await sandbox.run(Program("def run():\n    raise ValueError('why')"), LONG)
    assert outcome.stderr_tail.splitlines() == [
        "Traceback (most recent call last):",
        '  File "program.py", line 2, in run',
        "    raise ValueError('why')",
        "ValueError: why",
    ]


async def test_leftovers_do_not_hold_the_slot(sandbox: Sandbox) -> None:
    source = """
import atexit, threading, time
atexit.register(time.sleep, 20)
class T:
    def __del__(self): time.sleep(20)
t = T()
def run():
    threading.Thread(target=time.sleep, args=(20,)).start()
    return 1
"""
    outcome = await sandbox.run(Program(source), LONG)
    assert value(outcome) == 1
    assert outcome.wall_seconds < 10


async def test_threads_work_and_processes_do_not(sandbox: Sandbox) -> None:
    source = """
import os, threading
def run():
    out = []
    threads = [threading.Thread(target=out.append, args=(k,)) for k in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    try: os.fork()
    except PermissionError: out.append(-1)
    return sorted(out)
"""
    assert value(await sandbox.run(Program(source), LONG)) == [-1, *range(8)]


async def test_two_runs_at_once_never_share_a_uid(sandbox: Sandbox) -> None:
    source = "import os, time\ndef run():\n    time.sleep(0.5)\n    return os.getuid()"
    outcomes = await asyncio.gather(*(sandbox.run(Program(source), LONG) for _ in range(3)))
    uids = [value(outcome) for outcome in outcomes]
    assert 0 not in uids
    assert len(set(uids)) == (3 if os.geteuid() == 0 else 1)


def children() -> set[int]:
    task = f"/proc/{os.getpid()}/task"
    found: set[int] = set()
    for thread in os.listdir(task):
        with open(f"{task}/{thread}/children") as file:
            found |= {int(pid) for pid in file.read().split()}
    return found


async def test_a_cancelled_run_is_dead_before_the_cancellation_returns(sandbox: Sandbox) -> None:
    before = children()
    running = asyncio.create_task(sandbox.run(Program("import time\ndef run(): time.sleep(60)"), LONG))
    while not children() - before:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - began < 10
    assert children() == before


@pytest.mark.parametrize("backend", BACKENDS)
async def test_closing_kills_what_runs(backend: str) -> None:
    own = await asyncio.to_thread(opened, backend)
    running = asyncio.create_task(own.run(Program("import time\ndef run(): time.sleep(60)"), LONG))
    await asyncio.sleep(0.3)
    await own.close()
    outcome = await running
    assert (outcome.status, outcome.reason) == (Status.SANDBOX_ERROR, "cancelled")


async def test_no_descriptor_is_lost(sandbox: Sandbox) -> None:
    await sandbox.run(Program("def run(): return 1"), LONG)
    before = sorted(os.listdir("/proc/self/fd"))
    for source in ("def run(): return 1", "def run(): return 1 / 0"):
        await sandbox.run(Program(source), LONG)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_kill_comes_a_little_after_the_told_time() -> None:
    assert Limits(wall_seconds=10).kill_seconds == 12
    assert Limits(wall_seconds=1000).kill_seconds == 1100
    assert Limits(wall_seconds=10, cores=2).cpu_limit_seconds == 29
    assert SHORT.kill_seconds == 0.5
