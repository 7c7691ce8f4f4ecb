"""Runs seeds x {train on, train off} on one budget and tables them; see docs/results/learning.

    python -m scripts.learning [--seeds 1 2 3] [--home DIR] [--out docs/results/learning] [--set search.steps=8 ...]

Every run is a real one (`tttd run`), in a home of its own; repeating the command resumes what is there and adds what is missing.
The fixed parents are the same for every policy, so better parents in the archive cannot pass for a better policy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import subprocess
import sys
from pathlib import Path

from activities.blobs import Blobs, LocalStore
from activities.records import RunStore, StepReport
from scripts.learning.fixed_parents import FixedParents, PolicyResult
from scripts.learning.tables import CurvePoint, Experiment, write_results
from workflows.contracts.base import PolicyRef


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--home", type=Path, default=Path(".tttd-learning"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/learning"))
    parser.add_argument("--parents", type=int, default=32, help="fixed parents that first and last policies are measured on")
    parser.add_argument("--samples", type=int, default=4, help="programs sampled per fixed parent")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to every `tttd run`")
    arguments = parser.parse_args()
    os.environ["TTTD_HOME"] = str(arguments.home)

    names = {(seed, train): f"learning-{seed}-{train}" for seed in arguments.seeds for train in ("off", "on")}
    for (seed, train), name in names.items():
        _run(name, seed, train, arguments.set)
    subprocess.run([sys.executable, "-m", "console.main", "down"], check=True)

    store = Blobs(LocalStore(arguments.home / "store"))
    experiments = [Experiment(seed, train, _curve(store, name)) for (seed, train), name in names.items()]
    fixed = asyncio.run(_measure(store, names, arguments.parents, arguments.samples, arguments.home))
    command = "python -m scripts.learning " + " ".join(sys.argv[1:])
    write_results(arguments.out, experiments, fixed, command.strip(), _hardware())
    return 0


def _run(name: str, seed: int, train: str, settings: list[str]) -> None:
    chosen = [f"seed={seed}", f"train={train}", *settings]
    options = [part for item in chosen for part in ("--set", item)]
    command = [sys.executable, "-m", "console.main", "run", "circle_packing_26", "--name", name, *options]
    subprocess.run(command, check=True)


def _curve(blobs: Blobs, run: str) -> list[CurvePoint]:
    store = RunStore(blobs, run)
    points = []
    for step in range(1, (store.last_step() or 0) + 1):
        report = store.read(StepReport, store.step_key(step, "report"))
        assert report is not None
        points.append(CurvePoint.of(report))
    return points


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
    from activities.records import StepCommit

    digest = store.commit_digest(step)
    assert digest is not None
    return store.load(StepCommit, digest).policy


def _hardware() -> str:
    model = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    return f"{os.cpu_count()} cores {model}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
