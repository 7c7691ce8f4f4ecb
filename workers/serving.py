"""What every role has while it serves: the sign to stop, its health, its numbers, and the ports that tell of them.

Knows no role's business; a role marks its own conditions and hands over its own numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING

import structlog
from prometheus_client.registry import Collector
from temporalio.client import Client

from activities.blobs import Blobs
from workers.health import Health, keep_watch, watch_outside
from workers.metrics import MetricsInterceptor, WorkerMetrics
from workers.probes import health_pages, metrics_page, serve
from workers.settings import Settings
from workflows.contracts.base import RunRef

if TYPE_CHECKING:  # only a judge has this room
    from activities.judge.slots import Slots

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Serving:
    """One worker process while it serves."""

    def __init__(self, role: str, settings: Settings, stop: asyncio.Event) -> None:
        self.stop = stop
        self.drain = timedelta(seconds=settings.drain_seconds)
        """How long running activities get after the sign to stop."""
        self.health = Health(role)
        self.metrics = WorkerMetrics(role)
        self.metrics.ready.set_function(lambda: float(self.health.ready()[0]))
        self.refresh: Callable[[], None] = lambda: None
        """Marks what the role itself can tell without waiting; called every few seconds."""
        self.on_step: Callable[[RunRef, int], None] = lambda run, step: None
        """On a control worker: told of each step that was committed, in a thread of its own; must not raise."""
        self._settings = settings

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Answer on the ports that the settings name, and beat."""
        beat = asyncio.create_task(keep_watch(self.health, self.stop))
        servers = self._listen()
        try:
            yield
        finally:
            beat.cancel()
            for server in servers:
                server.shutdown()
                server.server_close()

    @contextlib.asynccontextmanager
    async def watching(self, client: Client, blobs: Blobs) -> AsyncIterator[None]:
        """Ask Temporal and the store now and then while the body runs."""
        task = asyncio.create_task(watch_outside(self.health, client, blobs, lambda: self.refresh()))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def counted(self, client: Client) -> Client:
        """The client, such that every worker made with it counts its activities."""
        interceptor = MetricsInterceptor(self.metrics, lambda run, step: self.on_step(run, step))
        config = client.config()
        config["interceptors"] = [*config["interceptors"], interceptor]
        return Client(**config)

    def show(self, numbers: Collector) -> None:
        """Show numbers of the role's own on /metrics, too."""
        self.metrics.registry.register(numbers)

    def show_slots(self, slots: Slots) -> None:
        """Show how many cores a judge has for programs, and how many are taken."""
        self.metrics.slots.set_function(lambda: slots.cores)
        self.metrics.slots_in_use.set_function(lambda: slots.cores_in_use)

    def _listen(self) -> list[ThreadingHTTPServer]:
        s = self._settings
        pages = {s.health_port: health_pages(self.health)} if s.health_port else {}
        if s.metrics_port:
            pages[s.metrics_port] = pages.get(s.metrics_port, {}) | metrics_page(self.metrics.registry)
        servers = [serve(s.probe_host, port, found) for port, found in pages.items()]
        if servers:
            log.info("probes_answer", host=s.probe_host, ports=sorted(pages))
        return servers
