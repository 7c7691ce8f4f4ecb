"""The exact judges of both autocorrelation inequalities: published sequences to their digits, hostile data that never scores."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.judges.autocorrelation import FirstAutocorrelation, SecondAutocorrelation
from tasks.judges.convolution import autoconvolution, convolution
from tasks.judging import Grade, TaskJudge
from tests.constructions import FOLDER, read_files

FIRST, SECOND = FirstAutocorrelation(), SecondAutocorrelation()
BOTH = pytest.mark.parametrize("judge", [FIRST, SECOND], ids=["first", "second"])


def published(name: str) -> list[float]:
    values: list[float] = read_files(FOLDER)[name]["values"]
    return values


def graded(judge: TaskJudge, answer: Any) -> Grade:
    return judge.grade(json.dumps(answer).encode())


# A second opinion: the definitions in fractions, no code of the judges. ----------------------------------------------------------
def convolved(f: list[Fraction]) -> list[Fraction]:
    n = len(f)
    return [sum((f[i] * f[k - i] for i in range(max(0, k - n + 1), min(n, k + 1))), Fraction(0)) for k in range(2 * n - 1)]


def first_bound(f: list[Fraction]) -> Fraction:
    return 2 * len(f) * max(convolved(f)) / sum(f) ** 2


def second_bound(f: list[Fraction]) -> Fraction:
    """Norms of the piecewise linear f*f, piece by piece: ∫ (a + (b-a)t)² = (a² + ab + b²)/3 and ∫ (a + (b-a)t) = (a + b)/2."""
    points = [Fraction(0), *convolved(f), Fraction(0)]
    pieces = list(itertools.pairwise(points))
    square = sum((a * a + a * b + b * b for a, b in pieces), Fraction(0)) / 3
    return square / (sum((a + b for a, b in pieces), Fraction(0)) / 2 * max(points))


def check_certificate(judge: TaskJudge, grade: Grade) -> None:
    """What every valid grade promises."""
    assert grade.exact is not None
    assert grade.score is not None
    f = [Fraction(int(a)) for a in grade.construction["heights"]]
    if judge is FIRST:
        assert first_bound(f) == grade.exact
        assert Fraction(math.nextafter(grade.score, -math.inf)) < grade.exact <= Fraction(grade.score)
    else:
        assert second_bound(f) == grade.exact
        assert Fraction(grade.score) <= grade.exact < Fraction(math.nextafter(grade.score, math.inf))
    again = judge.verify(json.loads(json.dumps(grade.construction)))
    assert (again.valid, again.exact, again.score, again.construction) == (True, grade.exact, grade.score, grade.construction)


@pytest.mark.parametrize(
    ("judge", "name", "certified"),
    [
        (FIRST, "ac1_prev_human.json", "1.5097201507458786686939"),
        (SECOND, "ac2_thetaevolve_AlphaEvolve_v1.json", "0.8962799441554077632814"),
    ],
    ids=["first", "second"],
)
def test_published_sequences_certify_to_their_digits(judge: TaskJudge, name: str, certified: str) -> None:
    f = published(name)
    grade = graded(judge, f)
    assert grade.valid, grade.reason
    assert grade.exact is not None
    digits = grade.exact * 10**22
    assert (math.ceil(digits) if judge is FIRST else math.floor(digits)) == int(certified.replace(".", ""))
    check_certificate(judge, grade)
    assert judge.offer(grade.construction) == pytest.approx([height / max(f) for height in f], rel=1e-15)


height = st.one_of(st.floats(0, 1e6), st.floats(0, 1), st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 1e6]))


@BOTH
@settings(max_examples=100, deadline=None)
@given(f=st.lists(height, min_size=1, max_size=8))
def test_any_sequence_is_certified(judge: TaskJudge, f: list[float]) -> None:
    grade = graded(judge, f)
    assert grade.valid == any(f)
    if grade.valid:
        check_certificate(judge, grade)
        assert grade.exact is not None
        true = (first_bound if judge is FIRST else second_bound)([Fraction(x) for x in f])
        assert (grade.exact, grade.reason) == (true, "")  # every bit of every double counts, whatever the exponents


numbers = st.lists(st.integers(0, 2**80 - 1), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(numbers)
def test_autoconvolution_is_the_definition(heights: list[int]) -> None:
    assert autoconvolution(heights) == convolved([Fraction(a) for a in heights])


@settings(max_examples=100, deadline=None)
@given(numbers, numbers)
def test_convolution_is_the_definition(a: list[int], b: list[int]) -> None:
    defined = [sum(a[i] * b[k - i] for i in range(len(a)) if 0 <= k - i < len(b)) for k in range(len(a) + len(b) - 1)]
    assert convolution(a, b) == defined


@BOTH
def test_the_scale_does_not_matter(judge: TaskJudge) -> None:
    ramp = graded(judge, list(range(20)))
    assert graded(judge, [3e-200 * 2.0**-7] * 3).exact == graded(judge, [1] * 3).exact
    assert graded(judge, [x * 3.0 for x in range(20)]) == ramp
    assert graded(judge, [x * 2.0**-900 for x in range(20)]) == ramp


def test_constants() -> None:
    for n in (1, 100):
        assert graded(FIRST, [1.0] * n).score == 2.0
        assert graded(SECOND, [1] * n).exact == Fraction(2, 3)


def test_wide_exponents_are_exact() -> None:
    f = [10.0**-i for i in range(323)]
    grade = graded(FIRST, f)
    assert grade.reason == ""
    check_certificate(FIRST, grade)
    a = [int(height) for height in grade.construction["heights"]]
    assert [Fraction(height, a[0]) for height in a] == [Fraction(x) for x in f]


def test_a_long_sequence_of_wide_exponents_is_shortened_and_says_so() -> None:
    """16 384 heights are kept to 1024 bits: 2^-1060 beside 1 is lost, 2^-1000 is not."""
    f = [1.0, *[2.0**-1060 if i % 2 else 2.0**-1000 for i in range(16_383)]]
    grade = graded(FIRST, f)
    assert grade.reason == "8191 heights rounded down to multiples of 2^-1023, for 16384 heights are kept to 1024 bits"
    assert grade.exact == FIRST.verify(grade.construction).exact
    assert grade.exact == graded(FIRST, [1.0, *[0.0 if i % 2 else 2.0**-1000 for i in range(16_383)]]).exact


@pytest.mark.slow
@BOTH
def test_the_work_is_bounded_for_as_many_heights_as_are_read(judge: TaskJudge) -> None:
    """Each with all its bits, over the whole range of exponents: kept whole, this product would have 220 million bits."""
    f = [math.ldexp(1 + (i * 0.6180339887498949) % 1, -((i * 7919) % 1074)) for i in range(100_000)]
    grade = graded(judge, f)
    assert grade.valid, grade.reason
    assert "kept to 167 bits" in grade.reason
    assert max(int(a) for a in grade.construction["heights"]).bit_length() <= 167
    assert judge.verify(grade.construction).exact == grade.exact


def test_long_sequences_are_scored() -> None:
    f = [1.0 + (i % 3) for i in range(8000)]
    grade = graded(FIRST, f)
    # f has mean 2 and the overlap at full length is Σ fᵢ f₍ₙ₋₁₋ᵢ₎, which the definition gives alone.
    assert grade.exact is not None
    assert grade.exact >= Fraction(2 * len(f) * int(sum(a * b for a, b in zip(f, reversed(f), strict=True))), int(sum(f)) ** 2)
    again = FIRST.verify(grade.construction)
    assert (again.exact, again.construction) == (grade.exact, grade.construction)


@BOTH
@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (b"", "empty"),
        (b"[]", "0 heights"),
        (b"[0.0, 0.0, -0.0]", "all heights are zero"),
        (b"[1.0, -1e-10]", "height 1 is -1e-10"),
        (b"[1.0, NaN]", "NaN"),
        (b"[1.0, Infinity]", "Infinity"),
        (b"[1.0, true]", "true"),
        (b'["1.0"]', "only finite numbers"),
        (b"[1.0, 1e200]", "height 1 is 1e+200"),
        (b"[[1.0, 2.0]]", "list of finite numbers"),
        (b"[[1.0, 2.0], 1e-9]", "list of finite numbers"),
        (b"1.5", "list of finite numbers"),
        (b"[" + b"1," * 100_000 + b"1]", "100001 heights"),
        (b"[" + b"1.000000," * 10**6 + b"1]", "bytes"),
    ],
    ids=lambda value: value[:20].decode() if isinstance(value, bytes) else None,
)
def test_hostile_results_never_score(judge: TaskJudge, result: bytes, reason: str) -> None:
    grade = judge.grade(result)
    assert (grade.valid, grade.exact, grade.score, grade.construction) == (False, None, None, None)
    assert reason in grade.reason


@BOTH
@pytest.mark.parametrize(
    ("construction", "reason"),
    [
        ({"heights": []}, "0 heights"),
        ({"heights": ["0", "0"]}, "largest height is 0"),
        ({"heights": ["1", "-1"]}, "'-1' is not"),
        ({"heights": ["1" * 1001]}, "at most 1000 digits"),
        ({"heights": [str(2**200)] * 90_000}, "90000 heights of 201 bits; at most 186 bits"),
        ({"heights": [1]}, "not a stored step function"),
        ({"heights": ["1"], "score": 1}, "not a stored step function"),
        (["1"], "not a stored step function"),
    ],
)
def test_a_stored_construction_must_be_well_formed(judge: TaskJudge, construction: Any, reason: str) -> None:
    grade = judge.verify(construction)
    assert (grade.valid, grade.exact, grade.score) == (False, None, None)
    assert reason in grade.reason
