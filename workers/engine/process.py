"""One engine process: start it, watch it, end it. Knows its HTTP health, not what it serves."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from activities.engine_http import AsyncEngineClient
from workers.engine.launch import Launch, embedded_command
from workers.engine.orphans import Session
from workers.settings import child_environment

__all__ = ["EngineProcess", "embedded_command", "launch_engine", "start_engine"]

log: structlog.stdlib.BoundLogger = structlog.get_logger()

POLL_SECONDS = 1.0
_ASK_SECONDS = 25.0
"""For one question about its health: SGLang answers after one second when it is well, and after 20 when it is not."""
_TAIL_BYTES = 16_384
_TOLD = 300
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
"""How Python ends a traceback."""
_PR_SET_PDEATHSIG = 1


@dataclass
class EngineProcess:
    """A running engine. A boot id names one process: what was proved of one boot says nothing about the next."""

    process: subprocess.Popen[bytes]
    launch: Launch
    log_file: Path
    session: Session
    log_from: int = 0
    """Byte of its log at which it began: the rest is of engines before it."""
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    heard: float = field(default_factory=time.monotonic)
    """time.monotonic() of its last good answer on /health."""

    @property
    def url(self) -> str:
        return self.launch.url

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    async def ready(self) -> None:
        """Wait until the engine answers.

        Raises:
            RuntimeError: it ended, or stayed silent for too long; says where its log is, and how that ends.
        """
        client, limit = AsyncEngineClient(self.url), self.launch.start_seconds
        try:
            async with asyncio.timeout(limit):
                while not await client.health(_ASK_SECONDS):
                    if not self.alive:
                        raise RuntimeError(f"the engine ended with code {self.process.returncode} while starting; {self._told()}")
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise RuntimeError(
                f"the engine did not answer {self.url}/health within {limit:.0f} s (engine_start_seconds); {self._told()}"
            ) from None
        finally:
            await client.close()

    async def ended(self) -> str:
        """Wait until the engine is gone or hangs; returns why."""
        client, limit = AsyncEngineClient(self.url), self.launch.hung_seconds
        self.heard = time.monotonic()
        try:
            while self.alive:
                # A question that hangs must not hide the process's end, which other workers wait for.
                question = asyncio.create_task(client.health(min(_ASK_SECONDS, limit)))
                while not question.done() and self.alive:
                    await asyncio.wait({question}, timeout=POLL_SECONDS)
                if not question.done():
                    question.cancel()
                elif question.result():
                    self.heard = time.monotonic()
                elif (silent := time.monotonic() - self.heard) >= limit:
                    return f"no good answer on /health for {silent:.0f} s (engine_hung_seconds)"
                await asyncio.sleep(min(POLL_SECONDS, limit / 4))
            return f"ended with code {self.process.returncode}; {self._told()}"
        finally:
            await client.close()

    def stop(self, patience_seconds: float = 5.0) -> None:
        """SIGTERM to the engine, then SIGKILL to all its processes: SGLang's scheduler holds the GPU, not the server we started."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_seconds)
        self.session.end()
        self.process.wait()

    def _told(self) -> str:
        """Where the log is, its last line, and the last error in it: SGLang's own end is often told after the cause of it."""
        try:
            with self.log_file.open("rb") as stream:
                stream.seek(max(self.log_from, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = stream.read().decode(errors="replace").split("\n")
        except OSError:
            lines = []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        error = next((line.strip() for line in reversed(lines) if _ERROR.match(line)), "")
        told = f"its log is {self.log_file}"
        told += f", the last error: {error[:_TOLD]}" if error and error != last else ""
        return told + (f", the last line: {last[:_TOLD]}" if last else "")


def start_engine(command: Sequence[str], url: str, log_file: Path) -> EngineProcess:
    """Start an engine with the environment of this process, nothing fetched."""
    return launch_engine(Launch(list(command), url, {"HF_HUB_OFFLINE": "1"}), log_file)


def launch_engine(launch: Launch, log_file: Path, pidfile: Path | None = None) -> EngineProcess:
    """Start an engine; its output goes to a log file of its own.

    The engine dies with the *thread* that calls this, by the kernel's own rule: call it from one that lives as long as the worker.

    Args:
        pidfile: where to note its processes for :func:`workers.engine.orphans.end_orphans`.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        log_from = output.tell()
        process = subprocess.Popen(
            launch.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(**launch.environment),
            start_new_session=True,  # all its processes are found by it, and Ctrl-C reaches the worker alone, which ends them
            preexec_fn=_die_with_parent,
        )
    session = Session.of(process.pid)
    if pidfile is not None:
        session.note(pidfile)
    log.info("engine_started", pid=process.pid, url=launch.url)
    return EngineProcess(process, launch, log_file, session, log_from)


def _die_with_parent() -> None:
    """Between fork and exec: have the kernel kill this process when its parent ends (Linux; elsewhere orphans.py does it later)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _load_libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


_libc = _load_libc()
