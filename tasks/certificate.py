"""A certificate: a construction with its exact value, and what was checked. Everything in it can be recomputed from it alone.

The format is ``docs/certificate.schema.json``. Numbers that count are fractions `p/q`; `digits` and `score` are the same value
rounded against the candidate. Knows tasks and their judges; knows no run, no store and no program.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from tasks.candidates import Candidate
from tasks.errors import TaskError
from tasks.judges.checks import Certifying, Check
from tasks.judging import Grade, TaskJudge
from tasks.registry import Task, judge_digest

FORMAT: Final = "tttd-certificate/1"
DECIMALS: Final = 40


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class JudgeIdentity(_Data):
    """Which judge certified."""

    name: str
    """As the task's folder has it: `module:Class`, or `file.py:name`."""
    parameters: dict[str, Any]
    digest: str
    """sha256 over everything that decides a score; values compare under one digest only."""


class CheckRecord(_Data):
    """One family of inequalities, all of which hold exactly."""

    family: str
    statement: str
    count: int
    tightest: str | None
    """Least slack of the family as a fraction p/q: 0 where an inequality holds with equality; null if the family is empty."""
    at: tuple[int, ...]
    """Where it is attained: indices of the statement, the first of several."""


class Origin(_Data):
    """Where the construction came from. For people: nothing of it is checked."""

    run: str | None = None
    step: int | None = None
    """Step of the run that found it; 0 for a start."""
    commit: str | None = None
    """Hash of the run's chain that it stands in."""
    file_sha256: str | None = None


class Certificate(_Data):
    """What `tttd verify --out` writes."""

    format: Literal["tttd-certificate/1"] = FORMAT
    valid: Literal[True] = True
    task: str
    problem: str | None
    """Definitions that an independent checker uses (`circle_packing`, `erdos_min_overlap`, `first_autocorrelation`,
    `second_autocorrelation`); null for a judge that only its own task knows."""
    judge: JudgeIdentity
    direction: Literal["maximize", "minimize"]
    rounding: Literal["down", "up"]
    """Which way `digits` and `score` are rounded: always against the candidate."""
    exact: str
    """The value as a fraction p/q in lowest terms."""
    digits: str
    """The value to 40 decimals."""
    score: float
    """The nearest double that is not better than the value."""
    construction: Any
    """Exact data that the value is computed from: decimal integers over a common denominator. Its form is the judge's own."""
    checks: tuple[CheckRecord, ...]
    """Empty for a judge that lists none."""
    repair: str
    """What was changed in the doubles that were given, in one line; empty if nothing was."""
    claimed: float | None
    """What was claimed beside the construction; never used."""
    origin: Origin


class Refused(_Data):
    """No certificate."""

    valid: Literal[False] = False
    task: str
    reason: str
    """Why, in one line."""


def certificate_schema() -> dict[str, Any]:
    """The JSON schema of both documents, as ``docs/certificate.schema.json`` holds it."""
    schema = TypeAdapter(Certificate | Refused).json_schema(mode="serialization")
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "What `tttd verify --json` prints"}
    return title | schema


def certify(task: Task, judge: TaskJudge, candidate: Candidate, origin: Origin | None = None) -> Certificate | Refused:
    """Re-derive the value of a construction.

    Raises:
        TaskError: the task's judge certifies no constructions, or none of this form; or its sources cannot be read.
        RuntimeError: the judge contradicts itself: what it stores is worth something else than what it graded.
    """
    given = _given(task, judge, candidate)
    if not given.valid:
        return Refused(task=task.name, reason=given.reason)
    # What is certified is what is written down: the stored construction, read back, without any repair.
    grade = judge.verify(given.construction)
    if (grade.valid, grade.exact, grade.score) != (True, given.exact, given.score):
        raise RuntimeError(
            f"judge {task.judge} graded {given.exact} ({given.score}) and verifies its own construction as {grade.exact} "
            f"({grade.score}, {grade.reason or 'valid'}); this is a mistake of the judge"
        )
    return _certificate(task, judge, grade, given, candidate, origin or Origin())


def _given(task: Task, judge: TaskJudge, candidate: Candidate) -> Grade:
    # A judge of programs that print, or one that is a service, is no TaskJudge in full.
    needed = "verify" if candidate.result is None else "grade"
    if not (hasattr(judge, "verify") and hasattr(judge, needed)):
        wanted = "a stored construction" if hasattr(judge, "verify") else "a program, with `tttd judge`"
        raise TaskError(f"task {task.name}: its judge {task.judge} takes no answer of this form; give it {wanted}")
    return judge.verify(candidate.construction) if candidate.result is None else judge.grade(candidate.result)


def _certificate(task: Task, judge: TaskJudge, grade: Grade, given: Grade, candidate: Candidate, origin: Origin) -> Certificate:
    if grade.exact is None or grade.score is None:
        raise RuntimeError(
            f"judge {task.judge} calls a construction valid and gives no exact value; this is a mistake of the judge"
        )
    certifying = judge if isinstance(judge, Certifying) else None
    checks = () if certifying is None else certifying.checks(grade.construction)
    rounding: Literal["down", "up"] = "down" if task.direction == "maximize" else "up"
    return Certificate(
        task=task.name,
        problem=None if certifying is None else certifying.problem,
        judge=JudgeIdentity(name=task.judge, parameters=task.judge_parameters, digest=judge_digest(task)),
        direction=task.direction,
        rounding=rounding,
        exact=_fraction(grade.exact),
        digits=directed_digits(grade.exact, rounding),
        score=grade.score,
        construction=grade.construction,
        checks=tuple(map(_record, checks)),
        repair=given.reason,
        claimed=candidate.claimed if given.claimed is None else given.claimed,
        origin=origin,
    )


def directed_digits(number: Fraction, rounding: Literal["down", "up"], decimals: int = DECIMALS) -> str:
    """A fraction in decimals, rounded down or up: never on the other side of the number."""
    scaled = number * 10**decimals
    whole = scaled.__floor__() if rounding == "down" else scaled.__ceil__()
    units, rest = divmod(abs(whole), 10**decimals)
    return f"{'-' if whole < 0 else ''}{units}.{rest:0{decimals}d}"


def _record(check: Check) -> CheckRecord:
    tightest = None if check.tightest is None else _fraction(check.tightest)
    return CheckRecord(family=check.family, statement=check.statement, count=check.count, tightest=tightest, at=check.at)


def _fraction(number: Fraction) -> str:
    return f"{number.numerator}/{number.denominator}"
