"""The two autocorrelation inequalities: a step function f >= 0 with n equal cells, judged by its autoconvolution c = f * f.

First: minimise 2n max c / (Σ f)². Second: maximise ‖f*f‖₂² / (‖f*f‖₁ ‖f*f‖∞), where f*f is linear between the points
0, c₀ .. c₂ₙ₋₂, 0, so that it equals (2 Σ cₖ² + Σ cₖ cₖ₊₁) / (3 Σ cₖ max c). Both ignore the scale of f, and every f proves a
bound. Source: spec tasks 6 and 7.

Everything is decided in integers. Heights keep what lies above 2^-80 of the largest: a double down to 2^-27 of the largest keeps
all its bits, and the width of the integers stays bounded whatever the exponents. What is scored is the function after that,
computed without error, rounded up for the first and down for the second.

Knows nothing of programs or sandboxes. A construction is stored as

    {"heights": ["a", ...]}

with decimal integers without a common divisor, the heights up to a scale, exactly.
"""

from __future__ import annotations

import decimal
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import msgspec

from tasks.judges import wire
from tasks.judging import Grade

MAXIMUM_POINTS = 100_000

MAXIMUM_HEIGHT = 1e6

_BITS = 80
"""Of the largest height as an integer; the others are rounded down to the same unit, a power of two."""

_INTEGER = re.compile(r"[0-9]{1,25}")

_RESULT_BYTES = (wire.MAXIMUM_NUMBER_CHARACTERS + 4) * (MAXIMUM_POINTS + 8)

_EXACT = decimal.Context(
    prec=decimal.MAX_PREC, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[decimal.Inexact, decimal.InvalidOperation]
)
"""Integers of any length; a product that did not fit would raise and could not be wrong."""


class _Construction(msgspec.Struct, forbid_unknown_fields=True):
    heights: list[str]


class _Invalid(Exception):
    """The answer is not one; the message is the reason."""


class _Autocorrelation(ABC):
    """What both judges share: a result is a list of n heights, shape (n,), in any unit."""

    def grade(self, result: bytes) -> Grade:
        """Grade a program's result text. Same bytes, same grade; bad data is an invalid grade with its reason."""
        try:
            heights = _from_doubles(_decode(result))
        except _Invalid as invalid:
            return Grade(valid=False, reason=str(invalid))
        return self._certified(heights)

    def verify(self, construction: Any) -> Grade:
        """Re-derive the grade from a stored construction: no rounding."""
        try:
            heights = _parse(construction)
        except _Invalid as invalid:
            return Grade(valid=False, reason=str(invalid))
        return self._certified(heights)

    def offer(self, construction: Any) -> list[float]:
        """A stored construction as n heights, shape (n,), scaled so that the largest is 1."""
        heights = _parse(construction)
        top = max(heights)
        return [height / top for height in heights]

    def _certified(self, heights: list[int]) -> Grade:
        common = math.gcd(*heights)
        heights = [height // common for height in heights]
        exact = self._value(heights, autoconvolution(heights))
        construction = {"heights": [str(height) for height in heights]}
        return Grade(valid=True, reason="", exact=exact, score=self._rounded(exact), construction=construction)

    @abstractmethod
    def _value(self, heights: Sequence[int], c: Sequence[int]) -> Fraction:
        """The certified score, from the heights (n,) and their autoconvolution (2n - 1,)."""

    @abstractmethod
    def _rounded(self, exact: Fraction) -> float:
        """A double that is not better than the exact score."""


class FirstAutocorrelation(_Autocorrelation):
    """Judge of the first inequality: minimise 2n max c / (Σ f)², an upper bound on the constant."""

    def _value(self, heights: Sequence[int], c: Sequence[int]) -> Fraction:
        return Fraction(2 * len(heights) * max(c), sum(heights) ** 2)

    def _rounded(self, exact: Fraction) -> float:
        nearest = exact.numerator / exact.denominator
        return math.nextafter(nearest, math.inf) if Fraction(nearest) < exact else nearest


class SecondAutocorrelation(_Autocorrelation):
    """Judge of the second inequality: maximise ‖f*f‖₂² / (‖f*f‖₁ ‖f*f‖∞), a lower bound on the constant."""

    def _value(self, heights: Sequence[int], c: Sequence[int]) -> Fraction:
        # One loop over c alone: its integers are long, and the products of neighbours end at c[-1] * 0.
        squares = sum(x * (2 * x + y) for x, y in zip(c, [*c[1:], 0], strict=True))
        return Fraction(squares, 3 * sum(c) * max(c))

    def _rounded(self, exact: Fraction) -> float:
        nearest = exact.numerator / exact.denominator
        return math.nextafter(nearest, -math.inf) if Fraction(nearest) > exact else nearest


def autoconvolution(heights: Sequence[int]) -> list[int]:
    """c of shape (2n - 1,): cₖ = Σᵢ aᵢ aₖ₋ᵢ, exactly, for integers aᵢ >= 0.

    Each height goes into decimal digits of its own, wide enough for the largest sum; then the square of the one long number holds
    every cₖ in its place (Kronecker substitution). Decimal numbers, because their product is exact and takes n log n, where
    that of plain integers takes n^1.6: measured with 30 000 heights, 0.3 s and not 2.2.
    """
    width = len(str(len(heights) * max(heights) ** 2))
    long = decimal.Decimal("".join(str(height).zfill(width) for height in heights))
    places = width * (2 * len(heights) - 1)
    digits = f"{_EXACT.multiply(long, long):f}".zfill(places)
    return [int(digits[at : at + width]) for at in range(0, places, width)]


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


def _from_doubles(heights: Sequence[float]) -> list[int]:
    """floor(2^shift f) of each height, with the shift that gives the largest 80 bits."""
    shift = _BITS - math.frexp(max(heights))[1]
    # The shift is positive: heights of at most 1e6 have exponents of at most 20.
    ratios = (height.as_integer_ratio() for height in heights)
    return [(numerator << shift) // denominator for numerator, denominator in ratios]


def _parse(construction: Any) -> list[int]:
    try:
        data = msgspec.convert(construction, _Construction)
    except msgspec.ValidationError as error:
        raise _Invalid(f"not a stored step function: {error}") from None
    _check_count(len(data.heights))
    heights = list(map(_integer, data.heights))
    if not 0 < max(heights) < 1 << _BITS:
        raise _Invalid(f"the construction's largest height is {max(heights)}; it must lie in 1 to 2^{_BITS} - 1")
    return heights


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise _Invalid(f"{text[:40]!r} is not a non-negative integer of at most 25 digits")
    return int(text)
