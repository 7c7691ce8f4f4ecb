"""What crosses between a judge and a sandbox service is typed and bounded, and nothing else gets through."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from activities.judge.sandbox import Isolation, Limits, Outcome, Program, Status
from activities.judge.sandbox import remote_wire as wire
from activities.judge.sandbox.backend import failed
from console.main import app
from console.output import USAGE

ID = "0123456789abcdef" * 2
ISOLATION = Isolation(backend="landlock", landlock_abi=7, uids="60000+slot", policy_hash="f" * 16, languages=("python", "cpp17"))
PROGRAM = Program(
    source="def run(): pass",
    entry="run",
    stdin=b"\x00\xff",
    helper="x = 1",
    python=Path("/anywhere/aaaabbbbccccdddd/bin/python"),
    arguments={"seed": 7, "budget_s": 0.1},
    constants={"h": [0.1, 5e-324, [1.0]]},
)
OUTCOME = Outcome(Status.OK, "", b"[1]", 0, None, 0.5, 0.4, None, 1 << 20, "out\n", "é", 4, 2, ISOLATION)


def request(**changes: Any) -> bytes:
    """A request with some fields replaced, as its bytes."""
    fields = msgspec.msgpack.decode(wire.encode_request(ID, PROGRAM, Limits()))
    return msgspec.msgpack.encode(fields | changes)


def with_limits(**changes: Any) -> bytes:
    return request(limits=dataclasses.asdict(Limits()) | changes)


def test_a_run_crosses_unchanged() -> None:
    limits = Limits(wall_seconds=1.5, grace_seconds=0.25, cores=2, processes=4)
    found = wire.decode_request(wire.encode_request(ID, PROGRAM, limits))
    assert (found.id, found.source, found.entry, found.stdin, found.helper) == (ID, PROGRAM.source, "run", b"\x00\xff", "x = 1")
    assert (found.environment, found.arguments, found.constants) == ("aaaabbbbccccdddd", PROGRAM.arguments, PROGRAM.constants)
    assert found.limits == limits


def test_an_outcome_crosses_unchanged() -> None:
    for outcome in (OUTCOME, failed("no room", ISOLATION)):
        assert wire.decode_outcome(wire.encode(outcome), Limits()) == outcome


def test_a_service_crosses_unchanged_and_another_protocol_is_named() -> None:
    service = wire.Service(protocol=wire.PROTOCOL, python="3.11", isolation=ISOLATION, cores=3, pid=7, port=80)
    assert wire.decode_service(wire.encode(service)) == service
    with pytest.raises(wire.WireError, match="protocol 2, this is 1"):
        wire.decode_service(wire.encode(msgspec.structs.replace(service, protocol=2)))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "malformed"),
        (b"{}", "malformed"),
        (b"\x93" * 100_000, "malformed"),
        (request(source=3), r"\$\.source"),
        (request(language="sh"), "language"),
        (request(extra=1), "extra"),
        (request(id="../x"), "32 hex digits"),
        (request(environment="../../etc"), "16 hex digits"),
        (with_limits(wall_seconds=math.nan), "wall_seconds is nan"),
        (with_limits(wall_seconds=math.inf), "wall_seconds is inf"),
        (with_limits(wall_seconds=0), "wall_seconds is 0"),
        (with_limits(cores=0), "cores is 0"),
        (with_limits(cores=10**6), "takes 1 to 1024"),
        (with_limits(memory_bytes=1), "memory_bytes"),
        (with_limits(processes=257), "processes"),
        (with_limits(result_bytes=1 << 30), "result_bytes"),
        (with_limits(log_tail_bytes=-1), "log_tail_bytes"),
        (with_limits(threads=2.5), "malformed"),
    ],
)
def test_what_is_no_run_is_named(body: bytes, words: str) -> None:
    with pytest.raises(wire.WireError, match=words):
        wire.decode_request(body)


def test_every_limit_has_a_bound() -> None:
    assert set(wire._BOUNDS) == {field.name for field in dataclasses.fields(Limits)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"result": None}, "ok without a result"),
        ({"status": Status.TIMEOUT}, "timeout with a result"),
        ({"result": b"1" * 101}, "101 bytes; at most 100"),
        ({"wall_seconds": -1.0}, "time"),
        ({"cpu_seconds": math.nan}, "time"),
        ({"stdout_tail": "x" * 200_000}, "the outcome has"),
    ],
)
def test_outcomes_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    body = wire.encode(dataclasses.replace(OUTCOME, **changes))
    with pytest.raises(wire.WireError, match=words):
        wire.decode_outcome(body, Limits(result_bytes=100, log_tail_bytes=100))


@pytest.mark.parametrize("body", [b"", b"\xc0", b"\x80", msgspec.msgpack.encode({"status": "fine"})])
def test_no_outcome_is_malformed(body: bytes) -> None:
    with pytest.raises(wire.WireError, match="malformed"):
        wire.decode_outcome(body, Limits())


@pytest.mark.parametrize("path", ["/usr/bin/python3", "/a/aaaabbbbccccdddd/python", "/a/AAAABBBBCCCCDDDD/bin/python", "python"])
def test_an_interpreter_of_no_environment_cannot_be_named(path: str) -> None:
    with pytest.raises(wire.WireError, match="tttd task build"):
        wire.environment_name(Path(path))


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(wire.WireError, match="arguments cannot be sent"):
        wire.encode_request(ID, Program("", arguments={"x": object()}), Limits())
    with pytest.raises(wire.WireError, match="at most 67108864 are sent"):
        wire.encode_request(ID, Program("", stdin=bytes(wire.MAXIMUM_REQUEST_BYTES)), Limits())


def test_a_token_file_must_hold_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTTD_HOME", str(tmp_path / "home"))
    for text, words in ((None, "No such file"), ("short", "5 characters"), ("a b" * 10, "without spaces"), ("é" * 20, "ascii")):
        path = tmp_path / "token"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        found = CliRunner().invoke(app, ["sandbox", "serve", "--token-file", str(path)])
        assert (found.exit_code, words in found.stderr) == (USAGE, True), found.stderr
