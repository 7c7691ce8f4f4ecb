"""Scoring a group under the frozen base while judges work: the same bits as in the step, once, and nobody else's rollouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from activities.blobs import Blobs, LocalStore
from activities.errors import InputError
from activities.open.identity_adapter import make_initial_policy
from activities.records import BaseScores, Batch, TrainRecord
from activities.train import training
from activities.train.fake import FakeSearch, make_model
from activities.train.grid import load_grid
from activities.train.scoring import base_log_probs, scores_key
from activities.train.torch_backend import TorchBackend
from activities.train.training import Trainer
from workflows.contracts.base import Digest, PolicyRef
from workflows.contracts.messages import ScoreBaseRequest

GROUPS, ROLLOUTS = 3, 4


@pytest.fixture
def search(tmp_path: Path) -> FakeSearch:
    model = make_model(tmp_path / "model")
    return FakeSearch.open(Blobs(LocalStore(tmp_path / "store")), model, optimizer={"learning_rate": 1e-2})


@pytest.fixture
def trainer(search: FakeSearch) -> Trainer:
    return Trainer(search.store.blobs, lambda _: search.folder, TorchBackend, lambda: 0.0)


def sample(search: FakeSearch, policy: PolicyRef, step: int = 1) -> Digest:
    return search.sample(step, policy, groups=GROUPS, rollouts=ROLLOUTS)


def requests(search: FakeSearch, batch: Digest, step: int = 1) -> list[ScoreBaseRequest]:
    rows = search.store.load(Batch, batch).rows
    return [
        ScoreBaseRequest(run=search.ref, step=step, group=g, rollouts=tuple(r.rollout for r in rows if r.at.group == g))
        for g in range(GROUPS)
    ]


def policy_of(search: FakeSearch) -> PolicyRef:
    return make_initial_policy(search.store, search.spec, search.folder)


def test_a_step_is_the_same_whether_or_not_its_groups_were_scored(search: FakeSearch, tmp_path: Path) -> None:
    """Two trained steps each, so that base and policy differ; one with every group scored, one with some, one with none."""
    adapters = []
    for run, scored in (("all", range(GROUPS)), ("some", range(1)), ("none", range(0))):
        own = FakeSearch.open(search.store.blobs, search.folder, run_id=run, optimizer={"learning_rate": 1e-2})
        trainer = Trainer(own.store.blobs, lambda _: search.folder, TorchBackend, lambda: 0.0)
        policy = policy_of(own)
        for step in (1, 2):
            batch = sample(own, policy, step)
            for group in scored:
                trainer.score_base(requests(own, batch, step)[group])
            policy = trainer.train(own.request(step, batch, policy)).policy
        adapters.append(policy.adapter)
        record = own.store.read(TrainRecord, own.store.step_key(2, "train"))
        assert record is not None
        assert record.metrics["kl_policy_base"] != 0  # the base was not the policy
    assert len(set(adapters)) == 1


def test_stored_scores_are_what_the_step_reads(search: FakeSearch, trainer: Trainer) -> None:
    policy = policy_of(search)
    batch = sample(search, policy)
    for request in requests(search, batch):
        trainer.score_base(request)
    key = scores_key(search.store, 1, 1)
    found = search.store.read(BaseScores, key)
    assert found is not None
    grid = load_grid(search.store, batch, 1, policy)
    rows = base_log_probs(search.store, _Refuses(), 1, grid.rollouts)  # type: ignore[arg-type]  # the back-end is not asked
    assert [row.size for row in rows] == [len(r.response) for r in grid.rollouts]
    np.testing.assert_array_equal(
        np.concatenate(rows[ROLLOUTS : 2 * ROLLOUTS]), np.concatenate([np.array(r) for r in found.log_probs])
    )


def test_scores_of_other_rollouts_are_not_taken(search: FakeSearch, trainer: Trainer) -> None:
    """A part of a group, as a trial trains on, is not the group that was scored."""
    policy = policy_of(search)
    batch = sample(search, policy)
    trainer.score_base(requests(search, batch)[0])
    grid = load_grid(search.store, batch, 1, policy)
    part = list(grid.groups[0][1:])
    (first, *_) = base_log_probs(search.store, search.backend, 1, part)
    assert first.size == len(part[0].response)
    with pytest.raises(AssertionError, match="asked"):
        base_log_probs(search.store, _Refuses(), 1, part)  # type: ignore[arg-type]


def test_a_second_scorer_returns_the_first_ones_record(
    search: FakeSearch, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = requests(search, sample(search, policy_of(search)))[0]
    first = trainer.score_base(request)
    monkeypatch.setattr(training, "score_group", _Refuses().log_probs)
    assert trainer.score_base(request) == first
    assert first.tokens > 0


def test_an_empty_response_has_no_scores(search: FakeSearch) -> None:
    policy = policy_of(search)
    grid = load_grid(search.store, sample(search, policy), 1, policy)
    empty = replace(grid.groups[0][0], response=(), log_probs=np.zeros(0), mask=np.zeros(0))
    rows = base_log_probs(search.store, search.backend, 1, [empty, *grid.groups[0][1:]])
    assert rows[0].size == 0
    assert all(row.size for row in rows[1:])


def test_rollouts_of_another_group_are_refused(search: FakeSearch, trainer: Trainer) -> None:
    first, second, _ = requests(search, sample(search, policy_of(search)))
    with pytest.raises(InputError, match="step 1 group 0: rollout 0 of the request is"):
        trainer.score_base(first.model_copy(update={"rollouts": second.rollouts}))


class _Refuses:
    """A back-end that must not be needed."""

    def log_probs(self, *_: object, **__: object) -> None:
        raise AssertionError("asked")
