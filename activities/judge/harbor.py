"""Judges a program inside Harbor's verifier container, and writes the reward where Harbor looks for it.

`tttd task export-harbor` puts this package beside a task; tests/test.sh starts it. Nothing is downloaded here: the image was built
with everything (`--build`). Where the sandbox or the judge fails no reward is written, which Harbor reports as an error of the
verifier: infrastructure is never a reward. Source: spec tasks 2. Knows no run and no store.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from activities.errors import TttdError
from activities.judge.cases import Services
from activities.judge.sandbox import SandboxUnavailable
from activities.judge.single import judge_file
from tasks.environments import DEFAULT_DIRECTORY, build
from tasks.errors import TaskError
from tasks.registry import read_task


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 with a reward written, 1 without."""
    parser = argparse.ArgumentParser(prog="python -m activities.judge.harbor", description=__doc__)
    parser.add_argument("--task", type=Path, required=True, help="the task's folder")
    parser.add_argument("--build", action="store_true", help="install what programs may import, and end")
    parser.add_argument("--program", type=Path, help="what the agent left")
    parser.add_argument("--logs", type=Path, help="Harbor's directory of the verifier")
    parser.add_argument("--service", action="append", default=[], metavar="NAME=URL", help="where a judge is that is a service")
    parser.add_argument("--environments", type=Path, default=DEFAULT_DIRECTORY, help="where programs' environments are")
    options = parser.parse_args(arguments)
    try:
        if options.build:
            environment = read_task(options.task).environment
            if environment is not None:
                print(build(environment, options.environments))
            return 0
        services = dict(given.partition("=")[::2] for given in options.service)
        verdict = judged(options.task, options.program, options.environments, services)
        write_reward(verdict, options.program, options.logs)
    except (TttdError, TaskError, SandboxUnavailable) as error:
        print(f"no reward: {error}", file=sys.stderr)
        return 1
    return 0


def judged(folder: Path, program: Path, environments: Path, services: Services | None = None) -> dict[str, Any]:
    """The verdict on what the agent left, as `docs/judge-verdict.schema.json` has it; no file, or no text, is no program."""
    name = folder.resolve().name
    try:
        program.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        return {
            "task": name,
            "outcome": "no_program",
            "valid": False,
            "score": None,
            "reward": 0.0,
            "reason": f"{program}: {error}",
        }
    return judge_file(name, program, task_directories=(folder,), environments=environments, services=services)


def write_reward(verdict: dict[str, Any], program: Path, logs: Path) -> None:
    """reward.json holds finite numbers only, as Harbor demands; an invalid program has no score, not the score 0."""
    logs.mkdir(parents=True, exist_ok=True)
    numbers = {"reward": verdict["reward"], "valid": int(verdict["valid"])}
    if verdict["score"] is not None and math.isfinite(verdict["score"]):
        numbers["score"] = verdict["score"]
    (logs / "verdict.json").write_text(json.dumps(verdict, indent=2) + "\n", encoding="utf-8")
    (logs / "reason.txt").write_text(f"{verdict['outcome']}: {verdict['reason']}\n", encoding="utf-8")
    if program.is_file():
        shutil.copyfile(program, logs / f"submission{program.suffix}")
    (logs / "reward.json").write_text(json.dumps(numbers) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
