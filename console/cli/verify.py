"""`tttd verify RUN|CONSTRUCTION.json`: re-derive an exact value, and write the certificate."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.cli.session import TaskDirOption
from console.output import OK, USAGE, VERIFICATION_FAILED, Failure, command, emit, emit_json, say

if TYPE_CHECKING:
    from console.cli.session import Session
    from console.stored import BestAnswer
    from tasks.candidates import Candidate
    from tasks.certificate import Certificate, Origin, Refused
    from tasks.registry import Task


@command
def verify(
    subject: Annotated[
        str, typer.Argument(metavar="RUN|CONSTRUCTION.json", help="A run in the store, or a JSON file with a construction.")
    ],
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="TASK", help="Name of a task folder; may be left out where the subject names it."),
    ] = None,
    task_dirs: TaskDirOption = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the certificate to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate (docs/certificate.schema.json).")] = False,
) -> int:
    """Re-derive the exact value of a run's best answer or of a construction. Exit code 0: valid, 4: not valid, 2: usage."""
    from console.cli.session import open_session
    from tasks.certificate import Refused

    session = open_session(task_dirs or ())
    answer = certified_subject(session, subject, task)
    if isinstance(answer, Refused):
        emit_json(answer) if as_json else emit(f"not valid: {answer.reason}")
        return VERIFICATION_FAILED
    if output is not None:
        _write(output, answer)
    if as_json:
        emit_json(answer)
    else:
        emit("\n".join(certificate_lines(answer, output)))
    return OK


def certified_subject(session: Session, subject: str, task: str | None) -> Certificate | Refused:
    """The certificate of a run's best answer, or of a file's construction.

    Raises:
        Failure: there is no such run or file, it belongs to another task, or the store contradicts its own construction.
    """
    return _of_file(session, Path(subject), task) if Path(subject).is_file() else _of_run(session, subject, task)


def _of_file(session: Session, path: Path, name: str | None) -> Certificate | Refused:
    from tasks.candidates import MAXIMUM_FILE_BYTES, CandidateError, read_candidate
    from tasks.certificate import Origin

    try:
        if path.stat().st_size > MAXIMUM_FILE_BYTES:
            raise Failure(f"{path}: {path.stat().st_size} bytes; at most {MAXIMUM_FILE_BYTES} are read", USAGE)
        data = path.read_bytes()
        candidate = read_candidate(data)
    except (OSError, CandidateError) as error:
        raise Failure(f"{path}: {error}", USAGE) from None
    chosen = _agreed(name, candidate.task, str(path))
    return _certified(_loaded(session, chosen), candidate, Origin(file_sha256=hashlib.sha256(data).hexdigest()))


def _of_run(session: Session, run: str, name: str | None) -> Certificate | Refused:
    from activities.run_store import RunStore
    from console.stored import best_answer, find_run, task_of, unknown_run
    from tasks.candidates import Candidate
    from tasks.certificate import Origin

    if run.endswith(".json"):
        raise Failure(f"{run}: there is no such file", USAGE)
    stored = find_run(session.blobs, run)
    if stored is None:
        raise Failure(unknown_run(session.blobs, run), USAGE)
    answer = best_answer(session.blobs, run, session.tasks)
    chosen = _agreed(name, answer.task, f"run {run}")
    task = task_of(stored.spec, session.tasks) or _loaded(session, chosen)
    if answer.construction is None:
        raise Failure(f"run {run}: its best answer ({answer.node}) has no stored construction; only its value was given")
    construction = json.loads(RunStore(session.blobs, run).blobs.get(answer.construction))
    candidate = Candidate(construction=construction, task=answer.task)
    certificate = _certified(task, candidate, Origin(run=run, step=answer.found_step, commit=answer.commit))
    if stored.spec:
        _compare(run, answer, certificate, judged_by=stored.spec.judge_digest)
    return certificate


def _compare(run: str, answer: BestAnswer, found: Certificate | Refused, judged_by: str) -> None:
    """What the store says must be what its construction proves.

    Raises:
        Failure: it is not; names both, and both judges if they differ.
    """
    from tasks.certificate import Refused

    said = f"run {run}: the store says {answer.score_name} {answer.score!r} ({answer.exact or 'no exact value'})"
    if isinstance(found, Refused):
        raise Failure(f"{said}, and its construction {answer.construction} is not valid: {found.reason}", VERIFICATION_FAILED)
    judges = ""
    if found.judge.digest != judged_by:
        judges = f"; the run was judged by {judged_by[:12]}, this is {found.judge.digest[:12]}"
    if found.score != answer.score or answer.exact not in (None, found.exact):
        raise Failure(f"{said}, its construction proves {found.score!r} ({found.exact}){judges}", VERIFICATION_FAILED)
    if judges:
        say(f"the value is the same under both judges{judges}")


def _certified(task: Task, candidate: Candidate, origin: Origin) -> Certificate | Refused:
    from tasks.certificate import certify
    from tasks.errors import JudgeFault

    try:
        return certify(task, task.make_judge(), candidate, origin)
    except JudgeFault as error:
        raise Failure(f"task {task.name}: {error}") from None


def _agreed(asked: str | None, named: str | None, where: str) -> str:
    if asked is None and not named:
        raise Failure(f"{where} names no task; give one with --task", USAGE)
    if asked and named and asked != named:
        raise Failure(f"{where} belongs to task {named}, and --task says {asked}", USAGE)
    return asked or str(named)


def _loaded(session: Session, name: str) -> Task:
    from tasks.errors import TaskError

    try:
        return session.tasks.load(name)
    except TaskError as error:
        raise Failure(str(error), USAGE) from None


def _write(path: Path, certificate: Certificate) -> None:
    try:
        path.write_text(certificate.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise Failure(f"the certificate cannot be written: {error}") from None


def certificate_lines(certificate: Certificate, written: Path | None = None) -> list[str]:
    """A certificate for people."""
    better = "at most" if certificate.rounding == "up" else "at least"
    lines = [
        f"valid         {certificate.task} ({certificate.judge.name}, {certificate.judge.digest[:12]})",
        f"score         {certificate.score!r} (rounded {certificate.rounding})",
        f"exact         {better} {certificate.digits}",
        *(f"checked       {_check_line(check.model_dump())}" for check in certificate.checks),
    ]
    if certificate.repair:
        lines.append(f"repaired      {certificate.repair}")
    if certificate.claimed is not None:
        lines.append(f"its claim     {certificate.claimed!r}, not used")
    if written is not None:
        lines.append(f"certificate   {written}")
    return lines


def _check_line(check: dict[str, Any]) -> str:
    from decimal import Decimal

    if check["tightest"] is None:
        return f"{check['family']}: none"
    above, _, below = check["tightest"].partition("/")
    size = f"{Decimal(above) / Decimal(below):.3g}"  # of integers that no double holds
    where = f" at {', '.join(map(str, check['at']))}" if check["at"] else ""
    return f"{check['count']} x {check['statement']}; tightest {size}{where}"


def register(app: typer.Typer) -> None:
    app.command()(verify)
