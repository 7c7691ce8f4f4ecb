"""What a sandbox is: the words that backends and their callers share. Source: spec sandbox 9.

Knows no backend and no problem. A sandbox takes a program and limits and returns an outcome; what the result means is the
judge's business.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

BackendName = Literal["auto", "bwrap", "landlock", "remote", "unsafe"]
"""`unsafe` contains nothing and is never chosen by `auto`."""


class Status(StrEnum):
    """How a run ended. All but SANDBOX_ERROR are results: they say something about the program and are never retried."""

    OK = "ok"
    """The program returned numbers within the limits of the wire format."""
    TIMEOUT = "timeout"
    """Wall or CPU time was used up."""
    MEMORY = "memory"
    CRASHED = "crashed"
    """An exception, a signal, or a nonzero exit."""
    OUTPUT_TOO_LARGE = "output_too_large"
    """The result or the log passed its cap."""
    INVALID_OUTPUT = "invalid_output"
    """No result, or one that is not numbers in lists."""
    SANDBOX_ERROR = "sandbox_error"
    """The sandbox failed before the program's first line ran: infrastructure, retryable."""


@dataclass(frozen=True)
class Limits:
    """What one run may use."""

    wall_seconds: float = 1100.0
    """Told to the program as `budget_s`; it is killed at :attr:`kill_seconds`."""
    grace_seconds: float | None = None
    """Time past `wall_seconds` before the kill; None: the larger of 2 s and 10 %."""
    cpu_seconds: float | None = None
    """None: cores x kill_seconds + 5."""
    cores: int = 1
    memory_bytes: int = 4 << 30
    """Bounds the address space together with `slack_bytes`."""
    slack_bytes: int | None = None
    """Address space that is reserved and not used; None: :data:`ADDRESS_SPACE_SLACK_BYTES` and some for each core."""
    threads: int = 64
    processes: int = 1
    """Above 1 only with a backend whose isolation says that it can (`bwrap`)."""
    scratch_bytes: int = 0
    """Size of a private temporary directory; 0: nothing is writable. Only with a backend that has one."""
    result_bytes: int = 16 << 20
    log_bytes: int = 16 << 20
    """Of stdout and stderr together; beyond it the program is killed."""
    log_tail_bytes: int = 8 << 10
    """Kept of each of stdout and stderr."""
    open_files: int = 64

    @property
    def kill_seconds(self) -> float:
        grace = max(2.0, 0.1 * self.wall_seconds) if self.grace_seconds is None else self.grace_seconds
        return self.wall_seconds + grace

    @property
    def cpu_limit_seconds(self) -> int:
        """Whole seconds, as RLIMIT_CPU counts them."""
        cpu = self.cores * self.kill_seconds + 5 if self.cpu_seconds is None else self.cpu_seconds
        return max(1, math.ceil(cpu))

    @property
    def address_space_bytes(self) -> int:
        usual = ADDRESS_SPACE_SLACK_BYTES + self.cores * ADDRESS_SPACE_PER_CORE_BYTES
        return self.memory_bytes + (usual if self.slack_bytes is None else self.slack_bytes)


ADDRESS_SPACE_SLACK_BYTES = 256 << 20
"""Interpreter, libraries and thread stacks reserve address space that they never touch (spec sandbox 4: 229 MB with NumPy)."""

ADDRESS_SPACE_PER_CORE_BYTES = 96 << 20
"""OpenBLAS reserves a buffer for every thread."""


@dataclass(frozen=True)
class Program:
    """A program and how it is called."""

    source: str
    entry: str = "run"
    language: Literal["python", "cpp17"] = "python"
    """A `cpp17` program is compiled inside the sandbox, then run on `stdin`; its standard output is the result."""
    stdin: bytes = b""
    helper: str = ""
    """Python source that runs in the program's namespace before it."""
    python: Path | None = None
    """Interpreter to run it with; None: the sandbox's own."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments, each passed only if the entry's signature names it or takes **kwargs. Plain data only."""
    constants: Mapping[str, list[Any]] = field(default_factory=dict)
    """Globals set before the program runs, each as a float64 array (nested lists of floats)."""


@dataclass(frozen=True)
class Isolation:
    """What stands between a program and the judge; recorded with every verdict."""

    backend: str
    landlock_abi: int
    uids: str
    """`60000+slot`, or `own` when the judge is an ordinary user."""
    policy_hash: str
    """First 16 hex digits of sha256 over the compiled filter and the readable paths."""
    reads_as_root: bool = False
    """The program keeps CAP_DAC_READ_SEARCH, since its interpreter lies where its uid cannot go; Landlock alone bounds reading."""
    processes: int = 1
    scratch_bytes: int = 0
    languages: tuple[str, ...] = ("python",)

    def __str__(self) -> str:
        if self.backend == "unsafe":
            return "unsafe: isolation none"
        note = " dac-read" if self.reads_as_root else ""
        return f"{self.backend} abi{self.landlock_abi} seccomp {self.policy_hash} uid {self.uids}{note}"


@dataclass(frozen=True)
class Outcome:
    """How one run ended, and what it left. Everything but the measurements comes from the program and may be forged."""

    status: Status
    reason: str
    """One line: `wall`, `cpu`, `signal 11`, `exit 1`, `MemoryError`, `log`, `result`, or why the result is not one."""
    result: bytes | None
    """JSON text of the return value (of `cpp17`: standard output), only with OK; the judge decodes it with a type of its own."""
    exit_code: int | None
    signal: int | None
    wall_seconds: float
    cpu_seconds: float | None
    wait_seconds: float | None
    """Time that the main thread was runnable but had no core."""
    peak_memory_bytes: int | None
    stdout_tail: str
    """Escaped: printable characters, newlines and tabs only."""
    stderr_tail: str
    stdout_bytes: int
    stderr_bytes: int
    isolation: Isolation

    @property
    def starved(self) -> bool:
        """True if the run waited for a core for more than a tenth of its time: the host was oversubscribed."""
        return self.wait_seconds is not None and self.wait_seconds > 0.1 * self.wall_seconds


@dataclass(frozen=True)
class SandboxSettings:
    """How a worker wants its sandbox."""

    backend: BackendName = "auto"
    """`auto` takes the strongest backend whose self-test passes, or refuses."""
    uid_base: int = 60_000
    """As root, run k takes uid (and gid) uid_base + k. Two judge workers of one host need ranges of their own."""
    pin: bool = False
    """Bind each run to its own cores. Only where the worker has its cores for itself: on a shared machine it costs 25 %."""
    python: Path | None = None
    """Interpreter of the programs; None: the judge's own. Its packages are what programs may import."""
    accept_unsafe: bool = False
    """The backend `unsafe` is opened only with this: two settings must agree that nothing is contained."""
    remote_url: str | None = None
    """Of the sandbox service that the backend `remote` uses."""
    remote_token: str | None = field(default=None, repr=False)
    """Secret that the service asks for."""


class SandboxUnavailable(Exception):
    """No backend is safe here. The message lists each check that failed and what to do about it."""

    def __init__(self, report: list[str], hints: list[str]) -> None:
        super().__init__(report, hints)
        self.report = report
        self.hints = hints

    def __str__(self) -> str:
        lines = ["no safe sandbox on this machine:", *(f"  - {line}" for line in self.report)]
        if self.hints:
            lines += ["what to do:", *(f"  - {line}" for line in self.hints)]
        return "\n".join(lines)


class Sandbox(ABC):
    """Runs programs, each in a process of its own."""

    isolation: Isolation

    @abstractmethod
    async def run(self, program: Program, limits: Limits) -> Outcome:
        """Run a program to its end. Raises only CancelledError, after the program is dead."""

    @abstractmethod
    async def close(self) -> None:
        """Kill what still runs and release everything."""

    @abstractmethod
    def close_blocking(self) -> None:
        """As :meth:`close`, in the calling thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_blocking()
