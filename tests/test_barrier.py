"""The barrier: a complete grid under one policy version, or the coordinates that are in the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.blobs import Blobs, digest_of
from activities.records import Batch, canonical_json
from tests.chain import Chain, spread
from workflows.contracts.base import Coordinate, Outcome, PolicyRef
from workflows.contracts.messages import Assembled


class Grid:
    """A selected step 1 of a fresh run, ready for rollouts."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.run, opened = chain.open()
        self.policy = opened.head.policy
        self.plan = chain.select(self.run, opened.head).plan
        self.coordinates = chain.coordinates(self.plan, 1)

    def fill(self, skip: Callable[[Coordinate], bool] = lambda _: False) -> None:
        for at in self.coordinates:
            if not skip(at):
                self.chain.write(self.plan, at, self.policy, spread(at))

    def assemble(self) -> Assembled:
        return self.chain.assemble(self.run, 1, self.plan, self.policy)

    def refused(self) -> str:
        with pytest.raises(ApplicationError) as caught:
            self.assemble()
        assert caught.value.type == "IncompleteGrid"
        assert caught.value.non_retryable
        return str(caught.value)


@pytest.fixture
def grid(blobs: Blobs, tmp_path: Path) -> Grid:
    return Grid(Chain.fresh(blobs, tmp_path))


FIRST, LAST = Coordinate(step=1, group=0, rollout=0), Coordinate(step=1, group=1, rollout=2)


def test_rows_stand_in_coordinate_order_with_what_the_verdicts_say(grid: Grid) -> None:
    for at in reversed(grid.coordinates):
        grid.chain.write(grid.plan, at, grid.policy, spread(at))
    assembled = grid.assemble()
    batch = grid.chain.store.load(Batch, assembled.batch)
    assert [row.at for row in batch.rows] == grid.coordinates
    assert (batch.step, batch.policy_version, batch.plan) == (1, 0, grid.plan)
    results = [spread(at) for at in grid.coordinates]
    values = [None if isinstance(result, Outcome) else result for result in results]
    assert [row.value for row in batch.rows] == [row.score for row in batch.rows] == values
    assert [row.reward for row in batch.rows] == [value or 0.0 for value in values]
    assert batch.rows[0].tokens_digest == digest_of(canonical_json([[1, 2, 3], [1, 0, 0]]))
    assert len({row.tokens_digest for row in batch.rows}) == len(batch.rows)
    valid = [value for value in values if value is not None]
    assert (assembled.rollouts, assembled.valid, assembled.best_score) == (6, len(valid), max(valid))
    assert assembled.mean_reward == pytest.approx(sum(valid) / 6)


def test_assembling_twice_gives_one_batch(grid: Grid) -> None:
    grid.fill()
    assert grid.assemble() == grid.assemble()


def test_missing_rollouts_are_named(grid: Grid) -> None:
    grid.fill(skip=lambda at: at in (FIRST, LAST))
    assert grid.refused().endswith("step 1: 4/6 rollouts complete; no rollout at g00/r00, g01/r02")


def test_missing_verdict_is_named(grid: Grid) -> None:
    grid.fill()
    grid.chain.blobs.store.delete(grid.chain.store.rollout_key(LAST, "verdict"))
    assert "5/6 rollouts complete; no verdict at g01/r02" in grid.refused()


@pytest.mark.parametrize("outcome", [Outcome.JUDGE_ERROR, Outcome.ENGINE_ERROR])
def test_failed_infrastructure_is_no_result(grid: Grid, outcome: Outcome) -> None:
    grid.fill(skip=lambda at: at == FIRST)
    grid.chain.write(grid.plan, FIRST, grid.policy, outcome)
    assert "no verdict at g00/r00" in grid.refused()


@pytest.mark.parametrize("outcome", [o for o in Outcome if o.is_result and o is not Outcome.VALID])
def test_every_failure_of_a_program_is_a_result_without_reward(grid: Grid, outcome: Outcome) -> None:
    grid.fill(skip=lambda at: at == FIRST)
    grid.chain.write(grid.plan, FIRST, grid.policy, outcome)
    row = grid.chain.store.load(Batch, grid.assemble().batch).rows[0]
    assert (row.outcome, row.reward, row.value) == (outcome, 0.0, None)


def test_a_second_policy_version_is_named(grid: Grid) -> None:
    grid.fill(skip=lambda at: at == LAST)
    other = PolicyRef(version=1, name="other-v0001", checkpoint="1" * 64, adapter="2" * 64)
    grid.chain.write(grid.plan, LAST, other, 1.0)
    assert f"sampled from other-v0001 instead of {grid.policy.name}: g01/r02" in grid.refused()


def test_long_lists_are_counted(blobs: Blobs, tmp_path: Path) -> None:
    request = {"search": {"groups": 3, "rollouts": 9}}
    grid = Grid(Chain.fresh(blobs, tmp_path, **request))
    message = grid.refused()
    assert "g00/r07 and 19 more" in message
    assert "g00/r08" not in message


@pytest.mark.parametrize(
    ("changes", "result", "message"),
    [
        ({"log_probs": (-0.5,)}, 1.0, "3 response tokens with 1 log-probs and 3 mask entries at g00/r00"),
        ({"mask": ()}, 1.0, "3 response tokens with 3 log-probs and 0 mask entries at g00/r00"),
        ({"response_tokens": (1, 2)}, Outcome.CRASHED, "2 response tokens with 3 log-probs and 3 mask entries at g00/r00"),
        ({"parent": "seed-07"}, 1.0, "sampled from parent seed-07 instead of seed-00 at g00/r00"),
        ({"score": None}, 1.0, "a valid verdict without a score at g00/r00"),
        ({"value": None}, 1.0, "a valid verdict without a score at g00/r00"),
        ({"reward": 0.5}, Outcome.INVALID, "reward 0.5 for outcome invalid at g00/r00"),
    ],
)
def test_documents_that_contradict_themselves_are_refused(
    grid: Grid, changes: dict[str, Any], result: float | Outcome, message: str
) -> None:
    grid.fill(skip=lambda at: at == FIRST)
    grid.chain.write(grid.plan, FIRST, grid.policy, result, **changes)
    assert message in grid.refused()


def test_documents_of_another_coordinate_are_refused(grid: Grid) -> None:
    grid.fill()
    store, rollouts = grid.chain.blobs.store, grid.chain.store
    store.put(rollouts.rollout_key(FIRST, "verdict"), store.get(rollouts.rollout_key(LAST, "verdict")))
    assert "documents of step 1 group 0 rollout 0 and step 1 group 1 rollout 2 at g00/r00" in grid.refused()


def test_an_empty_response_is_a_result(grid: Grid) -> None:
    grid.fill(skip=lambda at: at == FIRST)
    grid.chain.write(grid.plan, FIRST, grid.policy, Outcome.NO_PROGRAM, response_tokens=(), log_probs=(), mask=(), program=None)
    assert grid.assemble().rollouts == 6
