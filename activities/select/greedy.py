"""Greedy reuse: the best live nodes, and nothing but their values. Source: spec algorithm 7 (the original's default) and 8."""

from __future__ import annotations

import random

from activities.records import ArchiveState
from activities.select.strategy import Selection, Strategy, best_first, check_not_empty, cycled, selected
from workflows.contracts.request import SearchSettings


class Greedy(Strategy):
    """The G best live nodes, one a group, best first; of equal values the earlier node. Deterministic, without chance.

    Lineage blocking does not apply: a node, its parent and its children may all be picked in one step, as in the original's
    greedy sampler. Blocking is how PUCT keeps its parents apart; an ablation that kept it would be half of PUCT.
    """

    def select(self, archive: ArchiveState, groups: int, settings: SearchSettings, rng: random.Random) -> Selection:
        check_not_empty(archive)
        return selected(archive, cycled(best_first(archive), groups), few_nodes_note(archive, groups))


def few_nodes_note(archive: ArchiveState, groups: int) -> str:
    """Empty, or that there are fewer nodes than groups."""
    if len(archive.nodes) >= groups:
        return ""
    return f"only {len(archive.nodes)} nodes for {groups} groups: some nodes start more than one group"
