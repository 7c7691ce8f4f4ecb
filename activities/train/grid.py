"""Reads a batch's rollouts and refuses what must not be trained. Knows the stored documents, not what is done with them.
Source: spec algorithm 4 (rollout record, barrier).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from activities.blobs import read_together
from activities.errors import IncompleteGrid, InputError
from activities.records import Batch, BatchRow, RolloutRecord, Verdict
from activities.run_store import RunStore
from workflows.contracts.base import Coordinate, Digest, PolicyRef

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GridRollout:
    """One rollout as training sees it. Arrays have one entry per response token (T)."""

    at: Coordinate
    digest: Digest
    """Of its RolloutRecord."""
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    """Empty if the engine stopped at once: it counts in its group's advantages and trains no token."""
    log_probs: Floats
    """Captured at sampling."""
    mask: Floats
    """1 sampled, 0 forced."""
    reward: float

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.response


@dataclass(frozen=True)
class Grid:
    """A complete grid: groups in order, rollouts in order within."""

    groups: tuple[tuple[GridRollout, ...], ...]

    @property
    def rollouts(self) -> list[GridRollout]:
        return [rollout for group in self.groups for rollout in group]


def load_grid(store: RunStore, batch: Digest, step: int, policy: PolicyRef) -> Grid:
    """Read and check every rollout and verdict that a batch names.

    Raises:
        IncompleteGrid: another step or policy version, an infrastructure failure among the verdicts, groups of unequal size.
        InputError: a record contradicts itself; names its coordinate.
    """
    document = store.load(Batch, batch)
    if (document.step, document.policy_version) != (step, policy.version):
        raise IncompleteGrid(
            f"step {step}: the batch is of step {document.step} under policy version {document.policy_version}, "
            f"to be trained is step {step} from version {policy.version}"
        )
    rollouts = read_together(lambda row: _rollout(store, row, policy), document.rows)
    groups: dict[int, list[GridRollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.at.group, []).append(rollout)
    ordered = tuple(tuple(sorted(groups[g], key=lambda r: r.at.rollout)) for g in sorted(groups))
    sizes = sorted({len(group) for group in ordered})
    if len(sizes) != 1:
        raise IncompleteGrid(f"step {step}: groups of {sizes or 'no'} rollouts; all must have the same number")
    return Grid(ordered)


def _rollout(store: RunStore, row: BatchRow, policy: PolicyRef) -> GridRollout:
    record = store.load(RolloutRecord, row.rollout)
    verdict = store.load(Verdict, row.verdict)
    if not (record.at == verdict.at == row.at):
        raise InputError(f"{row.at}: its rollout says {record.at}, its verdict {verdict.at}")
    if (record.policy_version, record.policy_name) != (policy.version, policy.name):
        raise IncompleteGrid(f"{row.at}: sampled from {record.policy_name}, to be trained is {policy.name}")
    if not verdict.outcome.is_result:
        raise IncompleteGrid(f"{row.at}: {verdict.outcome} is an infrastructure failure and is never trained; judge it again")
    if verdict.reward != row.reward or not math.isfinite(row.reward):
        raise InputError(
            f"{row.at}: reward {row.reward} in the batch, {verdict.reward} in the verdict; one finite number is needed"
        )
    return GridRollout(
        at=row.at,
        digest=row.rollout,
        prompt=record.prompt_tokens,
        response=record.response_tokens,
        log_probs=_per_token(record, "log_probs"),
        mask=_per_token(record, "mask"),
        reward=row.reward,
    )


def _per_token(record: RolloutRecord, field: str) -> Floats:
    values = np.array(getattr(record, field), dtype=np.float64)
    if values.shape != (len(record.response_tokens),) or not np.isfinite(values).all():
        raise InputError(
            f"{record.at}: {values.size} {field} for {len(record.response_tokens)} response tokens; one finite number each"
        )
    if not record.prompt_tokens:
        raise InputError(f"{record.at}: the prompt has no tokens, so nothing predicts the first response token")
    return values
