"""Test cases of polyomino packing, made from a seed. Source: spec tasks 8a.

The pieces are the polyominoes of 1 to 10 cells, counted up to rotation and reflection, since a packing may use both: 6 473. A case
takes n = 10^U(2,4) of them, each uniform among all and shown in a uniform one of its eight orientations.

Knows no program and no packing. Same seed, same bytes, on every machine: only `random.Random.random` is drawn from, whose
sequence Python guarantees.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tasks.judging import TestCase

LARGEST_PIECE: Final = 10
ORIENTATIONS: Final = 8

_FEWEST_LOG10, _MOST_LOG10 = 2, 4
"""Of n, the number of pieces."""

Cells = NDArray[np.int8]


@dataclass(frozen=True)
class Case:
    """One case: its text and the same pieces as arrays. C cells in all, n pieces."""

    test: TestCase
    cells: Cells = field(repr=False)
    """Shape (C, 2): x, y of every cell, piece after piece."""
    sizes: NDArray[np.int64] = field(repr=False)
    """Shape (n,): cells of each piece."""


@dataclass(frozen=True)
class CaseSet:
    cases: tuple[Case, ...]
    digest: str
    """First 16 hex digits of sha256 over the inputs."""


@lru_cache(maxsize=4)
def case_set(seed: int, count: int) -> CaseSet:
    """The first `count` cases of a seed; a smaller set is the beginning of a larger one. Takes a few tenths of a second once."""
    cases = tuple(_case(seed, index) for index in range(count))
    digest = hashlib.sha256(b"".join(case.test.stdin for case in cases)).hexdigest()
    return CaseSet(cases, digest[:16])


def _case(seed: int, index: int) -> Case:
    draw = random.Random(f"polyomino_packing/{seed}/{index}").random
    table, table_sizes = _table()
    n = int(10 ** (_FEWEST_LOG10 + (_MOST_LOG10 - _FEWEST_LOG10) * draw()))
    picks = np.array([(int(draw() * len(table)), int(draw() * ORIENTATIONS)) for _ in range(n)])
    sizes = table_sizes[picks[:, 0]]
    cells = table[picks[:, 0], picks[:, 1]][np.arange(LARGEST_PIECE) < sizes[:, None]]
    return Case(TestCase(f"case {index} (n={n})", _text(cells, sizes)), cells, sizes)


def _text(cells: Cells, sizes: NDArray[np.int64]) -> bytes:
    """n, then for each piece its size k and k lines `x y`; coordinates have one digit."""
    lines = np.full((len(cells), 4), ord(" "), dtype=np.uint8)
    lines[:, 0::2] = cells.view(np.uint8) + ord("0")
    lines[:, 3] = ord("\n")
    text, ends = lines.tobytes(), np.cumsum(sizes) * 4
    begins = ends - sizes * 4
    parts = (b"%d\n%b" % (k, text[b:e]) for k, b, e in zip(sizes.tolist(), begins.tolist(), ends.tolist(), strict=True))
    return b"%d\n%b" % (len(sizes), b"".join(parts))


@cache
def _table() -> tuple[Cells, NDArray[np.int64]]:
    """Every piece in its eight orientations, shape (P, 8, 10, 2), cells past a piece's size 0; and the sizes, shape (P,)."""
    by_size = polyominoes(LARGEST_PIECE)
    table = np.zeros((sum(map(len, by_size)), ORIENTATIONS, LARGEST_PIECE, 2), dtype=np.int8)
    row = 0
    for shapes in by_size:
        turned = np.stack(list(_orientations(shapes)), axis=1)
        table[row : row + len(shapes), :, : shapes.shape[1]] = turned
        row += len(shapes)
    return table, np.repeat(np.arange(1, LARGEST_PIECE + 1), [len(shapes) for shapes in by_size])


def polyominoes(largest: int) -> list[Cells]:
    """The polyominoes of 1, 2, ..., `largest` cells up to rotation and reflection; item k - 1 has shape (count, k, 2).

    Least coordinates are 0; the order of shapes and of cells is fixed.
    """
    levels = [np.zeros((1, 1, 2), dtype=np.int8)]
    for _ in range(1, largest):
        levels.append(_distinct(_grown(levels[-1])))
    return levels


def _grown(shapes: Cells) -> Cells:
    """Every shape with every neighbouring cell added: shape (M, k + 1, 2)."""
    count, k, _ = shapes.shape
    steps = np.array([(1, 0), (-1, 0), (0, 1), (0, -1)], dtype=np.int8)
    new = (shapes[:, :, None] + steps).reshape(count, 4 * k, 1, 2)
    old = np.broadcast_to(shapes[:, None], (count, 4 * k, k, 2))
    is_new = ~(old == new).all(axis=-1).any(axis=-1)
    grown: Cells = np.concatenate([old, new], axis=2)[is_new]
    return grown


def _distinct(shapes: Cells) -> Cells:
    """One of each class under rotation and reflection: the orientation whose sorted cells come first. Shape (P, k, 2)."""
    least: NDArray[np.int16] | None = None
    for turned in _orientations(shapes):
        codes = np.sort(turned[..., 0].astype(np.int16) * (LARGEST_PIECE + 1) + turned[..., 1], axis=1)
        least = codes if least is None else np.where(_before(codes, least)[:, None], codes, least)
    assert least is not None
    codes = np.unique(least, axis=0)
    distinct: Cells = np.stack(np.divmod(codes, LARGEST_PIECE + 1), axis=-1).astype(np.int8)
    return distinct


def _before(a: NDArray[np.int16], b: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Row by row, whether a is lexicographically less than b."""
    at = (a != b).argmax(axis=1)
    rows = np.arange(len(a))
    less: NDArray[np.bool_] = a[rows, at] < b[rows, at]
    return less


def _orientations(shapes: Cells) -> list[Cells]:
    """The eight rotations and reflections of shapes (..., k, 2), each moved so that its least coordinates are 0."""
    found = []
    for mirrored in (False, True):
        turned = shapes * np.array([-1, 1], dtype=np.int8) if mirrored else shapes
        for _ in range(4):
            turned = np.stack([turned[..., 1], -turned[..., 0]], axis=-1)
            found.append(turned - turned.min(axis=-2, keepdims=True))
    return found
