"""What the kernel says of processes and of the machine: memory, CPU time, load. Linux. Knows no role."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """One process at one moment, all its threads."""

    cpu_seconds: float
    memory_bytes: int
    """Resident."""
    threads: int
    files: int
    """Open descriptors."""


def usage(pid: int) -> Usage:
    """Read a process.

    Raises:
        FileNotFoundError: it is gone.
    """
    root = Path(f"/proc/{pid}")
    fields = (root / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return Usage(
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
        memory_bytes=int(fields[21]) * _PAGE,
        threads=int(fields[17]),
        files=len(os.listdir(root / "fd")),
    )


def machine_cpu_seconds() -> float:
    """Time in which the machine's cores were not idle, all of them added up."""
    fields = [int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS


def hardware() -> str:
    """For the report: no host's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")
    memory = os.sysconf("SC_PHYS_PAGES") * _PAGE / (1 << 30)
    return (
        f"{os.cpu_count()} cores {model}, {memory:.0f} GiB memory, Linux {platform.release()}, Python {platform.python_version()}"
    )
