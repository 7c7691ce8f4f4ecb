"""One engine process: start it, watch it, end it. Knows its HTTP health, not what it serves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from activities.engine_http import AsyncEngineClient
from workers.settings import Settings, child_environment

log: structlog.stdlib.BoundLogger = structlog.get_logger()

START_SECONDS = 600.0
"""Real engines compile kernels at their first start; the embedded one needs seconds."""
HUNG_SECONDS = 60.0
"""Silence on /health after which a live process counts as hung."""
POLL_SECONDS = 1.0


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def embedded_command(settings: Settings, model: Path, port: int) -> list[str]:
    """Command line of the embedded engine."""
    options = ["--model-path", str(model), "--host", settings.engine_host, "--port", str(port)]
    return [
        sys.executable,
        "-m",
        "workers.engine.embedded",
        *options,
        "--threads",
        str(settings.engine_threads),
        "--die-with-parent",
    ]


@dataclass
class EngineProcess:
    """A running engine. A boot id names one process: what was proved of one boot says nothing about the next."""

    process: subprocess.Popen[bytes]
    url: str
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    async def ready(self) -> None:
        """Wait until the engine answers.

        Raises:
            RuntimeError: it ended or stayed silent for 600 s; says where its log is.
        """
        client = AsyncEngineClient(self.url)
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await client.health():
                    if not self.alive:
                        raise RuntimeError(f"the engine ended with code {self.process.returncode} while starting; see its log")
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise RuntimeError(f"the engine did not answer {self.url}/health within {START_SECONDS:.0f} s; see its log") from None
        finally:
            await client.close()

    async def ended(self) -> str:
        """Wait until the engine is gone or hangs; returns why."""
        client = AsyncEngineClient(self.url)
        loop = asyncio.get_running_loop()
        heard = loop.time()
        try:
            while self.alive:
                if await client.health():
                    heard = loop.time()
                elif loop.time() - heard > HUNG_SECONDS:
                    return f"no answer on /health for {HUNG_SECONDS:.0f} s"
                await asyncio.sleep(POLL_SECONDS)
            return f"ended with code {self.process.returncode}"
        finally:
            await client.close()

    def stop(self, patience_seconds: float = 5.0) -> None:
        """SIGTERM, then SIGKILL."""
        if not self.alive:
            return
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_seconds)
        if self.alive:
            self.process.kill()
            self.process.wait()


def start_engine(command: Sequence[str], url: str, log_file: Path) -> EngineProcess:
    """Start an engine; its output goes to a log file of its own."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=child_environment(HF_HUB_OFFLINE="1")
        )
    log.info("engine_started", pid=process.pid, url=url)
    return EngineProcess(process, url)
