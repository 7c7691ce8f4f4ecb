"""A judge against sandbox services that are not what they should be: none is used, and no answer of theirs becomes a verdict."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from activities.judge.sandbox import (
    Isolation,
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
from activities.judge.sandbox.backend import failed
from activities.judge.sandbox.remote import RemoteSandbox
from activities.judge.sandbox.remote_server import SandboxService
from activities.judge.slots import Slots

TOKEN = "correct-horse-battery-staple"
SHORT = Limits(wall_seconds=2, grace_seconds=0.5, result_bytes=2 << 20)


@contextlib.contextmanager
def listening(make: Callable[[int], Any]) -> Iterator[SandboxSettings]:
    """An ASGI application on a port of its own, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(make(port), log_config=None, lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield SandboxSettings(backend="remote", remote_url=f"http://127.0.0.1:{port}", remote_token=TOKEN)
        finally:
            server.should_exit = True
            thread.join()


class Sham(Sandbox):
    """A sandbox that answers as it is told, without running anything."""

    def __init__(self, isolation: Isolation, answer: Callable[[Program, Limits], Awaitable[Outcome]]) -> None:
        self.isolation = isolation
        self._answer = answer

    async def run(self, program: Program, limits: Limits) -> Outcome:
        return await self._answer(program, limits)

    async def close(self) -> None: ...

    def close_blocking(self) -> None: ...


HONEST = Isolation(backend="landlock", landlock_abi=7, uids="own", policy_hash="0" * 16)
UNSAFE = replace(HONEST, backend="unsafe")


def service_of(sandbox: Sandbox) -> Callable[[int], Any]:
    return lambda port: SandboxService(sandbox, Slots(4, 8 << 30), TOKEN, Path("/nonexistent"), port).app()


def answering(outcome: Outcome) -> Sham:
    async def answer(program: Program, limits: Limits) -> Outcome:
        return outcome

    return Sham(outcome.isolation, answer)


def returned(result: bytes, isolation: Isolation = HONEST) -> Outcome:
    return replace(failed("", isolation), status=Status.OK, result=result)


def test_a_service_without_isolation_is_refused() -> None:
    with (
        listening(service_of(answering(returned(b"[7,0.1,-5e-324]", UNSAFE)))) as settings,
        pytest.raises(SandboxUnavailable, match=r"contains nothing \(unsafe\)"),
    ):
        open_sandbox(settings)


async def test_an_outcome_that_was_made_without_isolation_is_none() -> None:
    with listening(service_of(answering(returned(b"1", UNSAFE)))) as settings:
        sandbox = RemoteSandbox(settings.remote_url or "", TOKEN, HONEST)
        outcome = await sandbox.run(Program(""), SHORT)
        assert (outcome.status, "contains nothing" in outcome.reason) == (Status.SANDBOX_ERROR, True)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (failed("no room", HONEST), r"ended as sandbox_error \(no room\)"),
        (returned(b"[7,0.1,0]"), "other numbers than it made"),
        (returned(b"[7,0.1,-5e-324]"), "a sleeping program ended as ok"),
    ],
)
def test_a_sandbox_that_does_not_run_programs_is_refused(outcome: Outcome, words: str) -> None:
    with listening(service_of(answering(outcome))) as settings, pytest.raises(SandboxUnavailable, match=words):
        open_sandbox(settings)


def test_a_sandbox_that_lets_programs_reach_the_service_is_refused() -> None:
    async def answer(program: Program, limits: Limits) -> Outcome:
        if "CHECKS" in program.source:
            return returned(b"[0,1,1,1,1,1,1,1,1,0]")
        if "sleep" in program.source:
            return replace(failed("wall", HONEST), status=Status.TIMEOUT)
        if "bytearray" in program.source:
            return replace(failed("", HONEST), status=Status.MEMORY)
        return returned(b"[7,0.1,-5e-324]")

    with listening(service_of(Sham(HONEST, answer))) as settings, pytest.raises(SandboxUnavailable) as caught:
        open_sandbox(settings)
    assert [line.partition(", ")[2] for line in caught.value.report] == [
        "a program can connect to the service that runs it",
        "a program can be root",
    ]


async def test_a_sandbox_that_raises_is_a_sandbox_error() -> None:
    async def answer(program: Program, limits: Limits) -> Outcome:
        raise ValueError("a mistake")

    with listening(service_of(Sham(HONEST, answer))) as settings:
        outcome = await RemoteSandbox(settings.remote_url or "", TOKEN, HONEST).run(Program(""), SHORT)
        assert (outcome.status, outcome.reason) == (Status.SANDBOX_ERROR, "the sandbox failed: ValueError: a mistake")


def raw(status: int, body: bytes) -> Callable[[int], Any]:
    """An application that answers everything with this."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    return lambda port: application


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"<html>no \x1b[31m", "HTTP 404: <html>no  [31m"),
        (500, b"", "HTTP 500: no message"),
        (200, b"<html>", "is this the address of a sandbox service"),
        (200, b"", "without an outcome"),
        (200, b"qqrr", "without an outcome"),
        (200, b"r=", "malformed"),
        (200, b"r=" + bytes(3 << 20), "more than"),
        (200, b"=" + remote_wire.encode(returned(b"1" * (2 << 20) + b"1")), "at most 2097152 were allowed"),
    ],
)
async def test_answers_that_are_none_are_sandbox_errors(status: int, body: bytes, words: str) -> None:
    with listening(raw(status, body)) as settings:
        outcome = await RemoteSandbox(settings.remote_url or "", TOKEN, HONEST).run(Program(""), SHORT)
    assert outcome.status is Status.SANDBOX_ERROR
    assert words in outcome.reason
    assert outcome.reason.isprintable()


async def test_a_service_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_wire, "SILENCE_SECONDS", 0.5)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"r", "more_body": True})
        await asyncio.sleep(5)

    with listening(lambda port: application) as settings:
        outcome = await RemoteSandbox(settings.remote_url or "", TOKEN, HONEST).run(Program(""), SHORT)
    assert (outcome.status, "ReadTimeout" in outcome.reason) == (Status.SANDBOX_ERROR, True)


async def test_a_run_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_wire, "SPARE_SECONDS", 0.0)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(60):
            await send({"type": "http.response.body", "body": b"r", "more_body": True})
            await asyncio.sleep(0.1)

    with listening(lambda port: application) as settings:
        limits = replace(SHORT, wall_seconds=0.3, grace_seconds=0.2)
        outcome = await RemoteSandbox(settings.remote_url or "", TOKEN, HONEST).run(Program(""), limits)
    assert (outcome.status, "did not end the run within 0.5 s" in outcome.reason) == (Status.SANDBOX_ERROR, True)


def test_another_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("activities.judge.sandbox.remote.PYTHON", "3.99")
    with (
        listening(service_of(answering(returned(b"1")))) as settings,
        pytest.raises(SandboxUnavailable, match=r"runs Python 3\.1\d, this is 3\.99"),
    ):
        open_sandbox(settings)
