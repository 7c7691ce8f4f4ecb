"""`tttd judge TASK PROGRAM.py`: one program, judged as in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from console.cli.session import TaskDirOption
from console.output import FAILED, OK, USAGE, VERIFICATION_FAILED, Failure, command, emit, emit_json


@command
def judge(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of a task folder.")],
    program: Annotated[Path, typer.Argument(metavar="PROGRAM", help="The program's file.")],
    task_dirs: TaskDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON (docs/judge-verdict.schema.json).")] = False,
    final: Annotated[
        bool,
        typer.Option("--final", help="Judge on the task's hidden cases, which no search sees; for the number a run ends with."),
    ] = False,
) -> int:
    """Run a program in the sandbox and certify its answer. Exit code 0: valid, 4: not valid, 1: could not be judged."""
    from activities.errors import InputError
    from activities.judge.sandbox import SandboxUnavailable
    from activities.judge.single import judge_file
    from console.cli.session import quiet_logs, with_task_dirs
    from workers.sandboxes import sandbox_settings
    from workers.settings import load_settings

    settings = with_task_dirs(load_settings(), task_dirs or ())
    quiet_logs(settings)
    try:
        verdict = judge_file(
            task,
            program,
            task_directories=settings.task_dirs,
            environments=settings.environments,
            settings=sandbox_settings(settings),
            services=settings.judge_services,
            final=final,
        )
    except SandboxUnavailable as error:
        raise Failure(str(error), FAILED) from None
    except InputError as error:
        raise Failure(str(error), USAGE) from None
    if as_json:
        emit_json(verdict)
    else:
        emit("\n".join(verdict_lines(verdict)))
    return OK if verdict["valid"] else VERIFICATION_FAILED


def verdict_lines(verdict: dict[str, Any]) -> list[str]:
    """A verdict for people. What the program says about itself is called a claim."""
    from console.lines import exact_digits

    lines = [f"{verdict['outcome']}" + (f": {verdict['reason']}" if verdict["reason"] else "")]
    if verdict["valid"]:
        lines.append(f"  certified score  {verdict['score']:.17g}")
        if digits := exact_digits(verdict["exact"]):
            lines.append(f"  exact value      {digits}")
    if verdict["claimed"] is not None:
        lines.append(f"  its own claim    {verdict['claimed']:.17g}")
    if used := verdict["resources"]:
        lines.append(f"  time             {used['wall_seconds']:.2f} s")
    if verdict["error_tail"].strip() and not verdict["valid"]:
        lines += ["  the end of its errors:", *(f"    {line}" for line in verdict["error_tail"].strip().splitlines()[-8:])]
    return lines


def register(app: typer.Typer) -> None:
    app.command()(judge)
