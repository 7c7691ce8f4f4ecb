"""From a program to a judgement: run it, certify what it returned, map both to one outcome and one reward.

Knows tasks, sandboxes and records; knows neither Temporal nor where a program came from.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from activities.errors import InputError, JudgeError
from activities.judge.cases import Services, ask_service, compile_message, run_cases
from activities.judge.sandbox import Limits, Program, Sandbox, Status
from activities.judge.sandbox import Outcome as RunOutcome
from activities.records import Resources, RunSpec, Verdict
from activities.run_store import RunStore
from tasks.environments import DEFAULT_DIRECTORY
from tasks.errors import EnvironmentMissing, JudgeFault, place_of
from tasks.judging import CasesJudge, Grade, ServiceJudge, TaskJudge
from tasks.registry import Task
from workflows.contracts.base import Coordinate, Outcome

T = TypeVar("T")

MAXIMUM_SOURCE_BYTES: Final = 200_000
"""Spec tasks 1."""

_OUTCOMES: Final = {
    Status.INVALID_OUTPUT: Outcome.INVALID,
    Status.OUTPUT_TOO_LARGE: Outcome.INVALID,
    Status.TIMEOUT: Outcome.TIMED_OUT,
    Status.MEMORY: Outcome.MEMORY,
    Status.CRASHED: Outcome.CRASHED,
}
"""The table of design 7; OK is decided by the task's judge, SANDBOX_ERROR is raised."""


@dataclass(frozen=True)
class Case:
    """One program to judge, and what it is called with."""

    program: str | None
    """None: the response held no complete program."""
    seed: int = 0
    construction: Any = None
    """The parent's stored construction, if the run offers it."""


@dataclass(frozen=True)
class Judgement:
    """What was decided about one program."""

    outcome: Outcome
    reason: str
    grade: Grade | None = None
    """Present if the program returned something that the task's judge looked at."""
    value: float | None = None
    """sign x score; higher is better."""
    reward: float = 0.0
    run: RunOutcome | None = field(default=None, repr=False)
    """None if nothing ran here. For a program that was run on several cases, all of them together."""
    starved_case: bool = False
    """One of several cases ran out of time while it waited for a core."""

    @property
    def starved_timeout(self) -> bool:
        """Timed out on a host that did not give it its core: worth one more attempt elsewhere (spec sandbox 7)."""
        return self.starved_case or (self.outcome is Outcome.TIMED_OUT and self.run is not None and self.run.starved)


def limits_of(spec: RunSpec) -> Limits:
    """The limits that a run has resolved from its request and its task."""
    return Limits(
        wall_seconds=spec.wall_seconds,
        cores=spec.cores,
        memory_bytes=spec.memory_bytes,
        processes=spec.processes,
        result_bytes=spec.result_bytes,
    )


def limits_of_task(task: Task, wall_seconds: float | None = None) -> Limits:
    """The task's own limits; a wall time given overrides its."""
    own = task.limits
    return Limits(
        wall_seconds=own.wall_seconds if wall_seconds is None else wall_seconds,
        cores=own.cores,
        memory_bytes=own.memory_bytes,
        processes=own.processes,
        result_bytes=own.result_bytes,
    )


async def judge(
    task: Task,
    task_judge: TaskJudge | CasesJudge | ServiceJudge,
    case: Case,
    limits: Limits,
    sandbox: Sandbox,
    environments: Path = DEFAULT_DIRECTORY,
    services: Services | None = None,
) -> Judgement:
    """Run and certify one program.

    Args:
        limits: of the program, or of each case if the judge has cases (:func:`activities.judge.cases.limits_of_case`).
        environments: where this host has the Python environments of programs.
        services: addresses of judges that are services.

    Raises:
        JudgeError: the sandbox failed before the program's first line, this host lacks the task's environment (says which command
            builds it), or a service did not answer. Retryable.
        InputError: the task's judge failed on the answer; names file and line. Never retried.
    """
    if case.program is None:
        return Judgement(Outcome.NO_PROGRAM, "the response holds no complete program")
    size = len(case.program.encode("utf-8", "surrogatepass"))
    if size > MAXIMUM_SOURCE_BYTES:
        return Judgement(Outcome.INVALID, f"the program has {size} bytes; at most {MAXIMUM_SOURCE_BYTES} are run")
    if isinstance(task_judge, ServiceJudge):
        return certify(task, await ask_service(task_judge, case.program, services or {}), None)
    if isinstance(task_judge, CasesJudge):
        return await _judge_on_cases(task, task_judge, case.program, limits, sandbox)
    try:
        python = task.program_python(environments)
    except EnvironmentMissing as error:
        raise JudgeError(f"task {task.name}: {error}") from None
    run = await sandbox.run(_program(task, task_judge, case, limits, python), limits)
    if run.status is Status.SANDBOX_ERROR:
        raise JudgeError(f"sandbox {run.isolation}: {run.reason}; the program did not run, another attempt may")
    if run.status is not Status.OK or run.result is None:
        return Judgement(_OUTCOMES[run.status], explain(run, limits), run=run)
    # Exact arithmetic on hostile numbers takes milliseconds to half a second: off the event loop.
    grade = await asyncio.to_thread(_graded, task, task_judge.grade, run.result)
    return certify(task, grade, run)


async def _judge_on_cases(task: Task, task_judge: CasesJudge, source: str, limits: Limits, sandbox: Sandbox) -> Judgement:
    if task.language == "python":
        raise InputError(f'task {task.name}: a judge with cases takes programs that read their input; set language = "cpp17"')
    cases = await asyncio.to_thread(task_judge.cases)
    done = await run_cases(Program(source, entry=task.entry, language=task.language), cases, limits, sandbox)
    if not done.compiled:
        return Judgement(Outcome.CRASHED, compile_message(done.total), run=done.total)
    grade = await asyncio.to_thread(_graded, task, task_judge.grade_runs, done.runs)
    return replace(certify(task, grade, done.total), starved_case=done.starved)


def _graded(task: Task, grade: Callable[[T], Grade], result: T) -> Grade:
    """The grade; a judge that fails instead is a mistake of the task, which is never a reward."""
    try:
        return grade(result)
    except JudgeFault as fault:
        raise InputError(f"task {task.name}: {fault}") from fault
    except Exception as error:
        where = place_of(error, task.folder)
        raise InputError(f"task {task.name}: judge {task.judge} failed at {where}: {type(error).__name__}: {error}") from error


def certify(task: Task, grade: Grade, run: RunOutcome | None) -> Judgement:
    """Outcome, value and reward of a grade."""
    if not grade.valid or grade.score is None:
        return Judgement(Outcome.INVALID, grade.reason, grade=grade, run=run)
    return Judgement(
        outcome=Outcome.VALID,
        reason=grade.reason,
        grade=grade,
        value=task.sign * grade.score,
        reward=reward_of(task, grade.score),
        run=run,
    )


def reward_of(task: Task, score: float) -> float:
    """What is trained for a valid score: the published maps (spec tasks 1).

    Maximising: the score itself (packing: the sum of radii). Minimising: 1/score, so that better is larger and invalid, which
    is 0, is worst.

    Raises:
        JudgeError: a score that its map does not take, which is a fault of the task's judge.
    """
    if task.direction == "maximize":
        if score < 0:
            raise JudgeError(
                f"task {task.name}: score {score} is negative and would rank below an invalid answer; fix {task.judge}"
            )
        return score
    if score <= 0:
        raise JudgeError(f"task {task.name}: score {score} has no reward 1/score; fix {task.judge}")
    return 1.0 / score


def explain(run: RunOutcome, limits: Limits) -> str:
    """One line that a person or a model understands; free of anything unprintable."""
    match run.status:
        case Status.TIMEOUT if run.reason == "cpu":
            return f"used up {limits.cpu_limit_seconds} s of CPU time on {limits.cores} core(s)"
        case Status.TIMEOUT:
            return f"no answer within {limits.wall_seconds:g} s (killed after {run.wall_seconds:.1f} s)"
        case Status.MEMORY:
            return f"needed more than {limits.memory_bytes >> 20} MiB of memory"
        case Status.OUTPUT_TOO_LARGE if run.reason == "log":
            return f"printed more than {limits.log_bytes} bytes"
        case Status.OUTPUT_TOO_LARGE:
            return f"returned more than {limits.result_bytes} bytes"
        case Status.CRASHED if run.signal is not None:
            return f"ended by signal {run.signal} ({_signal_name(run.signal)})"
        case Status.CRASHED:
            last = run.stderr_tail.strip().rpartition("\n")[2]
            return last[:200] or f"ended with exit code {run.exit_code}"
        case _:
            return run.reason


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unnamed"


def _program(task: Task, task_judge: TaskJudge, case: Case, limits: Limits, python: Path | None) -> Program:
    constants = {} if case.construction is None else {task.construction_name: task_judge.offer(case.construction)}
    return Program(
        source=case.program or "",
        entry=task.entry,
        language=task.language,
        helper=task.helper_source,
        python=python,
        arguments={"seed": case.seed, "budget_s": limits.wall_seconds},
        constants=constants,
    )


def verdict_of(judgement: Judgement, at: Coordinate, store: RunStore) -> Verdict:
    """The document of a judgement; stores the certified construction as a blob."""
    grade, run = judgement.grade, judgement.run
    valid = judgement.outcome is Outcome.VALID and grade is not None
    return Verdict(
        at=at,
        outcome=judgement.outcome,
        reason=judgement.reason,
        score=grade.score if grade is not None and valid else None,
        exact=exact_text(grade) if valid else None,
        value=judgement.value,
        reward=judgement.reward,
        construction=store.put(grade.construction) if grade is not None and valid else None,
        claimed=None if grade is None else grade.claimed,
        output_tail="" if run is None else run.stdout_tail,
        error_tail="" if run is None else run.stderr_tail,
        isolation="" if run is None else str(run.isolation),
        resources=None if run is None else resources_of(run),
    )


def exact_text(grade: Grade | None) -> str | None:
    """`p/q` in lowest terms."""
    if grade is None or grade.exact is None:
        return None
    return f"{grade.exact.numerator}/{grade.exact.denominator}"


def resources_of(run: RunOutcome) -> Resources:
    return Resources(
        wall_seconds=run.wall_seconds,
        cpu_seconds=run.cpu_seconds,
        wait_seconds=run.wait_seconds,
        peak_memory_bytes=run.peak_memory_bytes,
    )


def stored_construction(store: RunStore, digest: str) -> Any:
    """A construction as it was stored."""
    return msgspec.json.decode(store.blobs.get(digest))
