"""The processes of an engine as one session, and the end of all of them: also of those that a killed worker left behind.

An engine asks the kernel to be killed with its worker, and SGLang's own processes to be killed with it. A file beside the adapters
is for the cases where that fails: a process that hangs in the driver, or a system without that request. Two engines on one GPU
would share its memory, and neither would start.

Every engine leads a session of its own, and its children stay in it whatever they call themselves. A number is only taken for the
engine's if it was started when the file says, on this boot of the machine; a later process that got the number is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

log: structlog.stdlib.BoundLogger = structlog.get_logger()

_PATIENCE_SECONDS = 30.0
_MACHINE_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Session:
    """An engine's processes, named by the one that leads them."""

    leader: int
    started: int
    """When the leader was, in clock ticks since the machine's boot."""
    machine: str
    """Which boot of the machine that was."""

    @classmethod
    def of(cls, leader: int) -> Session:
        """The session of a process that has just been started as its leader."""
        found = _read(leader)
        return cls(leader, found.started if found else 0, _machine())

    def living(self) -> list[int]:
        """Ids of its processes. The kernel gives the leader's number to nobody else while one of them lives."""
        if self.machine != _machine():
            return []
        found = [p for p in map(_read, _pids()) if p is not None and p.session == self.leader]
        # A leader that was started at another time is a stranger, and so is its session.
        if any(p.pid == self.leader and p.started != self.started for p in found):
            return []
        return [p.pid for p in found if p.started >= self.started and p.state not in "ZX"]

    def end(self) -> list[int]:
        """SIGKILL to all its processes, and wait until they are gone. Returns their ids.

        Raises:
            RuntimeError: a process is still there after 30 s; names it.
        """
        killed = left = self.living()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while left:
            if time.monotonic() > deadline:
                numbers = ", ".join(map(str, left))
                raise RuntimeError(f"engine processes {numbers} cannot be killed; they may hold the GPU: see `nvidia-smi`")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
            left = self.living()
        return killed

    def note(self, file: Path) -> None:
        """Write it down for whoever comes after this worker."""
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(file)


def end_orphans(file: Path) -> list[int]:
    """End what is left of the engine that a file notes, and forget it. Returns the ids of the processes that were still there.

    Raises:
        RuntimeError: see :meth:`Session.end`.
    """
    try:
        session = Session(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none, or torn by a crash of the machine, after which nothing is left either
        return []
    killed = session.end()
    if killed:
        log.warning("orphaned_engine_killed", pids=killed, file=str(file))
    file.unlink(missing_ok=True)
    return killed


@dataclass(frozen=True)
class _Process:
    pid: int
    session: int
    started: int
    state: str


def _pids() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def _read(pid: int) -> _Process | None:
    try:
        # The name stands in brackets and may hold anything; the fields are counted from its end.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return _Process(pid, session=int(fields[3]), started=int(fields[19]), state=fields[0])
    except (OSError, IndexError, ValueError):
        return None


def _machine() -> str:
    with contextlib.suppress(OSError):
        return _MACHINE_BOOT.read_text(encoding="utf-8").strip()
    return ""
