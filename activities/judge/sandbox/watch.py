"""Sees one run to its end: drains its pipes, kills it at a limit, reaps it to the last descendant, says what is known about it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from dataclasses import dataclass
from typing import Final

from activities.judge.sandbox import proc
from activities.judge.sandbox.logs import Tail
from activities.judge.sandbox.meter import FamilyMeter, Meter, WalledMeter
from activities.judge.sandbox.policy import Plan
from activities.judge.sandbox.process import Child
from activities.judge.sandbox.types import Limits

START_SECONDS: Final = 60.0
"""For the interpreter to start, to close the sandbox and to run the helper; the program's own time begins after that."""

_CHUNK_BYTES: Final = 1 << 16
_READY: Final = b"G"
_SIGNALLED: Final = 128
"""A wall reports n + 128 for a program that signal n ended."""


@dataclass(frozen=True)
class Ended:
    """All that is known about a finished process."""

    killed_for: str | None
    """Our own reason for killing it: wall, cpu, memory, files, result, log, cancel, start; None if it ended by itself."""
    ready: bool
    """The sandbox was closed and the program began."""
    frame: bytes
    """What came on the result pipe after the ready byte (before it: why the sandbox was not closed)."""
    exit_code: int | None
    signal: int | None
    wall_seconds: float
    cpu_seconds: float
    wait_seconds: float | None
    peak_memory_bytes: int | None
    stdout: Tail
    stderr: Tail
    wall_broke: bool = False
    """The wall ended without saying how the program did."""


class _Watch:
    """State of watching one child."""

    def __init__(self, child: Child, limits: Limits, meter: Meter, cancel: int) -> None:
        self.child = child
        self.limits = limits
        self.meter = meter
        self.cancel = cancel
        self.stdout, self.stderr = Tail(limits.log_tail_bytes), Tail(limits.log_tail_bytes)
        self.result = bytearray()
        self.deadline = child.started + START_SECONDS
        self.killed_for: str | None = None
        self.ended = False
        self.next_sample = child.started + meter.interval_seconds
        self.selector = selectors.DefaultSelector()
        self.pipes = [d for d in (child.result, child.stdout, child.stderr, child.status) if d is not None]
        for descriptor in self.pipes:
            os.set_blocking(descriptor, False)
            self.selector.register(descriptor, selectors.EVENT_READ)
        self.selector.register(child.pidfd, selectors.EVENT_READ)
        self.selector.register(cancel, selectors.EVENT_READ)

    @property
    def ready(self) -> bool:
        return self.result[:1] == _READY

    def until_end(self) -> None:
        while not self.ended:
            now = time.monotonic()
            for key, _ in self.selector.select(max(0.0, min(self.next_sample, self.deadline) - now)):
                self._on_event(key.fd)
            now = time.monotonic()
            if now >= self.next_sample:
                self._sample()
                self.next_sample = now + self.meter.interval_seconds
            if not self.ended and now >= self.deadline:
                self.kill("wall" if self.ready else "start")
        # A dead program's last words are still in the pipes; nobody else holds the writing ends.
        for descriptor in self.pipes:
            while self._drain(descriptor):
                pass

    def kill(self, reason: str) -> None:
        if self.killed_for is None:
            self.killed_for = reason
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.deadline = float("inf")

    def _sample(self) -> None:
        if reason := self.meter.sample():
            self.kill(reason)

    def _on_event(self, descriptor: int) -> None:
        if descriptor == self.child.pidfd:
            self.ended = True
        elif descriptor == self.cancel:
            self.selector.unregister(self.cancel)
            self.kill("cancel")
        else:
            self._drain(descriptor)

    def _drain(self, descriptor: int) -> bool:
        """Read once; False at the end of the stream, or when nothing is there."""
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            with contextlib.suppress(KeyError):
                self.selector.unregister(descriptor)
            return False
        if descriptor == self.child.result:
            self._on_result(chunk)
        elif descriptor == self.child.status:
            assert isinstance(self.meter, WalledMeter)
            self.meter.read_report(chunk)
        else:
            (self.stdout if descriptor == self.child.stdout else self.stderr).feed(chunk)
            if self.stdout.total + self.stderr.total > self.limits.log_bytes:
                self.kill("log")
        return True

    def _on_result(self, chunk: bytes) -> None:
        was_ready = self.ready
        if len(self.result) <= self.limits.result_bytes + len("GJ"):
            self.result += chunk
        if self.ready and not was_ready and self.killed_for is None:
            self.deadline = time.monotonic() + self.limits.kill_seconds
            if self.child.status is not None:
                self._drain(self.child.status)  # written before the program started
            self.meter.begin()
        elif self.ready and len(self.result) < _CHUNK_BYTES:
            self._sample()  # the program ends now, and behind a wall cannot be asked afterwards
        if len(self.result) > self.limits.result_bytes + len("GJ"):
            self.kill("result")


def watch(child: Child, plan: Plan, limits: Limits, cancel: int) -> Ended:
    """Drain and watch a child until it is dead; kills it at a limit, or when `cancel` becomes readable."""
    meter = _meter(child, plan, limits)
    state = _Watch(child, limits, meter, cancel)
    floor = proc.high_water_bytes(os.getpid()) or 0
    try:
        state.until_end()
        wall = time.monotonic() - child.started
        reason = meter.finish()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # while the dead leader still holds the group's number
        status, cpu, largest = _reap(child)
    finally:
        state.selector.close()
        meter.close()
        for descriptor in (child.pidfd, *state.pipes):
            os.close(descriptor)
    code, broke = os.waitstatus_to_exitcode(status), False
    if isinstance(meter, WalledMeter):
        # Nobody but us has a reason to kill a wall, and what it says cannot be forged.
        reported = meter.reported("exit-code")
        broke = reported is None and state.killed_for is None
        if reported is not None:
            code = _SIGNALLED - reported if _SIGNALLED < reported <= _SIGNALLED + 64 else reported
    elif largest <= floor:
        # The kernel's own maximum starts at the size of the process that forked; below that only our samples tell, if any.
        largest = 0
    return Ended(
        killed_for=state.killed_for or reason,
        ready=state.ready,
        frame=bytes(state.result[1:] if state.ready else state.result),
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        wall_seconds=wall,
        cpu_seconds=max(cpu, meter.cpu_seconds),
        wait_seconds=meter.wait_seconds,
        peak_memory_bytes=max(largest, meter.peak_bytes or 0) or None,
        stdout=state.stdout,
        stderr=state.stderr,
        wall_broke=broke,
    )


def _meter(child: Child, plan: Plan, limits: Limits) -> Meter:
    if plan.wall is None:
        return Meter(child.pid)
    return FamilyMeter(limits) if plan.processes > 1 else WalledMeter()


def _reap(child: Child) -> tuple[int, float, int]:
    """Wait for every process of the group that is ours: the leader, and behind a wall the namespace's first, whose end means that
    nothing is left in it. Returns the leader's status, the program's CPU seconds and its largest resident size in bytes."""
    leader, cpu, largest = 0, 0.0, 0
    while True:
        try:
            pid, status, usage = os.wait4(-child.pid, 0)
        except ChildProcessError:
            return leader, cpu, largest
        if pid == child.pid:
            leader = status
        if pid != child.pid or child.status is None:
            cpu += usage.ru_utime + usage.ru_stime
            largest = max(largest, usage.ru_maxrss * 1024)
