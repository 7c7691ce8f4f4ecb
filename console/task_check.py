"""Checks of a task folder: what was looked at, whether it holds, and how to mend it. Knows no terminal.

Everything runs as in a search: programs in the sandbox, under the task's own limits but for the time, and answers through the
task's judge. Beside the folder's own attacks, every judge gets the standard hostile outputs of `console/hostile.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from activities.errors import TttdError
from activities.judge.judging import Case, Judgement, certify, limits_of_task
from activities.judge.judging import judge as judge_program
from activities.judge.sandbox import Sandbox
from console import harbor_rules, hostile
from tasks.bundles import pack
from tasks.errors import JudgeFault, TaskError, place_of
from tasks.judging import Grade, ServiceJudge
from tasks.registry import Task, judge_digest, task_digest
from tasks.starts import grade_answer, root_answer
from workflows.contracts.base import Outcome

Verdict = Literal["ok", "warning", "failed"]
_STATEMENT_CHARACTERS: Final = 12_000
"""A longer statement leaves a model little room in a context of 32k tokens."""
_ROOT_SEED: Final = 0


class Finding(BaseModel):
    """One thing that was checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    verdict: Verdict
    detail: str
    hint: str | None = None
    """How to mend it; None when all is well."""


@dataclass(frozen=True)
class Checked:
    """A task and what its checks need.

    Args:
        seconds: longest time that a program of the folder gets; less than the task's own limit, if that is large.
    """

    task: Task
    sandbox: Sandbox
    environments: Path
    seconds: float = 20.0

    def run(self, source: str) -> Judgement:
        """A program's judgement, as a run would make it.

        Raises:
            TttdError, TaskError: it could not be judged.
        """
        limits = limits_of_task(self.task, min(self.seconds, self.task.limits.wall_seconds))
        case = Case(source, seed=0)
        return asyncio.run(judge_program(self.task, self.task.make_judge(), case, limits, self.sandbox, self.environments))


def ok(name: str, detail: str) -> Finding:
    return Finding(name=name, verdict="ok", detail=detail)


def failed(name: str, detail: str, hint: str) -> Finding:
    return Finding(name=name, verdict="failed", detail=detail, hint=hint)


def static_checks(task: Task, environments: Path) -> Iterator[Finding]:
    """What needs no program to run. Later checks make sense only if none of these failed."""
    yield _statement(task)
    yield _environment(task, environments)
    yield _judge(task)
    yield _bundle(task)
    yield _harbor(task)


def program_checks(checked: Checked) -> Iterator[Finding]:
    """Starts, baseline, attacks, and what the judge does with good and hostile answers."""
    if isinstance(checked.task.make_judge(), ServiceJudge):
        detail = "judged by a service, which runs the programs itself: nothing was run here"
        yield Finding(name="programs", verdict="warning", detail=detail, hint=f"`tttd judge {checked.task.name} FILE` asks it")
        return
    answers: list[Judgement] = []
    for name in checked.task.starts:
        yield _start(checked, name, answers)
    if checked.task.baseline is not None:
        yield _baseline(checked, answers)
    if hasattr(checked.task.make_judge(), "grade"):
        yield _same_again(checked, answers)
        yield _hostile_texts(checked.task)
    if checked.task.language == "python":
        yield _hostile_programs(checked)
    yield from _attacks(checked)


def _statement(task: Task) -> Finding:
    if not task.instruction:
        return failed("statement", "instruction.md is empty", "describe the problem, what a program returns, and its score")
    if f"{task.entry}(" not in task.instruction and task.language == "python":
        hint = f"say in instruction.md that the program defines `{task.entry}()`, and what it returns"
        return failed("statement", f"instruction.md does not mention {task.entry}()", hint)
    size = f"{len(task.instruction)} characters"
    if len(task.instruction) > _STATEMENT_CHARACTERS:
        hint = f"shorten instruction.md to {_STATEMENT_CHARACTERS} characters, so that the parent program fits beside it"
        return Finding(name="statement", verdict="warning", detail=size, hint=hint)
    return ok("statement", size)


def _environment(task: Task, environments: Path) -> Finding:
    try:
        environment = task.environment
        python = task.program_python(environments)
    except TaskError as error:
        return failed("environment", str(error), "the message says what to do")
    if task.language != "python":
        return ok("environment", "programs are compiled")
    if environment is None:
        return ok("environment", "no environment/requirements.txt: programs run in the judge's own interpreter")
    return ok("environment", f"{len(environment.pins)} packages, {python}")


def _judge(task: Task) -> Finding:
    try:
        task.make_judge()
        return ok("judge", f"{task.judge}, digest {judge_digest(task)[:16]}, task digest {task_digest(task)[:16]}")
    except TaskError as error:
        return failed("judge", str(error), "mend the judge, or `judge` in task.toml")


def _bundle(task: Task) -> Finding:
    if task.is_built_in:
        return ok("bundle", "built in, so every host has it")
    try:
        return ok("bundle", f"{len(pack(task.folder))} bytes for hosts that do not have the folder")
    except TaskError as error:
        return failed("bundle", str(error), "the message says what to do")


def _harbor(task: Task) -> Finding:
    problems = harbor_rules.missing(task.folder)
    if not problems:
        return ok("harbor", "the folder has what Harbor's loader and lint ask for, as far as this can be seen offline")
    hint = "only Harbor needs these: compare `tttd task new`'s template"
    return Finding(name="harbor", verdict="warning", detail="; ".join(problems), hint=hint)


def _start(checked: Checked, name: str, answers: list[Judgement]) -> Finding:
    task, what = checked.task, f"start {name}"
    try:
        if task.starts[name].construction is not None:
            judge: Any = task.make_judge()
            judgement = certify(task, grade_answer(judge, root_answer(task, name, _ROOT_SEED, 0)), None)
        elif program := task.start_program(name):
            judgement = checked.run(program)
        else:
            return ok(what, "no program: the model writes the first one")
    except (TttdError, TaskError, JudgeFault) as error:
        return failed(what, str(error), "a start must be judged without an error")
    answers.append(judgement)
    return _certified(what, task, judgement)


def _baseline(checked: Checked, answers: list[Judgement]) -> Finding:
    try:
        judgement = checked.run(checked.task.baseline_source or "")
    except (TttdError, TaskError) as error:
        return failed("baseline", str(error), "the baseline must be judged without an error")
    answers.append(judgement)
    return _certified("baseline", checked.task, judgement)


def _certified(what: str, task: Task, judgement: Judgement) -> Finding:
    if judgement.outcome is not Outcome.VALID or judgement.grade is None:
        tail = "" if judgement.run is None else judgement.run.stderr_tail.strip().rpartition("\n")[2][:200]
        said = f" ({tail})" if tail and tail not in judgement.reason else ""
        hint = f"run it by itself: `tttd judge {task.name} FILE`"
        return failed(what, f"{judgement.outcome.value}: {judgement.reason}{said}", hint)
    if beats_best_known(task, judgement):
        detail = f"{task.score_name} {judgement.grade.score!r} is better than best_known {task.best_known!r}"
        return Finding(name=what, verdict="warning", detail=detail, hint="a discovery, or a mistake of the judge: look at both")
    return ok(what, f"{task.score_name} {judgement.grade.score!r}")


def beats_best_known(task: Task, judgement: Judgement) -> bool:
    """Whether an answer is worth more than anybody knows, beyond the last digits."""
    if task.best_known is None or judgement.value is None:
        return False
    known = task.sign * task.best_known
    return judgement.value > known + 1e-9 * abs(known)


def _same_again(checked: Checked, answers: list[Judgement]) -> Finding:
    """The same bytes give the same grade, and what is stored gives it again."""
    task, name = checked.task, "judge repeats"
    results = [a.run.result for a in answers if a.run is not None and a.run.result is not None]
    for result in results:
        first, second = (task.make_judge().grade(result) for _ in range(2))
        if first != second:
            return failed(name, f"one answer was graded {_shown(first)}, then {_shown(second)}", "a judge must be a pure function")
    grades = [a.grade for a in answers if a.grade is not None and a.grade.valid]
    for grade in grades:
        try:
            stored = json.loads(json.dumps(grade.construction, allow_nan=False))
            again = task.make_judge().verify(stored)
        except Exception as error:
            where = place_of(error, task.folder)
            return failed(name, f"verifying a stored construction failed at {where}: {error}", "the judge must take what it stores")
        if (again.valid, again.exact) != (True, grade.exact):
            hint = (
                "what the judge stores must be scored like what the program returned: return (score, construction) to store another"
            )
            return failed(name, f"a construction graded {_shown(grade)} is verified as {_shown(again)}", hint)
    return ok(name, f"{len(results)} results graded twice, {len(grades)} stored constructions verified to the same exact value")


def _shown(grade: Grade) -> str:
    return repr(grade.score) if grade.valid else f"invalid ({grade.reason})"


def _hostile_texts(task: Task) -> Finding:
    judge: Any = task.make_judge()
    valid = 0
    for what, text in hostile.TEXTS.items():
        try:
            grade = judge.grade(text)
        except Exception as error:
            where = "" if isinstance(error, JudgeFault) else f" at {place_of(error, task.folder)}"
            detail = f"{what} ({text[:40].decode()}) makes the judge raise{where}: {error}"
            return failed("hostile results", detail, "a judge never raises for bad data: raise ValueError(reason) instead")
        valid += grade.valid
        if grade.valid and beats_best_known(task, Judgement(Outcome.VALID, "", value=task.sign * (grade.score or 0.0))):
            detail = f"{what} ({text[:40].decode()}) scores {grade.score!r}, better than best_known {task.best_known!r}"
            return failed("hostile results", detail, "the judge must check what it is given")
    return ok("hostile results", f"{len(hostile.TEXTS)} texts, {len(hostile.TEXTS) - valid} invalid, none raises")


def _hostile_programs(checked: Checked) -> Finding:
    programs = hostile.programs(checked.task.entry)
    for what, source in programs.items():
        if problem := breach(checked, source):
            return failed("hostile programs", f"a program that {what}: {problem}", "the judge must check what it is given")
    return ok("hostile programs", f"{len(programs)} programs, none scores above what is known")


def _attacks(checked: Checked) -> Iterator[Finding]:
    """The folder's own: none may be worth more than anybody knows."""
    suffix = ".py" if checked.task.language == "python" else ".cpp"
    for file in sorted((checked.task.folder / "attacks").glob(f"*{suffix}")):
        name = f"attack {file.name}"
        try:
            problem = breach(checked, file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problem = f"cannot be read: {error}"
        yield failed(name, problem, "the judge must not be taken in by it") if problem else ok(name, "contained")


def breach(checked: Checked, source: str) -> str | None:
    """What a hostile program achieved; None if it is invalid, or worth no more than what is known."""
    try:
        judgement = checked.run(source)
    except (TttdError, TaskError) as error:
        return str(error)
    if judgement.outcome is not Outcome.VALID or judgement.grade is None:
        return None
    if checked.task.best_known is None:
        return f"it is valid, with {checked.task.score_name} {judgement.grade.score!r}; set best_known to say what is possible"
    return f"its {checked.task.score_name} is {judgement.grade.score!r}" if beats_best_known(checked.task, judgement) else None
