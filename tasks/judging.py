"""What a task's judge is: data in, an exact grade out.

A judge never runs the candidate. It gets the JSON text that the sandboxed program produced, decodes it with a strict type of its
own, and recomputes the score in exact arithmetic. Whatever the program says about itself is a claim, logged and never used.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Protocol, runtime_checkable


@dataclass(frozen=True)
class Grade:
    """A certified answer, or the reason why there is none."""

    valid: bool
    reason: str
    """Why it is invalid, or which repair was made; one line, safe to show a model."""
    exact: Fraction | None = None
    """The certified score; None unless valid."""
    score: float | None = None
    """`exact` rounded to a double against the candidate: down when maximising, up when minimising."""
    construction: Any = None
    """The JSON data that was scored, after repair; re-verifying it gives `exact` again."""
    claimed: float | None = None
    """The score that the program reported about itself, for the log."""


class TaskJudge(Protocol):
    """Judge of a problem whose programs return data. Implementations are pure: same bytes, same grade."""

    def grade(self, result: bytes) -> Grade:
        """Grade the JSON text of a program's return value. Never raises for bad data: that is an invalid grade."""
        ...

    def verify(self, construction: Any) -> Grade:
        """Re-derive the grade from a stored construction alone."""
        ...

    def offer(self, construction: Any) -> list[Any]:
        """A stored construction as nested lists of doubles, in the shape that child programs get as a float64 array."""
        ...


@dataclass(frozen=True)
class TestCase:
    """One input of a problem whose programs read standard input and write standard output."""

    name: str
    stdin: bytes


@dataclass(frozen=True)
class CaseRun:
    """What a program did with one test case, as the sandbox saw it."""

    status: Literal["ok", "timeout", "memory", "crashed", "output_too_large"]
    stdout: bytes
    """Empty unless `ok`."""
    cpu_seconds: float


@runtime_checkable
class CasesJudge(Protocol):
    """Judge of a problem whose programs are run once per test case (C++17 programs, spec tasks 8)."""

    def cases(self) -> Sequence[TestCase]:
        """The inputs of the search, always the same ones in the same order."""
        ...

    def grade_runs(self, runs: Sequence[CaseRun]) -> Grade:
        """Grade the outputs, one run per case. Never raises for bad output."""
        ...

    def verify(self, construction: Any) -> Grade:
        """Re-derive the grade from a stored construction (the canonical outputs) alone."""
        ...


class JudgeUnavailable(Exception):
    """A judge that is a service did not answer, or answered nonsense: infrastructure, never a reward. Says what to do."""


@runtime_checkable
class ServiceJudge(Protocol):
    """Judge that is a service of somebody else's: it runs the program itself (spec tasks 8c)."""

    service: str
    """Name of the service in the worker's settings, from which its address comes (`frontiercs`: `frontiercs_url`)."""

    def at(self, url: str | None) -> ServiceJudge:
        """This judge with the address that the settings have; one in the task's own parameters takes precedence."""
        ...

    def submit(self, source: str, stop: threading.Event | None = None) -> Grade:
        """The service's grade of a program. Blocks until it is there, or `stop` is set.

        Raises:
            JudgeUnavailable: no answer in time, or one that is not to be trusted.
        """
        ...

    def verify(self, construction: Any) -> Grade:
        """The grade of a stored answer of the service, which is all the certificate there is."""
        ...
