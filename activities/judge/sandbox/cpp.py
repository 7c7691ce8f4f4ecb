"""C++17 programs: compiled inside the sandbox as the hostile text that they are, then run as one binary. Source: spec sandbox 8.

Each tool of the compiler is one run of the sandbox: it reads /usr and the one directory that it may write, and starts nothing. The
binary is another run: it reads nothing but its own file, its input is `Program.stdin` and its output the result.

The CPU time of a run includes the launcher's, about 0.05 s. Knows no backend and no problem.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from activities.judge.sandbox.cpp_binaries import MAXIMUM_BINARY_BYTES, Binaries, NoBinary
from activities.judge.sandbox.cpp_toolchain import SOURCE, CompilerMissing, Step, Toolchain, find_toolchain, installed
from activities.judge.sandbox.execution import Execution
from activities.judge.sandbox.types import Limits, Outcome, Program, Status

COMPILE_ERROR: Final = "compile error"
"""Reason of an outcome whose program did not compile; the compiler's message is in its stderr_tail."""
COMPILE_SECONDS: Final = 30.0
"""For all tools together."""

_COMPILE_MEMORY_BYTES: Final = 1 << 30
_COMPILE_LOG_BYTES: Final = 4 << 20
_COMPILE_OUTPUT_BYTES: Final = 64 << 10
_SLACK_BYTES: Final = 32 << 20
"""Address space of a binary beyond what its limit says: its code, its first stack, and the launcher before it."""
_TREES: Final = (Path("/usr"),)
_ENVIRONMENT: Final = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
_RUN_ENVIRONMENT: Final = {**_ENVIRONMENT, "MALLOC_ARENA_MAX": "1"}
"""glibc reserves 64 MiB of address space for each thread that allocates, which would pass the memory limit now and then."""
_BAD_ALLOC: Final = "std::bad_alloc"

_PROBE: Final = '#include <cstdio>\n#include <thread>\nint main() { std::thread([] { std::puts("ready"); }).join(); }\n'
_PROBE_LIMITS: Final = Limits(wall_seconds=20, memory_bytes=256 << 20, result_bytes=1 << 10)

Run = Callable[[Program, Limits, int, Execution], Outcome]
"""(program, limits, cancel, what to become): one run of a sandbox."""


class _Failed(Exception):
    """The program was not compiled."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class CppPrograms:
    """Compiles and runs for one sandbox.

    Args:
        run: the sandbox's way to run a binary.
        failed: makes the outcome of a run that never began, from its reason.
    """

    def __init__(self, run: Run, failed: Callable[[str], Outcome]) -> None:
        self._run = run
        self._failed = failed
        self._binaries = Binaries()
        self._probe_lock = threading.Lock()
        self._proved = False

    @staticmethod
    def is_possible() -> bool:
        """Whether this machine has a compiler."""
        return installed() is not None

    def run_blocking(self, program: Program, limits: Limits, cancel: int) -> Outcome:
        """Compile unless that was done, and run. A program that does not compile has CRASHED for the reason COMPILE_ERROR."""
        try:
            toolchain = find_toolchain()
        except CompilerMissing as error:
            return self._failed(str(error))
        if problem := self._probed(toolchain, cancel):
            return self._failed(problem)
        return self._compiled_and_run(toolchain, program, limits, cancel)

    def close(self) -> None:
        self._binaries.close()

    def _probed(self, toolchain: Toolchain, cancel: int) -> str | None:
        """Why no C++ program can run here; asked once, since its own programs could not be told from broken ones."""
        with self._probe_lock:
            if self._proved:
                return None
            found = self._compiled_and_run(toolchain, Program(_PROBE, language="cpp17"), _PROBE_LIMITS, cancel)
            if found.status is Status.OK and found.result == b"ready\n":
                self._proved = True
                return None
        if found.status is Status.SANDBOX_ERROR:
            return found.reason
        said = found.stderr_tail.strip().rpartition("\n")[2]
        return (
            f"a C++ program that must work ended as {found.status} ({found.reason}: {said}); see that {toolchain.version!r} works, "
            "and that the temporary directory (TMPDIR) is open to every user and not mounted noexec"
        )

    def _compiled_and_run(self, toolchain: Toolchain, program: Program, limits: Limits, cancel: int) -> Outcome:
        def make(directory: Path) -> None:
            self._compile(toolchain, program.source, directory, cancel)

        try:
            with self._binaries.lease(toolchain.digest(program.source), make) as binary:
                return self._run_binary(toolchain, binary, program, limits, cancel)
        except _Failed as failed:
            return failed.outcome
        except NoBinary as error:
            return _not_compiled(self._failed(str(error)), str(error))
        except OSError as error:
            return self._failed(f"no room for a compiled program: {error}")

    def _run_binary(self, toolchain: Toolchain, binary: Path, program: Program, limits: Limits, cancel: int) -> Outcome:
        execution = Execution(path=binary, environment=_RUN_ENVIRONMENT, trees=() if toolchain.static else _TREES)
        bounded = replace(limits, slack_bytes=_SLACK_BYTES + binary.stat().st_size)
        outcome = self._run(Program("", stdin=program.stdin), bounded, cancel, execution)
        if outcome.status is Status.CRASHED and _BAD_ALLOC in outcome.stderr_tail:
            return replace(outcome, status=Status.MEMORY, reason=_BAD_ALLOC)
        return outcome

    def _compile(self, toolchain: Toolchain, source: str, directory: Path, cancel: int) -> None:
        """Leave the binary in the directory.

        Raises:
            _Failed: a tool refused the program, or the sandbox failed.
        """
        (directory / SOURCE).write_bytes(source.encode("utf-8", "surrogatepass"))
        (directory / SOURCE).chmod(0o444)
        deadline = time.monotonic() + COMPILE_SECONDS
        for step in toolchain.steps:
            outcome = self._run_tool(step, directory, deadline - time.monotonic(), cancel)
            if outcome.status is Status.SANDBOX_ERROR:
                raise _Failed(outcome)
            if outcome.status is not Status.OK:
                raise _Failed(_not_compiled(outcome, _why(step, outcome)))

    def _run_tool(self, step: Step, directory: Path, seconds: float, cancel: int) -> Outcome:
        limits = Limits(
            wall_seconds=max(0.1, seconds),
            grace_seconds=0.0,
            memory_bytes=_COMPILE_MEMORY_BYTES,
            slack_bytes=_SLACK_BYTES,
            scratch_bytes=MAXIMUM_BINARY_BYTES,
            result_bytes=_COMPILE_OUTPUT_BYTES,
            log_bytes=_COMPILE_LOG_BYTES,
        )
        execution = Execution(path=step.tool, arguments=step.arguments, environment=_ENVIRONMENT, trees=_TREES, directory=directory)
        return self._run(Program(""), limits, cancel, execution)


def _why(step: Step, outcome: Outcome) -> str:
    """What the tool itself may not have said."""
    if outcome.status is Status.TIMEOUT:
        return f"{step.tool.name} needed more than {COMPILE_SECONDS:g} s"
    if outcome.exit_code in (1, None) and outcome.signal is None and outcome.status is Status.CRASHED:
        return ""
    return f"{step.tool.name} ended as {outcome.status} ({outcome.reason})"


def _not_compiled(outcome: Outcome, why: str) -> Outcome:
    said = "\n".join(part for part in (outcome.stderr_tail.strip(), why) if part)
    return replace(outcome, status=Status.CRASHED, reason=COMPILE_ERROR, result=None, stderr_tail=said)
