"""The backends `landlock` and `bwrap`: processes of this machine, under a policy that the self-test has proved.

Knows who runs and when; what a run is given is decided in ``policy.py``, the process watched in ``watch.py``.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from activities.judge.sandbox.classify import classify
from activities.judge.sandbox.cpp import CppPrograms
from activities.judge.sandbox.execution import Execution
from activities.judge.sandbox.policy import Policy
from activities.judge.sandbox.process import ORPHANAGE, start
from activities.judge.sandbox.types import Isolation, Limits, Outcome, Program, Sandbox, SandboxUnavailable, Status
from activities.judge.sandbox.watch import Ended, watch

_MAXIMUM_RUNS = 256

PolicyFor = Callable[[Path], Policy]
"""The policy for programs of another interpreter; raises SandboxUnavailable, OSError or SubprocessError if there can be none."""


class LocalSandbox(Sandbox):
    """Runs programs under a policy. Use :func:`activities.judge.sandbox.open_sandbox`, which tests it first."""

    def __init__(self, policy: Policy, policy_for: PolicyFor | None = None) -> None:
        self.policy = policy
        self._cpp = CppPrograms(self.run_blocking, self.failed)
        languages = ("python", "cpp17") if self._cpp.is_possible() else ("python",)
        self.isolation = replace(policy.isolation(), languages=languages)
        self._policy_for = policy_for
        self._policies: dict[Path, Policy] = {}
        # One thread makes every child and lives until `close`: a child dies with the thread that made it.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-spawn")
        self._watchers = ThreadPoolExecutor(max_workers=_MAXIMUM_RUNS, thread_name_prefix="sandbox-watch")
        self._lock = threading.Lock()
        self._slots: set[int] = set()
        self._cancels: set[int] = set()
        self._adopts = policy.wall is not None
        if self._adopts:
            ORPHANAGE.enter()

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

    def run_blocking(self, program: Program, limits: Limits, cancel: int, execution: Execution | None = None) -> Outcome:
        """As :meth:`run`, in the calling thread.

        Args:
            cancel: a descriptor that becomes readable to stop the run.
            execution: a binary to become in place of running the program's source; its output is the outcome's result.
        """
        if refusal := self.policy.refusal(limits, execution):
            return self.failed(refusal)
        if program.language == "cpp17":
            return self._cpp.run_blocking(program, limits, cancel)
        try:
            policy = self._policy_of(program.python)
        except SandboxUnavailable as error:
            return self.failed("; ".join(error.report))
        except (OSError, RuntimeError, ValueError) as error:
            return self.failed(f"the interpreter {program.python} cannot be used: {error}")
        with self._slot(cancel) as slot:
            try:
                if execution is not None and execution.directory is not None and policy.uid_base is not None:
                    os.chown(execution.directory, policy.uid_base + slot, policy.uid_base + slot)
                plan = policy.plan(program, limits, slot, execution)
                child = self._spawner.submit(start, plan).result()
            except (OSError, ValueError, RuntimeError) as error:
                return self.failed(f"the interpreter could not be started: {error}")
            return self._outcome(watch(child, plan, limits, cancel), limits)

    async def close(self) -> None:
        await asyncio.to_thread(self.close_blocking)

    def close_blocking(self) -> None:
        with self._lock:
            for cancel in self._cancels:
                os.eventfd_write(cancel, 1)
        self._watchers.shutdown()
        self._spawner.shutdown()
        if self._adopts:
            self._adopts = False
            ORPHANAGE.leave()
        self._cpp.close()

    def failed(self, reason: str) -> Outcome:
        """The outcome of a run that never began."""
        return failed(reason, self.isolation)

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

    def _policy_of(self, python: Path | None) -> Policy:
        if python is None or self._policy_for is None:
            return self.policy
        with self._lock:
            found = self._policies.get(python)
        if found is None:
            found = self._policy_for(python)
            with self._lock:
                self._policies[python] = found
        return found

    def _outcome(self, ended: Ended, limits: Limits) -> Outcome:
        return outcome_of(ended, limits, self.isolation)


def outcome_of(ended: Ended, limits: Limits, isolation: Isolation) -> Outcome:
    """What is told about a finished process."""
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
        isolation=isolation,
    )


def failed(reason: str, isolation: Isolation) -> Outcome:
    return Outcome(Status.SANDBOX_ERROR, reason, None, None, None, 0.0, None, None, None, "", "", 0, 0, isolation)
