"""How long the selection of 8 parents takes from archives of 1,000 and 100,000 nodes. Prints a table; best of several runs.

    python scripts/bench_select.py [--nodes N ...] [--parents G] [--repeats K]

The archives are grown the way a search grows them: children of random live nodes, lineages several generations deep, tied
values among them. Run on one core; nothing else is measured than ``select_parents``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from activities.records import ArchiveState, Node
from activities.select.puct import select_parents

MAXIMUM_DEPTH = 50
"""Steps of a published run: a lineage is never longer."""


def grown_archive(count: int, seeds: int = 8, seed: int = 0) -> ArchiveState:
    """An archive of `count` nodes below `seeds` roots, values rising along lineages."""
    rng = random.Random(seed)
    nodes = [Node(id=f"seed-{i}", step=0, value=0.0, score=None, code="", construction=None) for i in range(seeds)]
    visits: dict[str, int] = {}
    best: dict[str, float] = {}
    while len(nodes) < count:
        parent = nodes[rng.randrange(max(0, len(nodes) - 64), len(nodes))]
        if len(parent.ancestors) >= MAXIMUM_DEPTH:
            parent = nodes[rng.randrange(seeds)]
        value = round(parent.value + rng.gauss(0.01, 0.05), 3)
        name = f"n{len(nodes)}"
        lineage = (parent.id, *parent.ancestors)
        nodes.append(Node(id=name, step=1, value=value, score=value, code=f"code {name}", construction=None, ancestors=lineage))
        best[parent.id] = max(best.get(parent.id, value), value)
        for ancestor in lineage:
            visits[ancestor] = visits.get(ancestor, 0) + 1
    return ArchiveState(
        nodes=tuple(nodes),
        seeds=tuple(n.id for n in nodes[:seeds]),
        visits=visits,
        best_child=best,
        total_visits=count - seeds,
    )


def best_seconds(archive: ArchiveState, parents: int, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        select_parents(archive, parents, exploration=1.0, visit_unit=1)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--parents", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{'nodes':>10} {'parents':>8} {'milliseconds':>13}")
    for count in options.nodes:
        milliseconds = best_seconds(grown_archive(count), options.parents, options.repeats) * 1000
        print(f"{count:>10,} {options.parents:>8} {milliseconds:>13.2f}")


if __name__ == "__main__":
    main()
