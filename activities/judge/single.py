"""Judges one program file of a task: what `tttd judge TASK PROGRAM.py` prints. Knows no run, no store and no Temporal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from activities.errors import InputError
from activities.judge.judging import Case, Judgement, exact_text, judge, limits_of_task, resources_of
from activities.judge.sandbox import Limits, Sandbox, SandboxSettings, open_sandbox
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
) -> dict[str, Any]:
    """Judge a file; the answer is as ``docs/judge-verdict.schema.json`` describes it.

    Args:
        wall_seconds: told to the program; None: the task's own limit.
        sandbox: an open one to use; None: one is opened, tested and closed.

    Raises:
        InputError: no such task, or the file cannot be read as UTF-8 text.
        SandboxUnavailable: no safe sandbox on this machine.
        JudgeError: the sandbox failed before the program's first line.
    """
    try:
        task = load_task(task_name, task_directories)
        source = program_path.read_text(encoding="utf-8")
    except (TaskError, OSError, UnicodeDecodeError) as error:
        raise InputError(f"judge {task_name} {program_path}: {error}") from None
    limits = limits_of_task(task, wall_seconds)
    judgement = asyncio.run(_judge(task, Case(source, seed), limits, sandbox, settings))
    return report(task, judgement)


async def _judge(task: Task, case: Case, limits: Limits, sandbox: Sandbox | None, settings: SandboxSettings | None) -> Judgement:
    if sandbox is not None:
        return await judge(task, task.make_judge(), case, limits, sandbox)
    own = open_sandbox(settings)
    try:
        return await judge(task, task.make_judge(), case, limits, own)
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
