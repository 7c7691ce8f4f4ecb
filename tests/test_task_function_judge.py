"""A plain function as a judge: what it may return, what it may raise, and what never becomes a reward."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tasks.errors import JudgeFault
from tasks.function_judge import FunctionJudge
from tasks.judges import wire

HERE = Path(__file__).parent


def judge(function: Callable[[Any], Any], direction: Literal["maximize", "minimize"] = "maximize") -> FunctionJudge:
    return FunctionJudge(function, direction, HERE)


@pytest.mark.parametrize(
    ("score", "exact"),
    [
        (0.1, Fraction(0.1)),
        (3, Fraction(3)),
        (Fraction(1, 3), Fraction(1, 3)),
        (np.float32(0.5), Fraction(1, 2)),
        (np.int64(2**62 + 1), Fraction(2**62 + 1)),
    ],
)
def test_a_score_keeps_all_its_digits(score: Any, exact: Fraction) -> None:
    grade = judge(lambda result: score).grade(b"[1, 2]")
    assert (grade.valid, grade.exact, grade.construction) == (True, exact, [1, 2])


def test_a_fraction_is_rounded_against_the_program() -> None:
    third = Fraction(1, 3)
    down = judge(lambda result: third).grade(b"1").score
    up = judge(lambda result: third, "minimize").grade(b"1").score
    assert down is not None
    assert up is not None
    assert Fraction(down) < third < Fraction(up)
    assert math.nextafter(down, 1) == up


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (None, "NoneType"),
        ("1.0", "str"),
        (True, "bool"),
        (1j, "complex"),
        (10**400, "range of a double"),
        (-1e-9, "negative"),
        ([1.0], "list"),
        ((1.0, 2.0, 3.0), "tuple"),
    ],
)
def test_what_is_no_score_is_invalid_with_a_reason(score: Any, reason: str) -> None:
    grade = judge(lambda result: score).grade(b"[1]")
    assert (grade.valid, grade.score, grade.exact) == (False, None, None)
    assert reason in grade.reason


def test_a_task_that_minimises_has_no_reward_for_zero() -> None:
    grade = judge(lambda result: 0.0, "minimize").grade(b"1")
    assert not grade.valid
    assert "1/score" in grade.reason


def test_value_error_is_the_answers_fault_and_its_reason_is_one_line() -> None:
    def score(result: Any) -> float:
        raise ValueError("too\nfew \x1b[31mnumbers" + "!" * 900)

    grade = judge(score).grade(b"[1]")
    assert not grade.valid
    assert grade.reason.startswith("too few [31mnumbers!!")
    assert len(grade.reason) < 400


def test_any_other_exception_is_the_judges_fault_with_file_and_line() -> None:
    def score(result: Any) -> Any:
        return result[7]  # the line that is named

    line = score.__code__.co_firstlineno + 1
    with pytest.raises(JudgeFault, match=rf"test_task_function_judge\.py:{line}: IndexError"):
        judge(score).grade(b"[1]")


@pytest.mark.parametrize("text", [b"NaN", b"[1, Infinity]", b'{"a": 1}', b'"1"', b"null", b"[" * 9 + b"]" * 9, b"[1e999]", b""])
def test_the_function_never_sees_what_is_not_numbers(text: bytes) -> None:
    def score(result: Any) -> float:
        raise AssertionError("called")

    assert not judge(score).grade(text).valid


def test_a_number_beyond_every_double_is_refused_though_its_digits_are_allowed() -> None:
    text = b"9" * 24 + b".0e300"
    assert wire.fault(text) is None
    grade = judge(lambda result: 1.0).grade(text)
    assert not grade.valid
    assert "no double" in grade.reason


def test_what_is_stored_may_differ_and_gives_the_score_again() -> None:
    def score(result: Any) -> tuple[float, Any]:
        repaired = np.clip(np.asarray(result, float), 0, 1)
        return float(repaired.sum()), repaired

    one = judge(score)
    grade = one.grade(b"[0.5, 7, -1]")
    assert grade.construction == [0.5, 1.0, 0.0]
    again = one.verify(json.loads(json.dumps(grade.construction)))
    assert (again.exact, again.construction) == (grade.exact, grade.construction)


def test_a_construction_that_cannot_be_stored_is_the_judges_fault() -> None:
    for construction in (object(), [float("nan")], {1, 2}):
        with pytest.raises(JudgeFault, match="cannot be stored"):
            judge(lambda result, c=construction: (1.0, c)).grade(b"1")


@pytest.mark.parametrize(
    ("construction", "offered"),
    [
        ([1, 2, 3], [1.0, 2.0, 3.0]),
        ([[1, 2], [3, 4]], [[1.0, 2.0], [3.0, 4.0]]),
        ([[[1, 2]], [0.5], 7], [1.0, 2.0, 0.5, 7.0]),
        ({"a": [1], "b": 2}, [1.0, 2.0]),
        (5, [5.0]),
    ],
)
def test_a_parent_is_offered_as_an_array_of_doubles(construction: Any, offered: list[Any]) -> None:
    made = judge(lambda result: 1.0).offer(construction)
    assert made == offered
    assert np.array(made, dtype=np.float64).dtype == np.float64
