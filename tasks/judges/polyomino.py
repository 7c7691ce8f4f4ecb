"""Polyomino packing: place all pieces of a case in a rectangle, score 100 x the mean over the cases of cells / (W x H).

Source: spec tasks 8. The cases are our own (``polyomino_cases.py``): same generator as the published problem's, other seeds. A
score from here is never set beside a figure of FrontierCS, whose 70 cases are others.

A case whose program did not end well, or whose output breaks any rule, scores 0 for that case; an answer with no valid case is
invalid. All arithmetic is on exact integers. A construction is stored as

    {"cases": "digest of the inputs", "outputs": ["base64 of zlib of the output", ..., null]}

with one output per case in canonical form (`W H`, then `X Y R F` for each piece, single spaces between), null where the case
scored 0.

Knows no sandbox: somebody else ran the program.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tasks.judges.polyomino_cases import Case, CaseSet, case_set
from tasks.judging import CaseRun, Grade, TestCase

MAXIMUM_COORDINATE: Final = 4 * 10**12
"""Of |X|, |Y|, W and H."""
MAXIMUM_AREA: Final = 2**63 - 1

MAXIMUM_OUTPUT_BYTES: Final = 1 << 20
"""Of one case; 10 000 pieces at the largest coordinates take less than 400 kB."""

_REASON_CHARACTERS: Final = 200

# One pass in C over hostile text: decimal integers without leading zeros, as the published checker reads them.
_INTEGERS = re.compile(rb"\s*(?:(?:0|-?[1-9][0-9]{0,12})(?:\s+|\Z))*", re.ASCII)

_ENDINGS: Final = {
    "timeout": "ran out of time",
    "memory": "needed too much memory",
    "crashed": "crashed",
    "output_too_large": f"printed more than {MAXIMUM_OUTPUT_BYTES} bytes",
}

Integers = NDArray[np.int64]


class _Construction(msgspec.Struct, forbid_unknown_fields=True):
    cases: str
    outputs: list[str | None]


class _Invalid(Exception):
    """The output is no packing, or a construction is none; the message is the reason."""


class PolyominoPacking:
    """Judge of C++ programs that read one case and print one packing.

    Args:
        cases: how many cases the search uses; a smaller set is the beginning of a larger one.
        seed: of those cases.
        final_cases, final_seed: the same for the hidden set, which only the final number of a run is measured on. No prompt
            names it, and no program can read this repository; whoever runs a contest changes the seed.
    """

    def __init__(self, cases: int = 70, seed: int = 1, final_cases: int = 70, final_seed: int = 2) -> None:
        if cases < 1 or final_cases < 1:
            raise ValueError(f"cases={cases}, final_cases={final_cases}; a set has at least 1")
        if seed == final_seed:
            raise ValueError(f"seed and final_seed are both {seed}; the hidden cases must be others than those of the search")
        self._set = cases, seed
        self._final = final_cases, final_seed

    def cases(self) -> Sequence[TestCase]:
        """The inputs of the search."""
        return [case.test for case in self._public().cases]

    def final_judge(self) -> PolyominoPacking:
        """The judge of the hidden set: its `cases` are the hidden ones."""
        (cases, seed), (final_cases, final_seed) = self._set, self._final
        return PolyominoPacking(final_cases, final_seed, cases, seed)

    def final_cases(self) -> Sequence[TestCase]:
        """The inputs of the final number; grade their outputs with `final_judge()`."""
        return self.final_judge().cases()

    def grade_runs(self, runs: Sequence[CaseRun]) -> Grade:
        """Grade the outputs, one run per case in the order of :meth:`cases`."""
        chosen = self._public()
        if len(runs) != len(chosen.cases):
            raise ValueError(f"{len(runs)} runs for {len(chosen.cases)} cases")
        return _grade(chosen, [_output(run) for run in runs])

    def verify(self, construction: Any) -> Grade:
        """Re-derive the grade from stored outputs, of the public or of the hidden set."""
        try:
            data = msgspec.convert(construction, _Construction)
            chosen = self._set_of(data)
            outputs = [_Invalid("no output is stored") if text is None else _unpack(text) for text in data.outputs]
        except msgspec.ValidationError as error:
            return Grade(valid=False, reason=f"not a stored packing: {error}")
        except _Invalid as invalid:
            return Grade(valid=False, reason=str(invalid))
        return _grade(chosen, outputs)

    def _public(self) -> CaseSet:
        count, seed = self._set
        return case_set(seed, count)

    def _set_of(self, data: _Construction) -> CaseSet:
        for count, seed in (self._set, self._final):
            chosen = case_set(seed, count)
            if chosen.digest == data.cases:
                if len(data.outputs) != count:
                    raise _Invalid(f"the construction has {len(data.outputs)} outputs for {count} cases")
                return chosen
        raise _Invalid(f"the construction is for other cases ({data.cases!r:.40}) than this judge's")


def _output(run: CaseRun) -> bytes | _Invalid:
    return run.stdout if run.status == "ok" else _Invalid(_ENDINGS[run.status])


def _grade(chosen: CaseSet, outputs: Sequence[bytes | _Invalid]) -> Grade:
    ratios: list[Fraction] = []
    kept: list[str | None] = []
    faults: list[str] = []
    for case, output in zip(chosen.cases, outputs, strict=True):
        try:
            if isinstance(output, _Invalid):
                raise output
            tokens = _tokens(output, len(case.sizes))
            ratios.append(_ratio(case, np.array([int(token) for token in tokens], dtype=np.int64)))
            kept.append(_pack(tokens))
        except _Invalid as invalid:
            kept.append(None)
            faults.append(f"{case.test.name} {invalid}")
    count = len(chosen.cases)
    if not ratios:
        return Grade(valid=False, reason=f"no case is valid: {faults[0]}"[:_REASON_CHARACTERS])
    exact = 100 * sum(ratios, Fraction(0)) / count
    return Grade(
        valid=True,
        reason=f"{len(faults)} of {count} cases score 0: {faults[0]}"[:_REASON_CHARACTERS] if faults else "",
        exact=exact,
        score=_round_down(exact),
        construction={"cases": chosen.digest, "outputs": kept},
    )


def _tokens(output: bytes, pieces: int) -> list[bytes]:
    """W, H, then X, Y, R, F of each piece: 2 + 4n decimal integers.

    Raises:
        _Invalid: another number of tokens, or one that is not an integer of at most 13 digits.
    """
    if len(output) > MAXIMUM_OUTPUT_BYTES:
        raise _Invalid(_ENDINGS["output_too_large"])
    tokens = output.split()
    wanted = 2 + 4 * pieces
    if len(tokens) != wanted:
        raise _Invalid(f"has {len(tokens)} numbers in its output; `W H` and `X Y R F` for each piece are {wanted}")
    if not _INTEGERS.fullmatch(output):
        raise _Invalid("has something in its output that is not a decimal integer of at most 13 digits")
    return tokens


def _ratio(case: Case, numbers: Integers) -> Fraction:
    """cells / (W x H) of a packing given as integers of shape (2 + 4n,).

    Raises:
        _Invalid: it breaks a rule; says which, and which piece.
    """
    width, height = int(numbers[0]), int(numbers[1])
    if not (1 <= width <= MAXIMUM_COORDINATE and 1 <= height <= MAXIMUM_COORDINATE):
        raise _Invalid(f"has a rectangle of {width} x {height}; each side must be between 1 and 4e12")
    if width * height > MAXIMUM_AREA:
        raise _Invalid(f"has a rectangle of {width} x {height} cells; the area must be less than 2^63")
    shift_x, shift_y, turns, mirror = numbers[2:].reshape(-1, 4).T
    _check_range("R", turns, 3)
    _check_range("F", mirror, 1)
    for name, shift in (("X", shift_x), ("Y", shift_y)):
        if (far := np.abs(shift) > MAXIMUM_COORDINATE).any():
            raise _Invalid(f"has {name}={shift[far.argmax()]} for piece {far.argmax()}; at most 4e12 either way")
    x, y, piece = _placed(case, shift_x, shift_y, turns, mirror)
    if (outside := (x < 0) | (x >= width) | (y < 0) | (y >= height)).any():
        at = outside.argmax()
        raise _Invalid(f"has piece {piece[at]} at cell ({x[at]}, {y[at]}), outside of {width} x {height}")
    keys = x * height + y  # below W x H, so it fits
    order = np.argsort(keys, kind="stable")
    if (twice := keys[order[1:]] == keys[order[:-1]]).any():
        first, second = order[twice.argmax()], order[twice.argmax() + 1]
        raise _Invalid(f"has pieces {piece[first]} and {piece[second]} on one cell ({x[first]}, {y[first]})")
    return Fraction(len(keys), width * height)


def _check_range(name: str, found: Integers, most: int) -> None:
    if (wrong := (found < 0) | (found > most)).any():
        raise _Invalid(f"has {name}={found[wrong.argmax()]} for piece {wrong.argmax()}; it must be between 0 and {most}")


def _placed(
    case: Case, shift_x: Integers, shift_y: Integers, turns: Integers, mirror: Integers
) -> tuple[Integers, Integers, Integers]:
    """x, y and piece number of every placed cell, each of shape (C,): mirrored, turned clockwise R times, then moved."""
    piece = np.repeat(np.arange(len(case.sizes)), case.sizes)
    x, y = case.cells.astype(np.int64).T
    x = np.where(mirror[piece] == 1, -x, x)
    turn = turns[piece]
    turned_x = np.choose(turn, [x, y, -x, -y])
    turned_y = np.choose(turn, [y, -x, -y, x])
    return turned_x + shift_x[piece], turned_y + shift_y[piece], piece


def _pack(tokens: list[bytes]) -> str:
    return base64.b64encode(zlib.compress(b" ".join(tokens))).decode()


def _unpack(text: str) -> bytes:
    """The output in a construction.

    Raises:
        _Invalid: it is no packed text, or a longer one than is ever stored.
    """
    try:
        inflate = zlib.decompressobj()
        output = inflate.decompress(base64.b64decode(text, validate=True), MAXIMUM_OUTPUT_BYTES + 1)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise _Invalid(f"an output is not base64 of zlib: {error}") from None
    if not inflate.eof and len(output) <= MAXIMUM_OUTPUT_BYTES:
        raise _Invalid("an output is cut off")
    return output


def _round_down(number: Fraction) -> float:
    nearest = number.numerator / number.denominator
    return math.nextafter(nearest, -math.inf) if Fraction(nearest) > number else nearest
