"""The HTTP side of a worker: /healthz, /readyz and /metrics, from a thread of its own. Read-only, and off unless a port is set.

A thread, because an answer must come also while the event loop is stuck: that is what the liveness probe is there to tell.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from workers.health import Health

log: structlog.stdlib.BoundLogger = structlog.get_logger()

Answer = tuple[int, str, bytes]
"""Status, content type, body."""


def health_pages(health: Health) -> dict[str, Callable[[str], Answer]]:
    """`/healthz` and `/readyz`: 200 or 503, with the reasons as JSON."""

    def page(ask: Callable[[], tuple[bool, dict[str, Any]]]) -> Callable[[str], Answer]:
        def answer(accept: str) -> Answer:
            good, told = ask()
            return 200 if good else 503, "application/json", json.dumps(told).encode()

        return answer

    return {"/healthz": page(health.live), "/readyz": page(health.ready)}


def metrics_page(registry: CollectorRegistry) -> dict[str, Callable[[str], Answer]]:
    """`/metrics` in the format that the scraper asks for."""

    def answer(accept: str) -> Answer:
        encode, kind = choose_encoder(accept)
        return 200, kind, encode(registry)

    return {"/metrics": answer}


def serve(host: str, port: int, pages: dict[str, Callable[[str], Answer]]) -> ThreadingHTTPServer:
    """Answer GET on a port until `shutdown()`.

    Args:
        port: 0 takes any free one; `server_port` says which.

    Raises:
        OSError: the port is taken; names it.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            page = pages.get(path)
            try:
                status, kind, body = page(self.headers.get("Accept", "")) if page else (404, "text/plain", b"no such page\n")
            except Exception as error:  # one bad collector must not look like a dead process
                log.exception("page_failed", path=path)
                status, kind, body = 500, "text/plain", f"{error}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes come every few seconds: no line for each."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port} for {', '.join(pages)}: {error.strerror}") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True, name=f"probes-{server.server_port}").start()
    return server
