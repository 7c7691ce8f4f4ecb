"""Sampling a batch of rows token by token with one KV cache, rows joining and leaving as they come and end.

Knows jobs, the model and the cache. Which jobs join when is the batcher's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from workers.engine.embedded.adapters import Adapter
from workers.engine.embedded.cache import RowCache
from workers.engine.embedded.jobs import Job
from workers.engine.embedded.model import CausalModel
from workers.engine.embedded.scoring import FORWARD_TOKENS, sample_rows

T = TypeVar("T")


class DecodeSession:
    """Rows of one adapter that are decoded together. All lists have one entry per live row, in the cache's order."""

    def __init__(self, model: CausalModel, adapter: Adapter | None, row_limit: int) -> None:
        self.adapter = adapter
        self._model = model
        self._row_limit = row_limit
        self._jobs: list[Job] = []
        self._starts: list[int] = []
        self._cache: RowCache | None = None

    @property
    def jobs(self) -> Sequence[Job]:
        return self._jobs

    @torch.inference_mode()
    def admit(self, jobs: Sequence[Job]) -> list[Job]:
        """Read the prompts and sample a first token each. Rollouts of one parent share a prompt: it is read once.

        Returns:
            Jobs that ended with their first token.
        """
        self._model.hooks.activate(self.adapter)
        finished: list[Job] = []
        for prompts in _forward_passes(jobs):
            finished += self._admit_pass(prompts)
        return finished

    def _admit_pass(self, prompts: dict[tuple[int, ...], list[Job]]) -> list[Job]:
        cache = RowCache(len(prompts), self._model.layers)
        hidden = self._model.hidden(list(prompts), cache)
        last = self._model.logits(hidden[range(len(prompts)), [len(prompt) - 1 for prompt in prompts]])
        jobs = [(source, job) for source, group in enumerate(prompts.values()) for job in group]
        ended = sample_rows([job for _, job in jobs], last[[source for source, _ in jobs]])
        staying = [(source, job) for (source, job), end in zip(jobs, ended, strict=True) if not end]
        if staying:
            self._join(cache, [source for source, _ in staying], [job for _, job in staying])
        return [job for (_, job), end in zip(jobs, ended, strict=True) if end]

    def _join(self, prefilled: RowCache, sources: list[int], jobs: list[Job]) -> None:
        lengths = [len(job.prompt) for job in jobs]
        if self._cache is None:
            self._cache = RowCache.like(prefilled, len(jobs), max(lengths))
        before = self._cache.end
        self._cache.append_rows(prefilled, sources, lengths, self._row_limit)
        shift = self._cache.end - before
        self._starts = [start + shift for start in self._starts] + [self._cache.end - length for length in lengths]
        self._jobs += jobs

    @torch.inference_mode()
    def step(self) -> list[Job]:
        """One more token for every row; returns the jobs that ended with it, whose rows are gone. Cancelled rows go silently."""
        self._remove([row for row, job in enumerate(self._jobs) if job.cancelled])
        if not self._jobs or self._cache is None:
            return []
        self._model.hooks.activate(self.adapter)
        logits_R = self._model.next_logits([job.output_ids[-1] for job in self._jobs], self._starts, self._cache)
        ended = sample_rows(self._jobs, logits_R)
        finished = [job for job, end in zip(self._jobs, ended, strict=True) if end]
        self._remove([row for row, end in enumerate(ended) if end])
        return finished

    def _remove(self, rows: list[int]) -> None:
        if not rows or self._cache is None:
            return
        for row in reversed(rows):  # from the end, so that the row that fills the hole is never one of those to go
            self._cache.remove_row(row)
            _fill_hole(self._jobs, row)
            _fill_hole(self._starts, row)
        if self._starts:
            self._cache.trim(min(self._starts))
        else:
            self._cache = None


def _fill_hole(values: list[T], row: int) -> None:
    """Drop an entry as the cache drops a row: the last one takes its place."""
    last = values.pop()
    if row < len(values):
        values[row] = last


def _forward_passes(jobs: Sequence[Job]) -> list[dict[tuple[int, ...], list[Job]]]:
    """Jobs by prompt, in passes of at most FORWARD_TOKENS padded tokens; shortest prompts first, so that padding is small."""
    by_prompt: dict[tuple[int, ...], list[Job]] = {}
    for job in jobs:
        by_prompt.setdefault(tuple(job.prompt), []).append(job)
    passes: list[dict[tuple[int, ...], list[Job]]] = [{}]
    for prompt in sorted(by_prompt, key=len):
        if passes[-1] and (len(passes[-1]) + 1) * len(prompt) > FORWARD_TOKENS:
            passes.append({})
        passes[-1][prompt] = by_prompt[prompt]
    return passes
