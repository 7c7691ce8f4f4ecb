"""Runs a task's baseline: the simple solver that any claim is measured against, a program like any other and judged like one.

`solve` is what the baseline finds by itself; `polish` is what it makes of an answer that somebody has. Knows no run and no store.
Source: spec tasks 3g, 4g, 6g and 7g, where such programs beat much of what was published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from activities.errors import InputError
from activities.judge.cases import Services
from activities.judge.judging import Case, Judgement, limits_of_task
from activities.judge.sandbox import Sandbox, SandboxSettings
from activities.judge.single import judge_case
from tasks.environments import DEFAULT_DIRECTORY
from tasks.judging import Grade
from tasks.registry import Task, TaskError
from workflows.contracts.base import Outcome

BASELINE_SECONDS: Final = 60.0
"""Of a Python baseline, unless somebody says otherwise or the task allows less. A C++ program has its task's own time per case."""


@dataclass(frozen=True)
class Solver:
    """How and where a baseline is run.

    Args:
        seconds: told to the program; None: :data:`BASELINE_SECONDS`, or the task's own limit where a program is run once per case.
        environments: where this host has the Python environments of programs.
        sandbox: an open one to use; None: one is opened, tested and closed.
        services: addresses of judges that are services.
    """

    seconds: float | None = None
    seed: int = 0
    environments: Path = DEFAULT_DIRECTORY
    sandbox: Sandbox | None = None
    settings: SandboxSettings | None = None
    services: Services | None = None

    def seconds_for(self, task: Task) -> float:
        """What the program is told."""
        if self.seconds is not None:
            return self.seconds
        return min(BASELINE_SECONDS, task.limits.wall_seconds) if task.language == "python" else task.limits.wall_seconds


@dataclass(frozen=True)
class Polished:
    """An answer, and what the baseline made of it in the time it had."""

    before: Grade
    after: Judgement
    improved: bool
    """Whether the exact value is better than before: rounding counts for nothing."""

    @property
    def best(self) -> Grade:
        """The better of the two: never worse than the answer that was given."""
        return self.after.grade if self.improved and self.after.grade is not None else self.before


def solve(task: Task, solver: Solver, construction: Any = None) -> Judgement:
    """Run the task's baseline and certify what it returns.

    Args:
        construction: a stored construction that it gets as its parent's; None: it begins by itself.

    Raises:
        InputError: the task has no baseline, or its judge or environment is not there; says what to do.
        SandboxUnavailable: no safe sandbox on this machine.
        JudgeError: the sandbox failed before the program's first line.
    """
    try:
        program = task.baseline_source
        if program is None:
            raise InputError(f"task {task.name} has no baseline; name a program file as `baseline` in its task.toml")
        task.program_python(solver.environments)
        task.check_judge()
    except TaskError as error:
        raise InputError(f"baseline of {task.name}: {error}") from None
    limits = limits_of_task(task, solver.seconds_for(task))
    case = Case(program, solver.seed, construction)
    return asyncio.run(judge_case(task, case, limits, solver.environments, solver.sandbox, solver.settings, solver.services))


def polish(task: Task, solver: Solver, construction: Any) -> Polished:
    """Give a stored construction to the baseline as its parent's, and compare exact values.

    Raises:
        InputError: as :func:`solve`; or the construction is not valid, or no program of this task can take one.
        SandboxUnavailable, JudgeError: as :func:`solve`.
    """
    judge = task.make_judge()
    offer: Callable[[Any], Any] | None = getattr(judge, "offer", None)
    if offer is None:
        raise InputError(f"task {task.name}: its programs take no construction, so there is nothing to polish")
    before = judge.verify(construction)
    if not before.valid:
        raise InputError(f"task {task.name}: the construction is not valid: {before.reason}")
    after = solve(task, solver, construction)
    better = after.outcome is Outcome.VALID and after.grade is not None and _gain(task, before, after.grade) > 0
    return Polished(before, after, better)


def _gain(task: Task, before: Grade, after: Grade) -> Fraction:
    """By how much the second is better, exactly; negative if it is worse."""
    return task.sign * (_exact(after) - _exact(before))


def _exact(grade: Grade) -> Fraction:
    assert grade.score is not None
    return Fraction(grade.score) if grade.exact is None else grade.exact
