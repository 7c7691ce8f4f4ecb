"""A judge made of a plain function: `score(result) -> number`.

The function gets the program's return value as numbers in (nested) lists, decoded under the strict rules of the wire format. It
returns the score: a float, an int or, to certify more digits than a double has, a Fraction; or `(score, construction)` where what
is stored differs from what was returned. `raise ValueError("why")` says that an answer is invalid. Any other exception is a
mistake of the judge: it ends the judging with file and line, and is never turned into a reward.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from numbers import Integral, Rational, Real
from pathlib import Path
from typing import Any, Literal

from tasks.errors import JudgeFault, place_of
from tasks.judges import wire
from tasks.judging import Grade

_REASON_CHARACTERS = 300


class FunctionJudge:
    """Judge of one answer by a function.

    Args:
        function: from a decoded result to a score; called with the task's `judge_parameters` bound.
        direction: decides which way a Fraction is rounded to a double: always against the candidate.
        folder: the task's; places in errors are given relative to it.
        result_bytes: longest result text that is decoded.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        direction: Literal["maximize", "minimize"],
        folder: Path,
        result_bytes: int = wire.MAXIMUM_BYTES,
    ) -> None:
        self._function = function
        self._direction = direction
        self._folder = folder
        self._result_bytes = result_bytes

    def grade(self, result: bytes) -> Grade:
        """Grade a program's result text.

        Raises:
            JudgeFault: the function raised something else than ValueError, or its construction is no JSON data.
        """
        if problem := wire.fault(result, self._result_bytes):
            return Grade(valid=False, reason=problem)
        try:
            value = json.loads(result, parse_float=_finite)
        except _TooLarge as error:
            return Grade(valid=False, reason=str(error))
        return self._graded(value)

    def verify(self, construction: Any) -> Grade:
        """Score a stored construction again: the function must take what it returned.

        Raises:
            JudgeFault: as :meth:`grade`.
        """
        return self._graded(construction)

    def offer(self, construction: Any) -> list[Any]:
        """A stored construction as lists of doubles: as it is where it makes an array, else all its numbers in one list."""
        if isinstance(construction, list) and (shape := _shape(construction)) and 0 not in shape:
            return _as_floats(construction)  # type: ignore[no-any-return]
        return list(_numbers(construction))

    def _graded(self, value: Any) -> Grade:
        try:
            answer = self._function(value)
        except ValueError as error:
            return Grade(valid=False, reason=_one_line(str(error)) or "the judge gave no reason")
        except Exception as error:
            raise JudgeFault(
                f"judge failed at {place_of(error, self._folder)}: {type(error).__name__}: {_one_line(str(error))}; "
                "make it raise ValueError(reason) for an answer that it does not take"
            ) from error
        score, construction = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, value)
        if problem := self._score_problem(score):
            return Grade(valid=False, reason=problem)
        exact = _exact(score)
        return Grade(valid=True, reason="", exact=exact, score=self._rounded(exact), construction=self._stored(construction))

    def _score_problem(self, score: Any) -> str | None:
        if isinstance(score, bool) or not isinstance(score, Real):
            return f"the judge's score is {type(score).__name__} {_one_line(repr(score))}, not a number"
        try:
            number = float(score)
        except (OverflowError, ValueError):
            return "the judge's score is beyond the range of a double"
        if not math.isfinite(number):
            return f"the judge's score is {number}; it must be finite"
        if self._direction == "maximize" and number < 0:
            return f"score {number!r} is negative: it would rank below an invalid answer, whose reward is 0"
        if self._direction == "minimize" and number <= 0:
            return f"score {number!r} is not positive: a task that minimises has the reward 1/score"
        return None

    def _rounded(self, exact: Fraction) -> float:
        nearest = exact.numerator / exact.denominator
        if self._direction == "maximize":
            return math.nextafter(nearest, -math.inf) if Fraction(nearest) > exact else nearest
        return math.nextafter(nearest, math.inf) if Fraction(nearest) < exact else nearest

    def _stored(self, construction: Any) -> Any:
        """The construction as plain JSON data, so that re-verifying what was stored sees the same numbers."""
        try:
            return json.loads(json.dumps(construction, allow_nan=False, default=_plain))
        except (TypeError, ValueError, RecursionError) as error:
            raise JudgeFault(
                f"the judge's construction cannot be stored: {error}; return (score, construction) with numbers, text, lists "
                "and objects only"
            ) from None


class _TooLarge(ValueError):
    """A number that no double holds."""


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _TooLarge(f"the result holds {text[:40]}, which no double holds")
    return number


def _exact(score: Any) -> Fraction:
    """Without the fixed width that NumPy's integers compute in."""
    if isinstance(score, Integral):
        return Fraction(int(score))
    return Fraction(int(score.numerator), int(score.denominator)) if isinstance(score, Rational) else Fraction(float(score))


def _plain(value: Any) -> Any:
    """NumPy's arrays and scalars as lists and numbers; known by their method, so that NumPy need not be there."""
    convert = getattr(value, "tolist", None)
    if convert is None:
        raise TypeError(f"it holds a {type(value).__name__}")
    return convert()


def _shape(value: Any) -> tuple[int, ...] | None:
    """Lengths of nested lists that make an array; None if they are ragged."""
    if not isinstance(value, list):
        return () if isinstance(value, int | float) and not isinstance(value, bool) else None
    shapes = {_shape(item) for item in value}
    if len(shapes) > 1 or None in shapes:
        return None
    return (len(value), *(shapes.pop() or () if shapes else ()))


def _as_floats(value: Any) -> Any:
    return [_as_floats(item) for item in value] if isinstance(value, list) else float(value)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)


def _one_line(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _REASON_CHARACTERS else f"{line[:_REASON_CHARACTERS]}..."
