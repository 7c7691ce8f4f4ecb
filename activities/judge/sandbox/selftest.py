"""Proves a sandbox against live canaries before it is used. Source: spec sandbox 9, "Self-test".

A sandbox that was only asked for is not one: kernels and containers refuse layers silently. The probe program attacks this very
process and files planted for it; one attempt that succeeds is enough to refuse.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from activities.judge.sandbox import probe
from activities.judge.sandbox.backend import LocalSandbox
from activities.judge.sandbox.filter import number_of
from activities.judge.sandbox.policy import SHARED_UID_SPARE_TASKS
from activities.judge.sandbox.types import Limits, Outcome, Program, Status

_CALLS = ("io_uring_setup", "bpf", "keyctl", "userfaultfd", "perf_event_open", "ptrace", "unshare")

_LIMITS = Limits(wall_seconds=20, memory_bytes=128 << 20, threads=32)
_SEVERAL = replace(_LIMITS, processes=2)
_FIRST_STRANGE_PID = 1 << 10
_BEYOND_BYTES = 2 << 30
_SLEEP = Limits(wall_seconds=0.2, grace_seconds=0.1)


@dataclass(frozen=True)
class _Canaries:
    file: Path
    text: str
    port: int
    name: str


def self_test(sandbox: LocalSandbox) -> list[str]:
    """Every attempt that was not refused, in words; empty if the sandbox holds. Takes about half a second for each variant."""
    walled = sandbox.policy.wall is not None
    with _canaries() as canaries, _never() as cancel:
        failures = _failures(sandbox.run_blocking(_probe(canaries, walled, several=False), _LIMITS, cancel))
        if not failures and sandbox.isolation.processes > 1:
            outcome = sandbox.run_blocking(_probe(canaries, walled, several=True), _SEVERAL, cancel)
            failures += [f"with several processes, {failure}" for failure in _failures(outcome)]
        if not canaries.file.is_file() or canaries.file.read_text() != canaries.text:
            failures.append("the canary file was changed")
        if not failures:
            sleeping = sandbox.run_blocking(Program("import time\ndef run():\n    time.sleep(60)"), _SLEEP, cancel)
            if sleeping.status is not Status.TIMEOUT:
                failures.append(f"a sleeping program ended as {sleeping.status} ({sleeping.reason}), not as timeout")
    return failures


def _probe(canaries: _Canaries, walled: bool, several: bool) -> Program:
    judge = os.getpid()
    if walled and judge < _FIRST_STRANGE_PID:
        judge += 1 << 21  # a judge of a low number, as in a container, would be taken for one of the run's own processes
    arguments = {
        "canary": str(canaries.file),
        "port": canaries.port,
        "name": canaries.name,
        "judge": judge,
        "memory_bytes": _BEYOND_BYTES,
        "threads": _LIMITS.threads + SHARED_UID_SPARE_TASKS + 40,
        "calls": {name: number_of(name) for name in _CALLS},
        "walled": walled,
        "several": several,
    }
    return Program(Path(probe.__file__).read_text(encoding="utf-8"), arguments=arguments)


def _failures(outcome: Outcome) -> list[str]:
    if outcome.status is not Status.OK or outcome.result is None:
        last = outcome.stderr_tail.strip().rpartition("\n")[2]
        return [f"the probe ended as {outcome.status} ({outcome.reason}): {last or 'no message'}"]
    answers = msgspec.json.decode(outcome.result, type=list[int])
    if len(answers) != len(probe.CHECKS):
        return [f"the probe answered {len(answers)} of {len(probe.CHECKS)} checks"]
    return [f"a program can {check}" for check, answer in zip(probe.CHECKS, answers, strict=True) if answer != 1]


@contextlib.contextmanager
def _canaries() -> Iterator[_Canaries]:
    """A file that anybody may write by its permission bits, a TCP and an abstract unix listener."""
    text = f"CANARY {secrets.token_hex(8)}"
    name = f"tttd-canary-{secrets.token_hex(8)}"
    with (
        tempfile.TemporaryDirectory(prefix="canary-") as folder,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        os.chmod(folder, 0o777)  # permission bits must not be what saves it
        file = Path(folder) / "canary"
        file.write_text(text)
        file.chmod(0o666)
        unix.bind("\0" + name)
        unix.listen()
        yield _Canaries(file, text, tcp.getsockname()[1], name)


@contextlib.contextmanager
def _never() -> Iterator[int]:
    cancel = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        yield cancel
    finally:
        os.close(cancel)
