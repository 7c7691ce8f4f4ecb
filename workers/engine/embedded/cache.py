"""A KV cache whose rows come and go: sequences are aligned at their right end, and buffers are reused in place.

transformers' own growing cache copies every key and value at each token, which costs more than a small model's arithmetic. Here a
token is written into spare columns, a finished row is replaced by the last one, and a new row takes a free slot.
Knows nothing of tokens, masks or sampling.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

SPARE_COLUMNS = 128
"""Columns allocated beyond what is needed now, plus a quarter of the length: growing is a copy of everything."""


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer: buffers [rows, heads, columns, head size], of which the owner says what is in use."""

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        # Weak, so that a cache is freed the moment it is dropped: a cycle would keep its buffers until Python's collector happens
        # to look, which takes gigabytes of them.
        self._owner = weakref.ref(owner)
        self.key_buffer: torch.Tensor | None = None
        self.value_buffer: torch.Tensor | None = None

    @property
    def owner(self) -> RowCache:
        owner = self._owner()
        assert owner is not None  # a layer is only reached through its cache
        return owner

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new columns [rows, heads, new, head size]; return all columns in use, as views."""
        owner = self.owner
        end = owner.end + key_states.shape[2]
        if self.key_buffer is None or self.value_buffer is None:
            shape = (key_states.shape[0], key_states.shape[1], end + _spare(end), key_states.shape[3])
            self.key_buffer = key_states.new_zeros(shape)
            self.value_buffer = value_states.new_zeros((*shape[:3], value_states.shape[3]))
        elif end > self.key_buffer.shape[2]:
            self.reshape(self.key_buffer.shape[0], end + _spare(end), 0)
        self.key_buffer[: owner.rows, :, owner.end : end] = key_states
        self.value_buffer[: owner.rows, :, owner.end : end] = value_states
        return (
            self.key_buffer[: owner.rows, :, owner.first : end],
            self.value_buffer[: owner.rows, :, owner.first : end],
        )

    def get_seq_length(self) -> int:
        return self.owner.length

    def reshape(self, rows: int, columns: int, shift: int) -> None:
        """Move everything into larger buffers, `shift` columns to the right. New places are zero: garbage may hold NaN."""
        self.key_buffer = _moved(self.key_buffer, self.owner, rows, columns, shift)
        self.value_buffer = _moved(self.value_buffer, self.owner, rows, columns, shift)


def _moved(buffer: torch.Tensor | None, owner: RowCache, rows: int, columns: int, shift: int) -> torch.Tensor:
    if buffer is None:
        raise RuntimeError("a cache can only be enlarged after its first forward pass")
    new = buffer.new_zeros((rows, buffer.shape[1], columns, buffer.shape[3]))
    new[: owner.rows, :, owner.first + shift : owner.end + shift] = buffer[: owner.rows, :, owner.first : owner.end]
    return new


def _spare(columns: int) -> int:
    return SPARE_COLUMNS + columns // 4


class RowCache(Cache):  # type: ignore[misc]
    """The cache of one batch. Columns [first, end) are in use; every row ends at `end`, shorter ones start later."""

    def __init__(self, rows: int, layers: int) -> None:
        self.rows = rows
        self.first = 0
        self.end = 0
        super().__init__(layers=[_Layer(self) for _ in range(layers)])

    @property
    def length(self) -> int:
        """Columns in use: the longest row."""
        return self.end - self.first

    def advance(self, columns: int) -> None:
        """Count columns that a forward pass has written. Layers write before the count moves, all at the same place."""
        self.end += columns

    def trim(self, first: int) -> None:
        """Forget columns before `first`, which no row needs any more. Costs nothing."""
        self.first = max(self.first, first)

    def remove_row(self, row: int) -> None:
        """Drop one row. The last row takes its place, so the caller must do the same with its own lists."""
        last = self.rows - 1
        if row != last:
            for layer in self.layers:
                layer.key_buffer[row, :, self.first : self.end] = layer.key_buffer[last, :, self.first : self.end]
                layer.value_buffer[row, :, self.first : self.end] = layer.value_buffer[last, :, self.first : self.end]
        self.rows = last

    def append_rows(self, other: RowCache, sources: Sequence[int], lengths: Sequence[int], row_limit: int) -> None:
        """Add rows from a cache whose rows are aligned at their left end (a right-padded prefill).

        Args:
            sources: for each new row, the row of `other` to copy; one may serve many.
            lengths: for each new row, how many columns of its source hold tokens.
            row_limit: rows this cache will ever hold; buffers grow towards it by doubling.
        """
        longest = max(lengths)
        self._make_room(self.rows + len(sources), longest, row_limit)
        for target, (source, length) in enumerate(zip(sources, lengths, strict=True), start=self.rows):
            for mine, theirs in zip(self.layers, other.layers, strict=True):
                mine.key_buffer[target, :, self.end - length : self.end] = theirs.key_buffer[source, :, :length]
                mine.value_buffer[target, :, self.end - length : self.end] = theirs.value_buffer[source, :, :length]
        self.rows += len(sources)
        self.first = min(self.first, self.end - longest)

    def _make_room(self, rows: int, longest: int, row_limit: int) -> None:
        held_rows, held_columns = self.layers[0].key_buffer.shape[0], self.layers[0].key_buffer.shape[2]
        shift = max(0, longest - self.end)
        if rows <= held_rows and shift == 0:
            return
        new_rows = held_rows if rows <= held_rows else max(rows, min(2 * held_rows, row_limit))
        columns = max(held_columns, self.end + shift + _spare(self.end + shift))
        for layer in self.layers:
            layer.reshape(new_rows, columns, shift)
        self.first += shift
        self.end += shift

    @classmethod
    def like(cls, other: RowCache, rows: int, columns: int) -> RowCache:
        """An empty cache with the layer shapes of `other`, with room for `rows` and `columns`, whose rows end at `columns`."""
        new = cls(0, len(other.layers))
        new.first = new.end = columns
        for mine, theirs in zip(new.layers, other.layers, strict=True):
            for name in ("key_buffer", "value_buffer"):
                old = getattr(theirs, name)
                setattr(mine, name, old.new_zeros((rows, old.shape[1], columns + _spare(columns), old.shape[3])))
        return new
