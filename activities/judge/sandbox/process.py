"""One run's process: started, drained, watched, killed, measured. Knows no policy: the order that the child obeys comes in ready.

`start` must be called on a thread that lives as long as the judge: the kernel kills the child when the thread that made it ends,
which is what keeps a killed judge from leaving programs behind.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from activities.judge.sandbox.types import Limits

CHILD: Final = Path(__file__).with_name("child.py")

START_SECONDS: Final = 60.0
"""For the interpreter to start and close the sandbox; the program's own time begins after that."""

_SAMPLE_SECONDS: Final = 0.5
_CHUNK_BYTES: Final = 1 << 16
_READY: Final = b"G"


class Tail:
    """The end of a stream, and how much there was."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept = kept_bytes
        self._data = bytearray()
        self.total = 0

    def feed(self, chunk: bytes) -> None:
        self.total += len(chunk)
        self._data += chunk
        if len(self._data) > 2 * self._kept:
            del self._data[: -self._kept]

    def text(self) -> str:
        """The last bytes, as text that no terminal or page can misread."""
        return escape(bytes(self._data[-self._kept :]))


def escape(data: bytes) -> str:
    """Text of printable characters, newlines and tabs; everything else as a backslash sequence."""
    text = data.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class Child:
    """A started process, with the reading ends of its pipes."""

    pid: int
    pidfd: int
    result: int
    stdout: int
    stderr: int
    started: float
    """time.monotonic() before the start."""


@dataclass(frozen=True)
class Ended:
    """All that is known about a finished process."""

    killed_for: str | None
    """Our own reason for killing it: wall, result, log, cancel, start; None if it ended by itself."""
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


def start(python: Path, environment: Mapping[str, str], order: Mapping[str, Any]) -> Child:
    """Start the child with its order on stdin. See the module docstring for the thread.

    Raises:
        OSError: no more processes, descriptors or memory.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as undo:
        ends = []
        for _ in range(3):
            reading, writing = os.pipe()
            undo.callback(os.close, writing)
            ends.append((reading, writing))
        abandoned = undo.enter_context(contextlib.ExitStack())
        for reading, _ in ends:
            abandoned.callback(os.close, reading)
        # A file in memory: unlike a pipe it takes the whole order before anybody reads it.
        stdin = os.memfd_create("order")
        undo.callback(os.close, stdin)
        with open(stdin, "wb", closefd=False) as file:
            marshal.dump({**order, "parent": os.getpid()}, file, 4)
        os.lseek(stdin, 0, os.SEEK_SET)
        result, stdout, stderr = (writing for _, writing in ends)
        process = subprocess.Popen(
            [str(python), "-s", "-P", "-B", str(CHILD), str(result)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(result,),
            cwd="/",
            env=dict(environment),
            start_new_session=True,
        )
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        # Reaped by `watch`; without this the Popen object would wait for it a second time.
        process.returncode = 0
        abandoned.pop_all()
        (result, _), (stdout, _), (stderr, _) = ends
        return Child(process.pid, pidfd, result, stdout, stderr, began)


class _Watch:
    """State of watching one child."""

    def __init__(self, child: Child, limits: Limits, cancel: int) -> None:
        self.child = child
        self.limits = limits
        self.cancel = cancel
        self.stdout, self.stderr = Tail(limits.log_tail_bytes), Tail(limits.log_tail_bytes)
        self.result = bytearray()
        self.deadline = child.started + START_SECONDS
        self.killed_for: str | None = None
        self.ended = False
        self.peak: int | None = None
        self.next_sample = child.started + _SAMPLE_SECONDS
        self.selector = selectors.DefaultSelector()
        for descriptor in (child.result, child.stdout, child.stderr):
            os.set_blocking(descriptor, False)
            self.selector.register(descriptor, selectors.EVENT_READ)
        self.selector.register(child.pidfd, selectors.EVENT_READ)
        self.selector.register(cancel, selectors.EVENT_READ)

    @property
    def ready(self) -> bool:
        return self.result[:1] == _READY

    def until_end(self) -> None:
        while not self.ended:
            timeout = max(0.0, min(_SAMPLE_SECONDS, self.deadline - time.monotonic()))
            for key, _ in self.selector.select(timeout):
                self._on_event(key.fd)
            now = time.monotonic()
            if now >= self.next_sample:
                self.peak = _high_water(self.child.pid) or self.peak
                self.next_sample = now + _SAMPLE_SECONDS
            if not self.ended and now >= self.deadline:
                self.kill("wall" if self.ready else "start")
        # A dead program's last words are still in the pipes; nobody else holds the writing ends.
        for descriptor in (self.child.result, self.child.stdout, self.child.stderr):
            while self._drain(descriptor):
                pass

    def kill(self, reason: str) -> None:
        if self.killed_for is None:
            self.killed_for = reason
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.deadline = float("inf")

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
        if len(self.result) > self.limits.result_bytes + len("GJ"):
            self.kill("result")


def watch(child: Child, limits: Limits, cancel: int) -> Ended:
    """Drain and watch a child until it is dead; kills it at a limit, or when `cancel` becomes readable."""
    state = _Watch(child, limits, cancel)
    floor = _high_water(os.getpid()) or 0
    try:
        state.until_end()
        wall = time.monotonic() - child.started
        wait = _run_queue_wait(child.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # while the dead leader still holds the group's number
        _, status, usage = os.wait4(child.pid, 0)
    finally:
        state.selector.close()
        for descriptor in (child.pidfd, child.result, child.stdout, child.stderr):
            os.close(descriptor)
    code = os.waitstatus_to_exitcode(status)
    # The kernel's own maximum starts at the size of the process that forked; below that only our samples tell, if there are any.
    largest = usage.ru_maxrss * 1024
    return Ended(
        killed_for=state.killed_for,
        ready=state.ready,
        frame=bytes(state.result[1:] if state.ready else state.result),
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        wall_seconds=wall,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        wait_seconds=wait,
        peak_memory_bytes=largest if largest > floor else state.peak,
        stdout=state.stdout,
        stderr=state.stderr,
    )


def _high_water(pid: int) -> int | None:
    """Largest resident size so far in bytes, while the process lives."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _run_queue_wait(pid: int) -> float | None:
    """Seconds that the main thread waited for a core; readable until the process is reaped."""
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    except OSError:
        return None
    return int(fields[1]) / 1e9 if len(fields) >= 2 else None
