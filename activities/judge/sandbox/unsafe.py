"""The backend `unsafe`: a plain subprocess with resource limits. It contains nothing, and every outcome says so.

For programs that their reader trusts, on machines without a sandbox (macOS). It uses nothing that only Linux has, so it shares
the code that runs a program with the other backends, and not the code that watches one.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Final

from activities.judge.sandbox.backend import failed, outcome_of
from activities.judge.sandbox.interpreter import FLAGS, Interpreter, ask
from activities.judge.sandbox.logs import Tail
from activities.judge.sandbox.policy import variables
from activities.judge.sandbox.process import CHILD
from activities.judge.sandbox.types import Isolation, Limits, Outcome, Program, Sandbox, SandboxUnavailable
from activities.judge.sandbox.watch import START_SECONDS, Ended

_CHUNK_BYTES: Final = 1 << 16
_LOOK_SECONDS: Final = 0.02

WARNING: Final = (
    "the sandbox backend is `unsafe`: programs run with all rights of this user, can read its files and use the network, and may "
    "outlive their run; every verdict is marked `isolation none`"
)
_ISOLATION: Final = Isolation(backend="unsafe", landlock_abi=0, uids="own", policy_hash="none", processes=64)


class UnsafeSandbox(Sandbox):
    """Use :func:`activities.judge.sandbox.open_sandbox`, which asks whether this was meant."""

    def __init__(self, python: Path) -> None:
        self.isolation = _ISOLATION
        try:
            self._interpreters = {python: ask(python)}
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxUnavailable([f"unsafe: the interpreter {python} does not run: {error}"], []) from None
        self._python = python
        self._running: set[_Run] = set()
        warnings.warn(WARNING, RuntimeWarning, stacklevel=3)

    async def run(self, program: Program, limits: Limits) -> Outcome:
        if program.language != "python":
            return failed("the backend unsafe runs Python programs only", self.isolation)
        try:
            run = await asyncio.to_thread(self._start, program, limits)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return failed(f"the interpreter could not be started: {error}", self.isolation)
        self._running.add(run)
        waiting = asyncio.ensure_future(asyncio.to_thread(run.until_end))
        try:
            ended = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            run.kill("cancel")
            await asyncio.wait([waiting])
            raise
        finally:
            self._running.discard(run)
        return outcome_of(ended, limits, self.isolation)

    async def close(self) -> None:
        self.close_blocking()

    def close_blocking(self) -> None:
        for run in tuple(self._running):
            run.kill("cancel")

    def _start(self, program: Program, limits: Limits) -> _Run:
        python = program.python or self._python
        if python not in self._interpreters:
            self._interpreters[python] = ask(python)
        return _Run(self._interpreters[python], program, limits)


class _Run:
    """One subprocess and the threads that read from it."""

    def __init__(self, interpreter: Interpreter, program: Program, limits: Limits) -> None:
        self.limits = limits
        self.killed_for: str | None = None
        self.result = bytearray()
        self.stdout, self.stderr = Tail(limits.log_tail_bytes), Tail(limits.log_tail_bytes)
        self.started = time.monotonic()
        self.ready_at: float | None = None
        reading, writing = os.pipe()
        # Input by a second pipe, so that its descriptor can be told; a thread fills it.
        given, giving = os.pipe() if program.stdin else (0, 0)
        try:
            self.process = subprocess.Popen(
                [str(interpreter.python), *FLAGS, "-c", CHILD, str(writing), str(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[fd for fd in (writing, given) if fd],
                cwd="/",
                env=variables(limits.cores),
                start_new_session=True,
            )
        except BaseException:
            for descriptor in (reading, *([giving] if giving else [])):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (writing, *([given] if given else [])):
                os.close(descriptor)
        if giving:
            self._thread(_fill, giving, program.stdin)
        order = marshal.dumps(_order(interpreter, program, limits), 4)
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._thread(_fill, os.dup(stdin.fileno()), order)
        stdin.close()
        self._readers = [
            self._thread(self._read, reading, self._on_result),
            self._thread(self._read, os.dup(stdout.fileno()), lambda chunk: self._on_log(self.stdout, chunk)),
            self._thread(self._read, os.dup(stderr.fileno()), lambda chunk: self._on_log(self.stderr, chunk)),
        ]
        stdout.close()
        stderr.close()

    def until_end(self) -> Ended:
        """Wait for the subprocess, and kill it when its time is up."""
        while True:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                break
            begun = self.ready_at
            deadline = self.started + START_SECONDS if begun is None else begun + self.limits.kill_seconds
            if time.monotonic() >= deadline:
                self.kill("start" if begun is None else "wall")
            time.sleep(_LOOK_SECONDS)
        wall = time.monotonic() - self.started
        self.process.returncode = code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(1.0)  # a descendant that left the group may hold the pipes for ever
        unit = 1 if os.uname().sysname == "Darwin" else 1024
        ready = bytes(self.result[:1]) == b"G"
        return Ended(
            killed_for=self.killed_for,
            ready=ready,
            frame=bytes(self.result[1:] if ready else self.result),
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            wall_seconds=wall,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            wait_seconds=None,
            peak_memory_bytes=usage.ru_maxrss * unit,
            stdout=self.stdout,
            stderr=self.stderr,
        )

    def kill(self, reason: str) -> None:
        if self.killed_for is None:
            self.killed_for = reason
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _on_result(self, chunk: bytes) -> None:
        if len(self.result) <= self.limits.result_bytes + len("GJ"):
            self.result += chunk
        if self.ready_at is None and self.result[:1] == b"G":
            self.ready_at = time.monotonic()
        if len(self.result) > self.limits.result_bytes + len("GJ"):
            self.kill("result")

    def _on_log(self, tail: Tail, chunk: bytes) -> None:
        tail.feed(chunk)
        if self.stdout.total + self.stderr.total > self.limits.log_bytes:
            self.kill("log")

    @staticmethod
    def _read(descriptor: int, on_chunk: Any) -> None:
        with open(descriptor, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                on_chunk(chunk)

    @staticmethod
    def _thread(target: Any, *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        return thread


def _fill(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(descriptor, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]


def _order(interpreter: Interpreter, program: Program, limits: Limits) -> dict[str, Any]:
    cpu = limits.cpu_limit_seconds
    bounds = [["RLIMIT_CPU", cpu, cpu + 1], ["RLIMIT_NOFILE", 256, 256], ["RLIMIT_CORE", 0, 0]]
    if os.uname().sysname == "Linux":  # elsewhere it fails, or is not kept
        bounds.append(["RLIMIT_AS", limits.address_space_bytes, limits.address_space_bytes])
    return {
        "code": list(interpreter.codes),
        "source": program.source,
        "helper": program.helper,
        "entry": program.entry,
        "arguments": dict(program.arguments),
        "constants": dict(program.constants),
        "modules": "",
        "result_bytes": limits.result_bytes,
        "limits": bounds,
        "filter": None,
    }
