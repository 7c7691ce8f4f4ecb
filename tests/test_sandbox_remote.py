"""The backend `remote` against a real service process: the same outcomes as here, and every way to lose each other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.judge.sandbox import (
    Limits,
    Outcome,
    Program,
    Sandbox,
    SandboxSettings,
    SandboxUnavailable,
    Status,
    open_sandbox,
    remote_wire,
)
from activities.judge.sandbox.remote import RemoteSandbox
from activities.judge.single import judge_file
from tests.attack_folders import entries_of
from tests.sandboxes import value
from tests.test_judge_single import GRID

pytestmark = pytest.mark.slow

ATTACKS = Path(__file__).parent / "data" / "attacks" / "programs"
TOKEN = "correct-horse-battery-staple"
SHORT = Limits(wall_seconds=2, grace_seconds=0.5, memory_bytes=1 << 30, result_bytes=2 << 20, log_bytes=8 << 20, threads=64)
SLEEPER = "import time\ndef run():\n    time.sleep(100)"
LONG = Limits(wall_seconds=90)


# A service in a process of its own ------------------------------------------------------------------------------------------------
@dataclass
class Served:
    """A running `tttd sandbox serve`."""

    process: subprocess.Popen[str]
    url: str
    isolation: str

    @property
    def settings(self) -> SandboxSettings:
        return SandboxSettings(backend="remote", remote_url=self.url, remote_token=TOKEN)

    def descendants(self) -> set[int]:
        """Processes that this one started, directly or through others."""
        found, waiting = set(), [self.process.pid]
        while waiting:
            pid = waiting.pop()
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with contextlib.suppress(OSError):
                    waiting += [int(child) for child in (task / "children").read_text().split()]
            found.add(pid)
        return found - {self.process.pid}


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, **environment: str) -> Iterator[Served]:
    (folder / "token").write_text(f"{TOKEN}\n")
    command = [sys.executable, "-m", "console.main", "sandbox", "serve", "--port", "0", "--token-file", str(folder / "token")]
    variables = {**os.environ, "TTTD_HOME": str(folder / "home"), **environment}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=log, text=True, env=variables)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(r"sandbox service at (http://127\.0\.0\.1:\d+): (.*)\n", line)
        if match is None:
            process.wait(timeout=30)
            words = (folder / "log").read_text()
            if "no safe sandbox" in words:
                pytest.skip(words)
            raise AssertionError(words)
        yield Served(process, match[1], match[2])
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("service"), "--slots", "1") as service:
        yield service


@pytest.fixture(scope="module")
def remote(served: Served) -> Iterator[Sandbox]:
    with open_sandbox(served.settings) as opened:
        yield opened


@pytest.fixture(scope="module")
def local() -> Iterator[Sandbox]:
    with open_sandbox() as opened:
        yield opened


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait for something to become true; fails if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.05)


def told(outcome: Outcome) -> tuple[Any, ...]:
    """Everything of an outcome that does not differ from run to run."""
    return (
        outcome.status,
        outcome.reason,
        outcome.result,
        outcome.exit_code,
        outcome.signal,
        outcome.stdout_tail,
        outcome.stdout_bytes,
    )


# The same as here -----------------------------------------------------------------------------------------------------------------
PROGRAMS = {
    "numbers": Program("def run(seed): return [seed, 0.1, 5e-324]", arguments={"seed": 3, "budget_s": 1.0}),
    "array": Program("import numpy as np\ndef run(): return np.linspace(0, 1, 1000) * h[0]", constants={"h": [0.5, 1.5]}),
    "helper": Program("def run(): return score(2)", helper="def score(x): return x * 21"),
    "prints": Program("def run():\n    print('hä\\x1b[31m')\n    return 1"),
    "exception": Program("def run(): return 1 / 0"),
    "signal": Program("import os\ndef run(): os.abort()"),
    "text": Program("def run(): return 'x'"),
    "no entry": Program("x = 1"),
    "memory": Program("def run(): return bytearray(1 << 40)"),
    "sleeps": Program("import time\ndef run():\n    print('begun', flush=True)\n    time.sleep(60)"),
    "large result": Program("def run(): return [0.123456789] * (1 << 20)"),
    "large log": Program("def run():\n    while True: print('x' * 10000)"),
    "c++": Program("#include <iostream>\nint main() { int x; std::cin >> x; std::cout << 2 * x; }", language="cpp17", stdin=b"21"),
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_ends_there_as_it_ends_here(name: str, remote: Sandbox, local: Sandbox) -> None:
    program = PROGRAMS[name]
    if program.language not in local.isolation.languages:
        pytest.skip("no C++ compiler here")
    limits = replace(SHORT, wall_seconds=20) if program.language == "cpp17" else SHORT
    there, here = await remote.run(program, limits), await local.run(program, limits)
    if name == "large log":  # how much was read before the kill is chance
        there, here = (replace(outcome, stdout_tail="", stdout_bytes=0) for outcome in (there, here))
    assert told(there) == told(here)
    assert there.isolation == replace(here.isolation, backend=f"remote:{here.isolation.backend}")
    assert there.isolation == remote.isolation


SAMPLE = (
    *("stdout_flood", "ignore_signals", "swallow_exceptions", "recursion_crash", "segfault", "syntax_error", "no_entry"),
    *("lazy_huge_array", "out_nested", "out_overflow", "out_pickle", "out_empty", "out_close_fds", "thread_left"),
)


@pytest.mark.parametrize("entry", [entry for entry in entries_of(ATTACKS) if entry.name in SAMPLE], ids=lambda entry: entry.name)
async def test_hostile_programs_end_as_they_must(entry: Any, remote: Sandbox) -> None:
    outcome = await remote.run(Program(entry.path.read_text(encoding="utf-8")), SHORT)
    assert outcome.status.value in {*entry.expect, *(["invalid_output"] if "ok" in entry.expect else [])}


def test_a_judge_certifies_what_ran_elsewhere(remote: Sandbox, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(GRID)
    report = judge_file("circle_packing_26", program, sandbox=remote, wall_seconds=10)
    assert report["valid"], report
    assert report["isolation"].startswith("remote:")


def test_what_is_returned_is_what_the_service_was_asked_for(remote: Sandbox) -> None:
    """Several event loops, one after the other and at once: a judge of one file has its own."""
    results: list[Any] = []

    def one(seed: int) -> None:
        program = Program("def run(seed): return seed", arguments={"seed": seed})
        results.append((seed, value(asyncio.run(remote.run(program, SHORT)))))

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [(seed, seed) for seed in range(4)]


async def test_a_run_waits_for_its_cores(remote: Sandbox) -> None:
    """The service has one core for programs: two runs that take half a second each do not overlap."""
    source = "import time\ndef run():\n    begun = time.time()\n    time.sleep(0.5)\n    return [begun, time.time()]"
    first, second = sorted(map(value, await asyncio.gather(*(remote.run(Program(source), SHORT) for _ in range(2)))))
    assert first[1] <= second[0]


async def test_an_environment_is_named_and_found_there(tmp_path: Path) -> None:
    name = "00112233aabbccdd"
    (tmp_path / "environments" / name / "bin").mkdir(parents=True)
    (tmp_path / "environments" / name / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "environments" / name / "complete").touch()
    with serving(tmp_path, TTTD_ENVIRONMENTS=str(tmp_path / "environments")) as service, open_sandbox(service.settings) as sandbox:
        program = Program("import sys\ndef run(): return 1", python=Path("/elsewhere") / name / "bin" / "python")
        assert value(await sandbox.run(program, SHORT)) == 1
        absent = await sandbox.run(replace(program, python=Path("/elsewhere/ffffffffffffffff/bin/python")), SHORT)
        assert absent.status is Status.SANDBOX_ERROR
        assert "environment ffffffffffffffff is not built on this host" in absent.reason
        nameless = await sandbox.run(replace(program, python=Path("/usr/bin/python3")), SHORT)
        assert (nameless.status, "tttd task build" in nameless.reason) == (Status.SANDBOX_ERROR, True)


# Losing each other ----------------------------------------------------------------------------------------------------------------
async def test_a_cancelled_run_is_dead_when_the_cancellation_returns(served: Served, remote: Sandbox) -> None:
    before = served.descendants()
    running = asyncio.create_task(remote.run(Program(SLEEPER), LONG))
    await until(lambda: served.descendants() - before)
    begun = served.descendants() - before
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not begun & served.descendants()
    assert value(await remote.run(Program("def run(): return 1"), SHORT)) == 1  # the only core is free again


async def test_a_judge_that_is_killed_takes_its_run_along(served: Served, remote: Sandbox) -> None:
    judge = (
        "import asyncio, sys\nfrom activities.judge.sandbox import *\n"
        f"sandbox = open_sandbox({served.settings!r}.__class__('remote', remote_url={served.url!r}, remote_token={TOKEN!r}))\n"
        f"asyncio.run(sandbox.run(Program({SLEEPER!r}), Limits(wall_seconds=90)))\n"
    )
    before = served.descendants()
    process = subprocess.Popen([sys.executable, "-c", judge])
    try:
        # The checks at opening come and go; what stays is the run.
        await until(lambda: sleepers(served.descendants() - before))
    finally:
        process.kill()
        process.wait()
    await until(lambda: not sleepers(served.descendants() - before))
    assert value(await remote.run(Program("def run(): return 1"), SHORT)) == 1


def sleepers(pids: set[int]) -> set[int]:
    """Those that have lived for two seconds."""
    ticks, up = os.sysconf("SC_CLK_TCK"), float(Path("/proc/uptime").read_text().split()[0])
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / ticks
            if up - started > 2:
                found.add(pid)
    return found


async def test_a_service_that_is_killed_makes_a_sandbox_error(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        sandbox = open_sandbox(service.settings)
        running = asyncio.create_task(sandbox.run(Program(SLEEPER), LONG))
        await until(lambda: sleepers(service.descendants()))
        programs = service.descendants()
        service.process.kill()
        outcome = await asyncio.wait_for(running, 20)
        assert outcome.status is Status.SANDBOX_ERROR
        assert f"sandbox service {service.url}: the connection failed" in outcome.reason
        await until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in programs))
        again = await sandbox.run(Program("def run(): return 1"), SHORT)  # nobody listens any more
        assert again.status is Status.SANDBOX_ERROR
        assert "ConnectError" in again.reason


async def test_a_service_told_to_stop_lets_runs_end(tmp_path: Path) -> None:
    with serving(tmp_path, "--slots", "2", "--drain-seconds", "30") as service:
        sandbox = open_sandbox(service.settings)
        before = service.descendants()
        program = Program("import time\ndef run():\n    time.sleep(3)\n    return 5")
        running = asyncio.create_task(sandbox.run(program, replace(SHORT, wall_seconds=10)))
        await until(lambda: service.descendants() - before)
        service.process.send_signal(signal.SIGTERM)
        await until(lambda: "draining" in (tmp_path / "log").read_text())
        late = await sandbox.run(Program("def run(): return 1"), SHORT)
        assert late.status is Status.SANDBOX_ERROR
        assert value(await running) == 5
        assert await asyncio.to_thread(service.process.wait, 20) == 0


async def test_a_service_told_to_stop_kills_what_does_not_end(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-seconds", "1") as service:
        sandbox = open_sandbox(service.settings)
        running = asyncio.create_task(sandbox.run(Program(SLEEPER), LONG))
        await until(lambda: sleepers(service.descendants()))
        programs = service.descendants()
        service.process.send_signal(signal.SIGTERM)
        outcome = await asyncio.wait_for(running, 30)
        assert (outcome.status, outcome.reason) == (Status.SANDBOX_ERROR, "the service stopped, and ended the run")
        assert await asyncio.to_thread(service.process.wait, 20) == 0
        assert not any(Path(f"/proc/{pid}/exe").exists() for pid in programs)


async def test_a_closed_sandbox_ends_its_runs(served: Served) -> None:
    sandbox = open_sandbox(served.settings)
    before = served.descendants()
    running = asyncio.create_task(sandbox.run(Program(SLEEPER), LONG))
    await until(lambda: served.descendants() - before)
    await sandbox.close()
    outcome = await asyncio.wait_for(running, 20)
    assert (outcome.status, outcome.reason) == (Status.SANDBOX_ERROR, "the sandbox was closed")
    assert served.descendants() <= before


# Who may ask ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"remote_token": "another-token-of-good-length"}, "refuses the token"),
        ({"remote_token": None}, "no token"),
        ({"remote_token": "short"}, "no token"),
        ({"remote_token": "with a space, which no token has"}, "no token"),
        ({"remote_url": "localhost:80"}, "no address"),
        ({"remote_url": "http://user@localhost"}, "no address"),
        ({"remote_url": None}, "no address"),
        ({"remote_url": "http://127.0.0.1:1"}, "does not answer"),
    ],
)
def test_a_service_that_cannot_be_used_is_unavailable(settings: dict[str, Any], words: str, served: Served) -> None:
    with pytest.raises(SandboxUnavailable, match=words) as caught:
        open_sandbox(replace(served.settings, **settings))
    assert caught.value.hints
    assert TOKEN not in str(caught.value)


async def test_every_request_needs_the_token(served: Served) -> None:
    body = remote_wire.encode_request("0" * 32, Program("def run(): return 1"), SHORT)
    async with httpx.AsyncClient(base_url=served.url) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}, {"authorization": TOKEN}):
            answers = [
                await client.get("/isolation", headers=headers),
                await client.post("/runs", headers=headers, content=body),
                await client.delete(f"/runs/{'0' * 32}", headers=headers),
            ]
            assert [answer.status_code for answer in answers] == [401] * 3
            assert all(answer.text == "the token is missing or wrong" for answer in answers)
        assert (await client.get("/healthz")).text == "ok"
    forged = RemoteSandbox(served.url, "another-token-of-good-length", open_sandbox(served.settings).isolation)
    outcome = await forged.run(Program("def run(): return 1"), SHORT)
    assert (outcome.status, "HTTP 401" in outcome.reason) == (Status.SANDBOX_ERROR, True)


async def test_what_is_no_run_is_refused_and_changes_nothing(served: Served, remote: Sandbox) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=served.url) as client:
        malformed = await client.post("/runs", headers=headers, content=b"\xc1 not a run")
        assert (malformed.status_code, "malformed" in malformed.text) == (400, True)
        with contextlib.suppress(httpx.TransportError):  # it may close before it has read a body that it will not take
            assert (await client.post("/runs", headers=headers, content=_too_much())).status_code == 400
        assert (await client.delete(f"/runs/{'0' * 32}", headers=headers)).status_code == 204  # dead, as was wished
    assert value(await remote.run(Program("def run(): return 1"), SHORT)) == 1


async def _too_much() -> AsyncIterator[bytes]:
    for _ in range((remote_wire.MAXIMUM_REQUEST_BYTES >> 20) + 8):
        yield b"x" * (1 << 20)


def test_a_body_that_is_announced_as_too_long_is_not_read(served: Served) -> None:
    port = int(served.url.rpartition(":")[2])
    length = remote_wire.MAXIMUM_REQUEST_BYTES + 1
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        lines = ["POST /runs HTTP/1.1", "host: here", f"authorization: Bearer {TOKEN}", f"content-length: {length}", "", ""]
        connection.sendall("\r\n".join(lines).encode())
        answer = b""
        while not answer.endswith(b"are read") and (chunk := connection.recv(1 << 16)):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 400")
    assert f"the request has {length} bytes".encode() in answer


def test_the_description_is_plain(served: Served) -> None:
    answer = httpx.get(f"{served.url}/isolation", headers={"authorization": f"Bearer {TOKEN}"})
    service = remote_wire.decode_service(answer.content)
    assert str(service.isolation) == served.isolation
    assert (service.cores, service.pid) == (1, served.process.pid)
    assert TOKEN not in json.dumps(answer.text)
