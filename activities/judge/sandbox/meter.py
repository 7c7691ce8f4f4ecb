"""Measures a run while it lives, and says when a run of several processes has used too much. Source: spec sandbox 7.

A single process is bounded by its rlimits, so it is only measured. Several together are not: their memory, CPU time and files are
added up five times a second.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Final

from activities.judge.sandbox import proc
from activities.judge.sandbox.types import Limits
from activities.judge.sandbox.wall import FILES_LIMIT, OWN_DIRECTORIES

SAMPLE_SECONDS: Final = 0.5
FAMILY_SAMPLE_SECONDS: Final = 0.2


class Meter:
    """Of a program that is our own child: it can be asked even after its end, until it is reaped."""

    interval_seconds = SAMPLE_SECONDS

    def __init__(self, pid: int) -> None:
        self.pid: int | None = pid
        self.wait_seconds: float | None = None
        self.peak_bytes: int | None = None
        self.cpu_seconds = 0.0

    def begin(self) -> None:
        """The program's turn has come."""

    def sample(self) -> str | None:
        """Measure; a reason to kill the run, if there is one."""
        if self.pid is not None:
            self.peak_bytes = proc.high_water_bytes(self.pid) or self.peak_bytes
            self.wait_seconds = _larger(self.wait_seconds, proc.run_queue_seconds(self.pid))
        return None

    def finish(self) -> str | None:
        """The group's leader has ended; a reason to call the run killed, if there is one."""
        if self.pid is not None:
            self.wait_seconds = _larger(self.wait_seconds, proc.run_queue_seconds(self.pid))
        return None

    def close(self) -> None:
        """Release everything."""


class WalledMeter(Meter):
    """Of a program behind a wall, which is not our child: its last sample stands."""

    def __init__(self) -> None:
        super().__init__(0)
        self.pid = None
        self.init: int | None = None
        """First process of the run's pid namespace, parent of whatever lost its own."""
        self._report = b""

    def read_report(self, chunk: bytes) -> None:
        """bubblewrap's JSON lines."""
        self._report += chunk
        self.init = self.reported("child-pid")

    def reported(self, name: str) -> int | None:
        """A number from the report; None if it has not come."""
        for line in self._report.splitlines():
            with contextlib.suppress(ValueError):  # the last line may not be whole yet
                value = json.loads(line).get(name)
                if isinstance(value, int):
                    return value
        return None

    def begin(self) -> None:
        if self.init is not None:
            # At this moment it has one child.
            self.pid = next(iter(proc.children(self.init)), None)
            self.sample()


class FamilyMeter(WalledMeter):
    """Of a program that may start others."""

    interval_seconds = FAMILY_SAMPLE_SECONDS

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits
        self._directories: list[int] = []
        self._largest = 0

    def begin(self) -> None:
        super().begin()
        if self.pid is not None:
            for path in OWN_DIRECTORIES:
                # Held open, so that they can be asked when everything in the run's namespaces is gone.
                with contextlib.suppress(OSError):
                    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                    self._directories.append(os.open(f"/proc/{self.pid}/root{path}", flags))

    def sample(self) -> str | None:
        super().sample()
        if self.init is None:
            return None
        family = proc.descendants(self.init)
        self.cpu_seconds = max(self.cpu_seconds, sum(proc.cpu_seconds(pid) for pid in (self.init, *family)))
        if self.cpu_seconds >= self._limits.cpu_limit_seconds:
            return "cpu"
        stored, files = self._stored()
        if files > FILES_LIMIT:
            return "files"
        # Shares take long to count, and are never more than what is resident.
        if sum(proc.resident_bytes(pid) for pid in family) + stored > self._largest:
            self._largest = max(self._largest, self._memory(family, stored))
        return "memory" if self._largest > self._limits.memory_bytes else None

    def finish(self) -> str | None:
        return "files" if self._stored()[1] > FILES_LIMIT else None

    def close(self) -> None:
        for descriptor in self._directories:
            os.close(descriptor)
        self._directories.clear()

    def _memory(self, family: list[int], stored: int) -> int:
        total = shared = 0
        for pid in family:
            shares = proc.shares_bytes(pid) or (proc.resident_bytes(pid), 0)
            total += shares[0]
            shared += shares[1]
        # What is stored in the directories and mapped counts once.
        total += max(0, stored - shared)
        self.peak_bytes = max(self.peak_bytes or 0, total)
        return total

    def _stored(self) -> tuple[int, int]:
        """(bytes, files) in the run's own directories."""
        seen = [os.fstatvfs(descriptor) for descriptor in self._directories]
        stored = sum((s.f_blocks - s.f_bfree) * s.f_frsize for s in seen)
        return stored, sum(s.f_files - s.f_ffree for s in seen)


def _larger(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)
