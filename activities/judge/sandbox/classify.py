"""From what is known about a finished process to a status. Source: spec sandbox 9, "Classification".

The first matching line wins. Whatever the program can forge stands below what only the judge and the kernel know, and no forgery
leads to a score or to a retry.
"""

from __future__ import annotations

import signal

from activities.judge.sandbox.logs import escape
from activities.judge.sandbox.types import Limits, Status
from activities.judge.sandbox.watch import Ended
from tasks.judges import wire

_REASON_CHARACTERS = 200

_OURS = {
    "result": (Status.OUTPUT_TOO_LARGE, "result"),
    "log": (Status.OUTPUT_TOO_LARGE, "log"),
    "wall": (Status.TIMEOUT, "wall"),
    "cpu": (Status.TIMEOUT, "cpu"),
    "memory": (Status.MEMORY, "memory of all processes"),
    "files": (Status.MEMORY, "too many files"),
    "cancel": (Status.SANDBOX_ERROR, "cancelled"),
    "start": (Status.SANDBOX_ERROR, "the interpreter did not start in time"),
}


def classify(ended: Ended, limits: Limits) -> tuple[Status, str, bytes | None]:
    """Status, one-line reason, and the result's JSON text if there is one."""
    if ended.killed_for is not None:
        return (*_OURS[ended.killed_for], None)
    if not ended.ready:
        return Status.SANDBOX_ERROR, _setup_failure(ended), None
    if ended.wall_broke:
        return Status.SANDBOX_ERROR, "the wall around the program broke: it was killed from outside", None
    out_of_time = ended.signal == signal.SIGKILL and ended.cpu_seconds >= limits.cpu_limit_seconds
    if ended.signal == signal.SIGXCPU or out_of_time:
        return Status.TIMEOUT, "cpu", None
    marker, body = ended.frame[:1], ended.frame[1:]
    if marker == b"M":
        return Status.MEMORY, "MemoryError", None
    if ended.signal is not None:
        return Status.CRASHED, f"signal {ended.signal}", None
    if ended.exit_code:
        return Status.CRASHED, f"exit {ended.exit_code}", None
    return _read_frame(marker, body, limits)


def _read_frame(marker: bytes, body: bytes, limits: Limits) -> tuple[Status, str, bytes | None]:
    if marker == b"L":
        return Status.OUTPUT_TOO_LARGE, "result", None
    if marker == b"X":
        return Status.OK, "", body
    if marker == b"R":
        return Status.INVALID_OUTPUT, one_line(body), None
    if marker != b"J":
        return Status.INVALID_OUTPUT, "no result was returned", None
    if problem := wire.fault(body, limits.result_bytes):
        return Status.INVALID_OUTPUT, one_line(problem.encode()), None
    return Status.OK, "", body


def _setup_failure(ended: Ended) -> str:
    marker, said = ended.frame[:1], one_line(ended.frame[1:])
    if marker == b"H":
        return f"the task's helper failed: {said}"
    if marker != b"S":
        said = ended.stderr.text().strip().rpartition("\n")[2]
    ending = f"signal {ended.signal}" if ended.signal is not None else f"exit {ended.exit_code}"
    return f"the sandbox could not be closed ({ending}): {said or 'no message'}"


def one_line(text: bytes) -> str:
    """A program's words as one short printable line."""
    return escape(text[: 4 * _REASON_CHARACTERS]).replace("\n", " ").replace("\t", " ")[:_REASON_CHARACTERS]
