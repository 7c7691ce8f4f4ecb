"""The process of a sandbox service: opens this host's sandbox, listens, drains on SIGTERM. The answers are the service's own.

Not a worker: it knows no Temporal and no store, so a host that runs hostile programs holds nothing but its token.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import uvicorn

from activities.judge.sandbox import Sandbox, SandboxSettings, open_sandbox
from activities.judge.sandbox.remote_server import SandboxService
from activities.judge.sandbox.remote_wire import MAXIMUM_TOKEN_BYTES, MINIMUM_TOKEN_BYTES
from activities.judge.slots import Slots

_LAST_SECONDS: Final = 30
"""For killed programs to be dead and their clients to be told, before connections are cut."""

log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True)
class ServiceOptions:
    """How a host serves."""

    token: str
    sandbox: SandboxSettings
    environments: Path
    slots: int | None
    """Cores that programs share; None: one less than there are."""
    drain_seconds: float
    """After SIGTERM, time for runs to end by themselves."""


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: uvicorn raises them again after its shutdown, and the exit status would say "killed"."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def read_token(path: Path) -> str:
    """The secret in a file, without the space around it.

    Raises:
        ValueError: it cannot be read, or is no token: too short, too long, or not printable ASCII without spaces.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAXIMUM_TOKEN_BYTES + 1)
        token = raw.decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token file {path}: {error}") from None
    if len(token) < MINIMUM_TOKEN_BYTES or len(raw) > MAXIMUM_TOKEN_BYTES or not token.isprintable() or " " in token:
        raise ValueError(
            f"token file {path}: {len(token)} characters; a token has {MINIMUM_TOKEN_BYTES} to {MAXIMUM_TOKEN_BYTES}, printable "
            "and without spaces. Make one with `openssl rand -hex 32`"
        )
    return token


def serve(options: ServiceOptions, listener: socket.socket, listening: Callable[[str, Sandbox], None]) -> None:
    """Serve until SIGTERM or SIGINT; then take nothing new, let runs end, and kill what is left.

    Args:
        listener: bound and listening; closed at the end.
        listening: called once with the address when the service answers.

    Raises:
        SandboxUnavailable: no sandbox is safe on this host.
    """
    with open_sandbox(options.sandbox) as sandbox:
        asyncio.run(_serve(options, listener, sandbox, listening))


async def _serve(
    options: ServiceOptions, listener: socket.socket, sandbox: Sandbox, listening: Callable[[str, Sandbox], None]
) -> None:
    host, port = listener.getsockname()[:2]
    service = SandboxService(sandbox, Slots(options.slots), options.token, options.environments, port)
    config = uvicorn.Config(
        service.app(),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=math.ceil(options.drain_seconds) + _LAST_SECONDS,
    )
    server = _Uvicorn(config)

    def end() -> None:
        if not service.draining:
            log.info("draining", runs=service.runs, drain_seconds=options.drain_seconds)
            service.draining = True
            server.should_exit = True
            loop.call_later(options.drain_seconds, service.end_all)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    address = f"http://{host}:{port}"
    log.info("listening", address=address, sandbox=str(sandbox.isolation))
    listening(address, sandbox)
    await serving
    log.info("stopped", runs=service.runs)
