"""What crosses between a judge and a sandbox service: programs and limits one way, outcomes the other, both typed and bounded.

MessagePack over HTTP/1.1, every request with a bearer token:

    GET    /isolation     -> Service                      what stands between programs and that host, proved when it started
    POST   /runs          RunRequest -> frames            one run; closing the connection kills it
    DELETE /runs/ID       -> 204 once the run is dead
    GET    /healthz       -> 200, or 503 while draining   without a token

The answer to a run is a row of single bytes, one every few seconds so that both sides notice when the other is gone: `q` while it
waits for a free core, `r` while it runs; then `=` and the outcome. Knows no sockets and no backend.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from activities.judge.sandbox.types import Isolation, Limits, Outcome, Program, Status

T = TypeVar("T")

PROTOCOL: Final = 1
CONTENT_TYPE: Final = "application/msgpack"

QUEUED, RUNNING, DONE = b"q", b"r", b"="
BEAT_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 30.0
"""Without a byte for so long the other side counts as gone."""
SPARE_SECONDS: Final = 120.0
"""For a compilation and the start of a process, beyond a run's own limit."""

MAXIMUM_REQUEST_BYTES: Final = 64 << 20
MAXIMUM_RESULT_BYTES: Final = 64 << 20
MAXIMUM_TOKEN_BYTES: Final = 4096
MINIMUM_TOKEN_BYTES: Final = 16

_ANSWER_SPARE_BYTES: Final = 64 << 10
_ESCAPED_BYTES: Final = 12
"""A byte of a log tail becomes at most so many when it is escaped and written as UTF-8."""

_ENVIRONMENT = re.compile(r"[0-9a-f]{16}")

_BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "wall_seconds": (0.001, 86_400),
    "grace_seconds": (0, 3_600),
    "cpu_seconds": (0.001, 1e8),
    "cores": (1, 1024),
    "memory_bytes": (1 << 20, 1 << 42),
    "slack_bytes": (0, 1 << 42),
    "threads": (1, 4096),
    "processes": (1, 256),
    "scratch_bytes": (0, 1 << 42),
    "result_bytes": (1, MAXIMUM_RESULT_BYTES),
    "log_bytes": (0, 1 << 30),
    "log_tail_bytes": (0, 1 << 20),
    "open_files": (8, 65_536),
}


class WireError(Exception):
    """What was sent, or is to be sent, is not of this protocol; one line that says why."""


class RunRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run."""

    id: str
    """32 hex digits, chosen by the client; names the run to DELETE."""
    source: str
    entry: str
    language: Literal["python", "cpp17"]
    stdin: bytes
    helper: str
    environment: str | None
    """Name of a Python environment that the service has too; None: its own interpreter."""
    arguments: dict[str, Any]
    constants: dict[str, list[Any]]
    limits: Limits


class Service(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a service is."""

    protocol: int
    python: str
    """Version of the interpreter that runs programs without an environment of their own, as `3.11`."""
    isolation: Isolation
    cores: int
    """Cores that programs share."""
    pid: int
    port: int
    """Where it listens, and under which process id: canaries for the client's checks."""


def encode_request(run_id: str, program: Program, limits: Limits) -> bytes:
    """A run as it crosses.

    Raises:
        WireError: it does not fit, holds something else than plain data, or names an interpreter that is no environment.
    """
    request = RunRequest(
        id=run_id,
        source=program.source,
        entry=program.entry,
        language=program.language,
        stdin=program.stdin,
        helper=program.helper,
        environment=environment_name(program.python),
        arguments=dict(program.arguments),
        constants=dict(program.constants),
        limits=limits,
    )
    try:
        body = msgspec.msgpack.encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"the program's arguments cannot be sent: {error}") from None
    if len(body) > MAXIMUM_REQUEST_BYTES:
        raise WireError(f"the program and its data have {len(body)} bytes; at most {MAXIMUM_REQUEST_BYTES} are sent")
    return body


def decode_request(body: bytes) -> RunRequest:
    """A run as the service takes it: of the right types, within bounds.

    Raises:
        WireError: it is not; names the field.
    """
    request = _decode(body, RunRequest, "the request")
    if not re.fullmatch(r"[0-9a-f]{32}", request.id):
        raise WireError("id: 32 hex digits are needed")
    if request.environment is not None and not _ENVIRONMENT.fullmatch(request.environment):
        raise WireError(f"environment {request.environment[:40]!r}: 16 hex digits are needed")
    for name, (low, high) in _BOUNDS.items():
        value = getattr(request.limits, name)
        if value is not None and not low <= value <= high:  # NaN is not within, either
            raise WireError(f"limits.{name} is {value!r}; the service takes {low:g} to {high:g}")
    return request


def encode(message: Service | Outcome) -> bytes:
    """Service or outcome as it crosses."""
    return msgspec.msgpack.encode(message)


def decode_service(body: bytes) -> Service:
    """What a service says of itself.

    Raises:
        WireError: it speaks another protocol.
    """
    service = _decode(body, Service, "its description")
    if service.protocol != PROTOCOL:
        raise WireError(f"it speaks protocol {service.protocol}, this is {PROTOCOL}; run the same version on both hosts")
    return service


def decode_outcome(body: bytes, limits: Limits) -> Outcome:
    """An outcome that a run under these limits can have.

    Raises:
        WireError: it is malformed, too large, or contradicts itself.
    """
    if len(body) > answer_bytes(limits):
        raise WireError(f"the outcome has {len(body)} bytes; at most {answer_bytes(limits)} are read")
    outcome = _decode(body, Outcome, "the outcome")
    if (outcome.result is not None) != (outcome.status is Status.OK):
        raise WireError(f"the outcome is {outcome.status} {'with' if outcome.result is not None else 'without'} a result")
    if outcome.result is not None and len(outcome.result) > limits.result_bytes:
        raise WireError(f"the result has {len(outcome.result)} bytes; at most {limits.result_bytes} were allowed")
    seconds = (outcome.wall_seconds, outcome.cpu_seconds, outcome.wait_seconds)
    if any(value is not None and not (math.isfinite(value) and value >= 0) for value in seconds):
        raise WireError("the outcome holds a time that is none")
    return outcome


def answer_bytes(limits: Limits) -> int:
    """Longest outcome of a run under these limits."""
    return limits.result_bytes + 2 * _ESCAPED_BYTES * limits.log_tail_bytes + _ANSWER_SPARE_BYTES


def environment_name(python: Path | None) -> str | None:
    """The name of the environment that an interpreter belongs to: `.../NAME/bin/python`. Equal lists have equal names everywhere.

    Raises:
        WireError: it is the interpreter of no environment; another host cannot know which one is meant.
    """
    if python is None:
        return None
    name = python.parent.parent.name
    if python.parent.name != "bin" or not _ENVIRONMENT.fullmatch(name):
        raise WireError(f"the interpreter {python} is of no environment made by `tttd task build`; a service cannot know it")
    return name


def _decode(body: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"{what} is malformed: {error}") from None
