"""Best of N: nothing is reused, every group of every step starts from the run's seed nodes. Source: spec algorithm 8, "no reuse".

The archive still takes in every valid child by its own rules, and so holds the best answer; it is only never asked for a parent.
"""

from __future__ import annotations

import random

from activities.errors import InputError
from activities.records import ArchiveState
from activities.select.strategy import Selection, Strategy, check_not_empty, cycled, selected
from workflows.contracts.request import SearchSettings


class BestOfN(Strategy):
    """Seed nodes by turns, in archive order: group g starts from seed g modulo their number. Deterministic, without chance."""

    def select(self, archive: ArchiveState, groups: int, settings: SearchSettings, rng: random.Random) -> Selection:
        """See :class:`Strategy`.

        Raises:
            InputError: also when the archive has nodes, but none of its seeds, which an archive never evicts.
        """
        check_not_empty(archive)
        names = set(archive.seeds)
        seeds = [i for i, node in enumerate(archive.nodes) if node.id in names]
        if not seeds:
            raise InputError(
                f"search.strategy=best_of_n starts every group from a seed, and none of the archive's {len(archive.nodes)} nodes "
                f"is one of its {len(names)} seeds. Restore the run's archive, or choose another search.strategy for a new run."
            )
        short = f"only {len(seeds)} seeds for {groups} groups: some seeds start more than one group"
        return selected(archive, cycled(seeds, groups), short if len(seeds) < groups else "")
