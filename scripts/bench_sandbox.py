"""What the sandbox costs: CPU time that hardening adds to a plain subprocess, and runs per second on all cores.

    python scripts/bench_sandbox.py [--pairs 40] [--backends landlock bwrap] [--write]

Plain and hardened runs alternate, and the least CPU time of each counts: whatever else the machine does only adds to it. CPU time
is of all processes of a run, bubblewrap's own included, as the kernel counts them when they are reaped. `--write` puts the table
into docs/results/sandbox/README.md. Exit code 1 if a backend adds 15 ms or more to the trivial program.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from activities.judge.sandbox import AUTO, Limits, Program, Sandbox, SandboxSettings, SandboxUnavailable, Status, open_sandbox
from activities.judge.sandbox.interpreter import FLAGS
from activities.judge.sandbox.policy import variables

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "results" / "sandbox" / "README.md"
MOST_ADDED_MS: Final = 15.0

PROGRAMS: Final = {
    "trivial": "def run():\n    return [1, 2.5]\n",
    "numpy and scipy.optimize": (
        "import numpy\nfrom scipy.optimize import minimize\n"
        "def run():\n    return float(minimize(lambda x: float((x ** 2).sum()), numpy.ones(4)).fun)\n"
    ),
}
_LIMITS: Final = Limits(wall_seconds=60)
_PLAIN: Final = (
    "import json, os, sys\nspace = {}\nexec(sys.stdin.read(), space)\nprint(json.dumps(space['run']()), flush=True)\nos._exit(0)"
)
"""Ends as a judged program does, without taking the interpreter apart, which costs more than the hardening."""


@dataclass(frozen=True)
class Row:
    """One backend and one program."""

    program: str
    backend: str
    plain_ms: float
    """Least CPU time of a plain subprocess."""
    hardened_ms: float
    judge_ms: float
    """Median CPU time of the judge itself for one run."""
    runs_per_second: float
    plain_per_second: float

    @property
    def added_ms(self) -> float:
        return self.hardened_ms - self.plain_ms


def _cpu_ms(who: int) -> float:
    usage = resource.getrusage(who)
    return 1e3 * (usage.ru_utime + usage.ru_stime)


def run_plain(source: str) -> None:
    """The same interpreter with the same flags and environment, and nothing around it."""
    command = [sys.executable, *FLAGS, "-c", _PLAIN]
    subprocess.run(command, input=source.encode(), env=variables(1), cwd="/", stdout=subprocess.DEVNULL, check=True)


async def run_hardened(sandbox: Sandbox, source: str) -> None:
    outcome = await sandbox.run(Program(source), _LIMITS)
    if outcome.status is not Status.OK:
        raise SystemExit(f"{sandbox.isolation}: {outcome.status} ({outcome.reason}): {outcome.stderr_tail}")


async def measure(sandbox: Sandbox, name: str, pairs: int) -> Row:
    """Alternate plain and hardened runs; then as many at once as there are cores."""
    source = PROGRAMS[name]
    plain, hardened, judge = [], [], []
    for _ in range(pairs):
        before = _cpu_ms(resource.RUSAGE_CHILDREN)
        await asyncio.to_thread(run_plain, source)
        between, own = _cpu_ms(resource.RUSAGE_CHILDREN), _cpu_ms(resource.RUSAGE_SELF)
        await run_hardened(sandbox, source)
        plain.append(between - before)
        hardened.append(_cpu_ms(resource.RUSAGE_CHILDREN) - between)
        judge.append(_cpu_ms(resource.RUSAGE_SELF) - own)
    cores = len(os.sched_getaffinity(0))
    return Row(
        program=name,
        backend=sandbox.isolation.backend,
        plain_ms=min(plain),
        hardened_ms=min(hardened),
        judge_ms=statistics.median(judge),
        runs_per_second=await _per_second(lambda: run_hardened(sandbox, source), cores, pairs),
        plain_per_second=await _per_second(lambda: asyncio.to_thread(run_plain, source), cores, pairs),
    )


async def _per_second(run: Callable[[], Awaitable[None]], cores: int, runs: int) -> float:
    left = iter(range(runs))

    async def work() -> None:
        for _ in left:
            await run()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(cores)))
    return runs / (time.perf_counter() - began)


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| program | backend | plain CPU, ms | hardened CPU, ms | added, ms | judge's own CPU, ms | runs/s | plain runs/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = (row.plain_ms, row.hardened_ms, row.added_ms, row.judge_ms, row.runs_per_second, row.plain_per_second)
        lines.append(f"| {row.program} | {row.backend} | " + " | ".join(f"{number:.1f}" for number in numbers) + " |")
    return lines


def hardware() -> str:
    """CPU model and cores, no more: this goes into a page."""
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return f"{models[0] if models else 'unknown CPU'}, {len(os.sched_getaffinity(0))} cores"


def page(rows: Sequence[Row], pairs: int) -> str:
    return "\n".join(
        [
            "# What the sandbox costs",
            "",
            f"Made by `python scripts/bench_sandbox.py --write` on {hardware()}, Python {sys.version.split()[0]}.",
            f"Plain and hardened runs alternate {pairs} times ({pairs // 2} with NumPy); the least CPU time of each counts,",
            "bubblewrap's own included. Runs per second are with as many runs at once as there are cores.",
            "",
            *table(rows),
            "",
            "Both sides end without taking the interpreter apart. The limit for what hardening adds to the trivial program is "
            f"{MOST_ADDED_MS:g} ms;",
            "differences of the other one are those of its imports from run to run. A program has up to 1100 s: none of this",
            "moves a score.",
            "",
        ]
    )


async def measure_all(backends: Sequence[str], pairs: int) -> list[Row]:
    rows = []
    for backend in backends:
        try:
            sandbox = await asyncio.to_thread(open_sandbox, SandboxSettings(backend=backend))  # type: ignore[arg-type]
        except SandboxUnavailable as refusal:
            print(refusal, file=sys.stderr)
            continue
        for name, share in zip(PROGRAMS, (1, 2), strict=True):  # what takes twenty times as long runs half as often
            rows.append(await measure(sandbox, name, max(1, pairs // share)))
        await sandbox.close()
    return sorted(rows, key=lambda row: list(PROGRAMS).index(row.program))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--backends", nargs="+", default=list(AUTO), choices=AUTO)
    parser.add_argument("--write", action="store_true", help="write docs/results/sandbox/README.md")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    rows = asyncio.run(measure_all(arguments.backends, arguments.pairs))
    print("\n".join(table(rows)))
    if arguments.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page(rows, arguments.pairs), encoding="utf-8")
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(row) | {"added_ms": row.added_ms} for row in rows], indent=1))
    return 1 if not rows or any(row.added_ms >= MOST_ADDED_MS for row in rows if row.program == "trivial") else 0


if __name__ == "__main__":
    sys.exit(main())
