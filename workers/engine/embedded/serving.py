"""Running the engine's HTTP side in uvicorn until a signal comes. Knows sockets and signals; the answers are the server's."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator

import structlog
import uvicorn

from workers.engine.embedded.model import CausalModel
from workers.engine.embedded.server import EngineOptions, EngineServer

SHUTDOWN_SECONDS = 1
"""For answers that are being written when the process is told to end."""

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that it is they who close: a request never meets a closing connection."""

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: uvicorn raises them again after its shutdown, and the exit status would say "killed"."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(model: CausalModel, options: EngineOptions, listener: socket.socket, begun: float) -> None:
    """Answer requests on a bound socket until SIGTERM or SIGINT.

    Args:
        begun: `time.monotonic()` of the process's start, for the log.
    """
    engine = EngineServer(model, options)
    config = uvicorn.Config(
        engine.app(),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    server = _Uvicorn(config)

    def end() -> None:
        log.info("stopping")
        engine.shut_down()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    host, port = listener.getsockname()[:2]
    startup_seconds = round(time.monotonic() - begun, 2)
    log.info("listening", host=host, port=port, boot_id=engine.boot_id, startup_seconds=startup_seconds)
    await serving
