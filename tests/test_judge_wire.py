"""What crosses from a program to a judge: the child's encoder takes exact numeric types only, the judge's reader trusts nothing."""

from __future__ import annotations

import datetime
import json
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.judge.sandbox import inside
from tasks.judges import wire

CAP = 1 << 20


def encoded(value: object) -> Any:
    frame = inside.encode(value, CAP)
    assert frame[:1] == b"J", frame
    assert wire.fault(frame[1:], CAP) is None
    return json.loads(frame[1:])


class ListSubclass(list[int]):
    pass


class FloatSubclass(float):
    def __repr__(self) -> str:
        return "9.0"


class IntSubclass(int):
    pass


class ArraySubclass(np.ndarray):
    pass


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (0.1, 0.1),
        (5e-324, 5e-324),
        ([1, (2.5, [3])], [1, [2.5, [3]]]),
        (np.float64(0.1), 0.1),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.arange(3), [0, 1, 2]),
        (np.ones((2, 2)), [[1.0, 1.0], [1.0, 1.0]]),
        (np.array(2.5), 2.5),
        ((np.zeros((1, 2)), np.zeros(1), 0), [[[0.0, 0.0]], [0.0], 0]),
        ([], []),
    ],
)
def test_numbers_cross_unchanged(value: object, expected: Any) -> None:
    assert encoded(value) == expected


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_short_floats_are_widened_exactly(kind: type) -> None:
    values: Any = np.array([0.1, 1 / 3, 6e-8, 1000.123], dtype=kind)
    assert encoded(values) == [float(v) for v in values]
    assert encoded(list(values)) == [float(v) for v in values]
    assert encoded(values) != [0.1, 1 / 3, 6e-8, 1000.123]  # what half precision lost stays lost


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_doubles_survive_bit_for_bit(values: list[float]) -> None:
    assert [v.hex() for v in encoded([float(v) for v in values])] == [v.hex() for v in values]
    assert [v.hex() for v in encoded(np.array(values, dtype=np.float64))] == [v.hex() for v in values]


@pytest.mark.parametrize(
    "value",
    [
        True,
        None,
        "0.5",
        b"0.5",
        1j,
        {"a": 1},
        {1, 2},
        range(3),
        (x for x in [1]),
        object(),
        datetime.datetime(2000, 1, 1),
        ListSubclass([1]),
        FloatSubclass(1.0),
        IntSubclass(1),
        Pair(1, 2),
        np.bool_(True),
        np.complex64(1),
        np.longdouble(1),
        np.array([True]),
        np.array(["0.5"]),
        np.array([1], dtype=object),
        np.array([1j]),
        np.array([1], dtype=np.longdouble),
        np.array(["2000-01-01"], dtype="datetime64[D]"),
        np.zeros(3).view(ArraySubclass),
        np.ma.masked_array([1.0, 2.0], mask=[True, True]),
        float("nan"),
        float("-inf"),
        np.array([np.nan]),
        10**25,
        -(10**5000),
        [[[[[1]]]]],
        np.zeros((1, 1, 1, 1, 1)),
        [[np.zeros((1, 1, 1))]],
    ],
    ids=lambda value: type(value).__name__ + repr(value)[:20] if not isinstance(value, int) else "int",
)
def test_anything_else_is_refused_with_a_reason(value: object) -> None:
    for wrapped in (value, [0.5, value]):
        frame = inside.encode(wrapped, CAP)
        assert frame[:1] == b"R"
        assert frame[1:].decode().isprintable()


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert inside.encode(loop, CAP)[:1] == b"R"


@pytest.mark.parametrize("value", [np.broadcast_to(np.float64(1), (10**10,)), [0.0] * CAP, [[0.123456789012345] * 40_000] * 2])
def test_what_does_not_fit_is_refused_before_it_is_copied(value: object) -> None:
    assert inside.encode(value, CAP)[:1] == b"L"


FAULTS = [
    (b"", "empty"),
    (b" \n", "empty"),
    (b"[NaN]", "NaN"),
    (b"[-Infinity]", "Infinity"),
    (b"null", "null"),
    (b'{"a":1}', "'{'"),
    (b'["1"]', "'\"'"),
    (b"[\xff]", "only finite numbers"),
    (b"[[[[[1]]]]]", "nested more than 4"),
    (b"[1]]", "unbalanced"),
    (b"[1", "unbalanced"),
    (b"[" + b"9" * 26 + b"]", "26 digits"),
    (b"[-" + b"9" * 26 + b"]", "26 digits"),
    (b"[0." + b"1" * 59 + b"]", "61 characters"),
    (b"[1e309]", "e309"),
    (b"[-1E400]", "E400"),
    (b"[1e+0310]", "e+0310"),
    (b"[0.1e99999]", "e99999"),
    (b"[1,,2]", "not JSON"),
    (b"[01]", "not JSON"),
    (b"[+1]", "not JSON"),
    (b"[1 2]", "not JSON"),
    (b"[1e]", "not JSON"),
    (b"1 2", "not JSON"),
    (b"[" * 200_000 + b"]" * 200_000, "nested"),
]


@pytest.mark.parametrize(("text", "words"), FAULTS, ids=range(len(FAULTS)))
def test_texts_that_are_no_answer_are_named(text: bytes, words: str) -> None:
    problem = wire.fault(text)
    assert problem is not None
    assert words in problem


@pytest.mark.parametrize(
    "text",
    [
        b"1",
        b"-0.5e-300",
        b"1e308",
        b"1E+300",
        b"1e-9999",
        b"[]",
        b"[[[[1]]]]",
        b" [1, 2.5 ,3e5]\n",
        b"[" + b"9" * 25 + b"]",
        b"[0." + b"1" * 58 + b"]",
    ],
)
def test_texts_at_the_limits_pass(text: bytes) -> None:
    assert wire.fault(text) is None


def test_the_cap_counts_bytes() -> None:
    assert wire.fault(b"[1,2]", 5) is None
    assert wire.fault(b"[1,2] ", 5) == "the result has 6 bytes; at most 5 are read"


def entry_plain() -> None: ...
def entry_seed(seed: int) -> None: ...
def entry_keyword(*, budget_s: float = 1) -> None: ...
def entry_positional_only(seed: int, /) -> None: ...
def entry_all(**arguments: Any) -> None: ...


def wrapped(function: Any) -> Any:
    import functools

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        (entry_plain, set()),
        (entry_seed, {"seed"}),
        (entry_keyword, {"budget_s"}),
        (entry_positional_only, set()),
        (entry_all, {"seed", "budget_s"}),
        (wrapped(entry_seed), {"seed"}),
        (wrapped(entry_plain), set()),
        (print, set()),
    ],
)
def test_arguments_are_passed_only_where_the_signature_takes_them(entry: Any, names: set[str]) -> None:
    assert set(inside.accepted(entry, {"seed": 1, "budget_s": 2.0})) == names
