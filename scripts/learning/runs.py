"""Running what an experiment compares: real runs by `tttd run`, one after the other, in a home of their own.

Repeating a command resumes what is there and adds what is missing: a run is found by its name, and `tttd run` refuses one of
another identity. Knows nothing of what is compared.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

from activities.blobs import Blobs, LocalStore

TASK = "circle_packing_26"


def parser_of(description: str | None, out: str) -> argparse.ArgumentParser:
    """The options that every experiment has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--home", type=Path, default=Path(".tttd-learning"))
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to every `tttd run`")
    return parser


def run_name(seed: int, train: str, strategy: str = "puct") -> str:
    """A run's name says what it is, so that two experiments in one home share the runs that both need."""
    return f"learning-{seed}-{train}" + ("" if strategy == "puct" else f"-{strategy}")


def run_all(home: Path, runs: dict[str, list[str]]) -> Blobs:
    """Run what is not finished yet, stop the services, and return the store.

    Args:
        runs: settings (KEY=VALUE) by name of the run.

    Raises:
        SystemExit: a run did not end well; names it and says how to go on.
    """
    os.environ["TTTD_HOME"] = str(home)
    for name, settings in runs.items():
        options = [part for item in settings for part in ("--set", item)]
        status = _tttd("run", TASK, "--name", name, *options)
        if status:
            raise SystemExit(
                f"run {name} in {home} ended with status {status} (its message stands above). What was stored stays: mend the "
                "cause and repeat the command, or take another --home when the run there is of another identity."
            )
    if status := _tttd("down"):
        raise SystemExit(f"`tttd down` in {home} ended with status {status}")
    return Blobs(LocalStore(home / "store"))


def _tttd(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "console.main", *arguments]).returncode


def command_line(module: str) -> str:
    """The command as the report quotes it."""
    return " ".join([f"python -m {module}", *sys.argv[1:]])


def hardware() -> str:
    model = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    return f"{os.cpu_count()} cores {model}, Python {platform.python_version()}"
