"""What a step does to the archive: counting, duplicates, top-k, capacity; and a search of many steps as a state machine."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from activities.commit.expand import best_node, child_id, expand, make_child, node_key
from activities.records import ArchiveState, BatchRow, Node, canonical_json
from activities.select.puct import select_parents
from workflows.contracts.base import Coordinate, Outcome

DIGEST = "0" * 64


def seed_node(i: int, value: float = 0.0, code: str = "seed") -> Node:
    return Node(id=f"seed-{i:02d}", step=0, value=value, score=value, code=code, construction=None)


def opened(count: int = 2, value: float = 0.0) -> ArchiveState:
    nodes = tuple(seed_node(i, value) for i in range(count))
    return ArchiveState(nodes=nodes, seeds=tuple(n.id for n in nodes))


def row(at: Coordinate, value: float | None, construction: str | None = None) -> BatchRow:
    """A batch row of a rollout; value None for a failure."""
    return BatchRow(
        at=at,
        rollout=DIGEST,
        verdict=DIGEST,
        outcome=Outcome.INVALID if value is None else Outcome.VALID,
        reward=value or 0.0,
        value=value,
        score=value,
        exact=None,
        construction=construction,
        tokens_digest=DIGEST,
    )


def made(step: int, group: int, rollout: int, parent: Node, value: float, code: str | None = None) -> Node:
    at = Coordinate(step=step, group=group, rollout=rollout)
    return make_child(row(at, value), parent, code or f"code {at}", "out")


def ids(archive: ArchiveState) -> list[str]:
    return [node.id for node in archive.nodes]


def test_child_carries_its_lineage() -> None:
    seed = seed_node(0, 1.0)
    first = made(1, 0, 0, seed, 2.0)
    second = made(2, 3, 7, first, 4.0)
    assert second.id == child_id(2, 3, 7) == "s000002-g03-r07"
    assert second.ancestors == (first.id, seed.id)
    assert second.ancestor_values == second.ancestor_scores == (2.0, 1.0)
    assert (second.step, second.output_tail) == (2, "out")


def test_failures_count_a_visit_all_the_way_up_and_nothing_else() -> None:
    archive = opened()
    seed = archive.nodes[0]
    first = made(1, 0, 0, seed, 2.0)
    archive = expand(archive, [(seed, first)], children_per_parent=2, capacity=9)
    after = expand(archive, [(first, None)] * 3, children_per_parent=2, capacity=9)
    assert after.visits == {seed.id: 4, first.id: 3}
    assert after.best_child == {seed.id: 2.0}
    assert after.total_visits == 4
    assert after.nodes == archive.nodes


def test_duplicates_are_counted_but_not_kept() -> None:
    archive = opened()
    seed = archive.nodes[0]
    first, again = made(1, 0, 0, seed, 1.0, "same"), made(1, 0, 1, seed, 4.0, "same")
    after = expand(archive, [(seed, first), (seed, again)], children_per_parent=2, capacity=9)
    assert ids(after) == ["seed-00", "seed-01", first.id]
    assert after.best_child == {seed.id: 4.0}
    assert after.total_visits == after.visits[seed.id] == 2


def test_the_construction_decides_what_is_the_same() -> None:
    seed = seed_node(0)
    at = Coordinate(step=1, group=0, rollout=0)
    one, two = (make_child(row(at, 1.0, construction="a" * 64), seed, code, "") for code in ("x", "y"))
    assert node_key(one) == node_key(two) == "a" * 64
    assert node_key(seed_node(0, code="")) is None


def test_a_child_equal_to_the_seed_program_is_no_new_answer() -> None:
    archive = opened()
    seed = archive.nodes[0]
    after = expand(archive, [(seed, made(1, 0, 0, seed, 0.0, "seed"))], children_per_parent=2, capacity=9)
    assert ids(after) == ids(archive)


def test_a_pruned_answer_may_come_back() -> None:
    archive = opened(1)
    seed = archive.nodes[0]
    children = [made(1, 0, i, seed, float(i), f"code {i}") for i in range(3)]
    archive = expand(archive, [(seed, c) for c in children], children_per_parent=2, capacity=9)
    assert ids(archive) == ["seed-00", children[2].id, children[1].id]
    back = made(2, 0, 0, children[2], 0.0, "code 0")
    assert back.id in ids(expand(archive, [(children[2], back)], children_per_parent=2, capacity=9))


def test_top_children_compete_over_all_steps_and_earlier_wins_a_tie() -> None:
    archive = opened(1)
    seed = archive.nodes[0]
    old = [made(1, 0, i, seed, value) for i, value in enumerate((1.0, 3.0))]
    archive = expand(archive, [(seed, c) for c in old], children_per_parent=2, capacity=9)
    new = [made(2, 0, i, seed, value) for i, value in enumerate((3.0, 2.0))]
    after = expand(archive, [(seed, c) for c in new], children_per_parent=2, capacity=9)
    assert ids(after) == ["seed-00", old[1].id, new[0].id]
    assert len(expand(archive, [(seed, c) for c in new], children_per_parent=0, capacity=9).nodes) == 5


def test_capacity_keeps_seeds_and_the_later_of_equals() -> None:
    archive = opened(2, value=-9.0)
    seed = archive.nodes[0]
    children = [made(1, 0, i, seed, value) for i, value in enumerate((5.0, 1.0, 1.0, 7.0))]
    after = expand(archive, [(seed, c) for c in children], children_per_parent=0, capacity=5)
    assert ids(after) == ["seed-00", "seed-01", children[0].id, children[2].id, children[3].id]
    full = expand(archive, [(seed, c) for c in children], children_per_parent=0, capacity=1)
    assert ids(full) == ["seed-00", "seed-01"]
    assert full.best_child[seed.id] == 7.0


def test_best_node_has_a_certified_score() -> None:
    unscored = Node(id="seed-00", step=0, value=99.0, score=None, code="", construction=None)
    archive = ArchiveState(nodes=(unscored, seed_node(1, 1.0), seed_node(2, 1.0)), seeds=("seed-00",))
    best = best_node(archive)
    assert best is not None
    assert best.id == "seed-01"
    assert best_node(ArchiveState(nodes=(unscored,), seeds=("seed-00",))) is None


@given(st.lists(st.tuples(st.integers(0, 1), st.none() | st.integers(-3, 3)), min_size=1, max_size=20), st.integers(1, 6))
def test_one_step_or_many_parts_count_the_same(rollouts: list[tuple[int, int | None]], parts: int) -> None:
    """Visits, best children and T do not depend on how rollouts are cut into batches; only eviction happens at the end of one."""
    archive = opened()
    submissions: list[tuple[Node, Node | None]] = []
    for i, (seed, value) in enumerate(rollouts):
        parent = archive.nodes[seed]
        submissions.append((parent, None if value is None else made(1, seed, i, parent, float(value))))
    whole = expand(archive, submissions, children_per_parent=2, capacity=5)
    for start in range(0, len(submissions), parts):
        archive = expand(archive, submissions[start : start + parts], children_per_parent=0, capacity=10**6)
    archive = expand(archive, [], children_per_parent=2, capacity=5)
    assert archive == whole


class Search(RuleBasedStateMachine):
    """A search: select parents, submit a full grid of their rollouts, over and over. Constants are drawn per search."""

    @initialize(
        seeds=st.integers(1, 4),
        rollouts=st.integers(1, 5),
        keep=st.integers(0, 3),
        spare=st.integers(0, 6),
        noise=st.integers(0, 2**32),
    )
    def open(self, seeds: int, rollouts: int, keep: int, spare: int, noise: int) -> None:
        self.archive = opened(seeds)
        self.seeds = [node.id for node in self.archive.nodes]
        self.rollouts, self.keep, self.capacity = rollouts, keep, seeds + spare
        self.step = 0
        self.rng = random.Random(noise)
        self.submitted: list[tuple[Node, Node | None]] = []
        self.grids: list[list[tuple[Node, Node | None]]] = []
        self.opening = self.archive
        self.best_value = 0.0

    @rule(groups=st.integers(1, 6), failing=st.sampled_from([0.0, 0.4, 1.0]), levels=st.integers(1, 40))
    def advance(self, groups: int, failing: float, levels: int) -> None:
        self.step += 1
        selection = select_parents(self.archive, groups, exploration=1.0, visit_unit=1)
        grid: list[tuple[Node, Node | None]] = []
        for group, pick in enumerate(selection.parents):
            for rollout in range(self.rollouts):
                value = None if self.rng.random() < failing else self.rng.randrange(levels) / 4
                code = f"program {self.rng.randrange(60)}"
                child = None if value is None else made(self.step, group, rollout, pick.node, value, code)
                grid.append((pick.node, child))
        before = {node.id for node in self.archive.nodes}
        self.archive = expand(self.archive, grid, children_per_parent=self.keep, capacity=self.capacity)
        self.grids.append(grid)
        self.submitted += grid
        assert {node.id for node in self.archive.nodes} <= before | {c.id for _, c in grid if c is not None}

    @invariant()
    def visits_conserve(self) -> None:
        if not hasattr(self, "archive"):
            return
        assert self.archive.total_visits == len(self.submitted)
        below: dict[str, int] = {}
        for parent, _ in self.submitted:
            for name in (parent.id, *parent.ancestors):
                below[name] = below.get(name, 0) + 1
        assert self.archive.visits == below
        assert sum(self.archive.visits.get(seed, 0) for seed in self.seeds) == len(self.submitted)

    @invariant()
    def best_children_are_the_best_submitted(self) -> None:
        if not hasattr(self, "archive"):
            return
        best: dict[str, float] = {}
        for parent, child in self.submitted:
            if child is not None:
                best[parent.id] = max(best.get(parent.id, child.value), child.value)
        assert self.archive.best_child == best

    @invariant()
    def archive_is_well_formed(self) -> None:
        if not hasattr(self, "archive"):
            return
        names = ids(self.archive)
        assert len(set(names)) == len(names) <= self.capacity
        assert names[: len(self.seeds)] == self.seeds
        keys = [node_key(node) for node in self.archive.nodes[len(self.seeds) :]]
        assert len(set(keys)) == len(keys)
        if self.keep:
            parents = [node.ancestors[0] for node in self.archive.nodes if node.ancestors]
            assert all(parents.count(parent) <= self.keep for parent in parents)
        known = {parent.id: parent for parent, _ in self.submitted}
        for node in self.archive.nodes:
            assert len(node.ancestors) == len(node.ancestor_values) == len(node.ancestor_scores)
            if node.ancestors:
                assert node.ancestors == (node.ancestors[0], *known[node.ancestors[0]].ancestors)
                assert node.ancestors[-1] in self.seeds

    @invariant()
    def best_answer_is_never_lost(self) -> None:
        if not hasattr(self, "archive"):
            return
        best = best_node(self.archive)
        assert best is not None
        assert best.value >= self.best_value or self.capacity == len(self.seeds)
        self.best_value = max(self.best_value, best.value)

    @invariant()
    def replay_of_the_grids_is_the_archive(self) -> None:
        if not hasattr(self, "archive"):
            return
        archive = self.opening
        for grid in self.grids:
            archive = expand(archive, grid, children_per_parent=self.keep, capacity=self.capacity)
        assert canonical_json(archive) == canonical_json(self.archive)


TestSearch: Any = Search.TestCase
TestSearch.settings = settings(max_examples=40, stateful_step_count=8, deadline=None)
