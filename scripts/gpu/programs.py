"""What kind of programs a policy writes, step by step: does it explore, copy, or repeat itself?

Scores alone do not tell: a copy of the best program scores as well as it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from activities.records import Batch, RolloutRecord
from activities.run_store import RunStore
from workflows.contracts.base import Outcome

_CLOSE, _ROUNDING = 1e-4, 1e-9
"""Relative to the seed's score: a copy with a constant written shorter loses a little, one that sums in another order may gain."""


@dataclass(frozen=True)
class Answer:
    """One rollout: what was written and what the judge said."""

    step: int
    group: int
    program: str | None
    valid: bool
    score: float | None


def read_answers(run: RunStore) -> Iterator[Answer]:
    """Every rollout of every step that has a batch."""
    for step in range(1, (run.last_step() or 0) + 1):
        batch = run.read(Batch, run.step_key(step, "batch"))
        assert batch is not None, f"step {step} of {run.run_id} has no batch"
        for row in batch.rows:
            program = run.load(RolloutRecord, row.rollout).program
            yield Answer(step, row.at.group, program, row.outcome is Outcome.VALID, row.score)


def describe(answers: Iterable[Answer], seed_program: str, seed_score: float | None, sign: int) -> list[dict[str, Any]]:
    """One row a step: counts of answers.

    Args:
        seed_program: of the run; whitespace at its ends does not count.
        seed_score: None for a run without one: every valid answer is then better.
        sign: +1 if larger scores are better, -1 if smaller ones are.
    """
    steps: dict[int, list[Answer]] = {}
    for answer in answers:
        steps.setdefault(answer.step, []).append(answer)
    return [{"step": step, **_counts(found, seed_program.strip(), seed_score, sign)} for step, found in sorted(steps.items())]


def _counts(answers: list[Answer], seed_program: str, seed_score: float | None, sign: int) -> dict[str, int]:
    programs = [(a.program or "").strip() for a in answers]
    valid = [(program, a.score) for program, a in zip(programs, answers, strict=True) if a.valid]
    scale = abs(seed_score) if seed_score else 1.0
    gains = [sign * (score - (seed_score or 0.0)) / scale for _, score in valid if score is not None]
    return {
        "answers": len(answers),
        "valid": len(valid),
        "distinct_programs": len(set(programs) - {""}),
        "distinct_valid": len({program for program, _ in valid}),
        "copies_of_the_seed": sum(program == seed_program for program in programs),
        "with_scipy": sum("scipy" in program for program in programs),
        "of_one_score_in_their_group": _of_one_score(answers),
        "as_good_as_the_seed": sum(-_CLOSE <= gain <= _ROUNDING for gain in gains),
        "better_than_the_seed": sum(gain > _ROUNDING for gain in gains),
    }


def _of_one_score(answers: list[Answer]) -> int:
    """Valid answers with their group's commonest score, to five digits: a policy that hands its parents back has few others."""
    groups: dict[int, Counter[str]] = {}
    for answer in answers:
        if answer.valid:
            groups.setdefault(answer.group, Counter())[f"{answer.score:.5g}"] += 1
    return sum(max(scores.values()) for scores in groups.values())
