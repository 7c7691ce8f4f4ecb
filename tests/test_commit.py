"""The hash chain: a step becomes true once, whatever the order of arrival, and replays to the same archive."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.blobs import Blobs, LocalStore
from activities.records import Batch, CommitRow, StepCommit, StepReport, TrainRecord
from tests.chain import Chain, spread
from workflows.contracts.base import Coordinate, Head, Outcome, PolicyRef
from workflows.contracts.messages import CommitRequest, Committed


@pytest.fixture
def chain(blobs: Blobs, tmp_path: Path) -> Chain:
    return Chain.fresh(blobs, tmp_path)


def run_steps(chain: Chain, steps: int, shuffle: random.Random | None = None) -> list[Head]:
    run, opened = chain.open()
    heads = [opened.head]
    for _ in range(steps):
        order = list(range(6))
        if shuffle:
            shuffle.shuffle(order)
        heads.append(chain.step(run, heads[-1], spread, order)[1].head)
    return heads


def test_chain_links_every_step_and_holds_every_coordinate_once(chain: Chain) -> None:
    heads = run_steps(chain, 3)
    for head, before in zip(heads[1:], heads, strict=False):
        commit = chain.store.load(StepCommit, head.commit)
        assert (commit.step, commit.previous) == (before.step + 1, before.commit)
        assert [(r.group, r.rollout) for r in commit.rows] == [(g, r) for g in range(2) for r in range(3)]
        assert chain.store.commit_digest(head.step) == head.commit
    assert chain.store.last_step() == 3
    assert chain.archive(heads[-1]).total_visits == 18


def test_arrival_order_changes_nothing(tmp_path: Path) -> None:
    commits = []
    for i in range(3):
        folder = tmp_path / str(i)
        chain = Chain.fresh(Blobs(LocalStore(folder / "store")), folder)
        commits.append([head.commit for head in run_steps(chain, 3, random.Random(i))])
    assert commits[0] == commits[1] == commits[2]


def test_run_name_and_store_are_not_in_the_chain(tmp_path: Path) -> None:
    one = Chain.fresh(Blobs(LocalStore(tmp_path / "store")), tmp_path)
    other = Chain(one.blobs, one.tasks_directory, one.models_directory, run_id="another", request=one.request)
    assert [h.commit for h in run_steps(one, 2)] == [h.commit for h in run_steps(other, 2)]


def test_committing_again_returns_the_same_commit_and_report(chain: Chain) -> None:
    run, opened = chain.open()
    request, first = chain.step(run, opened.head, spread)
    second = chain.commit(request.model_copy(update={"seconds": {"sample": 12.5}}))
    assert second == first  # the first report stands; times are not in the chain
    later, _ = chain.step(run, first.head, spread)
    assert chain.commit(request) == first
    assert chain.store.last_step() == later.step


def test_a_crash_between_commit_and_report_is_made_good(chain: Chain) -> None:
    run, opened = chain.open()
    request, first = chain.step(run, opened.head, spread)
    chain.blobs.store.delete(chain.store.step_key(1, "report"))
    assert chain.commit(request) == first
    assert chain.store.read(StepReport, chain.store.step_key(1, "report")) is not None


def other_policy(request: CommitRequest) -> CommitRequest:
    policy = PolicyRef(version=1, name="other", checkpoint="1" * 64, adapter="2" * 64)
    return request.model_copy(update={"policy": policy})


def test_a_second_different_commit_is_a_fork(chain: Chain) -> None:
    run, opened = chain.open()
    request, first = chain.step(run, opened.head, spread)
    with pytest.raises(ApplicationError, match=f"step 1 is already committed as {first.head.commit}") as caught:
        chain.commit(other_policy(request))
    assert caught.value.type == "ArchiveFork"
    assert caught.value.non_retryable
    assert chain.store.commit_digest(1) == first.head.commit


def test_another_verdict_is_another_commit(chain: Chain) -> None:
    """A zombie that judged the same rollouts otherwise cannot replace what is committed."""
    run, opened = chain.open()
    request, first = chain.step(run, opened.head, spread)
    batch = chain.store.load(Batch, request.batch)
    row = batch.rows[0].model_copy(update={"exact": "7/1"})
    forged = chain.store.put(batch.model_copy(update={"rows": (row, *batch.rows[1:])}))
    with pytest.raises(ApplicationError, match="already committed") as caught:
        chain.commit(request.model_copy(update={"batch": forged}))
    assert caught.value.type == "ArchiveFork"
    assert chain.store.commit_digest(1) == first.head.commit


def test_building_on_a_head_that_is_not_the_chains_is_a_fork(chain: Chain) -> None:
    run, opened = chain.open()
    request, _ = chain.step(run, opened.head, spread)
    stale = request.head.model_copy(update={"commit": "f" * 64})
    with pytest.raises(ApplicationError, match=r"built on commit f{64}") as caught:
        chain.commit(request.model_copy(update={"head": stale}))
    assert caught.value.type == "ArchiveFork"


@pytest.mark.parametrize("field", ["plan", "batch", "archive"])
def test_documents_of_another_step_are_refused(chain: Chain, field: str) -> None:
    run, opened = chain.open()
    first_request, first = chain.step(run, opened.head, spread)
    request, _ = chain.step(run, first.head, spread)
    if field == "archive":
        wrong = request.model_copy(update={"head": request.head.model_copy(update={"archive": opened.head.archive})})
    else:
        wrong = request.model_copy(update={field: getattr(first_request, field)})
    with pytest.raises(ApplicationError, match="to be committed is plan") as caught:
        chain.commit(wrong)
    assert caught.value.type == "ArchiveFork"


def test_stored_records_replay_to_the_same_chain(chain: Chain, tmp_path: Path) -> None:
    """Copy nothing but requests' inputs into an empty store: opening, rollouts and verdicts give every commit again."""
    heads = run_steps(chain, 3)
    again = Chain(Blobs(LocalStore(tmp_path / "other")), chain.tasks_directory, chain.models_directory, chain.run_id, chain.request)
    source, target = chain.blobs.store, again.blobs.store
    for key in source.keys(""):
        if key.startswith("blobs/") or key.endswith(("/rollout", "/verdict")):
            target.put(key, source.get(key))
    run, opened = again.open()
    head = opened.head
    for expected in heads[1:]:
        plan = again.select(run, head).plan
        batch = again.assemble(run, head.step + 1, plan, head.policy).batch
        head = again.commit(CommitRequest(run=run, step=head.step + 1, head=head, plan=plan, batch=batch, policy=head.policy)).head
        assert head == expected


def commit_with(chain: Chain, results: Callable[[Coordinate], Any]) -> Committed:
    run, opened = chain.open()
    return chain.step(run, opened.head, results)[1]


def test_summary_tells_best_mean_new_and_improved_apart(chain: Chain) -> None:
    table = {(0, 0): 2.0, (0, 1): 2.0, (0, 2): Outcome.TIMED_OUT, (1, 0): 0.25, (1, 1): 3.0, (1, 2): Outcome.INVALID}
    summary = commit_with(chain, lambda at: table[at.group, at.rollout]).summary
    assert (summary.rollouts, summary.valid, summary.valid_and_new, summary.improved) == (6, 4, 3, 3)
    assert (summary.step_best, summary.best, summary.previous_best) == (3.0, 3.0, None)
    assert summary.mean_reward == pytest.approx(7.25 / 6)
    assert summary.notes == ()
    report = chain.store.read(StepReport, chain.store.step_key(1, "report"))
    assert report is not None
    assert report.best_node == "s000001-g01-r01"
    assert report.metrics["judge/valid_fraction"] == pytest.approx(4 / 6)
    assert report.metrics["judge/timed_out_fraction"] == pytest.approx(1 / 6)
    assert report.metrics["sample/truncated_fraction"] == 0.0
    assert report.metrics["search/total_visits"] == 6


def test_a_step_without_signal_says_so(chain: Chain) -> None:
    assert commit_with(chain, lambda _: Outcome.CRASHED).summary.notes == (
        "collapsed: none of 6 programs is valid, so this step carries no signal",
    )


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_equal_rewards_are_no_signal_but_not_a_collapse(chain: Chain, value: float) -> None:
    (note,) = commit_with(chain, lambda _: value).summary.notes
    assert note == f"no signal: all 6 rewards are equal ({value:.8f})"


def test_best_of_a_worse_step_stays(chain: Chain) -> None:
    run, opened = chain.open()
    _, first = chain.step(run, opened.head, lambda at: 4.0 if at.rollout == 1 else 2.0)
    _, second = chain.step(run, first.head, lambda at: 1.0 + at.rollout)
    assert (second.summary.previous_best, second.summary.step_best, second.summary.best) == (4.0, 3.0, 4.0)
    _, resumed = chain.open()
    assert resumed.head == second.head


def test_training_moves_the_policy_and_keeps_the_one_before(chain: Chain) -> None:
    run, opened = chain.open()
    plan = chain.select(run, opened.head).plan
    for at in chain.coordinates(plan, 1):
        chain.write(plan, at, opened.head.policy, spread(at))
    batch = chain.assemble(run, 1, plan, opened.head.policy).batch
    trained = TrainRecord(
        step=1,
        base=opened.head.policy.checkpoint,
        batch=batch,
        checkpoint="1" * 64,
        adapter="2" * 64,
        gate="3" * 64,
        metrics={"kl_policy_base": 0.125, "gap_engine_trainer_rms": 0.0625},
        notes=("one group is constant",),
    )
    policy = PolicyRef(version=1, name="next", checkpoint="1" * 64, adapter="2" * 64, gate="3" * 64)
    request = CommitRequest(
        run=run, step=1, head=opened.head, plan=plan, batch=batch, policy=policy, train_record=chain.store.put(trained)
    )
    committed = chain.commit(request)
    assert committed.head.policy == policy
    assert committed.head.previous_policy == committed.head.initial_policy == opened.head.policy
    assert (committed.summary.kl, committed.summary.gap, committed.summary.policy_version) == (0.125, 0.0625, 1)
    assert committed.summary.notes == ("one group is constant",)


def test_nothing_that_only_took_time_is_in_a_commit_row() -> None:
    assert set(CommitRow.model_fields) == {"group", "rollout", "parent", "tokens", "outcome", "exact", "construction"}
