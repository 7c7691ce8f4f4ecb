"""Runs seeds x {train on, train off} on one budget and tables them; see docs/results/learning.

    python -m scripts.learning [--seeds 1 2 3] [--home DIR] [--out docs/results/learning] [--set search.steps=8 ...]

Every run is a real one (`tttd run`), in a home of its own; repeating the command resumes what is there and adds what is missing.
The fixed parents are the same for every policy, so better parents in the archive cannot pass for a better policy.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from activities.blobs import Blobs
from activities.records import StepCommit
from activities.run_store import RunStore
from scripts.learning.curves import Experiment, read_curve
from scripts.learning.fixed_parents import FixedParents, PolicyResult
from scripts.learning.runs import command_line, hardware, parser_of, run_all, run_name
from scripts.learning.tables import write_results
from workflows.contracts.base import PolicyRef


def main() -> int:
    parser = parser_of(__doc__, "docs/results/learning")
    parser.add_argument("--parents", type=int, default=32, help="fixed parents that first and last policies are measured on")
    parser.add_argument("--samples", type=int, default=4, help="programs sampled per fixed parent")
    arguments = parser.parse_args()

    names = {(seed, train): run_name(seed, train) for seed in arguments.seeds for train in ("off", "on")}
    settings = {name: [f"seed={seed}", f"train={train}", *arguments.set] for (seed, train), name in names.items()}
    store = run_all(arguments.home, settings)
    experiments = [Experiment(seed, train, read_curve(RunStore(store, name))) for (seed, train), name in names.items()]
    fixed = asyncio.run(_measure(store, names, arguments.parents, arguments.samples, arguments.home))
    write_results(arguments.out, experiments, fixed, command_line("scripts.learning"), hardware())
    return 0


async def _measure(
    blobs: Blobs, names: dict[tuple[int, str], str], parents: int, samples: int, home: Path
) -> dict[tuple[int, str], PolicyResult]:
    """First and last policy of every trained run on the fixed parents, with one sampling seed per run seed."""
    results = {}
    async with FixedParents(blobs, home, parents, samples) as fixed:
        for (seed, train), run in names.items():
            if train == "off":
                continue
            store = RunStore(blobs, run)
            last = store.last_step() or 0
            for label, policy in (("first", _policy(store, 0)), ("last", _policy(store, last))):
                results[seed, label] = await fixed.measure(store, policy, seed)
    return results


def _policy(store: RunStore, step: int) -> PolicyRef:
    digest = store.commit_digest(step)
    assert digest is not None
    return store.load(StepCommit, digest).policy


if __name__ == "__main__":
    sys.exit(main())
