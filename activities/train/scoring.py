"""Log-probs under the frozen base: made per group as soon as it is sampled, read by the step that trains on it (design 5).

They need no reward, so the trainer makes them while judges still work. A step makes what it does not find. Both ways a group is
one call to the back-end, cut into the same micro-batches: the same bits, whoever came first. Knows no advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from activities.blobs import read_together
from activities.errors import InputError
from activities.records import BaseScores, RolloutRecord
from activities.run_store import RunStore
from activities.train.backend import ScoredSequence, TrainerBackend
from activities.train.grid import GridRollout
from workflows.contracts.messages import ScoreBaseRequest

Floats = NDArray[np.float64]


def scores_key(store: RunStore, step: int, group: int) -> str:
    """Where a group's scores are claimed."""
    return store.step_key(step, f"g{group:02d}/base")


def response_of(prompt: Sequence[int], response: Sequence[int]) -> ScoredSequence | None:
    """The response tokens, predicted from everything before them; None for an empty response."""
    return ScoredSequence((*prompt, *response), len(prompt)) if response else None


def score_group(store: RunStore, request: ScoreBaseRequest, backend: TrainerBackend) -> BaseScores:
    """Score the rollouts of one group, without storing the result.

    Raises:
        InputError: a digest is of a rollout of another step or group.
    """
    records = read_together(lambda digest: store.load(RolloutRecord, digest), request.rollouts)
    for number, record in enumerate(records):
        if (record.at.step, record.at.group, record.at.rollout) != (request.step, request.group, number):
            raise InputError(f"step {request.step} group {request.group}: rollout {number} of the request is {record.at}")
    sequences = [response_of(record.prompt_tokens, record.response_tokens) for record in records]
    return BaseScores(
        step=request.step,
        group=request.group,
        rollouts=request.rollouts,
        log_probs=tuple(tuple(row.tolist()) for row in _score(backend, sequences)),
    )


def base_log_probs(store: RunStore, backend: TrainerBackend, step: int, rollouts: Sequence[GridRollout]) -> list[Floats]:
    """Log-probs under the frozen base of whole groups, in the order given: stored ones, or made now.

    Args:
        rollouts: every rollout of each group in it, groups one after another.
    """
    out: list[Floats] = []
    for group, members in groupby(rollouts, key=lambda r: r.at.group):
        found = store.read(BaseScores, scores_key(store, step, group))
        wanted = list(members)
        if found is not None and found.rollouts == tuple(r.digest for r in wanted):
            out.extend(np.array(row, dtype=np.float64) for row in found.log_probs)
        else:
            out.extend(_score(backend, [response_of(r.prompt, r.response) for r in wanted]))
    return out


def _score(backend: TrainerBackend, sequences: Sequence[ScoredSequence | None]) -> list[Floats]:
    """One array per sequence, empty where there is none."""
    there = [s for s in sequences if s is not None]
    rows = iter(backend.log_probs(there, adapter=False) if there else [])
    return [np.zeros(0) if s is None else next(rows) for s in sequences]
