"""Selection of parents: the formula against a second, plain writing of it, lineage blocking, fill-up and ties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.commit.expand import expand
from activities.errors import InputError
from activities.records import ArchiveState, Node
from activities.select.puct import score_nodes, select_parents
from activities.select.strategy import SCALE_FLOOR, as_pick, value_scale
from tests.archives import archives, child, opened, root


def plain_score(archive: ArchiveState, node: Node, exploration: float, unit: int) -> float:
    """The formula of the specification, one node at a time."""
    order = sorted(archive.nodes, key=lambda n: -n.value)
    rank = next(i for i, other in enumerate(order) if other.id == node.id)
    size, visits = len(order), archive.visits.get(node.id, 0)
    spread = [n.value for n in archive.nodes if n.id not in archive.seeds] or [n.value for n in archive.nodes]
    scale = max(max(spread) - min(spread), 1e-6)
    q = node.value if visits == 0 else archive.best_child.get(node.id, node.value)
    prior = (size - rank) / (size * (size + 1) / 2)
    return q + exploration * scale * prior * math.sqrt(1 + archive.total_visits / unit) / (1 + visits / unit)


def related(a: Node, b: Node) -> bool:
    return a.id == b.id or a.id in b.ancestors or b.id in a.ancestors


def plain_selection(archive: ArchiveState, count: int, exploration: float, unit: int) -> list[str]:
    """Walk and block, marking descendants by scanning the archive."""
    scored = [(plain_score(archive, n, exploration, unit), n.value, -i, n) for i, n in enumerate(archive.nodes)]
    picks: list[Node] = []
    for *_, node in sorted(scored, key=lambda s: s[:3], reverse=True):
        if len(picks) < count and not any(related(node, pick) for pick in picks):
            picks.append(node)
    return [pick.id for pick in picks]


@given(archives(), st.sampled_from([0.0, 1.0, 2.5]), st.sampled_from([1, 8, 64]))
def test_scores_are_the_formula(archive: ArchiveState, exploration: float, unit: int) -> None:
    for scored in score_nodes(archive, exploration=exploration, visit_unit=unit):
        assert scored.score == pytest.approx(plain_score(archive, scored.node, exploration, unit), rel=1e-12, abs=1e-12)
        assert scored.score == scored.q + scored.bonus
    assert sum(s.prior for s in score_nodes(archive, exploration=1.0, visit_unit=1)) == pytest.approx(1.0)


@given(archives(), st.integers(1, 10), st.sampled_from([1, 8]))
def test_picks_are_unrelated_while_lineages_last_and_the_grid_is_full(archive: ArchiveState, count: int, unit: int) -> None:
    selection = select_parents(archive, count, exploration=1.0, visit_unit=unit)
    names = [p.node.id for p in selection.parents]
    unrelated = plain_selection(archive, count, 1.0, unit)
    assert names[: len(unrelated)] == unrelated
    assert len(names) == count
    assert bool(selection.note) == (len(unrelated) < count)
    if selection.note:
        assert f"only {len(unrelated)} unrelated lineages for {count} groups" in selection.note
    # Filling up repeats no node before every live node has been taken.
    assert len(set(names)) == min(count, len(archive.nodes))


@given(archives(), st.integers(1, 6))
def test_selection_is_a_function_of_the_archive(archive: ArchiveState, count: int) -> None:
    again = ArchiveState.model_validate_json(archive.model_dump_json())
    first, second = (select_parents(a, count, exploration=1.0, visit_unit=1) for a in (archive, again))
    assert [as_pick(p) for p in first.parents] == [as_pick(p) for p in second.parents]


def test_ties_go_to_the_earlier_node() -> None:
    archive = opened(*(root(f"s{i}") for i in range(6)))
    picks = select_parents(archive, 6, exploration=1.0, visit_unit=1).parents
    assert [p.node.id for p in picks] == [f"s{i}" for i in range(6)]
    assert picks[0].bonus == pytest.approx(SCALE_FLOOR * 6 / 21)
    without_exploration = select_parents(archive, 3, exploration=0.0, visit_unit=1).parents
    assert [p.node.id for p in without_exploration] == ["s0", "s1", "s2"]


def test_blocking_outlives_the_eviction_of_the_ancestor_between() -> None:
    seed, other = root("s"), root("other", -1.0)
    middle = child("middle", seed, 1.0)
    archive = expand(opened(seed, other), [(seed, middle)], children_per_parent=2, capacity=10)
    leaf = child("leaf", middle, 5.0)
    better = [child(f"better{i}", seed, 2.0 + i) for i in range(2)]
    archive = expand(archive, [(middle, leaf), *((seed, b) for b in better)], children_per_parent=2, capacity=10)
    live = [n.id for n in archive.nodes]
    assert "middle" not in live
    assert "leaf" in live
    picks = [p.node.id for p in select_parents(archive, 4, exploration=0.0, visit_unit=1).parents]
    assert picks[:3] == ["leaf", "better1", "better0"]
    assert picks[3] == "other"  # and not the seed, whose descendant `leaf` still is
    assert archive.visits["s"] == 4  # the evicted parent still passes visits on


def test_visit_unit_counts_expansions() -> None:
    seed = root("s", 1.0)
    archive = expand(opened(seed, root("t", 0.5)), [(seed, None)] * 8, children_per_parent=2, capacity=10)
    (rollouts, _), (expansions, _) = (score_nodes(archive, exploration=1.0, visit_unit=unit) for unit in (1, 8))
    assert rollouts.bonus == pytest.approx(0.5 * (2 / 3) * math.sqrt(9) / 9)
    assert expansions.bonus == pytest.approx(0.5 * (2 / 3) * math.sqrt(2) / 2)


def test_visits_decide_between_own_value_and_best_child() -> None:
    seed = root("s", 1.0)
    cases: list[tuple[dict[str, int], float]] = [({}, 1.0), ({"s": 0}, 1.0), ({"s": 1}, 3.0)]
    for visits, q in cases:
        archive = ArchiveState(nodes=(seed,), seeds=("s",), visits=visits, best_child={"s": 3.0}, total_visits=1)
        assert score_nodes(archive, exploration=1.0, visit_unit=1)[0].q == q


def test_scale_spans_children_once_there_are_any() -> None:
    low, high = root("low", -100.0), root("high", 50.0)
    assert value_scale(opened(low, high)) == 150.0
    one = expand(opened(low, high), [(low, child("a", low, 1.0))], children_per_parent=2, capacity=10)
    assert value_scale(one) == SCALE_FLOOR
    two = expand(one, [(low, child("b", low, 3.0))], children_per_parent=2, capacity=10)
    assert value_scale(two) == 2.0


def test_empty_archive_is_an_error() -> None:
    with pytest.raises(InputError, match="archive is empty"):
        select_parents(ArchiveState(nodes=(), seeds=()), 4, exploration=1.0, visit_unit=1)
