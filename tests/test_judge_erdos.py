"""The exact judge of Erdős' minimum overlap: published functions to their digits, exact repairs, hostile data that never scores."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.judges.erdos import ErdosMinOverlap
from tasks.judging import Grade
from tests.constructions import FOLDER, read_files

JUDGE = ErdosMinOverlap()
UNIT = 2**52


def published(name: str) -> list[float]:
    values: list[float] = read_files(FOLDER)[name]["values"]
    return values


def graded(answer: Any) -> Grade:
    return JUDGE.grade(json.dumps(answer).encode())


# A second opinion: fractions and the definition, no code of the judge. -----------------------------------------------------------
def overlap(h: list[Fraction]) -> Fraction:
    n = len(h)
    sums = (sum((h[i] * (1 - h[i + k]) for i in range(max(0, -k), min(n, n - k))), Fraction(0)) for k in range(1 - n, n))
    return Fraction(2, n) * max(sums)


def check_certificate(grade: Grade) -> None:
    """What every valid grade promises."""
    assert grade.exact is not None
    assert grade.score is not None
    denominator = int(grade.construction["denominator"])
    h = [Fraction(int(a), denominator) for a in grade.construction["heights"]]
    assert all(0 <= height <= 1 for height in h)
    assert 2 * sum(h) == len(h)
    assert overlap(h) == grade.exact
    assert Fraction(math.nextafter(grade.score, -math.inf)) < grade.exact <= Fraction(grade.score)
    again = JUDGE.verify(json.loads(json.dumps(grade.construction)))
    assert (again.valid, again.exact, again.score, again.construction) == (True, grade.exact, grade.score, grade.construction)


@pytest.mark.parametrize(
    ("name", "certified"),
    [("erdos_haugland_51.json", "0.3809268534330869830757"), ("erdos_alphaevolve_95.json", "0.3809230351084501519782")],
)
def test_published_functions_certify_to_their_digits(name: str, certified: str) -> None:
    grade = graded([published(name), 0.1, 7])
    assert grade.valid, grade.reason
    check_certificate(grade)
    assert grade.exact is not None
    assert math.ceil(grade.exact * 10**22) == int(certified.replace(".", ""))
    assert grade.claimed == 0.1


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.floats(-1.5e-3, 1.5e-3))
def test_any_function_is_certified_or_refused(shape: list[float], error: float) -> None:
    """A function and its mirror image 1 - h have integral 1 together; the error is then added on top."""
    h = [min(1.0, max(0.0, height * (1 + error))) for height in (*shape, *(1 - height for height in shape))]
    off = abs(sum((Fraction(height) for height in h), Fraction(0)) / len(shape) - 1)
    grade = graded(h)
    if off > Fraction(1001, 10**6):
        assert not grade.valid
        assert (grade.exact, grade.score, grade.construction) == (None, None, None)
    elif off < Fraction(999, 10**6):
        assert grade.valid, grade.reason
    if grade.valid:
        check_certificate(grade)


def units_of(grade: Grade) -> list[int]:
    """Heights in units of 2^-52."""
    return [int(a) * (UNIT // int(grade.construction["denominator"])) for a in grade.construction["heights"]]


@pytest.mark.parametrize(
    ("h", "expected"),
    [
        # A surplus of 3 units: one from each, and the first gives the third.
        ([0.5 + 3 / UNIT, 0.5], [UNIT // 2 + 1, UNIT // 2 - 1]),
        # A height that has less to give than its share stops at 0, and the others give the rest.
        ([2 / UNIT, 0.9, 0.6 + 8 / UNIT, 0.5], None),
        # A height at 1 has no room above.
        ([1.0, 0.0, 0.4995, 0.5], None),
        # Half a unit is rounded up; what that adds is taken from the first height.
        ([0.5 + 0.5 / UNIT, 0.5 - 0.5 / UNIT], [UNIT // 2 + 0, UNIT // 2]),
    ],
)
def test_the_integral_is_repaired_by_equal_whole_units(h: list[float], expected: list[int] | None) -> None:
    grade = graded(h)
    assert grade.valid, grade.reason
    check_certificate(grade)
    units = units_of(grade)
    assert expected is None or units == expected
    moved = [a - round(Fraction(x) * UNIT) for a, x in zip(units, h, strict=True)]
    free = [m for m, a in zip(moved, units, strict=True) if 0 < a < UNIT]
    assert max(free) - min(free) <= 1
    assert all(abs(m) <= max(map(abs, free)) for m in moved)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 1e-5, 1 - 1e-5])), min_size=2, max_size=40),
    st.floats(-9e-4, 9e-4),
)
def test_a_repair_never_helps_beyond_what_it_moves(shape: list[float], error: float) -> None:
    """What is scored is the repaired function itself; it is the given one to within the repair."""
    h = [min(1.0, max(0.0, height + error)) for height in (*shape, *(1 - height for height in shape))]
    grade = graded(h)
    if not grade.valid:
        return
    check_certificate(grade)
    n, given = len(h), [Fraction(height) for height in h]
    moved = sum((abs(Fraction(a, UNIT) - x) for a, x in zip(units_of(grade), given, strict=True)), Fraction(0))
    off = abs(sum(given) - Fraction(n, 2))
    assert moved <= off + Fraction(2 * n, UNIT)
    assert grade.exact is not None
    assert abs(grade.exact - overlap(given)) <= Fraction(4, n) * (moved + Fraction(n, UNIT))


def test_heights_that_empty_one_after_the_other_are_repaired() -> None:
    """As many heights as are read, of all sizes, and a surplus as large as is repaired."""
    small = [2.0 ** -(k % 60) * 1e-3 for k in range(9_900)]
    grade = graded([*small, *[(10_000 * 1.0009 - sum(small)) / 10_100] * 10_100])
    assert grade.valid, grade.reason
    units = units_of(grade)
    assert 2 * sum(units) == len(units) * UNIT
    assert 0 == min(units) < max(units) < UNIT
    assert JUDGE.verify(grade.construction).exact == grade.exact


def test_a_function_of_integral_one_is_scored_as_it_is() -> None:
    grade = graded([0.5] * 50)
    assert (grade.reason, grade.exact, grade.score) == ("", Fraction(1, 2), 0.5)
    assert grade.construction == {"heights": ["1"] * 50, "denominator": "2"}
    assert JUDGE.offer(grade.construction) == [0.5] * 50


def test_an_offer_is_worth_the_same_within_rounding() -> None:
    grade = graded(published("erdos_haugland_51.json"))
    again = graded(JUDGE.offer(grade.construction))
    assert again.score == pytest.approx(grade.score, rel=1e-15)


def test_reported_numbers_change_nothing() -> None:
    h = published("erdos_haugland_51.json")
    alone = graded(h)
    assert alone.claimed is None
    for answer in ([h, 0.1, 51], [h, 0.38, 51.9999999999], [h, 999], [h, [], [1, 2]]):
        grade = graded(answer)
        assert (grade.score, grade.construction) == (alone.score, alone.construction)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (b"", "empty"),
        (b'[[0.5, 0.5], 0.38, "2"]', "only finite numbers"),
        (b"[[NaN, 0.5], 0.38, 2]", "NaN"),
        (b"[[true, 0.5], 0.38, 2]", "true"),
        (b"[[0.5], 0.5, 1]", "1 heights"),
        (b"[[], 0.5, 0]", "0 heights"),
        (b"[[[0.5, 0.5]], 0.5, 2]", "h alone"),
        (b"[[0.5, 0.5], 0.5, 2, 1]", "h alone"),
        (b"0.5", "h alone"),
        (b"[[0, 0, 0, 0], 0, 4]", "sum to 0"),
        (b"[[1e-300, 1e-300], 0.5, 2]", "0.1 %"),
        (b"[[0.501, 0.502], 0.5, 2]", "0.1 %"),
        (b"[[1.1, -0.1], 0.5, 2]", "height 0 is 1.1"),
        (b"[[-0.1, 1.0, 0.6], 0.5, 3]", "height 0 is -0.1"),
        (b"[" + b"0.5," * 20_000 + b"0.5]", "20001 heights"),
        (b"[[" + b"0.5," * 600_000 + b"0.5], 0.5, 2]", "bytes"),
    ],
)
def test_hostile_results_never_score(result: bytes, reason: str) -> None:
    grade = JUDGE.grade(result)
    assert (grade.valid, grade.exact, grade.score, grade.construction) == (False, None, None, None)
    assert reason in grade.reason


def test_half_precision_is_worth_what_it_is() -> None:
    h = published("erdos_haugland_51.json")
    coarse = graded([round(height * 1024) / 1024 for height in h])
    assert coarse.valid, coarse.reason
    check_certificate(coarse)
    assert coarse.score is not None
    assert coarse.score > 0.38093


@pytest.mark.parametrize(
    ("construction", "reason"),
    [
        ({"heights": ["1", "1"], "denominator": "3"}, "off by -0.333"),
        ({"heights": ["3", "-1"], "denominator": "2"}, "'-1' is not"),
        ({"heights": ["3", "0"], "denominator": "2"}, "height of 3/2"),
        ({"heights": ["0", "0"], "denominator": "0"}, "height of 0/0"),
        ({"heights": ["1"], "denominator": "2"}, "1 heights"),
        ({"heights": [1, 1], "denominator": "2"}, "not a stored step function"),
        ({"heights": ["1", "1"], "denominator": "2", "score": 0}, "not a stored step function"),
        ({"heights": ["1", "1"], "denominator": "2" * 1001}, "at most 1000 digits"),
        ({"heights": ["1"] * 20_000, "denominator": "2" * 300}, "over a denominator of 995 bits; at most 838 bits"),
        (None, "not a stored step function"),
    ],
)
def test_a_stored_construction_must_hold_exactly(construction: Any, reason: str) -> None:
    grade = JUDGE.verify(construction)
    assert (grade.valid, grade.exact, grade.score) == (False, None, None)
    assert reason in grade.reason
