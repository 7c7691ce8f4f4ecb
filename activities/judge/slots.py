"""How many programs run at once. Source: spec sandbox 7.

Programs stop by the clock, so a host that runs more of them than it has cores silently lowers their scores. Knows no program.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

_RUN_OVERHEAD_BYTES = 100 << 20
_MEMORY_SHARE = 0.8

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> float:
    """Cores that this process may use: its affinity, or its control group's quota if that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return cores


def usable_memory_bytes() -> int:
    """Memory that runs may share: 0.8 of what is free, or of the control group's limit if that is less."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no control group of version 2, or no limit in it
        free = min(free, int((_CGROUP / "memory.max").read_text()))
    return int(_MEMORY_SHARE * free)


def default_slots(cores_per_run: int = 1, cores: float | None = None) -> int:
    """floor((cores - 1) / cores_per_run), at least 1: one core stays with the judge."""
    total = usable_cores() if cores is None else cores
    return max(1, int((total - 1) // cores_per_run))


@dataclass
class _Waiting:
    cores: int
    memory: int
    turn: asyncio.Future[None]


class Slots:
    """First come, first served, by cores and by memory. For one event loop.

    Args:
        cores: cores for programs in all; None: one less than there are, at least 1.
        memory_bytes: memory for programs in all; None: what is free now.
    """

    def __init__(self, cores: int | None = None, memory_bytes: int | None = None) -> None:
        self.cores = default_slots() if cores is None else cores
        self.memory_bytes = usable_memory_bytes() if memory_bytes is None else memory_bytes
        if self.cores < 1:
            raise ValueError(f"slots: cores={self.cores}; at least 1 is needed to judge anything")
        self._free_cores = self.cores
        self._free_memory = self.memory_bytes
        self._queue: deque[_Waiting] = deque()

    @property
    def cores_in_use(self) -> int:
        """Cores that programs hold now."""
        return self.cores - self._free_cores

    @contextlib.asynccontextmanager
    async def take(self, cores: int, memory_bytes: int) -> AsyncIterator[None]:
        """Hold the cores and memory of one run. A run larger than everything gets everything, alone."""
        share = min(cores, self.cores), min(memory_bytes + _RUN_OVERHEAD_BYTES, self.memory_bytes)
        await self._wait(*share)
        try:
            yield
        finally:
            self._give(*share)

    async def _wait(self, cores: int, memory: int) -> None:
        waiting = _Waiting(cores, memory, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._admit()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled():
                self._give(cores, memory)  # its turn came in the same moment
            else:
                self._queue.remove(waiting)
                self._admit()
            raise

    def _give(self, cores: int, memory: int) -> None:
        self._free_cores += cores
        self._free_memory += memory
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._queue[0].cores <= self._free_cores and self._queue[0].memory <= self._free_memory:
            first = self._queue.popleft()
            self._free_cores -= first.cores
            self._free_memory -= first.memory
            if not first.turn.done():
                first.turn.set_result(None)
