"""`tttd task list|show|new|check|build|export-harbor`: problems as folders."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.cli.session import TaskDirOption
from console.output import FAILED, OK, USAGE, Failure, command, emit, emit_json, say

if TYPE_CHECKING:
    from console.task_check import Finding
    from tasks.registry import Task
    from workers.settings import Settings

app = typer.Typer(
    name="task",
    help="Problems: list, show, make, check, and build what their programs import.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="Name of a task, or its folder.")]
DirOption = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Directory in which the folder is made.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print as JSON.")]

_OWN = {"python": "the judge's own interpreter", "cpp17": "programs are compiled"}
_MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


@app.command("list")
@command
def list_tasks(task_dirs: TaskDirOption = None, as_json: JsonOption = False) -> int:
    """Every task: built-in ones, those of the settings' directories, and those of --task-dir."""
    from tasks.errors import TaskError
    from tasks.registry import read_task, task_folders

    settings = _settings(task_dirs)
    found: dict[str, dict[str, Any]] = {}
    for folder in reversed(list(task_folders(settings.task_dirs))):
        try:
            task = read_task(folder)
        except TaskError as error:
            found[folder.name] = {
                "name": folder.name,
                "direction": None,
                "best_known": None,
                "source": str(folder),
                "error": str(error),
            }
            continue
        source = "built in" if task.is_built_in else str(folder)
        found[task.name] = {"name": task.name, "direction": task.direction, "best_known": task.best_known, "source": source}
    rows = [found[name] for name in sorted(found)]
    if as_json:
        emit_json(rows)
        return OK
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        known = "" if row["best_known"] is None else f"{row['best_known']:.12g}"
        emit(f"{row['name']:<{width}}  {row['direction'] or 'MALFORMED':<9}  {known:<16}  {row.get('error', row['source'])}")
    return OK


@app.command()
@command
def show(task: TaskArgument, task_dirs: TaskDirOption = None, as_json: JsonOption = False) -> int:
    """What a search, its prompts and its judge read of a task."""
    settings = _settings(task_dirs)
    found = _find(task, settings)
    facts = _facts(found, settings)
    if as_json:
        emit_json(facts | {"statement": found.instruction})
        return OK
    for key, value in facts.items():
        for number, line in enumerate(value if isinstance(value, list) else [value]):
            emit(f"{key if number == 0 else '':<12} {line}")
    emit(f"\n{found.instruction}")
    return OK


def _facts(task: Task, settings: Settings) -> dict[str, Any]:
    from tasks.registry import judge_digest, task_digest

    own, environment = task.limits, task.environment
    built = (
        "" if environment is None or environment.python(settings.environments) else f" (not built: `tttd task build {task.name}`)"
    )
    starts = [
        f"{name}{' (default)' if name == task.default_start else ''}: "
        f"{' '.join(filter(None, (start.program, start.construction, start.description)))}"
        for name, start in sorted(task.starts.items())
    ]
    return {
        "name": task.name,
        "folder": str(task.folder),
        "language": f"{task.language}, entry {task.entry}()",
        "direction": f"{task.direction} {task.score_name}",
        "best known": "not stated" if task.best_known is None else f"{task.best_known:.17g}",
        "limits": f"{own.wall_seconds:g} s, {own.cores} core(s), {own.processes} process(es), {own.memory_bytes >> 20} MiB",
        "environment": _OWN[task.language]
        if environment is None
        else f"{environment.digest[:16]}: {', '.join(environment.pins)}{built}",
        "judge": f"{task.judge} {task.judge_parameters or ''}".rstrip(),
        "judge digest": judge_digest(task),
        "task digest": task_digest(task),
        "baseline": task.baseline or "none",
        "starts": starts,
    }


@app.command()
@command
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new task: letters, digits, - and _.")],
    directory: DirOption = Path(),
) -> int:
    """Make a task folder from the template: a small problem that works at once, every field explained."""
    from console.task_new import new_task
    from tasks.errors import TaskError

    try:
        task = new_task(name, directory)
    except TaskError as error:
        raise Failure(str(error), USAGE) from None
    where = shlex.quote(str(directory))
    emit(str(task.folder))
    say(f"next: change task.toml, instruction.md and tests/judge.py, then\n  tttd task check {shlex.quote(str(directory / name))}")
    say(f"  tttd run {name} --task-dir {where}")
    return OK


@app.command()
@command
def check(
    task: TaskArgument,
    task_dirs: TaskDirOption = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Longest time of one program of the folder.")] = 20.0,
    as_json: JsonOption = False,
) -> int:
    """Check a task: schema, judge, starts, baseline, attacks. Says what is wrong and how to mend it. Exit code 1 if anything is."""
    from console.task_check import failed

    settings = _settings(task_dirs)
    findings: list[Finding] = []
    try:
        found = _find(task, settings)
    except Failure as failure:
        _note(findings, failed("schema", str(failure), "compare `tttd task new`, whose task.toml explains every field"), as_json)
    else:
        _check_all(found, settings, seconds, findings, as_json)
    wrong = [finding.name for finding in findings if finding.verdict == "failed"]
    if as_json:
        emit_json({"ok": not wrong, "checks": [finding.model_dump(mode="json") for finding in findings]})
    else:
        emit(f"wrong: {', '.join(wrong)}" if wrong else f"{task} is ready")
    return FAILED if wrong else OK


def _check_all(task: Task, settings: Settings, seconds: float, findings: list[Finding], as_json: bool) -> None:
    from activities.judge.sandbox import SandboxUnavailable, open_sandbox
    from console.task_check import Checked, failed, ok, program_checks, static_checks
    from workers.sandboxes import sandbox_settings

    _note(findings, ok("schema", str(task.folder / "task.toml")), as_json)
    for finding in static_checks(task, settings.environments):
        _note(findings, finding, as_json)
    if any(finding.verdict == "failed" for finding in findings):
        return
    try:
        sandbox = open_sandbox(sandbox_settings(settings))
    except SandboxUnavailable as error:
        _note(findings, failed("sandbox", "; ".join(error.report), "; ".join(error.hints) or "see `tttd doctor`"), as_json)
        return
    with sandbox:
        for finding in program_checks(Checked(task, sandbox, settings.environments, seconds)):
            _note(findings, finding, as_json)


def _note(findings: list[Finding], finding: Finding, as_json: bool) -> None:
    findings.append(finding)
    if not as_json:
        emit(f"{_MARKS[finding.verdict]}  {finding.name:<24} {finding.detail}")
        if finding.hint:
            emit(f"         {'':<24} -> {finding.hint}")


@app.command()
@command
def build(
    tasks: Annotated[list[str] | None, typer.Argument(metavar="TASK...", help="Names of tasks, or their folders.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every task that is known.")] = False,
    task_dirs: TaskDirOption = None,
    pip: Annotated[
        str, typer.Option("--pip-args", metavar="ARGS", help="Passed on to pip; pip's own variables and files count as well.")
    ] = "",
) -> int:
    """Install what programs may import (environment/requirements.txt), apart from this installation; equal lists share one."""
    from tasks.environments import build as build_environment
    from tasks.registry import read_task, task_folders

    settings = _settings(task_dirs)
    if bool(tasks) == every:
        raise Failure("name the tasks, or --all", USAGE)
    folders = {folder.name: folder for folder in reversed(list(task_folders(settings.task_dirs)))} if every else {}
    chosen = [read_task(folder) for folder in folders.values()] if every else [_find(name, settings) for name in tasks or ()]
    places: dict[Path, list[str]] = {}
    for task in chosen:
        environment = task.environment
        if environment is None:
            say(f"{task.name}: no environment/requirements.txt, nothing to build")
            continue
        if environment.python(settings.environments) is None:
            say(f"{task.name}: installing {', '.join(environment.pins)}")
        places.setdefault(build_environment(environment, settings.environments, shlex.split(pip)), []).append(task.name)
    for python, names in places.items():
        emit(f"{python}  {', '.join(names)}")
    return OK


@app.command("export-harbor")
@command
def export_harbor(task: TaskArgument, directory: DirOption, task_dirs: TaskDirOption = None) -> int:
    """Copy a task so that Harbor can build and verify it by itself: its tests/ gets the task and the judge's code."""
    from console.task_new import export_for_harbor
    from tasks.errors import TaskError

    try:
        emit(str(export_for_harbor(_find(task, _settings(task_dirs)), directory)))
    except TaskError as error:
        raise Failure(str(error), USAGE) from None
    return OK


def _settings(task_dirs: Sequence[Path] | None) -> Settings:
    from console.cli.session import quiet_logs, with_task_dirs
    from workers.settings import load_settings

    settings = with_task_dirs(load_settings(), task_dirs or ())
    quiet_logs(settings)
    return settings


def _find(name: str, settings: Settings) -> Task:
    """A task by name, or by its folder.

    Raises:
        Failure: there is none, or it is malformed; usage.
    """
    from tasks.errors import TaskError
    from tasks.registry import load_task, read_task

    folder = Path(name)
    try:
        if (folder / "task.toml").is_file():
            return read_task(folder.resolve())
        return load_task(name, settings.task_dirs)
    except TaskError as error:
        raise Failure(str(error), USAGE) from None


def register(parent: typer.Typer) -> None:
    parent.add_typer(app)
