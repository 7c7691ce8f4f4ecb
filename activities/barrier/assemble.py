"""Collects a complete grid into a batch, or says exactly what is missing. Source: spec algorithm 4."""

from __future__ import annotations

from dataclasses import dataclass

from activities.blobs import digest_of, read_together
from activities.errors import IncompleteGrid
from activities.records import Batch, BatchRow, RolloutRecord, StepPlan, Verdict, canonical_json
from activities.run_store import RunStore
from workflows.contracts.base import Coordinate, Digest, Outcome, PolicyRef

_NAMED = 8
"""Coordinates spelled out in an error; the rest is counted."""


def assemble(store: RunStore, step: int, plan: Digest, rollouts: int, policy: PolicyRef) -> Batch:
    """Read all G×R rollouts and verdicts of a step.

    Raises:
        IncompleteGrid: a record or verdict is missing, a verdict is an infrastructure failure, a rollout was sampled from
            another policy version, or a document contradicts itself or the plan; names the coordinates.
    """
    parents = {g.group: g.parent.id for g in store.load(StepPlan, plan).groups}
    coordinates = [Coordinate(step=step, group=group, rollout=r) for group in parents for r in range(rollouts)]
    rows: list[BatchRow] = []
    contradictions: dict[str, list[Coordinate]] = {}
    missing: list[Coordinate] = []
    unjudged: list[Coordinate] = []
    versions: dict[str, list[Coordinate]] = {}
    for at, found in zip(coordinates, read_together(lambda at: _look(store, at, parents[at.group]), coordinates), strict=True):
        if found is None:
            missing.append(at)
            continue
        if found.policy_name != policy.name:
            versions.setdefault(found.policy_name, []).append(at)
        if found.row is None and not found.contradiction:
            unjudged.append(at)
        elif found.row is None:
            contradictions.setdefault(found.contradiction, []).append(at)
        else:
            rows.append(found.row)
    problems = [
        *([f"no rollout at {_list(missing)}"] if missing else []),
        *([f"no verdict at {_list(unjudged)}"] if unjudged else []),
        *(f"sampled from {name} instead of {policy.name}: {_list(where)}" for name, where in versions.items()),
        *(f"{why} at {_list(where)}" for why, where in contradictions.items()),
    ]
    if problems:
        raise IncompleteGrid(f"step {step}: {len(rows)}/{len(coordinates)} rollouts complete; {'; '.join(problems)}")
    return Batch(step=step, policy_version=policy.version, plan=plan, rows=tuple(rows))


@dataclass(frozen=True)
class _Found:
    """What is kept of a stored rollout and its verdict; the whole records of a grid would fill a gigabyte."""

    policy_name: str
    row: BatchRow | None = None
    """None: no verdict that is a result, or the documents contradict each other or the plan."""
    contradiction: str = ""


def _look(store: RunStore, at: Coordinate, parent: str) -> _Found | None:
    """Read one coordinate; None if there is no rollout."""
    rollout = store.find(store.rollout_key(at, "rollout"))
    if rollout is None:
        return None
    record = store.load(RolloutRecord, rollout)
    verdict = store.find(store.rollout_key(at, "verdict"))
    if verdict is None or not (judged := store.load(Verdict, verdict)).outcome.is_result:
        return _Found(record.policy_name)
    if why := _contradiction(at, parent, record, judged):
        return _Found(record.policy_name, contradiction=why)
    return _Found(record.policy_name, _row(at, rollout, verdict, record, judged))


def _contradiction(at: Coordinate, parent: str, record: RolloutRecord, judged: Verdict) -> str:
    """What makes a rollout or its verdict unusable, or the empty string. Trained or not, nothing of it may enter the archive."""
    if at not in (record.at, judged.at) or record.at != judged.at:
        return f"documents of {record.at} and {judged.at}"
    if record.parent != parent:
        return f"sampled from parent {record.parent} instead of {parent}"
    tokens = len(record.response_tokens)
    if (len(record.log_probs), len(record.mask)) != (tokens, tokens):
        return f"{tokens} response tokens with {len(record.log_probs)} log-probs and {len(record.mask)} mask entries"
    if judged.outcome is Outcome.VALID and (judged.value is None or judged.score is None):
        return "a valid verdict without a score"
    if judged.outcome is not Outcome.VALID and judged.reward != 0:
        return f"reward {judged.reward} for outcome {judged.outcome.value}"
    return ""


def _row(at: Coordinate, rollout: Digest, verdict: Digest, record: RolloutRecord, judged: Verdict) -> BatchRow:
    return BatchRow(
        at=at,
        rollout=rollout,
        verdict=verdict,
        outcome=judged.outcome,
        reward=judged.reward,
        value=judged.value,
        score=judged.score,
        exact=judged.exact,
        construction=judged.construction,
        tokens_digest=digest_of(canonical_json([record.prompt_tokens, record.response_tokens])),
    )


def _list(coordinates: list[Coordinate]) -> str:
    shown = ", ".join(f"g{c.group:02d}/r{c.rollout:02d}" for c in coordinates[:_NAMED])
    more = len(coordinates) - _NAMED
    return shown + (f" and {more} more" if more > 0 else "")
