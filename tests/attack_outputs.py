"""Answers, hostile and honest, and the verdict that each must get: the `outputs.json` of a folder of attacks.

Each program runs in the sandbox under its task's entry; what it returns is decided by the task's own judge. Knows no canary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from activities.judge.judging import limits_of_task
from activities.judge.sandbox import Outcome, Program, Sandbox, Status
from tasks.judging import CasesJudge, ServiceJudge
from tasks.registry import load_task

WALL_SECONDS = 20.0


@dataclass(frozen=True)
class Answer:
    """One program and its verdict."""

    name: str
    task: str
    source: str
    expect: Any
    """None: invalid. [low, high]: valid, with its certified score in there. "any": either."""


def answers_of(folder: Path, only: list[str]) -> list[Answer]:
    """The folder's answers, none if it has no outputs.json."""
    file = folder / "outputs.json"
    if not file.is_file():
        return []
    data = json.loads(file.read_text())
    found = [
        Answer(case["name"], case["task"], data["preludes"].get(case["task"], "") + case["program"], case["expect"])
        for case in data["cases"]
    ]
    return [answer for answer in found if not only or answer.name in only]


async def decide(sandbox: Sandbox, answer: Answer, python: Path | None) -> tuple[Outcome, str, str]:
    """Run and judge one answer; returns how it ran, what was decided, and why that is wrong ("" if it is right)."""
    task = load_task(answer.task)
    limits = replace(limits_of_task(task, WALL_SECONDS), grace_seconds=2.0, cores=1)
    arguments = {"seed": 0, "budget_s": limits.wall_seconds}
    outcome = await sandbox.run(Program(answer.source, entry=task.entry, arguments=arguments, python=python), limits)
    score: float | None = None
    reason = outcome.reason
    if outcome.status is Status.OK and outcome.result is not None:
        judge = task.make_judge()
        assert not isinstance(judge, CasesJudge | ServiceJudge), f"{task.name} judges no returned value"
        grade = judge.grade(outcome.result)
        score, reason = grade.score, grade.reason
    said = f"{'invalid' if score is None else f'{score:.17g}'} {reason}".strip()
    if outcome.status is Status.SANDBOX_ERROR:
        return outcome, said, f"the sandbox failed: {outcome.reason}"
    if answer.expect == "any":
        return outcome, said, ""
    if answer.expect is None:
        return outcome, said, "" if score is None else f"judged {said}, must be invalid"
    low, high = answer.expect
    right = score is not None and low <= score <= high
    return outcome, said, "" if right else f"judged {said}, must lie in {low}..{high}"
