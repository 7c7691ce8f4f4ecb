"""Rank-prior PUCT with lineage blocking. Source: spec algorithm 1.2 and 1.3.

    score_i = Q_i + c · scale · P_i · sqrt(1 + T/G) / (1 + n_i/G)

Every sort is stable, so that tied values rank by list order on every machine.

An archive of 100,000 nodes is scored as columns of numbers; objects are made for the picked nodes alone.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from activities.records import ArchiveState, Node
from activities.select.strategy import Scored, Selection, Strategy, best_first, check_not_empty, cycled, value_scale
from workflows.contracts.request import SearchSettings


class Puct(Strategy):
    """The formula with the run's constant c and its unit of a visit. Deterministic, without chance."""

    def select(self, archive: ArchiveState, groups: int, settings: SearchSettings, rng: random.Random) -> Selection:
        visit_unit = 1 if settings.visit_unit == "rollout" else settings.rollouts
        return select_parents(archive, groups, exploration=settings.exploration, visit_unit=visit_unit)


@dataclass(frozen=True)
class _Columns:
    """Score and its parts, one entry per live node in archive order (N)."""

    scale: float
    visits: list[int]
    q: list[float]
    prior: list[float]
    bonus: list[float]
    score: list[float]


def score_nodes(archive: ArchiveState, *, exploration: float, visit_unit: int) -> list[Scored]:
    """Score every live node, in archive order.

    Args:
        exploration: c of the formula.
        visit_unit: G of the formula: 1 counts rollouts, R counts expansions.
    """
    columns = _score(archive, exploration, visit_unit)
    return [_scored(archive, columns, i) for i in range(len(archive.nodes))]


def select_parents(archive: ArchiveState, count: int, *, exploration: float, visit_unit: int) -> Selection:
    """Pick `count` parents, no two of one lineage while lineages last.

    When there are too few lineages the rest is filled with the best nodes that were blocked, then with the best ones again, so
    that every step has its full grid; the note says so.

    Raises:
        InputError: the archive has no node to start from.
    """
    check_not_empty(archive)
    columns = _score(archive, exploration, visit_unit)
    values = [node.value for node in archive.nodes]
    order = sorted(range(len(values)), key=list(zip(columns.score, values, strict=True)).__getitem__, reverse=True)
    picks = _unblocked(archive.nodes, order, count)
    note = ""
    if len(picks) < count:
        lineages = len(picks)
        chosen = set(picks)
        picks += [i for i in order if i not in chosen][: count - lineages]
        picks += cycled(order, count - len(picks))
        note = f"only {lineages} unrelated lineages for {count} groups: filled up with the best related nodes"
    return Selection(tuple(_scored(archive, columns, i) for i in picks), columns.scale, note)


def _score(archive: ArchiveState, exploration: float, visit_unit: int) -> _Columns:
    nodes, n = archive.nodes, len(archive.nodes)
    total = n * (n + 1) / 2
    prior = [0.0] * n
    for rank, i in enumerate(best_first(archive)):
        prior[i] = (n - rank) / total
    visits = [archive.visits.get(node.id, 0) for node in nodes]
    # m may be known for a node without visits only in a hand-made archive; n decides, as the formula has it.
    q = [archive.best_child.get(node.id, node.value) if v > 0 else node.value for node, v in zip(nodes, visits, strict=True)]
    scale = value_scale(archive)
    explored = exploration * scale
    root = math.sqrt(1 + archive.total_visits / visit_unit)
    bonus = [explored * p * root / (1 + v / visit_unit) for p, v in zip(prior, visits, strict=True)]
    score = [a + b for a, b in zip(q, bonus, strict=True)]
    return _Columns(scale, visits, q, prior, bonus, score)


def _scored(archive: ArchiveState, columns: _Columns, i: int) -> Scored:
    return Scored(archive.nodes[i], columns.visits[i], columns.q[i], columns.prior[i], columns.bonus[i], columns.score[i])


def _unblocked(nodes: tuple[Node, ...], order: list[int], count: int) -> list[int]:
    """The first `count` of `order` that are neither ancestor nor descendant of one another. Siblings are not related.

    A node knows its whole lineage, so a candidate is checked against the picks alone instead of marking every descendant of
    a pick in the archive.
    """
    picks: list[int] = []
    picked: set[str] = set()
    above: set[str] = set()
    for i in order:
        if len(picks) == count:
            break
        node = nodes[i]
        if node.id in picked or node.id in above or not picked.isdisjoint(node.ancestors):
            continue
        picks.append(i)
        picked.add(node.id)
        above.update(node.ancestors)
    return picks
