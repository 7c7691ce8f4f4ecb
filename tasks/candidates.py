"""The files that people have constructions in, read into the two things that a judge takes.

    a bare answer                [h, bound, points], [[centers], [radii], total], [a, ...]: what a program returns
    {"values": [...]}            step heights as doubles                                     -> an answer, repaired as any is
    {"circles": [[x, y, r]...]}  circles as doubles                                          -> an answer, repaired as any is
    {"circles_int": [["x", "y", "r"]...], "scale": "1e40"}   integers over a common scale    -> exact, nothing is repaired
    {"circles": [...], "denominator": "d"}, {"heights": [...], ...}    a stored construction -> exact, nothing is repaired
    {"construction": {...}, ...} a certificate, or the verdict of `tttd judge --json`        -> exact, nothing is repaired

The exact form of every problem is decimal integers as strings over one common denominator, which holds any rational construction;
each judge's module documents its own. Knows no judge: whether the numbers make a construction is the judge's to say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final

MAXIMUM_FILE_BYTES: Final = 64 << 20
"""An exact construction of 100 000 heights has 5 MB."""

_MAXIMUM_SCALE_DIGITS: Final = 1000

_STORED_KEYS: Final = frozenset({"heights", "denominator"})


class CandidateError(Exception):
    """A file holds no construction in a form that is read here; says what was found."""


@dataclass(frozen=True)
class Candidate:
    """A construction somebody has, as a judge takes it: exactly one of `result` and `construction` is given."""

    result: bytes | None = None
    """JSON text as a program returns it, for `grade`: doubles, repaired within the tolerances."""
    construction: Any = None
    """A stored construction, for `verify`: exact."""
    task: str | None = None
    """The task that the file names."""
    claimed: float | None = None
    """The score that the file claims."""


def read_candidate(data: bytes) -> Candidate:
    """Recognise the form of a JSON file.

    Raises:
        CandidateError: too long, no JSON, or none of the forms above.
    """
    if len(data) > MAXIMUM_FILE_BYTES:
        raise CandidateError(f"the file has {len(data)} bytes; at most {MAXIMUM_FILE_BYTES} are read")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested too deep
        raise CandidateError(f"the file is not JSON: {error}") from None
    if isinstance(found, list):
        return Candidate(result=data)
    if not isinstance(found, dict):
        raise CandidateError(f"the file holds a {type(found).__name__}; a construction is a list or an object")
    task = found.get("task")
    return _of_object(found, task if isinstance(task, str) else None, _number(found.get("claimed")))


def _of_object(found: dict[str, Any], task: str | None, claimed: float | None) -> Candidate:
    if found.get("construction") is not None:
        return Candidate(construction=found["construction"], task=task, claimed=claimed)
    if "circles_int" in found:
        return Candidate(construction=_scaled(found), task=task, claimed=claimed)
    if "values" in found:
        return Candidate(result=json.dumps(found["values"]).encode(), task=task, claimed=claimed)
    if "circles" in found and "denominator" not in found:
        return Candidate(result=_circles(found["circles"]), task=task, claimed=claimed)
    stored = {key: found[key] for key in ("circles", "heights", "denominator") if key in found}
    if stored.keys() - {"denominator"}:
        return Candidate(construction=stored, task=task, claimed=claimed)
    keys = ", ".join(sorted(found)[:12]) or "none"
    raise CandidateError(f"the file has the keys {keys}; give it one of construction, values, circles, circles_int, heights")


def _circles(rows: Any) -> bytes:
    if not (isinstance(rows, list) and all(isinstance(row, list) and len(row) == 3 for row in rows)):
        raise CandidateError("`circles` must be rows [x, y, r]")
    return json.dumps([[row[:2] for row in rows], [row[2] for row in rows]]).encode()


def _scaled(found: dict[str, Any]) -> dict[str, Any]:
    text = str(found.get("scale", "1"))
    try:
        scale = Decimal(text)
    except InvalidOperation:
        raise CandidateError(f"`scale` is {text[:40]!r}, not a number such as 1e40") from None
    if not (scale.is_finite() and scale >= 1 and scale.adjusted() < _MAXIMUM_SCALE_DIGITS and scale == scale.to_integral_value()):
        raise CandidateError(f"`scale` is {text[:40]!r}; it must be a whole number below 1e{_MAXIMUM_SCALE_DIGITS}")
    rows = found["circles_int"]
    if not (isinstance(rows, list) and all(isinstance(row, list) for row in rows)):
        raise CandidateError("`circles_int` must be rows [x, y, r]")
    return {"circles": [[str(number) for number in row] for row in rows], "denominator": str(int(scale))}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e308:  # NaN and Infinity are no claims
        return None
    return float(value)
