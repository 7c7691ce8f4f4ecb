"""A proxy between the workers and the object store: it passes requests on byte for byte, remembers them, and can hold one.

A held request waits at one of three places:
    before   it has come, and the store has not heard of it            (before the effect)
    during   the store has got its head and half of its body
    after    the store has answered, and the client has not heard it   (after the effect, before the report)
The holder then passes it on, or drops it as a network would: by closing the connection.

The Host header goes through unchanged, since S3 signatures cover it. Knows from a request who signed it, the method and the key;
knows no run and no process.
"""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import BinaryIO, cast
from urllib.parse import unquote, urlsplit

from tests.faults.wire import Wire, read_head, read_request_body, read_response

_HOLD_SECONDS = 120.0
"""Longest hold: a harness that forgot one must not hang the system for ever."""
_SIGNER = re.compile(r"Credential=([^/,\s]+)/")


class Side(StrEnum):
    """Where a request is held."""

    BEFORE = "before"
    DURING = "during"
    AFTER = "after"


@dataclass(frozen=True)
class Request:
    """What the proxy understands of a request."""

    who: str
    """Access key that signed it, without its ending `-key`; empty for an unsigned one."""
    method: str
    key: str
    """Below the bucket; empty for the bucket itself."""
    size: int
    """Bytes of its body."""
    create: bool
    """It must not replace anything (`If-None-Match: *`)."""


@dataclass(frozen=True)
class Answered:
    """A request and what became of it."""

    request: Request
    status: int | None
    """None: no answer came from the store, or the request was dropped before it got there."""
    at: float
    """time.monotonic() when that was known."""


class NotReached(AssertionError):
    """The request to hold did not come in time."""


@dataclass
class Hold:
    """One request to hold, and later the one that is held."""

    matches: Callable[[Request], bool]
    side: Side
    nth: int
    request: Request | None = None
    _reached: threading.Event = field(default_factory=threading.Event)
    _released: threading.Event = field(default_factory=threading.Event)
    _dropped: bool = False

    def wait(self, seconds: float = 60.0) -> Request:
        """Wait until the request is held.

        Raises:
            NotReached: it did not come.
        """
        if not self._reached.wait(seconds) or self.request is None:
            raise NotReached(f"no request to hold came within {seconds:.0f} s")
        return self.request

    @property
    def reached(self) -> bool:
        return self._reached.is_set()

    def pass_on(self) -> None:
        """Let it go where it was going."""
        self._released.set()

    def drop(self) -> None:
        """Close its connection. What the store already knows of it stays."""
        self._dropped = True
        self._released.set()

    def meets(self, request: Request) -> bool:
        """Count a request; True for the one to hold. The proxy calls it under its lock."""
        if self.nth == 0 or not self.matches(request):
            return False
        self.nth -= 1
        if self.nth == 0:
            self.request = request
            return True
        return False

    def miss(self) -> None:
        """It got no answer to hold, so the next one that matches is to be held."""
        self.nth, self.request = 1, None

    def stop_here(self) -> bool:
        """Hold the calling thread; whether to go on afterwards."""
        self._reached.set()
        return self._released.wait(_HOLD_SECONDS) and not self._dropped


class Proxy:
    """Listens on a port of its own of 127.0.0.1 until closed.

    Args:
        target: host and port of the store.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._holds: list[Hold] = []
        self._answered: list[Answered] = []
        self._server = _Server(("127.0.0.1", 0), _Connection)
        self._server.proxy = self
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="proxy").start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.release_all()
        self._server.shutdown()
        self._server.server_close()

    def hold(self, matches: Callable[[Request], bool], side: Side, nth: int = 1) -> Hold:
        """Hold the n-th request from now on that matches. `matches` is called under a lock: it must not wait for the workers."""
        hold = Hold(matches, side, nth)
        with self._lock:
            self._holds.append(hold)
        return hold

    def release_all(self) -> None:
        """Pass on whatever is held, and forget what was to be held."""
        with self._lock:
            holds, self._holds = self._holds, []
        for hold in holds:
            hold.pass_on()

    def answered(self) -> list[Answered]:
        """Every request so far that is not under way any more, in the order of their ends."""
        with self._lock:
            return list(self._answered)

    # One request ----------------------------------------------------------------------------------------------------------
    def serve(self, message: Wire, client: BinaryIO) -> bool:
        """Pass one request on and its answer back; whether the connection lives on."""
        request = understand(message)
        hold = self._hold_for(request)
        status: int | None = None
        try:
            if hold and hold.side is Side.BEFORE and not hold.stop_here():
                return False
            answer = self._forward(message, request.method, hold if hold and hold.side is Side.DURING else None)
            if answer is None:
                return False
            status = int(answer.first_line[1])
        except OSError:  # the store is away: whoever asked sees a connection that ends
            if hold and not hold.reached:
                hold.miss()
            return False
        finally:
            self._note(request, status)
        if hold and hold.side is Side.AFTER and not hold.stop_here():
            return False
        client.write(answer.whole)
        client.flush()
        return not (message.closes or answer.closes)

    def _hold_for(self, request: Request) -> Hold | None:
        with self._lock:
            return next((hold for hold in self._holds if hold.meets(request)), None)

    def _forward(self, message: Wire, method: str, during: Hold | None) -> Wire | None:
        """The store's answer; None when the request was dropped half-way."""
        with socket.create_connection(self._target, timeout=_HOLD_SECONDS) as store:
            half = len(message.head) + len(message.body) // 2 if during else len(message.whole)
            store.sendall(message.whole[:half])
            if during and not during.stop_here():
                return None
            store.sendall(message.whole[half:])
            with store.makefile("rb") as stream:
                return read_response(cast(BinaryIO, stream), method)

    def _note(self, request: Request, status: int | None) -> None:
        with self._lock:
            self._answered.append(Answered(request, status, time.monotonic()))


def understand(message: Wire) -> Request:
    """Who asks for what; path-style addresses (`/bucket/key?query`)."""
    method, target, _ = message.first_line
    signer = _SIGNER.search(message.header("authorization") or "")
    return Request(
        who=signer[1].removesuffix("-key") if signer else "",
        method=method,
        key=unquote(urlsplit(target).path).removeprefix("/").partition("/")[2],
        size=len(message.body),
        create=message.header("if-none-match") == "*",
    )


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128
    proxy: Proxy


class _Connection(socketserver.StreamRequestHandler):
    """One client's connection. The store gets a fresh one for each request, so that its restarts are nobody's stale connection."""

    wbufsize = -1

    def handle(self) -> None:
        server = cast(_Server, self.server)
        stream, client = cast(BinaryIO, self.rfile), cast(BinaryIO, self.wfile)
        with contextlib.suppress(OSError):
            while (head := read_head(stream)) is not None:
                if b"\r\nexpect: 100-continue" in head.lower():
                    # The client waits for this before it sends the body; the store's own is left out of the answer.
                    client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    client.flush()
                if not server.proxy.serve(Wire(head, read_request_body(stream, head)), client):
                    return

    def finish(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone already
            super().finish()
