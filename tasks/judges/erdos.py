"""Erdős' minimum overlap: a step function h on [0, 2] into [0, 1], integral 1, minimise its largest overlap with 1 - h.

With n equal cells, C5(h) = (2/n) max over k of Σᵢ hᵢ (1 - hᵢ₊ₖ), both cut to [0, 2]. The overlap is piecewise linear in the shift,
so the maximum over whole cells is the true one, and every h proves an upper bound. Source: spec tasks 3.

Everything is decided in integers. Heights are rounded to multiples of 2^-52, halves up, and the integral is made exactly 1: all
heights that are not yet at the end of [0, 1] move by the same whole number of units, and the first ones by one more. What is
scored is the function after both, computed without error and rounded up. Self-reported bounds and point counts are never used.

Knows nothing of programs or sandboxes. A construction is stored as

    {"heights": ["a", ...], "denominator": "d"}

with decimal integers in lowest common terms: hᵢ = aᵢ/d, exactly. Any rational heights have this form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import msgspec

from tasks.judges import wire
from tasks.judges.checks import Check, family
from tasks.judges.convolution import BUDGET_BITS, convolution
from tasks.judging import Grade

MINIMUM_POINTS = 2
MAXIMUM_POINTS = 20_000

MASS_TOLERANCE = Fraction(1, 1000)
"""Largest relative error of the integral that is repaired; beyond it the answer is invalid."""

RANGE_TOLERANCE = 1e-6
"""How far outside [0, 1] a height is still cut to the range; beyond it the answer is invalid."""

_UNIT = 1 << 52
"""Heights of a program are rounded to multiples of 1/_UNIT."""

_MAXIMUM_DIGITS = 1000
"""Of one integer in a stored construction; heights of a program need 16. The exact value then has fewer than 4300 digits, which is
the most that Python converts."""

_INTEGER = re.compile(rf"[0-9]{{1,{_MAXIMUM_DIGITS}}}")

_RESULT_BYTES = (wire.MAXIMUM_NUMBER_CHARACTERS + 4) * (MAXIMUM_POINTS + 8)

_Shapes = (tuple[list[float], msgspec.Raw, msgspec.Raw], tuple[list[float], msgspec.Raw], list[float])
"""(h, bound, points), (h, bound), or h alone."""


class _Construction(msgspec.Struct, forbid_unknown_fields=True):
    heights: list[str]
    denominator: str


@dataclass(frozen=True)
class _Steps:
    """Heights as integers in [0, unit]."""

    heights: tuple[int, ...]
    unit: int

    @property
    def surplus(self) -> int:
        """Twice the mass beyond n/2, in units: 0 when the integral is exactly 1."""
        return 2 * sum(self.heights) - len(self.heights) * self.unit


class _Invalid(Exception):
    """The answer is not one; the message is the reason."""


class ErdosMinOverlap:
    """Judge of `(h (n,), bound, points)` or of h alone; bound and points are optional and never used."""

    problem = "erdos_min_overlap"

    def grade(self, result: bytes) -> Grade:
        """Grade a program's result text. Same bytes, same grade; bad data is an invalid grade with its reason."""
        claimed = None
        try:
            heights, claimed = _decode(result)
            steps, repair = _repair(_from_doubles(heights))
        except _Invalid as invalid:
            return Grade(valid=False, reason=str(invalid), claimed=claimed)
        return _certified(steps, repair, claimed)

    def verify(self, construction: Any) -> Grade:
        """Re-derive the grade from a stored construction: no tolerance, no repair."""
        try:
            steps = _parse(construction)
            if surplus := steps.surplus:
                error = Fraction(surplus, len(steps.heights) * steps.unit)
                raise _Invalid(f"the construction's integral is off by {float(error):.3g}; it must be exactly 1")
        except _Invalid as invalid:
            return Grade(valid=False, reason=str(invalid))
        return _certified(steps, "", None)

    def checks(self, construction: Any) -> tuple[Check, ...]:
        """What the certificate of a construction rests on. Shift k of h against 1 - h runs from -(n-1) to n-1."""
        steps = _parse(construction)
        n, unit = len(steps.heights), steps.unit
        overlaps = _overlaps(steps)
        top = max(overlaps)
        room = ((min(a, unit - a), i) for i, a in enumerate(steps.heights))
        shifts = ((Fraction(2 * (top - x), n * unit**2), (k - n + 1,)) for k, x in enumerate(overlaps))
        return (
            Check("range", "0 <= h_i <= 1", 2 * n, *_tightest(room, unit)),
            family("integral", "(2/n) sum h_i = 1", [(Fraction(steps.surplus, n * unit), ())]),
            family("overlap", "(2/n) sum_i h_i (1 - h_(i+k)) <= value", shifts),
        )

    def offer(self, construction: Any) -> list[float]:
        """A stored construction as n heights, shape (n,), each rounded to the nearest double."""
        steps = _parse(construction)
        return [height / steps.unit for height in steps.heights]


def _decode(result: bytes) -> tuple[list[float], float | None]:
    if len(result) > _RESULT_BYTES:
        raise _Invalid(f"the result has {len(result)} bytes; {MAXIMUM_POINTS} heights take at most {_RESULT_BYTES}")
    if problem := wire.fault(result, _RESULT_BYTES):
        raise _Invalid(problem)
    heights, claimed = _parts(result)
    _check_count(len(heights))
    for i, height in enumerate(heights):
        if not -RANGE_TOLERANCE <= height <= 1 + RANGE_TOLERANCE:
            raise _Invalid(f"height {i} is {height!r}; heights must lie in [0, 1]")
    return heights, claimed


def _parts(result: bytes) -> tuple[list[float], float | None]:
    for shape in _Shapes:
        try:
            found: Any = msgspec.json.decode(result, type=shape)
        except msgspec.DecodeError:
            continue
        return (found[0], _claim(found[1])) if isinstance(found, tuple) else (found, None)
    raise _Invalid("the result must be (h, bound, points) or h alone, with h a list of finite numbers")


def _claim(raw: msgspec.Raw) -> float | None:
    try:
        return msgspec.json.decode(raw, type=float)
    except msgspec.DecodeError:
        return None


def _check_count(points: int) -> None:
    if not MINIMUM_POINTS <= points <= MAXIMUM_POINTS:
        raise _Invalid(f"h has {points} heights; this task needs {MINIMUM_POINTS} to {MAXIMUM_POINTS}")


def _parse(construction: Any) -> _Steps:
    try:
        data = msgspec.convert(construction, _Construction)
    except msgspec.ValidationError as error:
        raise _Invalid(f"not a stored step function: {error}") from None
    _check_count(len(data.heights))
    unit = _integer(data.denominator)
    heights = tuple(map(_integer, data.heights))
    if max(heights) > unit or unit < 1:
        raise _Invalid(f"the construction has a height of {_shown(max(heights))}/{_shown(unit)}; heights must lie in [0, 1]")
    if len(heights) * unit.bit_length() > BUDGET_BITS:
        allowed = BUDGET_BITS // len(heights)
        raise _Invalid(
            f"{len(heights)} heights over a denominator of {unit.bit_length()} bits; at most {allowed} bits are read of so many"
        )
    return _Steps(heights, unit)


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise _Invalid(f"{text[:40]!r} is not a non-negative integer of at most {_MAXIMUM_DIGITS} digits")
    return int(text)


def _shown(number: int) -> str:
    text = str(number)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"


def _tightest(room: Iterable[tuple[int, int]], unit: int) -> tuple[Fraction, tuple[int, ...]]:
    slack, at = min(room)
    return Fraction(slack, unit), (at,)


def _from_doubles(heights: Sequence[float]) -> _Steps:
    return _Steps(tuple(min(_UNIT, max(0, _nearest(height * _UNIT))) for height in heights), _UNIT)


def _nearest(number: float) -> int:
    # A double times a power of two is exact, and so is what lies beyond its whole part; adding a half first would not be.
    whole = math.floor(number)
    return whole + (number - whole >= 0.5)


def _repair(steps: _Steps) -> tuple[_Steps, str]:
    """Make the integral exactly 1 by whole units; says what was done ("" if nothing was).

    Equal shares for all heights that have room, and one unit more for the first ones, until nothing is left: the same function
    whatever was done to the sum in floats, and never one beyond [0, 1], which scaling would leave.

    Raises:
        _Invalid: the integral is off by more than the tolerance.
    """
    n, unit, surplus = len(steps.heights), steps.unit, steps.surplus
    if surplus == 0:
        return steps, ""
    error = Fraction(surplus, n * unit)
    if abs(error) > MASS_TOLERANCE:
        raise _Invalid(f"the heights sum to {float((1 + error) * n / 2):.9g}, not n/2 = {n / 2:g}; at most 0.1 % is repaired")
    # Raising h is lowering 1 - h.
    heights = _lowered(steps.heights, surplus // 2) if surplus > 0 else _raised(steps.heights, unit, -surplus // 2)
    repaired = _Steps(tuple(heights), unit)
    return repaired, f"heights moved by equal amounts to make the integral exactly 1; it was off by {float(error):.3g}"


def _raised(heights: Sequence[int], unit: int, amount: int) -> list[int]:
    return [unit - height for height in _lowered([unit - height for height in heights], amount)]


def _lowered(heights: Sequence[int], amount: int) -> list[int]:
    """Heights with `amount` less in all, none below 0. Each round either ends or empties a height; there are few rounds."""
    lowered = list(heights)
    while amount:
        positive = [i for i, height in enumerate(lowered) if height > 0]
        share, rest = divmod(amount, len(positive))
        for position, i in enumerate(positive):
            taken = min(lowered[i], share or int(position < rest))
            lowered[i] -= taken
            amount -= taken
    return lowered


def _certified(steps: _Steps, repair: str, claimed: float | None) -> Grade:
    common = math.gcd(steps.unit, *steps.heights)
    steps = _Steps(tuple(height // common for height in steps.heights), steps.unit // common)
    exact = Fraction(2 * max(_overlaps(steps)), len(steps.heights) * steps.unit**2)
    construction = {"heights": [str(height) for height in steps.heights], "denominator": str(steps.unit)}
    return Grade(valid=True, reason=repair, exact=exact, score=_round_up(exact), construction=construction, claimed=claimed)


def _overlaps(steps: _Steps) -> list[int]:
    """Σᵢ aᵢ (d - aᵢ₊ₖ) for k = -(n-1) .. n-1, shape (2n - 1,), in units squared, exactly."""
    complement = [steps.unit - height for height in steps.heights]
    return convolution(complement, steps.heights[::-1])


def _round_up(number: Fraction) -> float:
    nearest = number.numerator / number.denominator
    return math.nextafter(nearest, math.inf) if Fraction(nearest) < number else nearest
