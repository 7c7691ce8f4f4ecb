"""Circle packing in the unit square: n disjoint circles inside [0,1]², maximise the sum of the radii. Source: spec tasks 4 and 5.

Everything is decided in integers. A double is an exact rational, so all coordinates are written over one common denominator
with 128 bits to spare, and distances are integer square roots, rounded down. A tolerance buys nothing: radii shrink by the
exact worst violation, every inequality is checked again with none, and the sum is rounded down.

Knows nothing of programs or sandboxes. A construction is stored as

    {"circles": [["x", "y", "r"], ...], "denominator": "d"}

with decimal integers in lowest common terms: circle = (x/d, y/d, r/d), exactly. Any rational packing has this form.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import msgspec

from tasks.judges import wire
from tasks.judges.checks import Check, family
from tasks.judging import Grade

TOLERANCE = Fraction(1, 10**6)
"""Largest violation that is repaired; beyond it the answer is invalid."""

_GUARD_BITS = 128
"""Extra bits of the common denominator: square roots are short by less than 2^-128."""

_MAXIMUM_DIGITS = 2000
"""Of one integer in a stored construction; doubles need at most about 370."""

_INTEGER = re.compile(rf"-?[0-9]{{1,{_MAXIMUM_DIGITS}}}")

_RESULT_BYTES_PER_CIRCLE = 3 * (wire.MAXIMUM_NUMBER_CHARACTERS + 4)

_Centers = list[tuple[float, float]]
_Radii = list[float]

_Triple = tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw]
_Pair = tuple[msgspec.Raw, msgspec.Raw]


class _Construction(msgspec.Struct, forbid_unknown_fields=True):
    circles: list[tuple[str, str, str]]
    denominator: str


@dataclass(frozen=True)
class _Packing:
    """Circles as integers over one denominator."""

    circles: tuple[tuple[int, int, int], ...]
    unit: int

    def with_radii(self, radii: Sequence[int]) -> _Packing:
        circles = tuple((x, y, r) for (x, y, _), r in zip(self.circles, radii, strict=True))
        return _Packing(circles, self.unit)


class _Invalid(Exception):
    """The answer is not one; the message is the reason."""


class CirclePacking:
    """Judge of `(centers (n,2), radii (n,), total)`; the total is optional and never used.

    Args:
        circles: n, the exact number of circles.
    """

    problem = "circle_packing"

    def __init__(self, circles: int) -> None:
        if circles < 1:
            raise ValueError(f"circles={circles}; a packing has at least 1")
        self.circles = circles

    def grade(self, result: bytes) -> Grade:
        """Grade a program's result text. Same bytes, same grade; bad data is an invalid grade with its reason."""
        claimed = None
        try:
            centers, radii, claimed = self._decode(result)
            packing, repair = _repair(_from_doubles(centers, radii))
        except _Invalid as invalid:
            return Grade(valid=False, reason=str(invalid), claimed=claimed)
        return _certified(packing, repair, claimed)

    def verify(self, construction: Any) -> Grade:
        """Re-derive the grade from a stored construction: no tolerance, no repair."""
        try:
            packing = self._parse(construction)
            if any(r < 0 for _, _, r in packing.circles):
                raise _Invalid("the construction has a negative radius")
            violation = _worst_violation(packing)
            if violation > 0:
                raise _Invalid(f"the construction violates a constraint by {_size(violation, packing)}; it must hold exactly")
        except _Invalid as invalid:
            return Grade(valid=False, reason=str(invalid))
        return _certified(packing, "", None)

    def checks(self, construction: Any) -> tuple[Check, ...]:
        """What the certificate of a construction rests on."""
        packing = self._parse(construction)
        unit, circles = packing.unit, packing.circles
        walls = ((min(x - r, y - r, unit - x - r, unit - y - r), i) for i, (x, y, r) in enumerate(circles))
        wall, at = min(walls)
        return (
            family("radii", "r_i >= 0", ((Fraction(r, unit), (i,)) for i, (_, _, r) in enumerate(circles))),
            Check("walls", "r_i <= x_i <= 1 - r_i and r_i <= y_i <= 1 - r_i", 4 * len(circles), Fraction(wall, unit), (at,)),
            family("pairs", "(x_i - x_j)^2 + (y_i - y_j)^2 >= (r_i + r_j)^2", _pair_slacks(packing)),
        )

    def offer(self, construction: Any) -> list[list[float]]:
        """A stored construction as rows (x, y, r) of doubles, shape (n, 3), radii rounded down."""
        packing = self._parse(construction)
        unit = packing.unit
        return [[x / unit, y / unit, _round_down(Fraction(r, unit))] for x, y, r in packing.circles]

    def _decode(self, result: bytes) -> tuple[_Centers, _Radii, float | None]:
        limit = _RESULT_BYTES_PER_CIRCLE * (self.circles + 8)
        if len(result) > limit:
            raise _Invalid(f"the result has {len(result)} bytes; {self.circles} circles take at most {limit}")
        if problem := wire.fault(result, limit):
            raise _Invalid(problem)
        raw_centers, raw_radii, raw_total = _parts(result)
        centers = _typed(raw_centers, _Centers, f"centers must be {self.circles} pairs (x, y)")
        radii = _typed(raw_radii, _Radii, f"radii must be {self.circles} numbers")
        for name, found in (("centers", len(centers)), ("radii", len(radii))):
            if found != self.circles:
                raise _Invalid(f"{found} {name}; this task needs exactly {self.circles}")
        for i, r in enumerate(radii):
            if r < 0:
                raise _Invalid(f"radius {i} is {r!r}; radii must not be negative")
        return centers, radii, _claim(raw_total)

    def _parse(self, construction: Any) -> _Packing:
        try:
            data = msgspec.convert(construction, _Construction)
        except msgspec.ValidationError as error:
            raise _Invalid(f"not a stored packing: {error}") from None
        if len(data.circles) != self.circles:
            raise _Invalid(f"the construction has {len(data.circles)} circles; this task needs exactly {self.circles}")
        unit = _integer(data.denominator)
        if unit < 1:
            raise _Invalid(f"the construction's denominator is {unit}; it must be positive")
        circles = tuple((_integer(x), _integer(y), _integer(r)) for x, y, r in data.circles)
        # The guard bits come back on: distances must round down as finely as when the packing was graded.
        return _scaled(_Packing(circles, unit), _GUARD_BITS)


def _parts(result: bytes) -> tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw | None]:
    try:
        return msgspec.json.decode(result, type=_Triple)
    except msgspec.DecodeError:
        pass
    try:
        return (*msgspec.json.decode(result, type=_Pair), None)
    except msgspec.DecodeError:
        raise _Invalid("the result must be (centers, radii, total)") from None


def _typed(raw: msgspec.Raw, kind: Any, expected: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise _Invalid(f"{expected}: {error}") from None


def _claim(raw: msgspec.Raw | None) -> float | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=float)
    except msgspec.DecodeError:
        return None


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise _Invalid(f"{text[:40]!r} is not an integer of at most {_MAXIMUM_DIGITS} digits")
    return int(text)


def _from_doubles(centers: _Centers, radii: _Radii) -> _Packing:
    ratios = [number.as_integer_ratio() for (x, y), r in zip(centers, radii, strict=True) for number in (x, y, r)]
    unit = max(denominator for _, denominator in ratios)  # powers of two: the largest is the common one
    numbers = [numerator * (unit // denominator) for numerator, denominator in ratios]
    circles = tuple(zip(numbers[0::3], numbers[1::3], numbers[2::3], strict=True))
    return _scaled(_Packing(circles, unit), _GUARD_BITS)


def _scaled(packing: _Packing, bits: int) -> _Packing:
    circles = tuple((x << bits, y << bits, r << bits) for x, y, r in packing.circles)
    return _Packing(circles, packing.unit << bits)


def _worst_violation(packing: _Packing) -> int:
    """The least amount, in units, by which all radii must shrink so that every inequality holds; 0 or less if all hold.

    A boundary r <= x <= 1 - r costs its own violation, an overlapping pair half its overlap, rounded up. Distances are rounded
    down, so the amount is never too small.
    """
    unit, circles = packing.unit, packing.circles
    worst = max(max(r - x, r - y, x + r - unit, y + r - unit) for x, y, r in circles)
    for i, (x, y, r) in enumerate(circles):
        for u, v, s in circles[i + 1 :]:
            square = (x - u) ** 2 + (y - v) ** 2
            # Most pairs are far apart, and squares tell so without a root.
            if (r + s) ** 2 > square:
                overlap = r + s - math.isqrt(square)
                worst = max(worst, (overlap + 1) // 2)
    return worst


def _pair_slacks(packing: _Packing) -> Iterator[tuple[Fraction, tuple[int, ...]]]:
    for (i, (x, y, r)), (j, (u, v, s)) in itertools.combinations(enumerate(packing.circles), 2):
        yield Fraction((x - u) ** 2 + (y - v) ** 2 - (r + s) ** 2, packing.unit**2), (i, j)


def _repair(packing: _Packing) -> tuple[_Packing, str]:
    """Shrink the radii until every inequality holds exactly; says what was done ("" if nothing was).

    Raises:
        _Invalid: the worst violation exceeds the tolerance, or a centre lies outside the square.
    """
    violation = _worst_violation(packing)
    if violation <= 0:
        return packing, ""
    if Fraction(violation, packing.unit) > TOLERANCE:
        size = _size(violation, packing)
        raise _Invalid(f"worst violation {size} (half an overlap, or outside the square); at most 1e-6 is repaired")
    # A circle smaller than the violation stops at radius 0 and no longer gives its half; the others then give twice.
    for shrink in (violation, 2 * violation):
        repaired = packing.with_radii([max(0, r - shrink) for _, _, r in packing.circles])
        if _worst_violation(repaired) <= 0:
            return repaired, f"radii shrunk by {_size(shrink, packing)} to remove the worst violation"
    raise _Invalid("a centre lies outside the unit square")


def _size(violation: int, packing: _Packing) -> str:
    # Numbers near the largest double, or of 2000 digits, have no float: beyond the square it does not matter by how much.
    return "more than 1" if violation > packing.unit else f"{violation / packing.unit:.3g}"


def _certified(packing: _Packing, repair: str, claimed: float | None) -> Grade:
    exact = Fraction(sum(r for _, _, r in packing.circles), packing.unit)
    return Grade(
        valid=True,
        reason=repair,
        exact=exact,
        score=_round_down(exact),
        construction=_construction(packing),
        claimed=claimed,
    )


def _construction(packing: _Packing) -> dict[str, Any]:
    common = math.gcd(packing.unit, *(number for circle in packing.circles for number in circle))
    circles = [[str(number // common) for number in circle] for circle in packing.circles]
    return {"circles": circles, "denominator": str(packing.unit // common)}


def _round_down(number: Fraction) -> float:
    nearest = number.numerator / number.denominator
    return math.nextafter(nearest, -math.inf) if Fraction(nearest) > number else nearest
