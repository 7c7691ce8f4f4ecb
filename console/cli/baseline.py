"""`tttd baseline TASK`: what the task's simple solver finds by itself, certified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.cli.session import TaskDirOption
from console.output import FAILED, OK, USAGE, VERIFICATION_FAILED, Failure, command, emit, emit_json, say

if TYPE_CHECKING:
    from activities.judge.solving import Solver
    from console.cli.session import Session
    from tasks.registry import Task

SecondsOption = Annotated[
    float | None,
    typer.Option("--seconds", min=1, help="Time the solver is told; by default 60, or the task's own limit for each case of C++."),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the solver's random starts.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the certificate of the answer to this file.")
]


@command
def baseline(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of a task folder.")],
    seconds: SecondsOption = None,
    seed: SeedOption = 0,
    task_dirs: TaskDirOption = None,
    output: OutOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON (docs/judge-verdict.schema.json).")] = False,
) -> int:
    """Run a task's simple solver in the sandbox and certify its answer. A search is worth what it finds beyond it. Exit code 0:
    valid, 4: not valid, 1: could not be run."""
    from activities.judge.single import report
    from console.cli.judge import verdict_lines
    from console.cli.session import open_session

    session = open_session(task_dirs or ())
    chosen = loaded(session, task)
    solver = solver_of(session, seconds, seed)
    say(f"the baseline of {chosen.name} has {solver.seconds_for(chosen):g} s")
    verdict = report(chosen, solved(chosen, solver))
    if output is not None and verdict["valid"]:
        write_certificate(output, chosen, verdict["construction"])
    if as_json:
        emit_json(verdict)
    else:
        emit("\n".join([*verdict_lines(verdict), *known_lines(chosen)]))
    return OK if verdict["valid"] else VERIFICATION_FAILED


def loaded(session: Session, name: str) -> Task:
    """A task by name.

    Raises:
        Failure: there is none, or its folder is malformed.
    """
    from tasks.errors import TaskError

    try:
        return session.tasks.load(name)
    except TaskError as error:
        raise Failure(str(error), USAGE) from None


def solver_of(session: Session, seconds: float | None, seed: int) -> Solver:
    """How this machine runs baselines."""
    from activities.judge.solving import Solver
    from workers.sandboxes import sandbox_settings

    settings = session.settings
    return Solver(seconds, seed, settings.environments, settings=sandbox_settings(settings), services=settings.judge_services)


def solved(task: Task, solver: Solver) -> Any:
    """The judgement of the baseline.

    Raises:
        Failure: it cannot be run here; says what to do.
    """
    from activities.errors import InputError
    from activities.judge.sandbox import SandboxUnavailable
    from activities.judge.solving import solve

    try:
        return solve(task, solver)
    except SandboxUnavailable as error:
        raise Failure(str(error), FAILED) from None
    except InputError as error:
        raise Failure(str(error), USAGE) from None


def write_certificate(path: Path, task: Task, construction: Any) -> None:
    """Write what `tttd verify` would write about a stored construction.

    Raises:
        Failure: the file cannot be written.
    """
    from tasks.candidates import Candidate
    from tasks.certificate import Certificate, certify

    certificate = certify(task, task.make_judge(), Candidate(construction=construction))
    assert isinstance(certificate, Certificate), "the judge refuses what it has just certified"
    try:
        path.write_text(certificate.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise Failure(f"the certificate cannot be written: {error}") from None
    say(f"certificate  {path}")


def known_lines(task: Task) -> list[str]:
    """The best known value, for comparison."""
    return [] if task.best_known is None else [f"  best known       {task.best_known:.17g}"]


def register(app: typer.Typer) -> None:
    app.command()(baseline)
