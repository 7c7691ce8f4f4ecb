"""The numbers of a step: each is what its description says, none is undocumented, and `tttd metrics` prints them all."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from activities.blobs import Blobs, digest_of
from activities.commit.grid import Grid, Measured, Sample
from activities.commit.measuring import kept_samples, measure_step
from activities.commit.metrics import describe
from activities.open.identity_adapter import make_initial_policy
from activities.records import (
    ArchiveState,
    BatchRow,
    GateComparison,
    Node,
    ParentPick,
    PlannedGroup,
    PublishReport,
    StepPlan,
    StepReport,
    TrainRecord,
)
from activities.train.advantages import group_advantages
from activities.train.fake import FakeSearch, make_model
from activities.train.objective import choose_groups
from activities.train.stepping import StepInputs, train_step
from console.main import app
from tests.chain import Chain
from tests.console_world import World
from workflows.contracts.base import Coordinate, Head, Outcome, PolicyRef, RunRef
from workflows.contracts.messages import CommitRequest

DOCUMENT = Path(__file__).parent.parent / "docs" / "metrics.md"
DIGEST = digest_of(b"")


# The list -------------------------------------------------------------------------------------------------------------
def test_the_document_lists_every_number_and_no_other() -> None:
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert rows == [f"| `{d.name}` | {d.unit} | {d.meaning} |" for d in describe()]


def test_every_number_has_a_unit_and_a_meaning_of_its_own() -> None:
    described = list(describe())
    assert len({d.name for d in described}) == len(described) > 80
    assert all(d.unit and d.meaning.endswith(".") and "|" not in d.meaning for d in described)
    assert {d.name.partition("/")[0] for d in described} == {"search", "reward", "sample", "judge", "train", "publish", "time"}


# Grids made by hand ---------------------------------------------------------------------------------------------------
def node(name: str, value: float, **changes: Any) -> Node:
    return Node(**({"id": name, "step": 0, "value": value, "score": value, "code": name, "construction": None} | changes))


SEED = node("seed", 1.0)
OLD = node("old", 2.0, step=1, ancestors=("seed",))


def sample(group: int, rollout: int, parent: Node, reward: float | Outcome, code: str = "", **measured: Any) -> Sample:
    at = Coordinate(step=2, group=group, rollout=rollout)
    outcome, paid = (reward, 0.0) if isinstance(reward, Outcome) else (Outcome.VALID, reward)
    valid = outcome is Outcome.VALID
    row = BatchRow(
        at=at,
        rollout=DIGEST,
        verdict=DIGEST,
        outcome=outcome,
        reward=paid,
        value=paid if valid else None,
        score=paid if valid else None,
        exact=None,
        construction=None,
        tokens_digest=DIGEST,
    )
    child = node(f"{group}-{rollout}", paid, step=2, code=code or f"{group}-{rollout}", ancestors=(parent.id,)) if valid else None
    plain = {"prompt_tokens": 10, "shortened": False, "response_tokens": 4, "sampled_tokens": 4, "thinking_tokens": 0}
    return Sample(row, parent, child, Measured(**(plain | {"log_prob_sum": -2.0, "truncated": False} | measured)))


def grid_of(samples: list[Sample], archive: tuple[Node, ...] = (SEED, OLD)) -> Grid:
    parents = {s.row.at.group: s.parent for s in samples}
    groups = tuple(
        PlannedGroup(group=g, pick=ParentPick(node=p.id, visits=2 * (p is SEED), q=0, prior=0, bonus=0, score=0), parent=p)
        for g, p in sorted(parents.items())
    )
    plan = StepPlan(step=2, archive=DIGEST, groups=groups, scale=0.5)
    return Grid(plan, tuple(samples), ArchiveState(nodes=archive, seeds=("seed",)))


def numbers(
    grid: Grid, after: tuple[Node, ...] = (SEED, OLD), train: TrainRecord | None = None, **more: Any
) -> dict[str, float | None]:
    archive = ArchiveState(nodes=after, seeds=("seed",), total_visits=9)
    return measure_step(grid, archive, train, more.get("reports", ()), more.get("seconds", {})).flat()


SAMPLES = [
    # A mixed group from the seed: one answer is the archive's own, one is new.
    sample(0, 0, SEED, 2.0, code="old"),
    sample(0, 1, SEED, 3.0, response_tokens=8, sampled_tokens=6, thinking_tokens=5, log_prob_sum=-9.0),
    sample(0, 2, SEED, Outcome.CRASHED, truncated=True, response_tokens=9, sampled_tokens=9, thinking_tokens=9),
    # All valid and all paid the same, and no better than their parent.
    sample(1, 0, OLD, 2.0, code="same"),
    sample(1, 1, OLD, 2.0, code="same"),
    sample(1, 2, OLD, 2.0, code="other", shortened=True, prompt_tokens=16),
    # None valid.
    sample(2, 0, SEED, Outcome.NO_PROGRAM, response_tokens=0, sampled_tokens=0, log_prob_sum=0.0),
    sample(2, 1, SEED, Outcome.TIMED_OUT),
    sample(2, 2, SEED, Outcome.INVALID),
]


def test_numbers_of_a_grid_before_and_after_groups_without_signal_are_dropped() -> None:
    best = node("0-1", 3.0, step=2, ancestors=("seed",))
    found = numbers(grid_of(SAMPLES), after=(SEED, OLD, best))
    expected = {
        "reward/mean": 11 / 9,
        "reward/max": 3.0,
        "reward/zero_fraction": 4 / 9,
        "reward/std": statistics.pstdev([2, 3, 0, 2, 2, 2, 0, 0, 0]),
        "reward/kept_mean": 5 / 3,
        "reward/kept_std": statistics.pstdev([2, 3, 0]),
        "reward/groups_mixed_fraction": 1 / 3,
        "reward/groups_all_good_fraction": 1 / 3,
        "reward/groups_all_bad_fraction": 1 / 3,
        "reward/groups_constant_fraction": 2 / 3,
        "reward/groups_kept": 1,
        "sample/rollouts": 9,
        "sample/prompt_tokens_mean": 96 / 9,
        "sample/prompt_tokens_max": 16,
        "sample/prompt_shortened_fraction": 1 / 9,
        "sample/response_tokens_sum": 4 * 6 + 8 + 9,
        "sample/response_tokens_min": 0,
        "sample/truncated_fraction": 1 / 9,
        "sample/thinking_tokens_mean": 14 / 9,
        "sample/unanswered_fraction": 1 / 9,
        "sample/forced_fraction": 1 / 9,
        "sample/forced_tokens_sum": 2,
        "sample/entropy": 23 / 39,
        "sample/kept_response_tokens_mean": 7,
        "sample/kept_truncated_fraction": 1 / 3,
        "sample/kept_entropy": 13 / 19,
        "judge/valid_fraction": 5 / 9,
        "judge/crashed_fraction": 1 / 9,
        "judge/memory_fraction": 0,
        "judge/valid_and_new_fraction": 3 / 9,
        "judge/improved_fraction": 2 / 9,
        "judge/kept_valid_fraction": 2 / 3,
        "search/archive_size": 3,
        "search/archive_value_mean": 2,
        "search/best_score": 3.0,
        "search/children_kept": 1,
        "search/total_visits": 9,
        "search/scale": 0.5,
        "search/parents": 3,
        "search/parents_distinct": 2,
        "search/parents_expanded_fraction": 2 / 3,
        "search/parent_value_mean": 4 / 3,
        "search/parent_depth_mean": 1 / 3,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    outcomes = [
        name for name in found if name.startswith("judge/") and name.split("/")[1].removesuffix("_fraction") in set(Outcome)
    ]
    assert len(outcomes) == 6
    assert sum(found[name] or 0.0 for name in outcomes) == pytest.approx(1)
    assert not [name for name in found if name.startswith(("train/", "publish/"))]  # nothing was trained


def test_a_grid_without_a_token_has_no_entropy_and_one_without_a_signal_keeps_its_first_group() -> None:
    nothing = {"response_tokens": 0, "sampled_tokens": 0, "log_prob_sum": 0.0}
    found = numbers(grid_of([sample(g, r, SEED, Outcome.NO_PROGRAM, **nothing) for g in range(2) for r in range(3)]))
    assert found["sample/entropy"] is found["sample/kept_entropy"] is None
    assert (found["reward/groups_kept"], found["reward/groups_constant_fraction"]) == (1, 1)
    assert found["sample/unanswered_fraction"] == 0


grids_of_rewards = st.integers(3, 5).flatmap(
    lambda size: st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 1.0 + 2**-50, 2.5]), min_size=size, max_size=size), min_size=1, max_size=6
    )
)


@given(grids_of_rewards)
def test_kept_groups_are_those_that_training_keeps(rewards: list[list[float]]) -> None:
    samples = [sample(g, r, SEED, reward) for g, group in enumerate(rewards) for r, reward in enumerate(group)]
    kept = {s.row.at.group for s in kept_samples(grid_of(samples))}
    assert kept == set(choose_groups(rewards).kept)


@given(grids_of_rewards)
def test_advantages_of_the_whole_grid_follow_from_those_that_were_trained(rewards: list[list[float]]) -> None:
    kept = choose_groups(rewards).kept
    solved = [group_advantages(group).advantages for group in rewards]
    trained = np.concatenate([solved[g] for g in kept])
    told = {f"advantage_{name}": float(getattr(trained, name)()) for name in ("mean", "min", "max", "std")}
    record = train_record(**told, groups_trained=float(len(kept)))
    samples = [sample(g, r, SEED, reward) for g, group in enumerate(rewards) for r, reward in enumerate(group)]
    found = numbers(grid_of(samples), train=record)
    whole = np.concatenate(solved)
    for name in ("mean", "min", "max", "std"):
        assert found[f"train/grid_advantage_{name}"] == pytest.approx(float(getattr(whole, name)()), rel=1e-9, abs=1e-9)


def train_record(**metrics: float) -> TrainRecord:
    return TrainRecord(step=2, base=DIGEST, batch=DIGEST, checkpoint=DIGEST, adapter=DIGEST, gate=DIGEST, metrics=metrics)


def test_training_publishing_and_times_have_their_places() -> None:
    def comparison(slope: float, z: float) -> GateComparison:
        return GateComparison(
            against="v", tokens=9, slope=slope, z=z, residual=0.1 * z, residual_bound=1, trainer_rms=0.1, passed=True
        )

    plain = {"boot_id": "b", "policy": "p", "version": 1, "passed": True, "amplification": 8.0}
    reports = (
        PublishReport(
            engine="a",
            comparisons=(comparison(0.9, 8), comparison(1.1, 9)),
            engine_gap=0.06,
            seconds=2.0,
            served_share=0.3,
            **plain,
        ),
        PublishReport(
            engine="b",
            comparisons=(comparison(1.0, 7),),
            engine_gap=0.02,
            seconds=3.0,
            served_share=0.4,
            **plain,
        ),
    )
    record = train_record(kl_policy_base=0.25, seconds_gradient=4.0, another_back_ends_number=1.5)
    seconds = {"select": 0.5, "sample+judge": 60.0, "some later phase": 1.0}
    found = numbers(grid_of(SAMPLES), train=record, reports=reports, seconds=seconds)
    expected = {
        "publish/engines": 2,
        "publish/gate_slope_min": 0.9,
        "publish/gate_slope_max": 1.1,
        "publish/gate_z_min": 7,
        "publish/gate_residual_max": 0.9,
        "publish/engine_gap_rms_max": 0.06,
        "publish/gate_amplification": 8.0,
        "publish/served_share_min": 0.3,
        "train/kl_policy_base": 0.25,
        "train/another_back_ends_number": 1.5,
        "train/grad_norm": None,
        "time/select_seconds": 0.5,
        "time/sample_judge_seconds": 60.0,
        "time/barrier_seconds": None,
        "time/train_gradient_seconds": 4.0,
        "time/publish_engine_seconds_max": 3.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert not [name for name in found if "seconds_gradient" in name or "later" in name]


def test_every_number_of_a_real_training_step_is_documented(blobs: Blobs, tmp_path: Path) -> None:
    search = FakeSearch.open(blobs, make_model(tmp_path / "qwen2"))
    policy = make_initial_policy(search.store, search.spec, search.folder)
    inputs = StepInputs(step=1, batch=search.sample(1, policy), policy=policy)
    record = train_step(search.store, search.spec, inputs, search.backend, resident=False, clock=iter(range(99)).__next__)
    samples = [sample(g, r, SEED, float(r)) for g in range(2) for r in range(4)]
    found = numbers(grid_of(samples), train=record)
    documented = {d.name for d in describe()}
    assert set(found) <= documented
    missing = {name for name in documented if name.startswith("train/")} - {n for n, v in found.items() if v is not None}
    assert missing == set()
    assert all(found[f"time/train_{phase}_seconds"] is not None for phase in ("load", "base", "gradient", "evidence", "store"))


# As stored and printed ------------------------------------------------------------------------------------------------
def test_a_committed_step_stores_them_all(blobs: Blobs, tmp_path: Path) -> None:
    chain = Chain.fresh(blobs, tmp_path)
    run, opened = chain.open()
    plan = chain.select(run, opened.head).plan
    for at in chain.coordinates(plan, 1):
        forced = {"mask": (1, 0, 1), "thinking_tokens": 2, "finish_reason": "length"} if at.rollout == 1 else {}
        chain.write(plan, at, opened.head.policy, 1.0 + at.rollout, **forced)
    _commit(chain, run, opened.head, plan, opened.head.policy)
    report = chain.store.read(StepReport, chain.store.step_key(1, "report"))
    assert report is not None
    documented = [d.name for d in describe() if not d.name.startswith(("train/", "publish/"))]
    assert sorted(report.metrics) == sorted(documented)
    assert report.metrics["sample/forced_tokens_sum"] == 2
    assert report.metrics["sample/truncated_fraction"] == pytest.approx(1 / 3)
    assert report.metrics["sample/entropy"] == pytest.approx((4 * 1.75 + 2 * 1.5) / 16)
    assert report.metrics["time/select_seconds"] == 0.25


def _commit(chain: Chain, run: RunRef, head: Head, plan: str, policy: PolicyRef) -> None:
    batch = chain.assemble(run, 1, plan, policy).batch
    chain.commit(CommitRequest(run=run, step=1, head=head, plan=plan, batch=batch, policy=policy, seconds={"select": 0.25}))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    world = World.make(tmp_path / "home")
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return world


def test_the_command_writes_one_line_a_step(world: World, tmp_path: Path) -> None:
    world.commit_steps(*world.open_run("small"), 2)
    printed = CliRunner().invoke(app, ["metrics", "small"])
    assert printed.exit_code == 0
    lines = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [(line["run"], line["step"]) for line in lines] == [("small", 1), ("small", 2)]
    assert lines[1]["search/total_visits"] == 12
    assert all(math.isfinite(value) for line in lines for name, value in line.items() if "/" in name and value is not None)
    written = CliRunner().invoke(app, ["metrics", "small", "-o", "metrics.jsonl"])
    assert (written.exit_code, written.stdout) == (0, "2 steps of small in metrics.jsonl\n")
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == printed.stdout


def test_the_command_says_what_is_not_there(world: World) -> None:
    run, opened = world.open_run("small")
    assert CliRunner().invoke(app, ["metrics", "small"]).stdout == ""
    unknown = CliRunner().invoke(app, ["metrics", "other"])
    assert unknown.exit_code == 1
    assert "no run 'other'" in unknown.stderr
    world.commit_steps(run, opened, 1)
    world.blobs.store.delete("runs/small/steps/000001/report")
    lost = CliRunner().invoke(app, ["metrics", "small"])
    assert (lost.exit_code, lost.stdout) == (0, "")
    assert "step 1 of small is committed, but its report was lost" in lost.stderr
