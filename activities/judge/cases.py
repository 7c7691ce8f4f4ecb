"""Judging of programs that are run once per test case, and of programs that a service runs itself.

Knows sandboxes, judges and what a judgement needs; decides no outcome and no reward (``judging.py`` does).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from activities.errors import JudgeError
from activities.judge.sandbox import Limits, Outcome, Program, Sandbox, Status
from activities.judge.sandbox.cpp import COMPILE_ERROR
from tasks.judging import CaseRun, Grade, JudgeUnavailable, ServiceJudge, TestCase

Services = Mapping[str, str | None]
"""Name of a service to its address; None, or no entry: the settings have none."""

WALL_PER_CPU: Final = 2.0
"""A case is killed after this many times its CPU time by the clock, as the published judge of such problems does."""

_CASE_STATUS: Final[Mapping[Status, Literal["ok", "timeout", "memory", "crashed", "output_too_large"]]] = {
    Status.OK: "ok",
    Status.TIMEOUT: "timeout",
    Status.MEMORY: "memory",
    Status.CRASHED: "crashed",
    Status.INVALID_OUTPUT: "crashed",
    Status.OUTPUT_TOO_LARGE: "output_too_large",
}


@dataclass(frozen=True)
class CaseRuns:
    """What a program did with all cases, or why it was not run on them."""

    runs: tuple[CaseRun, ...]
    total: Outcome
    """Time and CPU added up, the largest memory, and the last thing that the program printed as an error; the compiler's outcome if
    the program was not compiled."""
    compiled: bool
    starved: bool
    """A case ran out of time while it waited for a core."""


def limits_of_case(limits: Limits) -> Limits:
    """Of one case, from a task's limits: `wall_seconds` is the CPU time that a case has, and the clock allows twice as much."""
    seconds = limits.wall_seconds
    return replace(limits, cpu_seconds=seconds * limits.cores, grace_seconds=(WALL_PER_CPU - 1) * seconds)


async def run_cases(program: Program, cases: Sequence[TestCase], limits: Limits, sandbox: Sandbox) -> CaseRuns:
    """Run a program on one case after another. It is compiled before the first, if its language needs that.

    Raises:
        JudgeError: the sandbox failed; names the case.
    """
    bounded = limits_of_case(limits)
    outcomes: list[Outcome] = []
    for case in cases:
        outcome = await sandbox.run(replace(program, stdin=case.stdin), bounded)
        if outcome.status is Status.SANDBOX_ERROR:
            raise JudgeError(
                f"sandbox {outcome.isolation}: {case.name}: {outcome.reason}; the program did not run, another attempt may"
            )
        if outcome.reason == COMPILE_ERROR:
            return CaseRuns((), outcome, compiled=False, starved=False)
        outcomes.append(outcome)
    runs = tuple(CaseRun(_CASE_STATUS[o.status], o.result or b"", o.cpu_seconds or 0.0) for o in outcomes)
    starved = any(o.status is Status.TIMEOUT and o.starved for o in outcomes)
    return CaseRuns(runs, _total(outcomes), compiled=True, starved=starved)


def _total(outcomes: Sequence[Outcome]) -> Outcome:
    last = outcomes[-1]
    errors = next((o.stderr_tail for o in reversed(outcomes) if o.stderr_tail), "")
    return replace(
        last,
        status=Status.OK,
        reason="",
        result=None,
        exit_code=None,
        signal=None,
        wall_seconds=sum(o.wall_seconds for o in outcomes),
        cpu_seconds=_sum([o.cpu_seconds for o in outcomes]),
        wait_seconds=_sum([o.wait_seconds for o in outcomes]),
        peak_memory_bytes=max((o.peak_memory_bytes for o in outcomes if o.peak_memory_bytes is not None), default=None),
        stdout_tail="",
        stderr_tail=errors,
        stdout_bytes=sum(o.stdout_bytes for o in outcomes),
        stderr_bytes=sum(o.stderr_bytes for o in outcomes),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def compile_message(outcome: Outcome) -> str:
    """The compiler's first complaint, in one line."""
    lines = [line.strip() for line in outcome.stderr_tail.splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no message")
    return f"{COMPILE_ERROR}: {first}"[:200]


async def ask_service(judge: ServiceJudge, source: str, services: Services) -> Grade:
    """A service's grade of a program.

    Raises:
        JudgeError: it is not there, or answers nonsense; says what to do.
    """
    stop = threading.Event()
    try:
        return await asyncio.to_thread(judge.at(services.get(judge.service)).submit, source, stop)
    except JudgeUnavailable as error:
        raise JudgeError(str(error)) from None
    finally:
        stop.set()  # when this is cancelled, the thread must not wait on
