"""One run's process: started from a plan. ``watch.py`` sees it to its end.

`start` must be called on a thread that lives as long as the judge: the kernel kills the child when the thread that made it ends,
which is what keeps a killed judge from leaving programs behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import os
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from activities.judge.sandbox.interpreter import FLAGS
from activities.judge.sandbox.policy import Plan

CHILD: Final = Path(__file__).with_name("child.py").read_text(encoding="utf-8")

_PR_SET_CHILD_SUBREAPER: Final = 36
_SEALS: Final = (
    fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE if hasattr(fcntl, "F_SEAL_SEAL") else 0
)


@dataclass(frozen=True)
class Child:
    """A started process, with the reading ends of its pipes."""

    pid: int
    """Of the group's leader: the program itself, or the wall's outermost process."""
    pidfd: int
    result: int
    stdout: int
    stderr: int
    status: int | None
    """The wall's report; None without a wall."""
    started: float
    """time.monotonic() before the start."""


class _Descriptors:
    """Pipes and files of a child that is being started; what is not kept is closed."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self.ours = undo.enter_context(contextlib.ExitStack())
        self._theirs = undo.enter_context(contextlib.ExitStack())
        self.passed: list[int] = []

    def pipe(self) -> tuple[int, int]:
        reading, writing = os.pipe()
        self.ours.callback(os.close, reading)
        self._theirs.callback(os.close, writing)
        return reading, writing

    def file(self, data: bytes) -> int:
        """A file in memory: unlike a pipe it takes everything before anybody reads it. Sealed, or its reader could fill it up."""
        self.passed.append(descriptor := self.unpassed(data))
        return descriptor

    def unpassed(self, data: bytes) -> int:
        """As :meth:`file`, for standard input."""
        descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._theirs.callback(os.close, descriptor)
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor


def start(plan: Plan) -> Child:
    """Start the child with its order on stdin. See the module docstring for the thread.

    Raises:
        OSError: no more processes, descriptors or memory.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as undo:
        made = _Descriptors(undo)
        result, stdout, stderr = made.pipe(), made.pipe(), made.pipe()
        order = made.unpassed(marshal.dumps(dict(plan.order), 4))
        given = made.file(plan.stdin) if plan.stdin else 0
        command = [*plan.command, *FLAGS, "-c", CHILD, str(result[1]), str(given)]
        made.passed.append(result[1])
        status = None
        if plan.wall is not None:
            status = made.pipe()
            made.passed.append(status[1])
            options = plan.wall.arguments(plan.view, status[1], made.file)
            listed = made.file(b"".join(os.fsencode(option) + b"\0" for option in options))
            command = [str(plan.wall.bwrap), "--args", str(listed), "--", *command]
        process = subprocess.Popen(
            command,
            stdin=order,
            stdout=stdout[1],
            stderr=stderr[1],
            pass_fds=made.passed,
            cwd="/",
            env=dict(plan.environment),
            start_new_session=True,
        )
        pidfd = _pidfd(process)
        made.ours.pop_all()
        return Child(process.pid, pidfd, result[0], stdout[0], stderr[0], status[0] if status else None, began)


def _pidfd(process: subprocess.Popen[bytes]) -> int:
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise
    # Reaped by `watch`; without this the Popen object would wait for it a second time.
    process.returncode = 0
    return pidfd


class Orphanage:
    """While a walled sandbox is open, this process becomes the parent of descendants whose own parent ends.

    bubblewrap's outermost process does not wait for the one below it, which alone knows what the program used. Not longer than
    needed: somebody else's orphans would stay as zombies, which the system's first process would have reaped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0

    def enter(self) -> None:
        with self._lock:
            self._open += 1
            _set_subreaper(1)

    def leave(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                _set_subreaper(0)


ORPHANAGE: Final = Orphanage()


def _set_subreaper(value: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(value), *(ctypes.c_ulong(0) for _ in range(3))) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
