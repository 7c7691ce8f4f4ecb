"""Reads what the kernel says about processes (``/proc``). Knows no sandbox.

Every function takes a process that may end at any moment, and then answers None or nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def high_water_bytes(pid: int) -> int | None:
    """Largest resident size so far."""
    for line in _lines(f"/proc/{pid}/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def run_queue_seconds(pid: int) -> float | None:
    """Time that the main thread waited for a core; readable until the process is reaped."""
    fields = " ".join(_lines(f"/proc/{pid}/schedstat")).split()
    return int(fields[1]) / 1e9 if len(fields) >= 2 else None


def cpu_seconds(pid: int) -> float:
    """Of a process, its threads, and those of its children that it has waited for."""
    fields = _stat(pid)
    return sum(int(field) for field in fields[11:15]) / _TICKS if len(fields) > 14 else 0.0


def resident_bytes(pid: int) -> int:
    fields = " ".join(_lines(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * _PAGE if len(fields) > 1 else 0


def shares_bytes(pid: int) -> tuple[int, int] | None:
    """(proportional share of all memory, of shared memory): a page that n processes map counts 1/n in each."""
    found = {}
    for line in _lines(f"/proc/{pid}/smaps_rollup"):
        name, _, rest = line.partition(":")
        if name in ("Pss", "Pss_Shmem"):
            found[name] = int(rest.split()[0]) * 1024
    return (found["Pss"], found.get("Pss_Shmem", 0)) if "Pss" in found else None


def descendants(pid: int) -> list[int]:
    """Of a process, without itself."""
    found: list[int] = []
    todo = [pid]
    while todo:
        more = children(todo.pop())
        found += more
        todo += more
    return found


def children(pid: int) -> list[int]:
    task = f"/proc/{pid}/task"
    try:
        threads = os.listdir(task)
    except OSError:
        return []
    if not os.path.exists(f"{task}/{pid}/children"):  # a kernel without CONFIG_PROC_CHILDREN
        return [other for other in _pids() if (fields := _stat(other)) and fields[1] == str(pid)]
    return [int(child) for thread in threads for child in " ".join(_lines(f"{task}/{thread}/children")).split()]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Fields of stat from the state on: state, ppid, ..., utime (11), stime, cutime, cstime."""
    return " ".join(_lines(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
