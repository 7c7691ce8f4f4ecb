"""The backend `remote`: programs run on another host, in the sandbox of a service (`tttd sandbox serve`). Source: spec sandbox 9.

For judges in places without Landlock and namespaces. A run is one HTTP request; when its connection closes, for whatever reason,
the service kills the program. Nothing is retried here: a service that is gone makes the run a SANDBOX_ERROR, which its caller
retries. What the service says is decoded by type and bounded, but it is trusted: it decides what a program returned.

Use a private network, or https: the token and the programs cross as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
import msgspec

from activities.judge.sandbox import remote_probe, remote_wire
from activities.judge.sandbox.backend import failed
from activities.judge.sandbox.remote_wire import Service, WireError
from activities.judge.sandbox.types import Isolation, Limits, Outcome, Program, Sandbox, SandboxSettings, SandboxUnavailable, Status
from tasks.environments import PYTHON

_CONNECT_SECONDS: Final = 10.0
_KILL_SECONDS: Final = 10.0
_WORDS: Final = 400
"""Bytes of a service's error text that are repeated in ours."""

_PROBE: Final = Limits(wall_seconds=20, memory_bytes=256 << 20, threads=8)
_SLEEP: Final = Limits(wall_seconds=0.2, grace_seconds=0.1)
_ECHO: Final = "def run(seed):\n    return [seed, 0.1, -5e-324]"
_HOG: Final = "def run():\n    return len(bytearray(4 << 30))"
_SLEEPER: Final = "import time\ndef run():\n    time.sleep(60)"


class RemoteSandbox(Sandbox):
    """Runs programs in a service's sandbox. Use :func:`activities.judge.sandbox.open_sandbox`, which tests it first.

    Args:
        url: of the service.
        token: its secret.
    """

    def __init__(self, url: str, token: str, isolation: Isolation) -> None:
        self.isolation = replace(isolation, backend=f"remote:{isolation.backend}")
        self._url = url
        self._headers = {"authorization": f"Bearer {token}", "content-type": remote_wire.CONTENT_TYPE}
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if url.startswith("https:") else False
        self._lock = threading.Lock()
        self._running: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._closed = False

    async def run(self, program: Program, limits: Limits) -> Outcome:
        run_id = secrets.token_hex(16)
        try:
            body = remote_wire.encode_request(run_id, program, limits)
        except WireError as error:
            return failed(str(error), self.isolation)
        with self._registered() as closing:
            exchange = asyncio.ensure_future(self._exchange(body, limits))
            stopped = asyncio.ensure_future(closing.wait())
            try:
                await asyncio.wait({exchange, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if exchange.done():
                    return exchange.result()
                return failed("the sandbox was closed", self.isolation)
            finally:
                stopped.cancel()
                if not exchange.done():
                    exchange.cancel()  # closes the connection, which kills the program
                    await asyncio.wait({exchange})
                    await asyncio.shield(self._until_dead(run_id))

    async def close(self) -> None:
        self.close_blocking()

    def close_blocking(self) -> None:
        with self._lock:
            self._closed = True
            running = list(self._running)
        for loop, closing in running:
            with contextlib.suppress(RuntimeError):  # its loop is closed, and the run with it
                loop.call_soon_threadsafe(closing.set)

    @contextlib.contextmanager
    def _registered(self) -> Iterator[asyncio.Event]:
        closing = asyncio.Event()
        entry = (asyncio.get_running_loop(), closing)
        with self._lock:
            self._running.add(entry)
            if self._closed:
                closing.set()
        try:
            yield closing
        finally:
            with self._lock:
                self._running.remove(entry)

    def _client(self) -> httpx.AsyncClient:
        # One connection a run: closing it is what kills the run, and event loops come and go. Proxies of the environment are for
        # other hosts than this one.
        timeout = httpx.Timeout(remote_wire.SILENCE_SECONDS, connect=_CONNECT_SECONDS)
        return httpx.AsyncClient(base_url=self._url, headers=self._headers, timeout=timeout, verify=self._tls, trust_env=False)

    async def _exchange(self, body: bytes, limits: Limits) -> Outcome:
        try:
            async with self._client() as client, client.stream("POST", "/runs", content=body) as response:
                if response.status_code != 200:
                    words = await _words(response)
                    return self._failed(f"HTTP {response.status_code}: {words}")
                return self._marked(remote_wire.decode_outcome(await _frames(response, limits), limits))
        except WireError as error:
            return self._failed(str(error))
        except TimeoutError:
            seconds = limits.kill_seconds + remote_wire.SPARE_SECONDS
            return self._failed(f"it did not end the run within {seconds:g} s")
        except (httpx.HTTPError, OSError) as error:
            return self._failed(f"the connection failed ({type(error).__name__}: {error})")

    async def _until_dead(self, run_id: str) -> None:
        """Wait until the service has killed a run; if it cannot be asked, the closed connection has to do."""
        with contextlib.suppress(httpx.HTTPError, OSError, TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS), self._client() as client:
                await client.delete(f"/runs/{run_id}")

    def _marked(self, outcome: Outcome) -> Outcome:
        where = outcome.isolation
        if where.backend == "unsafe":  # restarted with another one since it was tested
            raise WireError("its sandbox contains nothing (unsafe)")
        return replace(outcome, isolation=replace(where, backend=f"remote:{where.backend}"))

    def _failed(self, why: str) -> Outcome:
        return failed(f"sandbox service {self._url}: {why}"[: 2 * _WORDS], self.isolation)


async def _words(response: httpx.Response) -> str:
    text = b""
    async for chunk in response.aiter_bytes():
        text += chunk
        if len(text) > _WORDS:
            break
    shown = "".join(c if c.isprintable() else " " for c in text[:_WORDS].decode("utf-8", "replace"))
    return shown.strip() or "no message"


async def _frames(response: httpx.Response, limits: Limits) -> bytes:
    """Read beats until the outcome begins, then the outcome.

    Raises:
        WireError: something else came, or too much.
        TimeoutError: the run was begun and did not end.
    """
    outcome: bytearray | None = None
    most = remote_wire.answer_bytes(limits)
    async with asyncio.timeout(None) as deadline:
        async for chunk in response.aiter_bytes():
            if outcome is None:
                beats, done, chunk = chunk.partition(remote_wire.DONE)
                if beats.strip(remote_wire.QUEUED + remote_wire.RUNNING):
                    raise WireError(f"it answered {beats[:20]!r}; is this the address of a sandbox service?")
                if remote_wire.RUNNING in beats and deadline.when() is None:
                    seconds = limits.kill_seconds + remote_wire.SPARE_SECONDS
                    deadline.reschedule(asyncio.get_running_loop().time() + seconds)
                if not done:
                    continue
                outcome = bytearray()
            outcome += chunk
            if len(outcome) > most:
                raise WireError(f"the outcome has more than {most} bytes")
    if outcome is None:
        raise WireError("it ended the answer without an outcome")
    return bytes(outcome)


def open_remote(settings: SandboxSettings) -> RemoteSandbox:
    """A service's sandbox that has passed checks through the wire; takes two or three seconds.

    Raises:
        SandboxUnavailable: it cannot be reached, refuses the token, contains nothing, or lets a program do what it must not.
    """
    url, token = _address(settings)
    service = _ask(url, token)
    if service.isolation.backend == "unsafe":
        raise _unavailable(f"the service at {url} contains nothing (unsafe)", "start it where `tttd doctor` finds a safe sandbox")
    if service.python != PYTHON:
        why = f"the service at {url} runs Python {service.python}, this is {PYTHON}: the same program may answer differently"
        raise _unavailable(why, "use the same version on both hosts")
    sandbox = RemoteSandbox(url, token, service.isolation)
    if failures := _in_a_loop_of_its_own(sandbox, service):
        sandbox.close_blocking()
        raise SandboxUnavailable([f"remote: at {url}, {failure}" for failure in failures], ["look at the service's log"])
    return sandbox


def _address(settings: SandboxSettings) -> tuple[str, str]:
    url, token = (settings.remote_url or "").rstrip("/"), settings.remote_token or ""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise _unavailable(f"{url!r} is no address of a sandbox service", "write http://HOST:PORT, or https://")
    if not (len(token) >= remote_wire.MINIMUM_TOKEN_BYTES and token.isascii() and token.isprintable() and " " not in token):
        hint = "set TTTD_JUDGE_REMOTE_TOKEN_FILE to a copy of the service's token file"
        raise _unavailable(f"no token for the service at {url}, or none that it could have", hint)
    return url, token


def _ask(url: str, token: str) -> Service:
    timeout = httpx.Timeout(remote_wire.SILENCE_SECONDS, connect=_CONNECT_SECONDS)
    try:
        response = httpx.get(f"{url}/isolation", headers={"authorization": f"Bearer {token}"}, timeout=timeout, trust_env=False)
    except (httpx.HTTPError, OSError) as error:
        hint = "start it there with `tttd sandbox serve`, and let this host reach its port"
        raise _unavailable(f"the service at {url} does not answer ({type(error).__name__}: {error})", hint) from None
    if response.status_code == 401:
        raise _unavailable(f"the service at {url} refuses the token", "give both hosts the same token file")
    if response.status_code != 200:
        raise _unavailable(f"the service at {url} answers HTTP {response.status_code}", "is this the address of a sandbox service?")
    try:
        return remote_wire.decode_service(response.content)
    except WireError as error:
        raise _unavailable(f"the service at {url}: {error}", "is this the address of a sandbox service?") from None


def _unavailable(why: str, hint: str) -> SandboxUnavailable:
    return SandboxUnavailable([f"remote: {why}"], [hint])


def _in_a_loop_of_its_own(sandbox: RemoteSandbox, service: Service) -> list[str]:
    """Run the checks from any thread, whether or not an event loop runs in it."""
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(_failures(sandbox, service))), name="remote-checks")
    thread.start()
    thread.join()
    return found[0] if found else ["the checks ended with an error, see above"]


async def _failures(sandbox: RemoteSandbox, service: Service) -> list[str]:
    """What the service's sandbox does otherwise than it must, in words."""
    echo = await sandbox.run(Program(_ECHO, arguments={"seed": 7}), _PROBE)
    numbers = _numbers(echo)
    if numbers is None:
        return [f"a program that returns numbers ended as {_shown(echo)}"]
    if numbers != [7, 0.1, -5e-324]:
        return [f"a program returned other numbers than it made: {numbers!r:.80}"]
    failures = []
    for name, source, limits, status in (
        ("a sleeping program", _SLEEPER, _SLEEP, Status.TIMEOUT),
        ("a program that takes 4 GiB where it may take 256 MiB", _HOG, _PROBE, Status.MEMORY),
    ):
        outcome = await sandbox.run(Program(source), limits)
        if outcome.status is not status:
            failures.append(f"{name} ended as {_shown(outcome)}, not as {status}")
    arguments = {"port": service.port, "pid": _strange_pid(service)}
    outcome = await sandbox.run(Program(Path(remote_probe.__file__).read_text(encoding="utf-8"), arguments=arguments), _PROBE)
    answers = _numbers(outcome)
    if answers is None or len(answers) != len(remote_probe.CHECKS):
        return [*failures, f"the probe ended as {_shown(outcome)} with {len(answers or ())} of {len(remote_probe.CHECKS)} answers"]
    return [*failures, *(f"a program can {c}" for c, answer in zip(remote_probe.CHECKS, answers, strict=True) if answer != 1)]


def _numbers(outcome: Outcome) -> list[float] | None:
    """What a program of ours returned; None if it returned no numbers."""
    try:
        return None if outcome.result is None else msgspec.json.decode(outcome.result, type=list[float])
    except msgspec.DecodeError:
        return None


def _strange_pid(service: Service) -> int:
    """The service's process id. In a namespace of its own a run has the low numbers itself: those are no canaries."""
    return service.pid + (1 << 21) if service.isolation.backend == "bwrap" and service.pid < 1 << 10 else service.pid


def _shown(outcome: Outcome) -> str:
    last = outcome.stderr_tail.strip().rpartition("\n")[2]
    return f"{outcome.status} ({outcome.reason})" + (f": {last}" if last else "")
