"""SGLang's attention and sampling back-ends on this machine: which start here, and how fast each is with the same load.

    python -m scripts.gpu.backends --model coder --out OUT --home HOME --kinds triton:pytorch flashinfer:flashinfer fa4:pytorch

Engines start together, each with a small share of the GPU, and are measured one after the other. A back-end may need compilers or
packages that are not there: its entry then holds the last lines of its log. The kind `default` is the settings' own. Other settings
as for every command (TTTD_*); TTTD_ENGINE_MEMORY_FRACTION counts what is free when an engine starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from activities.models import find_model
from activities.train.megatron.shape import read_shape
from scripts.gpu.lab import hardware, versions
from workers.engine.launch import engine_launch
from workers.engine.process import EngineProcess, launch_engine
from workers.ports import free_port
from workers.settings import Settings, load_settings

_LAST_LINES = 12


def start(settings: Settings, model: str, kind: str, home: Path) -> tuple[EngineProcess, Path, str]:
    """An engine of this kind, its log and its address."""
    attention, _, sampling = kind.partition(":")
    more = () if kind == "default" else ("--attention-backend", attention, "--sampling-backend", sampling)
    chosen = settings.model_copy(update={"engine_args": (*settings.engine_args, *more)})
    launch = engine_launch(chosen, find_model(model, settings.model_directories), free_port(settings.engine_host))
    log = home / "logs" / f"backend-{kind.replace(':', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return launch_engine(launch, log), log, launch.url


async def load(url: str, vocabulary: int, requests: int, prompt: int, new: int) -> dict[str, Any]:
    """The same requests for every engine, all at once, without an adapter; the first round warms up."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(vocabulary // 4, vocabulary // 2, (requests, prompt)).tolist()
    limits = httpx.Limits(max_connections=requests)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600, trust_env=False) as client:

        async def ask(tokens: list[int]) -> int:
            parameters = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
            response = await client.post("/generate", json={"input_ids": tokens, "sampling_params": parameters})
            response.raise_for_status()
            return int(response.json()["meta_info"]["completion_tokens"])

        seconds = 0.0
        for _ in range(2):
            await client.post("/flush_cache")
            began = time.monotonic()
            found = sum(await asyncio.gather(*(ask(tokens) for tokens in prompts)))
            seconds = time.monotonic() - began
    return {"tokens": found, "seconds": round(seconds, 2), "tokens_per_second": round(found / seconds)}


async def measure(engines: dict[str, tuple[EngineProcess, Path, str]], wish: argparse.Namespace) -> dict[str, Any]:
    """Every engine that comes up; the last words of those that do not."""

    async def ready(process: EngineProcess) -> str:
        try:
            await asyncio.wait_for(process.ready(), wish.start_seconds)
        except Exception as error:  # whatever a back-end that cannot run here does
            return f"{type(error).__name__}: {error}"
        return ""

    failures = dict(zip(engines, await asyncio.gather(*(ready(process) for process, _, _ in engines.values())), strict=True))
    vocabulary = read_shape(find_model(wish.model, load_settings().model_directories)).vocabulary
    found: dict[str, Any] = {}
    for kind, (process, log, url) in engines.items():
        if not failures[kind]:
            found[kind] = await load(url, vocabulary, wish.requests, wish.prompt, wish.new)
        else:
            found[kind] = {"failed": failures[kind], "log": log.read_text(errors="replace").splitlines()[-_LAST_LINES:]}
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
    parser.add_argument("--start-seconds", type=float, default=300.0)
    wish = parser.parse_args()
    settings = load_settings()
    engines = {kind: start(settings, wish.model, kind, wish.home) for kind in wish.kinds}
    document = {
        "command": " ".join(["python -m scripts.gpu.backends", *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
        "results": asyncio.run(measure(engines, wish)),
    }
    wish.out.mkdir(parents=True, exist_ok=True)
    (wish.out / "backends.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
