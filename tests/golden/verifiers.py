"""Replays the answers that the reference verifiers were given, against the exact judges. Source: spec tasks 3, 4, 6, 7.

The target is the number a reference computes, within float error, and its verdict. A difference is named only after it has been
recomputed: the same judge must agree with the reference once the one rule in question is applied to the data.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from tasks.judges.autocorrelation import FirstAutocorrelation, SecondAutocorrelation
from tasks.judges.circle_packing import CirclePacking
from tasks.judges.erdos import MASS_TOLERANCE, MAXIMUM_POINTS, MINIMUM_POINTS, ErdosMinOverlap
from tasks.judging import Grade, TaskJudge
from tests.golden.outcome import RELATIVE, Case, number

KEYS = {"erdos", "circle_packing", "autocorrelation"}

_CAP = 1000.0
"""The references cut heights of an autocorrelation sequence to [0, 1000] and refuse a sum below 0.01."""
_LEAST_SUM = 0.01

_OTHER_TYPES = re.compile("float32|int64|tuple|array")


def replay_verifiers(data: dict[str, dict[str, Any]]) -> list[Case]:
    """All cases of the file, each group by its own judge."""
    return [
        *(_replay_overlap(f"erdos {name}", record) for name, record in data["erdos"].items()),
        *(_replay_packing(f"packing {name}", record) for name, record in data["circle_packing"].items()),
        *(_replay_sequence(f"autocorrelation {name}", record) for name, record in data["autocorrelation"].items()),
    ]


def _graded(judge: TaskJudge, answer: Any) -> Grade:
    """The answer as the child writes it, with the tokens NaN and Infinity where the file has words for them."""
    text = json.dumps(answer)
    return judge.grade(re.sub(r'"(-?(?:NaN|Infinity))"', r"\1", text).encode())


def _paid(reference: dict[str, Any]) -> float | None:
    """What a reference pays; None if it refuses (by raising, or by an infinite bound)."""
    value = number(reference["value"]) if reference["ok"] else math.nan
    return value if math.isfinite(value) else None


def _close(found: float | None, expected: float) -> bool:
    return found is not None and math.isclose(found, expected, rel_tol=RELATIVE)


def _numbers(values: list[Any]) -> list[float] | None:
    """The data, if it is nothing but finite numbers."""
    plain = all(type(value) in (int, float) and abs(value) < math.inf for value in values)
    try:
        return [float(value) for value in values] if plain else None
    except OverflowError:  # an integer beyond the doubles
        return None


def _compare(case: Case, where: str, grade: Grade, paid: float | None, kind: str) -> None:
    case.checks += 1
    if grade.score == paid or (paid is not None and _close(grade.score, paid)):
        return
    case.differ(where, f"found {grade.score!r} ({grade.reason}), the reference pays {paid!r}", kind)


# Erdős ----------------------------------------------------------------------------------------------------------------------
def _replay_overlap(name: str, record: dict[str, Any]) -> Case:
    case = Case(name)
    grade = _graded(ErdosMinOverlap(), [record["h_values"], record["reported_c5"], record["n_points"]])
    for tag in ("original_returns", "nanodiscover_returns"):
        paid = _paid(record[tag])
        _compare(case, tag, grade, paid, _why_overlap(record, grade, paid))
    return case


def _why_overlap(record: dict[str, Any], grade: Grade, paid: float | None) -> str:
    h = _numbers(record["h_values"])
    if h is None:
        return ""
    n, error = len(h), abs(sum(h) / (len(h) / 2) - 1) if h else 1.0
    if grade.score is None:
        if not MINIMUM_POINTS <= n <= MAXIMUM_POINTS:
            return "verifier_size"
        return "erdos_mass" if error > MASS_TOLERANCE else ""
    if paid is None:
        return _why_accepted(record, h, grade.score)
    # Paid the claim itself, which is another number than what the same function is worth.
    if paid == record["reported_c5"] and _close(_overlap(h), grade.score):
        return "self_reported"
    return "erdos_repair" if error > RELATIVE / 10 and abs(grade.score - paid) <= 2 * error else ""


def _why_accepted(record: dict[str, Any], h: list[float], score: float) -> str:
    rescaled_top = max(h) * (len(h) / 2) / sum(h)
    if max(h) > 1 or min(h) < 0 or rescaled_top > 1:
        return "erdos_repair"
    claim = number(record["reported_c5"])
    if not math.isclose(score, claim, rel_tol=1e-5, abs_tol=1e-4):
        return "self_reported"
    return "point_count" if record["n_points"] != len(h) else ""


def _overlap(h: list[float]) -> float | None:
    """C5 in floats by the definition: shares nothing with the judge."""
    n, mass = len(h), sum(h)
    if not mass:
        return None
    h = [height * n / 2 / mass for height in h]
    return 2 / n * max(sum(h[i] * (1 - h[i + k]) for i in range(max(0, -k), min(n, n - k))) for k in range(1 - n, n))


# Packings -------------------------------------------------------------------------------------------------------------------
def _replay_packing(name: str, record: dict[str, Any]) -> Case:
    case = Case(name)
    centers, radii, n = record["centers"], record["radii"], record["n"]
    grade = _graded(CirclePacking(n), [centers, radii, 0.0])
    counted = len(centers) == len(radii) == n
    # The original's checks take whatever number of circles they get; only with the right number do they say the same.
    for tag in ("nanodiscover_correct", *(("original_validate",) if counted else ())):
        accepted = _paid(record[tag]) == 1.0
        case.checks += 1
        if accepted != grade.valid:
            repaired = grade.valid and "shrunk" in grade.reason and grade.score < record["sum_radii"]
            case.differ(tag, f"valid {grade.valid} ({grade.reason}), there {accepted}", "packing_repair" if repaired else "")
    if grade.valid:
        assert grade.score is not None
        # A repair takes at most 1e-6 of each radius, or 2e-6 where a circle vanishes.
        case.near("sum", grade.score, record["sum_radii"], absolute=2e-6 * n if "shrunk" in grade.reason else 1e-15)
    return case


# Autocorrelation ------------------------------------------------------------------------------------------------------------
def _replay_sequence(name: str, record: dict[str, Any]) -> Case:
    case = Case(name)
    judges: dict[str, TaskJudge] = {"ac1": FirstAutocorrelation(), "ac2": SecondAutocorrelation()}
    for task, judge in judges.items():
        grade = _graded(judge, record["sequence"])
        for tag in (f"{task}_original", f"{task}_nanodiscover"):
            paid = _paid(record[tag])
            _compare(case, tag, grade, paid, _why_sequence(record, judge, grade, paid))
    return case


def _why_sequence(record: dict[str, Any], judge: TaskJudge, grade: Grade, paid: float | None) -> str:
    f = _numbers(record["sequence"])
    if f is None:
        return ""
    if paid is None and grade.valid:
        if sum(f) < _LEAST_SUM:
            # Scale does not matter: the same shape, large enough for the references, is worth the same here.
            larger = _graded(judge, [_CAP * height / max(f) for height in f])
            return "sequence_scale" if larger.score is not None and _close(grade.score, larger.score) else ""
        return "types" if _OTHER_TYPES.search(record["note"]) else ""
    cut = [min(max(height, 0.0), _CAP) for height in f]
    if paid is None or cut == f or not _close(_graded(judge, cut).score, paid):
        return ""
    return "sequence_negative" if min(f) < 0 else "sequence_cap"
