"""What a task's judge is: data in, an exact grade out.

A judge never runs the candidate. It gets the JSON text that the sandboxed program produced, decodes it with a strict type of its
own, and recomputes the score in exact arithmetic. Whatever the program says about itself is a claim, logged and never used.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol


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
    """One problem's judge. Implementations are pure: same bytes, same grade."""

    def grade(self, result: bytes) -> Grade:
        """Grade the JSON text of a program's return value. Never raises for bad data: that is an invalid grade."""
        ...

    def verify(self, construction: Any) -> Grade:
        """Re-derive the grade from a stored construction alone."""
        ...

    def offer(self, construction: Any) -> list[Any]:
        """A stored construction as nested lists of doubles, in the shape that child programs get as a float64 array."""
        ...
