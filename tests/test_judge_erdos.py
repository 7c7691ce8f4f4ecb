"""The exact judge of Erdős' minimum overlap: published functions to their digits, exact repairs, hostile data that never scores."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.judges.erdos import ErdosMinOverlap
from tasks.judging import Grade

CONSTRUCTIONS = Path(__file__).parent / "data" / "constructions"
JUDGE = ErdosMinOverlap()
HALF_AN_ULP = Fraction(1, 2**55)
"""Of a double near 0.38: published values were made exact by another repair of the integral, within rounding."""


def published(name: str) -> list[float]:
    values: list[float] = json.loads((CONSTRUCTIONS / name).read_text())["values"]
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
    assert abs(grade.exact - Fraction(certified)) < HALF_AN_ULP
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


def test_a_surplus_scales_h_and_a_deficit_scales_its_complement() -> None:
    surplus, deficit = graded([1.0, 0.0005]), graded([1.0, 0.0, 0.9995, 0.0])
    for grade in (surplus, deficit):
        assert grade.valid, grade.reason
        check_certificate(grade)
    assert surplus.reason.startswith("h scaled")
    # Scaled up, the first height would leave [0, 1].
    assert deficit.reason.startswith("1 - h scaled")
    assert deficit.construction["heights"][0] == deficit.construction["denominator"]


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
        ({"heights": ["1", "1"], "denominator": "2" * 31}, "at most 30 digits"),
        (None, "not a stored step function"),
    ],
)
def test_a_stored_construction_must_hold_exactly(construction: Any, reason: str) -> None:
    grade = JUDGE.verify(construction)
    assert (grade.valid, grade.exact, grade.score) == (False, None, None)
    assert reason in grade.reason
