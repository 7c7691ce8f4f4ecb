"""`tttd polish RUN|CONSTRUCTION.json`: what the simple solver makes of an answer, so that nobody claims what it also finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.cli.baseline import OutOption, SecondsOption, SeedOption, loaded, solver_of, write_certificate
from console.cli.session import TaskDirOption
from console.output import FAILED, OK, USAGE, VERIFICATION_FAILED, Failure, command, emit, emit_json, say

if TYPE_CHECKING:
    from activities.judge.solving import Polished, Solver
    from console.cli.session import Session
    from tasks.judging import Grade
    from tasks.registry import Task


@command
def polish(
    subject: Annotated[
        str, typer.Argument(metavar="RUN|CONSTRUCTION.json", help="A run in the store, or a JSON file with a construction.")
    ],
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="TASK", help="Name of a task folder; may be left out where the subject names it."),
    ] = None,
    seconds: SecondsOption = None,
    seed: SeedOption = 0,
    task_dirs: TaskDirOption = None,
    output: OutOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print both values and the better construction as JSON.")] = False,
) -> int:
    """Give an answer to the task's simple solver and report its exact value before and after. Never worse than what was given.
    Exit code 0: polished or no improvement, 4: the answer is not valid, 2: usage."""
    from console.cli.session import open_session
    from console.cli.verify import certified_subject
    from tasks.certificate import Refused

    session = open_session(task_dirs or ())
    given = certified_subject(session, subject, task)
    if isinstance(given, Refused):
        emit_json(given) if as_json else emit(f"not valid: {given.reason}")
        return VERIFICATION_FAILED
    chosen = _task(session, subject, given.task)
    solver = solver_of(session, seconds, seed)
    say(f"the baseline of {chosen.name} has {solver.seconds_for(chosen):g} s for {given.score!r}")
    found = _polished(chosen, solver, given.construction)
    if output is not None:
        write_certificate(output, chosen, found.best.construction)
    if as_json:
        emit_json(polish_report(chosen, found))
    else:
        emit("\n".join(polish_lines(chosen, found)))
    return OK


def _task(session: Session, subject: str, name: str) -> Task:
    """The run's own task, which it may have brought along as a bundle; else the one of that name."""
    from pathlib import Path

    from console.stored import find_run, task_of

    stored = None if Path(subject).is_file() else find_run(session.blobs, subject)
    return (None if stored is None else task_of(stored.spec, session.tasks)) or loaded(session, name)


def _polished(task: Task, solver: Solver, construction: Any) -> Polished:
    from activities.errors import InputError
    from activities.judge.sandbox import SandboxUnavailable
    from activities.judge.solving import polish as polish_construction

    try:
        return polish_construction(task, solver, construction)
    except SandboxUnavailable as error:
        raise Failure(str(error), FAILED) from None
    except InputError as error:
        raise Failure(str(error), USAGE) from None


def polish_report(task: Task, found: Polished) -> dict[str, Any]:
    """Before and after as JSON data; `construction` is the better one."""
    after = found.after.grade if found.after.grade is not None and found.after.grade.valid else None
    return {
        "task": task.name,
        "improved": found.improved,
        "before": _value(found.before),
        "after": None if after is None else _value(after),
        "outcome": found.after.outcome.value,
        "reason": found.after.reason,
        "best_known": task.best_known,
        "construction": found.best.construction,
    }


def _value(grade: Grade) -> dict[str, Any]:
    return {"score": grade.score, "exact": _exact(grade)}


def _exact(grade: Grade) -> str | None:
    return None if grade.exact is None else f"{grade.exact.numerator}/{grade.exact.denominator}"


def polish_lines(task: Task, found: Polished) -> list[str]:
    """Before and after for people."""
    from console.lines import exact_digits

    best_known = [] if task.best_known is None else [f"  best known   {task.best_known:.17g}"]
    before = [f"  before       {found.before.score:.17g}", f"  exact        {exact_digits(_exact(found.before))}"]
    if found.improved:
        after = [f"  after        {found.best.score:.17g}", f"  exact        {exact_digits(_exact(found.best))}"]
        return [f"improved: the simple solver betters this {task.score_name}", *before, *after, *best_known]
    return [f"no improvement: {_why_not(found)}", *before, *best_known]


def _why_not(found: Polished) -> str:
    grade = found.after.grade
    if grade is not None and grade.valid and grade.score is not None:
        return f"the simple solver ended with {grade.score:.17g}"
    return f"the simple solver ended without an answer ({found.after.outcome.value}: {found.after.reason})"


def register(app: typer.Typer) -> None:
    app.command()(polish)
