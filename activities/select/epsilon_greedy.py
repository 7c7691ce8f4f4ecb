"""ε-greedy reuse: greedy, but now and then a node by chance. Source: spec algorithm 8 (ablation)."""

from __future__ import annotations

import random

from activities.records import ArchiveState
from activities.select.greedy import few_nodes_note
from activities.select.strategy import Selection, Strategy, best_first, check_not_empty, selected
from workflows.contracts.request import SearchSettings


class EpsilonGreedy(Strategy):
    """Group by group: with probability `search.epsilon` any live node with equal chances, else the best one.

    Both choose among the nodes that no group of the step has yet, so that no node starts two groups while another waits.
    Lineage blocking does not apply, as for :class:`Greedy`. The original draws its random node from the few best that it keeps;
    here any node of the archive can come, or an ε of 1 would not be a random search.
    """

    def select(self, archive: ArchiveState, groups: int, settings: SearchSettings, rng: random.Random) -> Selection:
        check_not_empty(archive)
        picks: list[int] = []
        waiting: list[int] = []
        for _ in range(groups):
            waiting = waiting or best_first(archive)
            # Two draws a group, used or not: what one group does never shifts the chances of the next.
            explore, place = rng.random() < settings.epsilon, rng.random()
            picks.append(waiting.pop(int(place * len(waiting)) if explore else 0))
        return selected(archive, picks, few_nodes_note(archive, groups))
