"""Was it the search or the training? Runs the search strategies with and without training on one budget, and draws every run.

    python -m scripts.learning.strategies [--seeds 1 2 3] [--home DIR] [--out docs/results/strategies] [--set search.steps=8 ...]

Every run is a real one (`tttd run`). In one home with `python -m scripts.learning` the runs of PUCT are those of that command, and
are not made twice. Repeating the command resumes what is there and adds what is missing.
"""

from __future__ import annotations

import sys

from activities.run_store import RunStore
from scripts.learning.curves import read_curve
from scripts.learning.runs import command_line, hardware, parser_of, run_all, run_name
from scripts.learning.strategy_tables import VARIANTS, Ablation, write_results


def main() -> int:
    arguments = parser_of(__doc__, "docs/results/strategies").parse_args()
    # Seed by seed: whoever stops early has whole comparisons.
    runs = {(seed, *variant): run_name(seed, variant[1], variant[0]) for seed in arguments.seeds for variant in VARIANTS}
    settings = {
        name: [f"seed={seed}", f"train={train}", f"search.strategy={strategy}", *arguments.set]
        for (seed, strategy, train), name in runs.items()
    }
    store = run_all(arguments.home, settings)
    ablations = [
        Ablation(seed, train, read_curve(RunStore(store, name)), strategy) for (seed, strategy, train), name in runs.items()
    ]
    write_results(arguments.out, ablations, command_line("scripts.learning.strategies"), hardware())
    return 0


if __name__ == "__main__":
    sys.exit(main())
