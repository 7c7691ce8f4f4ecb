"""The `landlock` backend: Landlock, seccomp, rlimits and a uid of its own around one Python process. Needs no privilege.

Knows how a run is ordered and who runs it; the order is obeyed in ``inside.py``, the process watched in ``process.py``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from activities.judge.sandbox import landlock
from activities.judge.sandbox.classify import classify
from activities.judge.sandbox.filter import OWN_PID
from activities.judge.sandbox.interpreter import Interpreter
from activities.judge.sandbox.process import Ended, start, watch
from activities.judge.sandbox.types import Isolation, Limits, Outcome, Program, Sandbox, Status

_MAXIMUM_RUNS = 256
SHARED_UID_SPARE_TASKS = 64
"""Tasks that an ordinary user's own processes may gain during a run, which count against the program's limit."""


@dataclass(frozen=True)
class Policy:
    """Everything about a run that does not change between runs."""

    interpreter: Interpreter
    rules: landlock.Rules
    filter: bytes
    seccomp_number: int
    uid_base: int | None
    """None: programs keep the judge's uid."""
    reads_as_root: bool
    pin: bool
    cores: tuple[int, ...]
    """Cores that this process may use."""

    def digest(self) -> str:
        return hashlib.sha256(self.filter + repr(self.rules).encode() + self.interpreter.inside).hexdigest()

    def isolation(self) -> Isolation:
        return Isolation(
            backend="landlock",
            landlock_abi=self.rules.abi,
            uids="own" if self.uid_base is None else f"{self.uid_base}+slot",
            policy_hash=self.digest()[:16],
            reads_as_root=self.reads_as_root,
        )

    def order(self, program: Program, limits: Limits, slot: int) -> dict[str, Any]:
        """What the child is told; plain data, since it crosses as marshal."""
        rules = self.rules
        return {
            "inside": self.interpreter.inside,
            "source": program.source,
            "entry": program.entry,
            "arguments": dict(program.arguments),
            "constants": dict(program.constants),
            "result_bytes": limits.result_bytes,
            "limits": self._rlimits(limits),
            "cores": self._cores(limits, slot),
            "uid": 0 if self.uid_base is None else self.uid_base + slot,
            "reads_as_root": self.reads_as_root,
            "landlock": {
                "calls": {"create": landlock.CREATE_RULESET, "add": landlock.ADD_RULE, "restrict": landlock.RESTRICT_SELF},
                "abi": rules.abi,
                "files": rules.files,
                "network": rules.network,
                "scopes": rules.scopes,
                "restrict_flags": rules.restrict_flags,
                "grants": [list(grant) for grant in rules.grants],
                "own_process": rules.own_process,
            },
            "filter": {"code": self.filter, "own_pid": OWN_PID, "seccomp": self.seccomp_number},
        }

    def _rlimits(self, limits: Limits) -> list[list[Any]]:
        cpu = limits.cpu_limit_seconds
        tasks = limits.threads
        if self.uid_base is None:
            tasks += tasks_of(os.getuid()) + SHARED_UID_SPARE_TASKS
        return [
            ["RLIMIT_CPU", cpu, cpu + 1],
            *(
                [name, value, value]
                for name, value in (
                    ("RLIMIT_AS", limits.address_space_bytes),
                    ("RLIMIT_NPROC", tasks),
                    ("RLIMIT_NOFILE", limits.open_files),
                    ("RLIMIT_FSIZE", 0),
                    ("RLIMIT_CORE", 0),
                    ("RLIMIT_MEMLOCK", 0),
                    ("RLIMIT_MSGQUEUE", 0),
                )
            ),
        ]

    def _cores(self, limits: Limits, slot: int) -> list[int]:
        if not self.pin:
            return []
        first = slot * limits.cores
        return [self.cores[(first + k) % len(self.cores)] for k in range(min(limits.cores, len(self.cores)))]


def environment(cores: int) -> dict[str, str]:
    """All that a program finds in its environment."""
    threads = ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "BLIS", "VECLIB", "NUMBA")
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        "SETUPTOOLS_USE_DISTUTILS": "stdlib",  # an installed setuptools would otherwise cost every start some milliseconds
        **{f"{name}_NUM_THREADS": str(cores) for name in threads},
    }


class LandlockSandbox(Sandbox):
    """Runs programs under a policy. Use :func:`activities.judge.sandbox.open_sandbox`, which tests it first."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.isolation = policy.isolation()
        # One thread makes every child and lives until `close`: a child dies with the thread that made it.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-spawn")
        self._watchers = ThreadPoolExecutor(max_workers=_MAXIMUM_RUNS, thread_name_prefix="sandbox-watch")
        self._lock = threading.Lock()
        self._slots: set[int] = set()
        self._cancels: set[int] = set()

    async def run(self, program: Program, limits: Limits) -> Outcome:
        cancel = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._watchers, self.run_blocking, program, limits, cancel)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                os.eventfd_write(cancel, 1)
                await asyncio.wait([running])
                raise
        finally:
            os.close(cancel)

    def run_blocking(self, program: Program, limits: Limits, cancel: int) -> Outcome:
        """As :meth:`run`, in the calling thread; `cancel` is a descriptor that becomes readable to stop it."""
        with self._slot(cancel) as slot:
            try:
                order = self.policy.order(program, limits, slot)
                python, variables = self.policy.interpreter.python, environment(limits.cores)
                child = self._spawner.submit(start, python, variables, order).result()
            except (OSError, ValueError, RuntimeError) as error:
                return self._failed(f"the interpreter could not be started: {error}")
            return self._outcome(watch(child, limits, cancel), limits)

    async def close(self) -> None:
        await asyncio.to_thread(self.close_blocking)

    def close_blocking(self) -> None:
        with self._lock:
            for cancel in self._cancels:
                os.eventfd_write(cancel, 1)
        self._watchers.shutdown()
        self._spawner.shutdown()

    @contextmanager
    def _slot(self, cancel: int) -> Iterator[int]:
        """The lowest free number: two programs that run at once never share a uid."""
        with self._lock:
            slot = next(k for k in range(_MAXIMUM_RUNS + 1) if k not in self._slots)
            self._slots.add(slot)
            self._cancels.add(cancel)
        try:
            yield slot
        finally:
            with self._lock:
                self._slots.remove(slot)
                self._cancels.remove(cancel)

    def _outcome(self, ended: Ended, limits: Limits) -> Outcome:
        status, reason, result = classify(ended, limits)
        return Outcome(
            status=status,
            reason=reason,
            result=result,
            exit_code=ended.exit_code,
            signal=ended.signal,
            wall_seconds=ended.wall_seconds,
            cpu_seconds=ended.cpu_seconds,
            wait_seconds=ended.wait_seconds,
            peak_memory_bytes=ended.peak_memory_bytes,
            stdout_tail=ended.stdout.text(),
            stderr_tail=ended.stderr.text(),
            stdout_bytes=ended.stdout.total,
            stderr_bytes=ended.stderr.total,
            isolation=self.isolation,
        )

    def _failed(self, reason: str) -> Outcome:
        return Outcome(Status.SANDBOX_ERROR, reason, None, None, None, 0.0, None, None, None, "", "", 0, 0, self.isolation)


def tasks_of(uid: int) -> int:
    """Threads that a user has now, as RLIMIT_NPROC counts them."""
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
            except OSError:
                continue  # it ended meanwhile
    return count
