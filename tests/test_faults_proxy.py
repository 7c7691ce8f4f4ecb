"""The harness's proxy by itself: bytes go through unchanged, and a request is held before, during and after its effect."""

from __future__ import annotations

import http.client
import io
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import pytest

from tests.faults.proxy import Hold, NotReached, Proxy, Request, Side, understand
from tests.faults.wire import Broken, Wire, read_head, read_request_body, read_response


class Store(socketserver.ThreadingTCPServer):
    """A store that keeps every message as it came, and answers what it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.got: list[bytes] = []
        """Everything that came on each connection."""
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Odd:  two  spaces\r\n\r\nok"

    def keys(self) -> list[bytes]:
        return [message.split(b" ", 2)[1] for message in self.got]


class _Session(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        store = cast(Store, self.server)
        stream = cast(BinaryIO, self.rfile)
        head = read_head(stream)
        if head is None:
            return
        number = len(store.got)
        store.got.append(head)
        try:
            store.got[number] += read_request_body(stream, head)
        except Broken:
            return
        self.wfile.write(store.answer)


@pytest.fixture
def store() -> Iterator[Store]:
    server = Store()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def proxy(store: Store) -> Iterator[Proxy]:
    proxy = Proxy(cast(tuple[str, int], store.server_address))
    yield proxy
    proxy.close()


def sent(proxy: Proxy, message: bytes) -> bytes:
    """What comes back for raw bytes, until the proxy closes."""
    host, port = proxy.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(message)
        client.shutdown(socket.SHUT_WR)
        return client.makefile("rb").read()


class Asking(threading.Thread):
    """One request under way."""

    def __init__(self, proxy: Proxy, key: str, body: bytes = b"x" * 1000) -> None:
        super().__init__(daemon=True)
        self._proxy, self._key, self._body = proxy, key, body
        self.status: int | str | None = None
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._proxy.url.removeprefix("http://"), timeout=5)
        try:
            connection.request("PUT", f"/bucket/{self._key}", self._body)
            self.status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            self.status = type(error).__name__

    def end(self) -> int | str | None:
        self.join(5)
        return self.status


def of(key: str) -> Any:
    return lambda request: request.key == key


def test_bytes_pass_unchanged_both_ways(proxy: Proxy, store: Store) -> None:
    body = bytes(range(256)) * 40
    head = (
        b"PUT /bucket/runs/a%20b?x-id=PutObject HTTP/1.1\r\nhOsT: 127.0.0.1:9\r\nX-Twice: 1\r\nX-Twice:2\r\n"
        b"Content-Length: 10240\r\nConnection: close\r\n\r\n"
    )
    assert sent(proxy, head + body) == store.answer
    assert store.got == [head + body]


def test_chunks_pass_unchanged_both_ways(proxy: Proxy, store: Store) -> None:
    store.answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n0\r\nX-Trailer: t\r\n\r\n"
    message = b"PUT /b/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    assert sent(proxy, message) == store.answer
    assert store.got == [message]


def test_many_requests_on_one_connection(proxy: Proxy, store: Store) -> None:
    first, second = (b"GET /b/%s HTTP/1.1\r\n\r\n" % key for key in (b"one", b"two"))
    assert sent(proxy, first + second) == store.answer * 2
    assert store.keys() == [b"/b/one", b"/b/two"]


def test_a_client_that_waits_for_100_continue_gets_one_and_no_other(proxy: Proxy, store: Store) -> None:
    store.answer = b"HTTP/1.1 100 Continue\r\n\r\n" + store.answer
    head = b"PUT /b/k HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    host, port = proxy.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as client, client.makefile("rb") as stream:
        client.sendall(head)
        assert read_head(cast(BinaryIO, stream)) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"abc")
        answer = read_head(cast(BinaryIO, stream))
    assert answer is not None
    assert answer.startswith(b"HTTP/1.1 200")
    assert store.got == [head + b"abc"]


def test_no_body_belongs_to_the_answer_to_head(proxy: Proxy, store: Store) -> None:
    store.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 700\r\n\r\n"
    assert sent(proxy, b"HEAD /b/k HTTP/1.1\r\n\r\n") == store.answer


def test_held_before_the_store_has_not_heard_of_it(proxy: Proxy, store: Store) -> None:
    hold = proxy.hold(of("held"), Side.BEFORE)
    held, other = Asking(proxy, "held"), Asking(proxy, "other")
    assert hold.wait(5).key == "held"
    assert other.end() == 200
    assert store.keys() == [b"/bucket/other"]
    hold.pass_on()
    assert held.end() == 200
    assert store.keys() == [b"/bucket/other", b"/bucket/held"]


def test_held_before_and_dropped_it_never_happened(proxy: Proxy, store: Store) -> None:
    hold = proxy.hold(of("held"), Side.BEFORE)
    held = Asking(proxy, "held")
    hold.wait(5)
    hold.drop()
    assert held.end() == "RemoteDisconnected"
    assert store.got == []
    assert [(a.request.key, a.status) for a in proxy.answered()] == [("held", None)]


def test_held_in_the_middle_the_store_has_half_of_it(proxy: Proxy, store: Store) -> None:
    hold = proxy.hold(of("held"), Side.DURING)
    held = Asking(proxy, "held", b"y" * 5000)
    hold.wait(5)
    assert not proxy.answered()
    hold.pass_on()
    assert held.end() == 200
    (message,) = store.got
    assert message.endswith(b"y" * 5000)
    again = proxy.hold(of("held"), Side.DURING)
    dropped = Asking(proxy, "held", b"z" * 5000)
    again.wait(5)
    again.drop()
    assert dropped.end() == "RemoteDisconnected"
    deadline = time.monotonic() + 5
    while len(store.got) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert b"z" * 5000 not in store.got[1]


def test_held_after_it_happened_and_the_client_does_not_know(proxy: Proxy, store: Store) -> None:
    hold = proxy.hold(of("held"), Side.AFTER)
    held = Asking(proxy, "held")
    hold.wait(5)
    assert store.keys() == [b"/bucket/held"]
    assert held.status is None
    assert [a.status for a in proxy.answered()] == [200]
    hold.drop()
    assert held.end() == "RemoteDisconnected"


def test_what_the_store_never_answered_is_not_held_after(proxy: Proxy, store: Store) -> None:
    good, store.answer = store.answer, b""
    hold = proxy.hold(of("held"), Side.AFTER)
    assert Asking(proxy, "held").end() == "RemoteDisconnected"
    assert not hold.reached
    store.answer = good
    again = Asking(proxy, "held")
    hold.wait(5)
    hold.pass_on()
    assert again.end() == 200


def test_the_nth_is_held_and_no_other(proxy: Proxy, store: Store) -> None:
    hold = proxy.hold(lambda request: request.method == "PUT", Side.AFTER, nth=2)
    assert Asking(proxy, "first").end() == 200
    assert not hold.reached
    second = Asking(proxy, "second")
    assert hold.wait(5).key == "second"
    assert Asking(proxy, "third").end() == 200
    hold.pass_on()
    assert second.end() == 200


def test_what_does_not_come_is_said(proxy: Proxy) -> None:
    with pytest.raises(NotReached, match="no request to hold came within 0 s"):
        proxy.hold(of("nothing"), Side.BEFORE).wait(0.05)


def test_closing_releases_what_is_held(store: Store) -> None:
    proxy = Proxy(cast(tuple[str, int], store.server_address))
    hold: Hold = proxy.hold(of("held"), Side.BEFORE)
    held = Asking(proxy, "held")
    hold.wait(5)
    proxy.release_all()
    assert held.end() == 200
    proxy.close()


def test_a_store_that_is_away_ends_the_connection() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy = Proxy(unused.getsockname())
        assert Asking(proxy, "k").end() == "RemoteDisconnected"
        assert [a.status for a in proxy.answered()] == [None]
        proxy.close()


def test_what_is_understood_of_a_request() -> None:
    head = (
        b"PUT /tttd/runs/r%2B1/steps/000001/plan?x-id=PutObject HTTP/1.1\r\nIf-None-Match: *\r\n"
        b"Authorization: AWS4-HMAC-SHA256 Credential=judge-2-key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host\r\n\r\n"
    )
    assert understand(Wire(head, b"12345")) == Request("judge-2", "PUT", "runs/r+1/steps/000001/plan", 5, True)
    listing = understand(Wire(b"GET /tttd?list-type=2&prefix=runs HTTP/1.1\r\n\r\n", b""))
    assert (listing.key, listing.who, listing.create) == ("", "", False)


@pytest.mark.parametrize(
    "torn",
    [b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", b"", b"HTTP/1.1 100 Continue\r\n\r\n"],
)
def test_an_answer_that_ends_too_soon_is_no_answer(proxy: Proxy, store: Store, torn: bytes) -> None:
    store.answer = torn
    assert sent(proxy, b"GET /b/k HTTP/1.1\r\n\r\n") == b""
    assert [a.status for a in proxy.answered()] == [None]
    with pytest.raises(Broken):
        read_response(io.BytesIO(torn), "GET")
