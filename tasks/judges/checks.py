"""What a judge says it has checked: one family of inequalities, how many there are, and how near the nearest comes to failing.

For certificates only: no score depends on it. Knows no problem.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Check:
    """One family of inequalities that hold exactly."""

    family: str
    statement: str
    """The inequality, in the symbols of the problem."""
    count: int
    tightest: Fraction | None
    """Smallest of left side minus right side over the family, written as `difference >= 0`; None if the family is empty."""
    at: tuple[int, ...]
    """Indices where it is attained, the first of several."""


@runtime_checkable
class Certifying(Protocol):
    """A judge that can list what its certificates rest on."""

    problem: str
    """Which definitions an independent checker has to use."""

    def checks(self, construction: Any) -> tuple[Check, ...]:
        """Every family of inequalities of a construction that this judge's `verify` accepts."""
        ...


def family(name: str, statement: str, slacks: Iterable[tuple[Fraction, tuple[int, ...]]]) -> Check:
    """A family from the slack and the indices of each of its inequalities."""
    listed = list(slacks)
    if not listed:
        return Check(name, statement, 0, None, ())
    tightest, at = min(listed)
    return Check(name, statement, len(listed), tightest, at)
