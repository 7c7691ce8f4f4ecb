"""The other end of the backend `remote`: an HTTP service that runs programs in this host's sandbox. Protocol: ``remote_wire.py``.

One request is one run. It waits for free cores, first come, first served, and is killed as soon as its connection closes. Knows no
task and no store; whoever has the token may run any program, and learns nothing but what programs return.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from activities.judge.sandbox import remote_wire
from activities.judge.sandbox.backend import failed
from activities.judge.sandbox.remote_wire import RunRequest, Service, WireError
from activities.judge.sandbox.types import Outcome, Program, Sandbox
from activities.judge.slots import Slots
from tasks.environments import PYTHON

MAXIMUM_RUNS: Final = 256
"""Running and waiting together; one more is refused, and its caller tries again later."""


@dataclass
class _Run:
    """One run that was accepted."""

    request: RunRequest
    program: Program
    running: bool = False
    """False while it waits for cores."""
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Outcome] | None = None
    ended: bool = False

    def end(self) -> None:
        """Kill it. Once: a second cancellation would interrupt the wait for the program's death."""
        if self.task is not None and not self.ended:
            self.ended = True
            self.task.cancel()


class SandboxService:
    """The service, for one event loop.

    Args:
        sandbox: of this host; it has passed its self-test.
        slots: cores and memory that programs share.
        token: secret that every request has to carry.
        environments: where this host has the Python environments of programs.
        port: that it listens on.
    """

    def __init__(self, sandbox: Sandbox, slots: Slots, token: str, environments: Path, port: int) -> None:
        self._sandbox = sandbox
        self._slots = slots
        self._token = token.encode()
        self._environments = environments
        self._port = port
        self._runs: dict[str, _Run] = {}
        self.draining = False
        """While set, new runs are refused; those that run go on."""

    @property
    def runs(self) -> int:
        """Runs that wait or run."""
        return len(self._runs)

    def app(self) -> Starlette:
        routes = [
            Route("/healthz", self._health, methods=["GET"]),
            Route("/isolation", self._isolation, methods=["GET"]),
            Route("/runs", self._start, methods=["POST"]),
            Route("/runs/{id}", self._end, methods=["DELETE"]),
        ]
        return Starlette(routes=routes)

    # Requests ---------------------------------------------------------------------------------------------------------------
    async def _health(self, request: Request) -> Response:
        return PlainTextResponse("draining" if self.draining else "ok", 503 if self.draining else 200)

    async def _isolation(self, request: Request) -> Response:
        if not self._is_allowed(request):
            return _refused()
        about = Service(
            protocol=remote_wire.PROTOCOL,
            python=PYTHON,
            isolation=self._sandbox.isolation,
            cores=self._slots.cores,
            pid=os.getpid(),
            port=self._port,
        )
        return Response(remote_wire.encode(about), media_type=remote_wire.CONTENT_TYPE)

    async def _start(self, request: Request) -> Response:
        if not self._is_allowed(request):  # before anything of the body is read
            return _refused()
        if self.draining or len(self._runs) >= MAXIMUM_RUNS:
            why = "it is about to stop" if self.draining else f"it has {MAXIMUM_RUNS} runs already"
            return PlainTextResponse(f"no run is taken now: {why}", 503)
        try:
            run = self._accept(remote_wire.decode_request(await _body(request)))
        except WireError as error:
            return PlainTextResponse(str(error), 400)
        except ClientDisconnect:
            return PlainTextResponse("gone", 400)
        return _Answer(self, run)

    async def _end(self, request: Request) -> Response:
        if not self._is_allowed(request):
            return _refused()
        if run := self._runs.get(request.path_params["id"]):
            run.end()
            await run.dead.wait()
        return Response(status_code=204)

    def _is_allowed(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), self._token)

    # Runs -------------------------------------------------------------------------------------------------------------------
    def _accept(self, request: RunRequest) -> _Run:
        if request.id in self._runs:
            raise WireError(f"there is a run {request.id} already")
        program = Program(
            source=request.source,
            entry=request.entry,
            language=request.language,
            stdin=request.stdin,
            helper=request.helper,
            python=self._python(request.environment),
            arguments=request.arguments,
            constants=request.constants,
        )
        run = self._runs[request.id] = _Run(request, program)
        return run

    def _python(self, name: str | None) -> Path | None:
        if name is None:
            return None
        place = self._environments / name
        if not (place / "complete").is_file():
            raise WireError(
                f"the Python environment {name} is not built on this host, or for another platform or Python than {PYTHON}; "
                "run `tttd task build TASK` here"
            )
        return place / "bin" / "python"

    async def run(self, run: _Run) -> Outcome:
        """Wait for cores, then run to the end. Cancelling it kills the program."""
        limits = run.request.limits
        async with self._slots.take(limits.cores, limits.memory_bytes):
            run.running = True
            return await self._sandbox.run(run.program, limits)

    def end_all(self) -> None:
        """Kill every run; their clients are told a SANDBOX_ERROR."""
        for run in self._runs.values():
            run.end()

    def forget(self, run: _Run) -> None:
        """A run is dead."""
        del self._runs[run.request.id]
        run.dead.set()

    def failed(self, why: str) -> Outcome:
        return failed(why, self._sandbox.isolation)


class _Answer(Response):
    """Beats while a run waits and runs, then its outcome; ends the run when the client goes."""

    def __init__(self, service: SandboxService, run: _Run) -> None:
        super().__init__(media_type=remote_wire.CONTENT_TYPE)
        self._service = service
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = self._run.task = asyncio.create_task(self._service.run(self._run))
        gone = asyncio.create_task(_gone(receive))
        headers = [(b"content-type", remote_wire.CONTENT_TYPE.encode()), (b"cache-control", b"no-store")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._beat_until_done(task, gone, send)
            if task.done():
                await send({"type": "http.response.body", "body": remote_wire.DONE + self._outcome(task)})
        except OSError:  # the client closed while it was being told
            pass
        finally:
            gone.cancel()
            self._run.end()
            try:
                await asyncio.wait({task})
            finally:  # cancelled once more, by a service that ends at once
                self._service.forget(self._run)

    async def _beat_until_done(self, task: asyncio.Task[Outcome], gone: asyncio.Task[None], send: Send) -> None:
        told: bool | None = None
        since = 0.0
        while not (task.done() or gone.done()):
            if told != self._run.running or since >= remote_wire.BEAT_SECONDS:
                told, since = self._run.running, 0.0
                beat = remote_wire.RUNNING if told else remote_wire.QUEUED
                await send({"type": "http.response.body", "body": beat, "more_body": True})
            pause = remote_wire.BEAT_SECONDS if told else 0.25  # a run that waits begins at a moment that nobody announces
            await asyncio.wait({task, gone}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            since += pause

    def _outcome(self, task: asyncio.Task[Outcome]) -> bytes:
        if task.cancelled():
            return remote_wire.encode(self._service.failed("the service stopped, and ended the run"))
        if error := task.exception():
            return remote_wire.encode(self._service.failed(f"the sandbox failed: {type(error).__name__}: {error}"))
        return remote_wire.encode(task.result())


def _refused() -> Response:
    return PlainTextResponse("the token is missing or wrong", 401, headers={"www-authenticate": "Bearer"})


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass


async def _body(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    most = remote_wire.MAXIMUM_REQUEST_BYTES
    if declared.isdecimal() and int(declared[:20]) > most:
        raise WireError(f"the request has {declared[:20]} bytes; at most {most} are read")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise WireError(f"the request has more than {most} bytes")
    return bytes(body)
