"""Judges one program file of a task: what `tttd judge TASK PROGRAM.py` prints. Knows no run, no store and no Temporal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from activities.errors import InputError
from activities.judge.cases import Services
from activities.judge.judging import Case, Judgement, exact_text, judge, limits_of_task, resources_of
from activities.judge.sandbox import Limits, Sandbox, SandboxSettings, open_sandbox
from tasks.environments import DEFAULT_DIRECTORY
from tasks.judging import CasesJudge, ServiceJudge, TaskJudge
from tasks.registry import Task, TaskError, judge_digest, load_task
from workflows.contracts.base import Outcome


def judge_file(
    task_name: str,
    program_path: Path,
    *,
    task_directories: Sequence[Path] = (),
    wall_seconds: float | None = None,
    seed: int = 0,
    sandbox: Sandbox | None = None,
    settings: SandboxSettings | None = None,
    environments: Path = DEFAULT_DIRECTORY,
    services: Services | None = None,
    final: bool = False,
) -> dict[str, Any]:
    """Judge a file; the answer is as ``docs/judge-verdict.schema.json`` describes it.

    Args:
        wall_seconds: told to the program; None: the task's own limit.
        sandbox: an open one to use; None: one is opened, tested and closed.
        environments: where this host has the Python environments of programs.
        services: addresses of judges that are services.
        final: judge on the task's hidden cases, which no search sees.

    Raises:
        InputError: no such task, its judge or environment is not there, it has no hidden cases, or the file cannot be read as
            UTF-8 text.
        SandboxUnavailable: no safe sandbox on this machine.
        JudgeError: the sandbox failed before the program's first line.
    """
    try:
        task = load_task(task_name, task_directories)
        task.program_python(environments)
        task.check_judge()
        task_judge = final_judge(task) if final else task.make_judge()
        source = program_path.read_text(encoding="utf-8")
    except (TaskError, OSError, UnicodeDecodeError) as error:
        raise InputError(f"judge {task_name} {program_path}: {error}") from None
    limits = limits_of_task(task, wall_seconds)
    judgement = asyncio.run(judge_case(task, Case(source, seed), limits, environments, sandbox, settings, services, task_judge))
    return report(task, judgement)


def final_judge(task: Task) -> CasesJudge:
    """The judge of a task's hidden cases.

    Raises:
        TaskError: it has none.
    """
    make: Callable[[], CasesJudge] | None = getattr(task.make_judge(), "final_judge", None)
    if make is None:
        raise TaskError(f"task {task.name} has no hidden cases: its judge {task.judge} has no final_judge()")
    return make()


async def judge_case(
    task: Task,
    case: Case,
    limits: Limits,
    environments: Path,
    sandbox: Sandbox | None,
    settings: SandboxSettings | None,
    services: Services | None = None,
    task_judge: TaskJudge | CasesJudge | ServiceJudge | None = None,
) -> Judgement:
    """Judge one program in a sandbox that is open, or in one of its own.

    Args:
        task_judge: None: the task's own.

    Raises:
        SandboxUnavailable: no safe sandbox on this machine.
        InputError, JudgeError: as :func:`activities.judge.judging.judge`.
    """
    task_judge = task_judge or task.make_judge()
    if sandbox is not None:
        return await judge(task, task_judge, case, limits, sandbox, environments, services)
    own = open_sandbox(settings)
    try:
        return await judge(task, task_judge, case, limits, own, environments, services)
    finally:
        await own.close()


def report(task: Task, judgement: Judgement) -> dict[str, Any]:
    """A judgement as JSON data. Keys are a contract: see the schema."""
    grade, run = judgement.grade, judgement.run
    valid = judgement.outcome is Outcome.VALID and grade is not None
    return {
        "task": task.name,
        "outcome": judgement.outcome.value,
        "valid": valid,
        "score": grade.score if grade is not None and valid else None,
        "exact": exact_text(grade) if valid else None,
        "value": judgement.value,
        "reward": judgement.reward,
        "reason": judgement.reason,
        "claimed": None if grade is None else grade.claimed,
        "repaired": bool(valid and judgement.reason),
        "construction": grade.construction if grade is not None and valid else None,
        "output_tail": "" if run is None else run.stdout_tail,
        "error_tail": "" if run is None else run.stderr_tail,
        "isolation": "" if run is None else str(run.isolation),
        "resources": None if run is None else resources_of(run).model_dump(mode="json"),
        "judge_digest": judge_digest(task),
    }
