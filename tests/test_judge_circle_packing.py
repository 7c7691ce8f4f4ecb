"""The exact packing judge: published constructions to their digits, repairs that always hold, hostile data that never scores."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.judges.circle_packing import CirclePacking
from tasks.judging import Grade
from tests.constructions import FOLDER, read_files, read_table

PACKINGS = {name: content for name, content in read_files(FOLDER).items() if name.startswith("cp")}
CERTIFIED = read_table(FOLDER)

Circle = tuple[Fraction, Fraction, Fraction]


# A second opinion: fractions only, no integers over a common denominator, no code of the judge. ---------------------------------
def exact_circles(construction: Any) -> list[Circle]:
    denominator = int(construction["denominator"])
    return [tuple(Fraction(int(n), denominator) for n in circle) for circle in construction["circles"]]  # type: ignore[misc]


def holds_exactly(circles: list[Circle]) -> bool:
    for i, (x, y, r) in enumerate(circles):
        if r < 0 or x - r < 0 or x + r > 1 or y - r < 0 or y + r > 1:
            return False
        for u, v, s in circles[:i]:
            if (x - u) ** 2 + (y - v) ** 2 < (r + s) ** 2:
                return False
    return True


def float_violation(rows: list[tuple[float, float, float]]) -> float:
    """Worst violation in floats: an approximation that shares nothing with the judge."""
    worst = max(max(r - x, r - y, x + r - 1, y + r - 1) for x, y, r in rows)
    pairs = ((a, b) for i, a in enumerate(rows) for b in rows[:i])
    return max([worst, *((a[2] + b[2] - math.hypot(a[0] - b[0], a[1] - b[1])) / 2 for a, b in pairs)])


def result_of(rows: list[tuple[float, float, float]], total: float = 0.0) -> bytes:
    return json.dumps([[row[:2] for row in rows], [row[2] for row in rows], total]).encode()


def check_certificate(judge: CirclePacking, grade: Grade) -> None:
    """What every valid grade promises."""
    assert grade.exact is not None
    assert grade.score is not None
    circles = exact_circles(grade.construction)
    assert holds_exactly(circles)
    assert sum(r for _, _, r in circles) == grade.exact
    assert Fraction(grade.score) <= grade.exact < Fraction(math.nextafter(grade.score, math.inf))
    again = judge.verify(json.loads(json.dumps(grade.construction)))
    assert (again.valid, again.exact, again.score, again.construction) == (True, grade.exact, grade.score, grade.construction)


@pytest.mark.parametrize("name", PACKINGS)
def test_published_constructions_certify_to_their_digits(name: str) -> None:
    data = PACKINGS[name]
    judge = CirclePacking(CERTIFIED[name].n)
    if "circles_int" in data:
        grade = judge.verify({"circles": data["circles_int"], "denominator": str(10**40)})
    else:
        grade = judge.grade(result_of([tuple(row) for row in data["circles"]]))
    assert grade.valid, grade.reason
    check_certificate(judge, grade)
    assert grade.exact is not None
    digits = CERTIFIED[name].value
    places = len(digits.partition(".")[2])
    assert f"{math.floor(grade.exact * 10**places)}" == digits.replace(".", "").lstrip("0")


coordinate = st.floats(0, 1)
radius = st.one_of(st.floats(0, 0.6), st.floats(0, 1e-5), st.sampled_from([0.0, 5e-324, 0.25, 0.5]))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(coordinate, coordinate, radius), min_size=1, max_size=6))
def test_any_packing_is_certified_or_refused(rows: list[tuple[float, float, float]]) -> None:
    judge = CirclePacking(len(rows))
    grade = judge.grade(result_of(rows))
    violation = float_violation(rows)
    if violation > 1e-6 + 1e-12:
        assert not grade.valid
        assert grade.exact is None
        assert grade.score is None
        assert grade.construction is None
    elif violation < 1e-6 - 1e-12:
        assert grade.valid, grade.reason
    if grade.valid:
        check_certificate(judge, grade)
        assert grade.exact is not None
        assert grade.exact <= sum(Fraction(row[2]) for row in rows)  # a repair never adds


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.floats(-4e-7, 4e-7), st.floats(-4e-7, 4e-7), st.floats(-2e-7, 2e-7)), min_size=36, max_size=36),
)
def test_small_violations_are_repaired_at_no_profit(k: int, noise: list[tuple[float, float, float]]) -> None:
    """A k x k grid of touching circles, shaken within the tolerance: always repaired, never worth more than it really is."""
    r = 1 / (2 * k)
    cells = [(i, j) for i in range(k) for j in range(k)]
    rows = [((2 * i + 1) * r + dx, (2 * j + 1) * r + dy, r + dr) for (i, j), (dx, dy, dr) in zip(cells, noise, strict=False)]
    judge = CirclePacking(k * k)
    grade = judge.grade(result_of(rows))
    if float_violation(rows) < 1e-6 - 1e-12:
        assert grade.valid, grade.reason
    if grade.valid:
        check_certificate(judge, grade)
        assert grade.exact is not None
        assert grade.exact <= Fraction(k, 2) + Fraction(4 * k * k, 10**7)


def test_exact_contact_is_valid_without_repair() -> None:
    grade = CirclePacking(4).grade(result_of([(x, y, 0.25) for x in (0.25, 0.75) for y in (0.25, 0.75)]))
    assert (grade.valid, grade.reason, grade.exact, grade.score) == (True, "", Fraction(1), 1.0)


def test_an_overlap_of_one_unit_in_the_last_place_is_seen() -> None:
    r = math.nextafter(0.25, 1)
    grade = CirclePacking(2).grade(result_of([(0.25, 0.5, 0.25), (0.75, 0.5, r)]))
    assert grade.valid
    assert grade.exact is not None
    assert grade.exact < Fraction(1, 2)
    assert "shrunk" in grade.reason


def test_a_circle_smaller_than_the_violation_stops_at_zero_and_the_rest_gives_more() -> None:
    # The small circle has 1e-9 to give, the overlap needs 4e-7 from both: the large one gives twice.
    rows = [(0.5, 0.5, 0.5), (0.5 + 0.5 - 8e-7, 0.5, 1e-9)]
    judge = CirclePacking(2)
    grade = judge.grade(result_of(rows))
    assert grade.valid, grade.reason
    check_certificate(judge, grade)
    circles = exact_circles(grade.construction)
    assert circles[1][2] == 0
    assert Fraction(1, 2) - circles[0][2] > Fraction(8, 10**7)


def test_a_centre_outside_the_square_cannot_be_repaired() -> None:
    grade = CirclePacking(1).grade(result_of([(-1e-7, 0.5, 0.0)]))
    assert not grade.valid
    assert "outside" in grade.reason


def test_claims_are_logged_and_never_used() -> None:
    grade = CirclePacking(1).grade(b"[[[0.5,0.5]],[0.25],999.0]")
    assert (grade.score, grade.claimed) == (0.25, 999.0)
    assert CirclePacking(1).grade(b"[[[0.5,0.5]],[0.25]]").claimed is None
    assert CirclePacking(1).grade(b"[[[0.5,0.5]],[0.25],[7]]").score == 0.25


HOSTILE = {
    "nothing": b"",
    "a number": b"1",
    "an object": b'{"centers":[[0.5,0.5]],"radii":[0.5]}',
    "NaN": b"[[[NaN,0.5]],[0.1],0]",
    "Infinity": b"[[[0.5,0.5]],[Infinity],0]",
    "overflow": b"[[[0.5,0.5]],[1e999],0]",
    "a string": b'[[["0.5",0.5]],[0.1],0]',
    "a bool": b"[[[true,0.5]],[0.1],0]",
    "null": b"[[[null,0.5]],[0.1],0]",
    "a negative radius": b"[[[0.5,0.5]],[-0.1],0]",
    "three coordinates": b"[[[0.5,0.5,0.5]],[0.1],0]",
    "one coordinate": b"[[[0.5]],[0.1],0]",
    "radii in a column": b"[[[0.5,0.5]],[[0.1]],0]",
    "two circles": b"[[[0.5,0.5],[0.1,0.1]],[0.1,0.1],0]",
    "radii missing": b"[[[0.5,0.5]],[],0]",
    "four parts": b"[[[0.5,0.5]],[0.1],0,0]",
    "one part": b"[[[0.5,0.5]]]",
    "a far centre": b"[[[1.7e308,0.5]],[1.7e308],0]",
    "a huge integer": b"[[[0.5,0.5]],[" + b"9" * 26 + b"],0]",
    "a long number": b"[[[0.5,0.5]],[0." + b"1" * 70 + b"],0]",
    "deep": b"[" * 700 + b"]" * 700,
    "deeper": b"[" * 100_000 + b"]" * 100_000,
    "wide": b"[" + b"[]," * 5_000_000 + b"[]]",
    "many numbers": b"[[" + b"[0.5,0.5]," * 1_500_000 + b"[0.5,0.5]],[0.1],0]",
    "cut off": b"[[[0.5,0.5]],[0.1",
    "not text": b"\xff\xfe\x00",
    "trailing": b"[[[0.5,0.5]],[0.1],0]]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_data_is_invalid_with_a_one_line_reason(name: str) -> None:
    grade = CirclePacking(1).grade(HOSTILE[name])
    assert not grade.valid
    assert (grade.exact, grade.score, grade.construction) == (None, None, None)
    assert grade.reason.isprintable()
    assert 0 < len(grade.reason) < 250


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(alphabet="[]0123456789.,eE-+ ", max_size=60).map(str.encode)))
def test_no_bytes_make_the_judge_raise(data: bytes) -> None:
    grade = CirclePacking(1).grade(data)
    assert grade.valid == (grade.exact is not None)


def tampered() -> dict[str, Any]:
    grade = CirclePacking(1).grade(b"[[[0.5,0.5]],[0.25],0]")
    construction: dict[str, Any] = grade.construction
    return construction


@pytest.mark.parametrize(
    "change",
    [
        {"circles": [["2", "2", "3"]]},
        {"circles": [["2", "2", "-1"]]},
        {"circles": [["2", "2", "1"], ["2", "2", "1"]]},
        {"circles": [["2", "2", 1]]},
        {"circles": [["2", "2", "0x1"]]},
        {"circles": [["2", "2", "9" * 5000]]},
        {"denominator": "0"},
        {"denominator": "-4"},
        {"denominator": "4.0"},
        {"extra": 1},
    ],
)
def test_a_tampered_construction_is_refused(change: dict[str, Any]) -> None:
    assert CirclePacking(1).verify(tampered()).score == 0.25
    assert tampered() == {"circles": [["2", "2", "1"]], "denominator": "4"}
    grade = CirclePacking(1).verify(tampered() | change)
    assert not grade.valid
    assert grade.reason


def test_a_construction_is_offered_as_doubles_with_radii_rounded_down() -> None:
    rows = [(0.1, 0.1, 0.1), (0.30000000000000004, 0.1, 0.1)]
    judge = CirclePacking(2)
    grade = judge.grade(result_of(rows))
    offered = judge.offer(grade.construction)
    exact = exact_circles(grade.construction)
    assert [len(row) for row in offered] == [3, 3]
    assert all(Fraction(row[2]) <= circle[2] for row, circle in zip(offered, exact, strict=True))
    assert offered[0] == pytest.approx(rows[0])
