"""Named experiments, each leaving one JSON document in OUT with its command, hardware and versions.

    python -m scripts.gpu.experiment doctor_and_gate --out OUT --home HOME --model coder --grid 8x16 --steps 2
    python -m scripts.gpu.experiment gate_rates      --out OUT --home HOME --model coder --grid 8x64 --steps 2 --gate="..."
    python -m scripts.gpu.experiment learning        --out OUT --home HOME --model coder --grid 8x64 --steps 8
    python -m scripts.gpu.experiment throughput      --out OUT --home HOME --model qwen3-8b --set sampling.max_new_tokens=512
    python -m scripts.gpu.experiment whole_run       --out OUT --home HOME --model coder --grid 8x16 --steps 2
    python -m scripts.gpu.experiment parity          --out OUT --tests tests/...

Everything of ours runs: Temporal, workers, sandboxed judges, the engine, the trainer. Where they run is a matter of settings
(TTTD_CONFIG=deploy/gpu-1.toml and the like). Repeating a command goes on with its runs. HOME must have a local store.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path

from scripts.gpu.lab import Lab, Wish

EXPERIMENTS = ("doctor_and_gate", "gate_rates", "learning", "throughput", "whole_run", "parity")


def parse(arguments: list[str]) -> tuple[str, Wish]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path(".tttd-gpu"))
    parser.add_argument("--task", default="circle_packing_26")
    parser.add_argument("--model", default="packing", help="name below model_dirs, or a folder")
    parser.add_argument("--profile", default="paper")
    parser.add_argument("--grid", default="8x64", help="groups x rollouts")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--samples", type=int, default=512, help="responses of each policy to the fixed parent")
    parser.add_argument("--arms", nargs="+", default=[], help="of learning: only these of train, no-train, best-of-n")
    parser.add_argument("--together", action="store_true", help="arms of learning side by side; seconds by phase are then shared")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to every `tttd run`")
    parser.add_argument("--gate", default="", help="for gate_rates: arguments of scripts.gate, in one string")
    parser.add_argument("--tests", nargs="*", default=[], help="for parity")
    options = parser.parse_args(arguments)
    groups, _, rollouts = options.grid.partition("x")
    if not (groups.isdigit() and rollouts.isdigit()):
        parser.error(f"--grid {options.grid!r}: write GROUPSxROLLOUTS, for example 8x64")
    return options.name, Wish(
        out=options.out,
        home=options.home,
        task=options.task,
        model=options.model,
        profile=options.profile,
        groups=int(groups),
        rollouts=int(rollouts),
        steps=options.steps,
        settings=tuple(options.set),
        tests=tuple(options.tests),
        samples=options.samples,
        arms=tuple(options.arms),
        together=options.together,
        gate=tuple(shlex.split(options.gate)),
    )


def main() -> int:
    name, wish = parse(sys.argv[1:])
    module = importlib.import_module(f"scripts.gpu.{name}")
    module.experiment(Lab(name, wish))
    print(wish.out / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
