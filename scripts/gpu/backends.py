"""SGLang's attention and sampling back-ends on this machine: which start here, and how fast each is with the same load.

    python -m scripts.gpu.backends --model coder --out OUT --home HOME --kinds triton:pytorch flashinfer:flashinfer fa4:pytorch

Engines start together, each with a small share of the GPU, and are measured one after the other. A back-end may need compilers or
packages that are not there: its entry then holds the last lines of its log. The kind `default` is the settings' own. Other settings
as for every command: TTTD_ENGINE_MEMORY_FRACTION counts what is free when an engine starts, TTTD_ENGINE_START_SECONDS is how long
one may take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from activities.models import find_model
from activities.train.megatron.shape import read_shape
from scripts.gpu.lab import hardware, versions
from scripts.gpu.throughput import ask_directly, flush
from workers.engine.launch import engine_launch
from workers.engine.process import EngineProcess, launch_engine
from workers.ports import free_port
from workers.settings import Settings, load_settings

_LAST_LINES = 12


def start(settings: Settings, model: Path, kind: str, home: Path) -> tuple[EngineProcess, Path]:
    """An engine of this kind, and its log."""
    attention, _, sampling = kind.partition(":")
    more = () if kind == "default" else ("--attention-backend", attention, "--sampling-backend", sampling)
    chosen = settings.model_copy(update={"engine_args": (*settings.engine_args, *more)})
    launch = engine_launch(chosen, model, free_port(settings.engine_host))
    log = home / "logs" / f"backend-{kind.replace(':', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return launch_engine(launch, log), log


async def measure(engines: dict[str, tuple[EngineProcess, Path]], load: list[tuple[list[int], int]]) -> dict[str, Any]:
    """The second of two rounds on every engine that comes up; the last words of those that do not."""

    async def ready(process: EngineProcess) -> str:
        try:
            await process.ready()
        except RuntimeError as error:
            return str(error)
        return ""

    failures = dict(zip(engines, await asyncio.gather(*(ready(process) for process, _ in engines.values())), strict=True))
    found: dict[str, Any] = {}
    for kind, (process, log) in engines.items():
        if failures[kind]:
            found[kind] = {"failed": failures[kind], "log": log.read_text(errors="replace").splitlines()[-_LAST_LINES:]}
        else:
            for _ in range(2):  # the first compiles
                flush(process.url)
                found[kind] = await ask_directly(process.url, load, None)
        process.stop()
        print(kind, found[kind], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=["triton:pytorch"], help="ATTENTION:SAMPLING, or default")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=512)
    wish = parser.parse_args()
    settings = load_settings()
    model = find_model(wish.model, settings.model_directories)
    vocabulary = read_shape(model).vocabulary
    prompts = np.random.default_rng(0).integers(vocabulary // 4, vocabulary // 2, (wish.requests, wish.prompt)).tolist()
    engines = {kind: start(settings, model, kind, wish.home) for kind in wish.kinds}
    document = {
        "command": " ".join(["python -m scripts.gpu.backends", *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
        "results": asyncio.run(measure(engines, [(prompt, wish.new) for prompt in prompts])),
    }
    wish.out.mkdir(parents=True, exist_ok=True)
    (wish.out / "backends.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
