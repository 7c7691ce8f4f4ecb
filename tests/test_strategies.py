"""Search strategies: one interface for all of them, and what each does that the others do not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.blobs import Blobs, LocalStore
from activities.commit.expand import best_node, expand
from activities.errors import InputError
from activities.records import ArchiveState, StepCommit, StepPlan
from activities.select.puct import select_parents
from activities.select.strategies import STRATEGIES
from activities.select.strategy import Selection, Strategy, as_pick, step_seed, value_scale
from tests.archives import archives, child, opened, root
from tests.chain import Chain
from workflows.contracts.base import Coordinate, Outcome
from workflows.contracts.request import SearchSettings

ALL = sorted(STRATEGIES)
every_strategy = pytest.mark.parametrize("name", ALL)


def select(name: str, archive: ArchiveState, groups: int, seed: int = 0, **settings: Any) -> Selection:
    return STRATEGIES[name].select(archive, groups, SearchSettings(**settings), random.Random(seed))


def names(selection: Selection) -> list[str]:
    return [parent.node.id for parent in selection.parents]


def family() -> ArchiveState:
    """Two seeds; `a` > `aa` > ... below the first, one child below the second."""
    s, t = root("s", 0.0), root("t", 0.0)
    a, b = child("a", s, 3.0), child("b", t, 2.0)
    archive = expand(opened(s, t), [(s, a), (t, b)], children_per_parent=2, capacity=100)
    return expand(archive, [(a, child("aa", a, 5.0)), (a, child("ab", a, 4.0))], children_per_parent=2, capacity=100)


# The interface ----------------------------------------------------------------------------------------------------------------
def test_every_name_of_a_request_is_a_strategy_and_the_other_way_round() -> None:
    assert set(STRATEGIES) == set(get_args(SearchSettings.model_fields["strategy"].annotation))
    assert all(isinstance(strategy, Strategy) for strategy in STRATEGIES.values())


@every_strategy
@given(archive=archives(), groups=st.integers(1, 10), seed=st.integers(0, 2**31 - 1), epsilon=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_the_grid_is_full_of_live_nodes_and_a_shortage_is_told(
    name: str, archive: ArchiveState, groups: int, seed: int, epsilon: float
) -> None:
    before = archive.model_dump_json()
    selection = select(name, archive, groups, seed, epsilon=epsilon)
    assert len(selection.parents) == groups
    live = {node.id: node for node in archive.nodes}
    for parent in selection.parents:
        assert parent.node is live[parent.node.id]
        assert parent.visits == archive.visits.get(parent.node.id, 0)
        assert parent.score == parent.q + parent.bonus
    assert selection.scale == value_scale(archive)
    repeated = len(set(names(selection))) < groups
    assert selection.note or not repeated, "nodes start more than one group, and no note says so"
    if selection.note:
        assert selection.note.startswith("only ")
        assert f"for {groups} groups" in selection.note
    if name != "puct":  # which also tells of related parents
        assert bool(selection.note) == repeated
    assert archive.model_dump_json() == before


@every_strategy
@given(archive=archives(), groups=st.integers(1, 6), seed=st.integers(0, 2**31 - 1))
def test_one_seed_is_one_selection_also_after_storing_the_archive(name: str, archive: ArchiveState, groups: int, seed: int) -> None:
    again = ArchiveState.model_validate_json(archive.model_dump_json())
    first, second = (select(name, a, groups, seed, epsilon=0.5) for a in (archive, again))
    assert [as_pick(p) for p in first.parents] == [as_pick(p) for p in second.parents]
    assert (first.scale, first.note) == (second.scale, second.note)


@every_strategy
def test_nothing_starts_from_an_empty_archive(name: str) -> None:
    with pytest.raises(InputError, match="archive is empty"):
        select(name, ArchiveState(nodes=(), seeds=()), 4)


def test_step_seeds_are_of_31_bits_and_differ_by_run_and_step() -> None:
    seeds = {step_seed(run, step) for run in range(20) for step in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**31 for seed in seeds)
    # Fixed: another derivation would be another search under the same identity.
    assert step_seed(3, 7) == 1778793246


# Over a run -------------------------------------------------------------------------------------------------------------------
def outcome(at: Coordinate) -> float | Outcome:
    """Better with every step, some invalid."""
    return Outcome.INVALID if (at.group + at.rollout) % 4 == 3 else 1.0 + at.step + 0.1 * at.group + 0.01 * at.rollout


def run_steps(folder: Path, name: str, steps: int, **changes: Any) -> tuple[Chain, list[StepPlan], StepCommit]:
    """A run by the real rooms over made-up verdicts: its plans, and its last commit."""
    search = {"strategy": name, "epsilon": 0.5, "groups": 3, "rollouts": 3, "steps": steps}
    chain = Chain.fresh(Blobs(LocalStore(folder / "store")), folder, search=search, **changes)
    run, opened_run = chain.open()
    head, plans = opened_run.head, []
    for _ in range(steps):
        request, committed = chain.step(run, head, outcome)
        plans.append(chain.store.load(StepPlan, request.plan))
        head = committed.head
    return chain, plans, chain.store.load(StepCommit, head.commit)


@every_strategy
def test_a_plan_records_its_seed_and_can_be_made_again_from_it(tmp_path: Path, name: str) -> None:
    chain, plans, commit = run_steps(tmp_path / "a", name, 3, seed=5)
    assert [plan.seed for plan in plans] == [step_seed(5, step) for step in (1, 2, 3)]
    for plan in plans:
        assert plan.seed is not None
        archive = chain.store.load(ArchiveState, plan.archive)
        again = select(name, archive, 3, plan.seed, epsilon=0.5, rollouts=3)
        assert [group.pick for group in plan.groups] == [as_pick(parent) for parent in again.parents]
    _, plans_again, commit_again = run_steps(tmp_path / "b", name, 3, seed=5)
    assert plans_again == plans
    assert commit_again == commit


@every_strategy
def test_the_archive_keeps_the_best_answer_whatever_the_strategy(tmp_path: Path, name: str) -> None:
    chain, _, commit = run_steps(tmp_path, name, 3)
    best = best_node(chain.store.load(ArchiveState, commit.archive))
    results = [outcome(Coordinate(step=3, group=g, rollout=r)) for g in range(3) for r in range(3)]
    assert best is not None
    assert best.score == max(result for result in results if isinstance(result, float))


# Each by itself ---------------------------------------------------------------------------------------------------------------
@given(archives(), st.integers(1, 8), st.sampled_from(["rollout", "expansion"]), st.sampled_from([0.0, 1.0, 2.5]))
def test_puct_reads_constant_and_visit_unit_from_the_settings(archive: ArchiveState, groups: int, unit: str, c: float) -> None:
    expected = select_parents(archive, groups, exploration=c, visit_unit=1 if unit == "rollout" else 16)
    assert select("puct", archive, groups, exploration=c, visit_unit=unit, rollouts=16) == expected


@given(archives(), st.integers(1, 10))
def test_best_of_n_takes_the_seeds_by_turns_and_never_anything_else(archive: ArchiveState, groups: int) -> None:
    selection = select("best_of_n", archive, groups)
    seeds = archive.seeds
    assert names(selection) == [seeds[g % len(seeds)] for g in range(groups)]
    short = f"only {len(seeds)} seeds for {groups} groups: some seeds start more than one group"
    assert selection.note == (short if len(seeds) < groups else "")


def test_best_of_n_without_its_seeds_is_an_error_that_says_so() -> None:
    node = child("a", root("s"), 1.0)
    with pytest.raises(InputError, match=r"none of the archive's 1 nodes is one of its 1 seeds"):
        select("best_of_n", ArchiveState(nodes=(node,), seeds=("s",)), 2)


def test_greedy_takes_the_best_nodes_related_or_not() -> None:
    assert names(select("greedy", family(), 4)) == ["aa", "ab", "a", "b"]
    assert names(select("puct", family(), 2, exploration=0)) == ["aa", "ab"]  # siblings
    assert "a" not in names(select("puct", family(), 3, exploration=0))  # the parent of both is blocked


@given(archives(), st.integers(1, 10))
def test_greedy_is_by_value_and_then_by_age(archive: ArchiveState, groups: int) -> None:
    ranked = sorted(enumerate(archive.nodes), key=lambda item: (-item[1].value, item[0]))
    expected = [ranked[g % len(ranked)][1].id for g in range(groups)]
    assert names(select("greedy", archive, groups)) == expected


def many(count: int) -> ArchiveState:
    """Unrelated nodes of rising value, and so the last is the best."""
    return opened(*(root(f"n{i}", float(i)) for i in range(count)))


@given(archives(), st.integers(1, 10), st.integers(0, 2**31 - 1))
def test_epsilon_0_is_greedy(archive: ArchiveState, groups: int, seed: int) -> None:
    assert select("epsilon_greedy", archive, groups, seed, epsilon=0) == select("greedy", archive, groups)


def test_epsilon_1_reaches_every_node_alike() -> None:
    """Of 10 nodes each of 3 groups draws one: over 2,000 seeds every node comes 600 times, with a deviation of about 20."""
    counts: dict[str, int] = {}
    for seed in range(2000):
        picks = names(select("epsilon_greedy", many(10), 3, seed, epsilon=1))
        assert len(set(picks)) == 3
        for pick in picks:
            counts[pick] = counts.get(pick, 0) + 1
    assert len(counts) == 10
    assert all(abs(count - 600) < 100 for count in counts.values()), counts


def test_a_group_explores_with_probability_epsilon_and_else_takes_the_best_that_is_left() -> None:
    """4,000 groups in steps of 8 over 50 nodes: 1,200 explore, 1 in 46 of them draws the best by chance; deviation 29."""
    ranked = [f"n{i}" for i in reversed(range(50))]
    strays = 0
    for seed in range(500):
        left = list(ranked)
        for pick in names(select("epsilon_greedy", many(50), 8, seed, epsilon=0.3)):
            strays += pick != left[0]
            left.remove(pick)
    assert abs(strays - 1174) < 145


@given(archives(), st.integers(0, 2**31 - 1))
def test_epsilon_greedy_decides_group_by_group(archive: ArchiveState, seed: int) -> None:
    few, more = (names(select("epsilon_greedy", archive, groups, seed, epsilon=0.5)) for groups in (3, 7))
    assert more[:3] == few
    assert len(set(more[: len(archive.nodes)])) == min(7, len(archive.nodes))
