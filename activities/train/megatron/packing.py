"""Sequences into packed micro-batches, balanced by tokens over data-parallel ranks. Pure.

The order of the grid is kept, never that of lengths or arrival: the same grid is always cut, and its gradient summed, in one way.
"""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int, ways: int) -> list[range]:
    """Cut sequences, in their order, into runs of consecutive ones.

    The number of runs is the smallest multiple of `ways` with which no run has more than `budget` tokens, or than the longest
    sequence if that has more; among those cuts, the longest run is as short as it can be. Run i belongs to rank i % ways. Trailing
    runs may be empty, if there are too few sequences.
    """
    if not lengths:
        return []
    most = max(budget, *lengths)
    rounds = -(-len(_fill(lengths, most)) // ways)
    low, high = max(lengths), most
    while low < high:  # the least capacity that still fits into so many runs
        middle = (low + high) // 2
        if len(_fill(lengths, middle)) <= rounds * ways:
            high = middle
        else:
            low = middle + 1
    runs = _fill(lengths, low)
    end = len(lengths)
    return runs + [range(end, end)] * (rounds * ways - len(runs))


def _fill(lengths: Sequence[int], capacity: int) -> list[range]:
    """As few runs as possible of at most `capacity` tokens; no single length may exceed it."""
    runs: list[range] = []
    start, total = 0, 0
    for i, length in enumerate(lengths):
        if total + length > capacity:
            runs.append(range(start, i))
            start, total = i, 0
        total += length
    runs.append(range(start, len(lengths)))
    return runs
