"""A small FrontierCS judge over real HTTP, with every weakness of the real one; it judges nothing and answers as it is told."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def accepted(ratio: str = "0.500000000") -> dict[str, Any]:
    return {
        "ok": True,
        "status": "Wrong Answer",
        "msg": f"ok Ratio: {ratio} (cells=5)",
        "scoreRatio": float(ratio),
        "output": "1 1\n",
    }


def failed(message: str = "", ratio: float | None = 0.0) -> dict[str, Any]:
    return {"ok": False, "status": "Wrong Answer", "time": 1, "memory": 1, "msg": message, "scoreRatio": ratio}


def done(*cases: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The service's own addition, which believes every ratio."""
    total = sum(case["scoreRatio"] or 0 for case in cases)
    return {"status": "done", "passed": False, "score": 100 * total / max(1, len(cases)), "cases": list(cases)} | changes


class Service(ThreadingHTTPServer):
    """As the real one: it forgets a result when it is fetched, and counts submissions without a lock."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.result: dict[str, Any] | bytes | int = done(accepted("0.25"), accepted("0.75"))
        """What a submission ends with; a number is an HTTP status."""
        self.polls_in_queue = 1
        self.queued: dict[str, Any] | bytes | int = {"status": "queued"}
        self.problems = {"0"}
        self.submit_status = 200
        self.submit_answer: bytes | None = None
        self.submit_seconds = 0.0
        self.counter = 0
        self.left: dict[int, int] = {}
        self.submitting = 0
        self.most_at_once = 0
        self.requests: list[str] = []
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        service = self.server
        service.requests.append(f"GET {self.path}")
        if problem := re.fullmatch(r"/problem/(\w+)/statement", self.path):
            return self.answer(b"statement" if problem[1] in service.problems else 404)
        if found := re.fullmatch(r"/result/(\d+)", self.path):
            return self.answer(self.result_of(int(found[1])))
        return self.answer(404)

    def result_of(self, sid: int) -> dict[str, Any] | bytes | int:
        service = self.server
        if sid not in service.left:
            return 404
        service.left[sid] -= 1
        if service.left[sid] >= 0:
            return service.queued
        del service.left[sid]
        return service.result

    def do_POST(self) -> None:
        service = self.server
        service.requests.append(f"POST {self.path}")
        service.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        service.submitting += 1
        service.most_at_once = max(service.most_at_once, service.submitting)
        before = service.counter
        time.sleep(service.submit_seconds)
        service.counter = sid = before + 1
        service.submitting -= 1
        service.left[sid] = service.polls_in_queue
        if service.submit_answer is not None:
            return self.answer(service.submit_answer)
        return self.answer({"sid": sid} if service.submit_status == 200 else service.submit_status)

    def answer(self, what: dict[str, Any] | bytes | int) -> None:
        body = b"" if isinstance(what, int) else what if isinstance(what, bytes) else json.dumps(what).encode()
        self.send_response(what if isinstance(what, int) else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Service]:
    """A running service on a free port."""
    with Service() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
