"""The two autocorrelation inequalities: a step function f >= 0 with n equal cells, judged by its autoconvolution c = f * f.

First: minimise 2n max c / (Σ f)². Second: maximise ‖f*f‖₂² / (‖f*f‖₁ ‖f*f‖∞), where f*f is linear between the points
0, c₀ .. c₂ₙ₋₂, 0, so that it equals (2 Σ cₖ² + Σ cₖ cₖ₊₁) / (3 Σ cₖ max c). Both ignore the scale of f, and every f proves a
bound. Source: spec tasks 6 and 7.

Everything is decided in integers. A double is an exact rational, so the heights are taken as they are, over one power of two.
Only where that would cost too much are they shortened: n heights keep what lies above 2^-b of the largest, b = 2^24 / n. For
n <= 15 335 that is every bit of every double, for n = 100 000 it is 167 bits; a sequence needs more only if its heights differ by
more than 2^114 = 2e34. Those are rounded down, the reason says how many, and the function after that is what is scored, without
error. The value is rounded up for the first and down for the second.

Knows nothing of programs or sandboxes. A construction is stored as

    {"heights": ["a", ...]}

with decimal integers without a common divisor, the heights up to a scale, exactly. Rational heights have this form too, over any
common denominator.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import msgspec

from tasks.judges import wire
from tasks.judges.checks import Check, family
from tasks.judges.convolution import BUDGET_BITS, autoconvolution
from tasks.judging import Grade

MAXIMUM_POINTS = 100_000

MAXIMUM_HEIGHT = 1e6

_LAST_BIT = 1074
"""Every double is a multiple of 2^-1074."""

_ALL_BITS = _LAST_BIT + 20
"""Of a height of at most 1e6 < 2^20, without loss."""

_MAXIMUM_DIGITS = 1000
"""Of one integer in a stored construction; a double's take at most 330. The exact value then has fewer than 4300, which is the
most that Python converts."""

_INTEGER = re.compile(rf"[0-9]{{1,{_MAXIMUM_DIGITS}}}")

_RESULT_BYTES = (wire.MAXIMUM_NUMBER_CHARACTERS + 4) * (MAXIMUM_POINTS + 8)


class _Construction(msgspec.Struct, forbid_unknown_fields=True):
    heights: list[str]


class _Invalid(Exception):
    """The answer is not one; the message is the reason."""


class _Autocorrelation(ABC):
    """What both judges share: a result is a list of n heights, shape (n,), in any unit."""

    problem: str

    def grade(self, result: bytes) -> Grade:
        """Grade a program's result text. Same bytes, same grade; bad data is an invalid grade with its reason."""
        try:
            heights, repair = _from_doubles(_decode(result))
        except _Invalid as invalid:
            return Grade(valid=False, reason=str(invalid))
        return self._certified(heights, repair)

    def verify(self, construction: Any) -> Grade:
        """Re-derive the grade from a stored construction: no rounding."""
        try:
            heights = _parse(construction)
        except _Invalid as invalid:
            return Grade(valid=False, reason=str(invalid))
        return self._certified(heights, "")

    def checks(self, construction: Any) -> tuple[Check, ...]:
        """What the certificate of a construction rests on."""
        heights = _parse(construction)
        c = autoconvolution(heights)
        top, mass = max(c), sum(heights)
        return (
            family("heights", "a_i >= 0", ((Fraction(a), (i,)) for i, a in enumerate(heights))),
            family("mass", "sum a_i > 0", [(Fraction(mass), ())]),
            family("autoconvolution", "c_k <= max c, c = a * a", ((Fraction(top - x), (k,)) for k, x in enumerate(c))),
        )

    def offer(self, construction: Any) -> list[float]:
        """A stored construction as n heights, shape (n,), scaled so that the largest is 1."""
        heights = _parse(construction)
        top = max(heights)
        return [height / top for height in heights]

    def _certified(self, heights: list[int], repair: str) -> Grade:
        common = math.gcd(*heights)
        heights = [height // common for height in heights]
        exact = self._value(heights, autoconvolution(heights))
        construction = {"heights": [str(height) for height in heights]}
        return Grade(valid=True, reason=repair, exact=exact, score=self._rounded(exact), construction=construction)

    @abstractmethod
    def _value(self, heights: Sequence[int], c: Sequence[int]) -> Fraction:
        """The certified score, from the heights (n,) and their autoconvolution (2n - 1,)."""

    @abstractmethod
    def _rounded(self, exact: Fraction) -> float:
        """A double that is not better than the exact score."""


class FirstAutocorrelation(_Autocorrelation):
    """Judge of the first inequality: minimise 2n max c / (Σ f)², an upper bound on the constant."""

    problem = "first_autocorrelation"

    def _value(self, heights: Sequence[int], c: Sequence[int]) -> Fraction:
        return Fraction(2 * len(heights) * max(c), sum(heights) ** 2)

    def _rounded(self, exact: Fraction) -> float:
        nearest = exact.numerator / exact.denominator
        return math.nextafter(nearest, math.inf) if Fraction(nearest) < exact else nearest


class SecondAutocorrelation(_Autocorrelation):
    """Judge of the second inequality: maximise ‖f*f‖₂² / (‖f*f‖₁ ‖f*f‖∞), a lower bound on the constant."""

    problem = "second_autocorrelation"

    def _value(self, heights: Sequence[int], c: Sequence[int]) -> Fraction:
        # One loop over c alone: its integers are long, and the products of neighbours end at c[-1] * 0.
        squares = sum(x * (2 * x + y) for x, y in zip(c, [*c[1:], 0], strict=True))
        return Fraction(squares, 3 * sum(c) * max(c))

    def _rounded(self, exact: Fraction) -> float:
        nearest = exact.numerator / exact.denominator
        return math.nextafter(nearest, -math.inf) if Fraction(nearest) > exact else nearest


def _decode(result: bytes) -> list[float]:
    if len(result) > _RESULT_BYTES:
        raise _Invalid(f"the result has {len(result)} bytes; {MAXIMUM_POINTS} heights take at most {_RESULT_BYTES}")
    if problem := wire.fault(result, _RESULT_BYTES):
        raise _Invalid(problem)
    try:
        heights = msgspec.json.decode(result, type=list[float])
    except msgspec.DecodeError as error:
        raise _Invalid(f"the result must be a list of finite numbers: {error}") from None
    _check_count(len(heights))
    for i, height in enumerate(heights):
        if not 0 <= height <= MAXIMUM_HEIGHT:
            raise _Invalid(f"height {i} is {height!r}; heights must lie in [0, {MAXIMUM_HEIGHT:g}]")
    if not any(heights):
        raise _Invalid("all heights are zero")
    return heights


def _check_count(points: int) -> None:
    if not 1 <= points <= MAXIMUM_POINTS:
        raise _Invalid(f"the list has {points} heights; this task needs 1 to {MAXIMUM_POINTS}")


def _from_doubles(heights: Sequence[float]) -> tuple[list[int], str]:
    """The heights in a unit that is a power of two, and what was lost in words: "" for nothing, which is the rule."""
    bits = min(_ALL_BITS, BUDGET_BITS // len(heights))
    shift = min(bits - math.frexp(max(heights))[1], _LAST_BIT)
    # The shift is positive: heights of at most 1e6 have exponents of at most 20, and at least 167 bits are kept.
    ratios = [height.as_integer_ratio() for height in heights]
    short = sum((numerator << shift) % denominator != 0 for numerator, denominator in ratios)
    repair = f"{short} heights rounded down to multiples of 2^-{shift}, for {len(heights)} heights are kept to {bits} bits"
    return [(numerator << shift) // denominator for numerator, denominator in ratios], repair if short else ""


def _parse(construction: Any) -> list[int]:
    try:
        data = msgspec.convert(construction, _Construction)
    except msgspec.ValidationError as error:
        raise _Invalid(f"not a stored step function: {error}") from None
    _check_count(len(data.heights))
    heights = list(map(_integer, data.heights))
    if max(heights) == 0:
        raise _Invalid("the construction's largest height is 0; it must be positive")
    bits = max(heights).bit_length()
    if len(heights) * bits > BUDGET_BITS:
        raise _Invalid(f"{len(heights)} heights of {bits} bits; at most {BUDGET_BITS // len(heights)} bits are read of so many")
    return heights


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise _Invalid(f"{text[:40]!r} is not a non-negative integer of at most {_MAXIMUM_DIGITS} digits")
    return int(text)
