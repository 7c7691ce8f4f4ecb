"""The two commands of the harness; see the package. Exit code 1 if anything does not hold."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from pathlib import Path

from tests.faults.cases import CASES, by_run
from tests.faults.chaos import CHAOS, Chaos, most_kills, run_calm, run_chaos, verdict
from tests.faults.matrix import Result, run_cases, run_undisturbed, table
from tests.faults.world import PARTS, World


def say(line: str) -> None:
    print(line, flush=True)


async def matrix(world: World, only: list[str]) -> int:
    """Run the table, or the parts named, and print it."""
    began = time.monotonic()
    reference = await run_undisturbed(world)
    say("undisturbed: steps of " + ", ".join(f"{seconds:.1f} s" for seconds in reference.seconds.values()))
    results: list[Result] = []
    for run, cases in by_run([case for case in CASES if not only or case.part in only]).items():
        found = await run_cases(world, cases, reference)
        say(f"{run}: " + ", ".join(f"{r.case.point} {'FAILED' if r.problems else 'OK'}" for r in found))
        results += found
    say(table(results))
    say(f"{time.monotonic() - began:.0f} s in all")
    return int(any(result.problems for result in results))


async def chaos(world: World, kills: int, steps: int, seed: int) -> int:
    """Run undisturbed, then disturbed; print every fault and the verdict."""
    reference = await run_calm(world, steps)
    say(f"undisturbed: {steps} steps, chain {reference.commits[steps]}; now with faults, seed {seed}")
    disturbed = Chaos(world, CHAOS, kills, steps, random.Random(seed), say)
    began = time.monotonic()
    try:
        problems = await run_chaos(world, disturbed, reference)
    except AssertionError as error:
        problems = [str(error)]
    say(verdict(disturbed, problems, time.monotonic() - began))
    return int(bool(problems))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Kill and freeze parts of the whole system.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("matrix", help="every part at every point, as a table")
    one.add_argument("--only", action="append", default=[], choices=PARTS, help="cases of this part; may be repeated")
    two = commands.add_parser("chaos", help="random parts at random moments, one chain in the end")
    two.add_argument("--kills", type=int, default=30, help="by kill -9; what is frozen comes on top")
    two.add_argument("--steps", type=int, default=6)
    two.add_argument("--seed", type=int, default=0, help="of the sequence of faults")
    for command in (one, two):
        command.add_argument("--folder", type=Path, help="a new folder for store, histories and logs, kept afterwards")
    options = parser.parse_args()
    if options.command == "chaos" and not 0 < options.kills <= most_kills(options.steps):
        parser.error(f"--kills {options.kills}: {options.steps} steps have room for 1 to {most_kills(options.steps)}; add --steps")
    with tempfile.TemporaryDirectory(prefix="tttd-faults-") as folder:
        world = World(options.folder.resolve() if options.folder else Path(folder))
        try:
            world.start_all()
            code = asyncio.run(_command(world, options))
        finally:
            world.stop()
    os._exit(code)  # threads of a Temporal client can crash the interpreter's own exit


async def _command(world: World, options: argparse.Namespace) -> int:
    if options.command == "matrix":
        return await matrix(world, options.only)
    return await chaos(world, options.kills, options.steps, options.seed)


if __name__ == "__main__":
    main()
