"""What our sample worker costs: a grid sampled by a real run, and the very same tokens asked straight from the engine.

The direct load has each rollout's own prompt, and asks for exactly as many tokens as the rollout had, so both engines' work is the
same. All is asked at once, the prefix cache emptied before. `base` is the same without an adapter: what LoRA costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from activities.blobs import LocalStore
from activities.records import RolloutRecord
from activities.run_store import RunStore
from scripts.gpu.doctor_and_gate import commit_of, first_engine, stored
from scripts.gpu.lab import Lab

_REQUEST_SECONDS = 3600.0


def experiment(lab: Lab) -> None:
    """One step of a run, then the same load without us, with and without adapter."""
    lab.up()
    # Workers load tokenizers and the engine compiles kernels at their first work; a short grid takes that out of the measurement.
    lab.run("throughput-warm", last=("search.steps=1", "train=off", "sampling.max_new_tokens=16"))
    url = first_engine(lab).url
    flush(url)
    run = lab.run("throughput", last=("search.steps=1", "train=off"))
    records = [run.load(RolloutRecord, digest) for digest in stored(run, "rollout").values()]
    tokens = sum(len(record.response_tokens) for record in records)
    seconds = sampled_seconds(lab, run)
    ours = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, "rollouts": len(records)}
    lab.keep("through_our_worker", ours | {"engines": sorted({record.engine for record in records})})
    load = [(record.prompt_tokens, len(record.response_tokens)) for record in records]
    adapter = commit_of(run, 0).policy.name
    for label, name in (("direct_with_adapter", adapter), ("direct_base", None)):
        flush(url)
        lab.keep(label, asyncio.run(ask_directly(url, load, name)))
    direct = lab.results["direct_with_adapter"]["tokens_per_second"]
    lab.keep("ours_to_direct", ours["tokens_per_second"] / direct)
    lab.down()


def sampled_seconds(lab: Lab, run: RunStore) -> float:
    """From the plan of step 1 to its last rollout, by the times of their files: scheduling, prompts and storing included."""
    store = lab.blobs.store
    assert isinstance(store, LocalStore), "times are read from files; use a local store here"
    root = Path(lab.settings.store_url)
    rollouts = [(root / key).stat().st_mtime for key in stored(run, "rollout")]
    return max(rollouts) - (root / run.step_key(1, "plan")).stat().st_mtime


def flush(url: str) -> None:
    """Empty the engine's prefix cache; the embedded engine has none."""
    httpx.post(f"{url}/flush_cache", timeout=60, trust_env=False)


async def ask_directly(url: str, load: Sequence[tuple[Sequence[int], int]], adapter: str | None) -> dict[str, Any]:
    """Every request at once, as a bare HTTP client would; log-probs come along, as a run needs them.

    Args:
        load: (prompt, number of new tokens) of each request.
    """
    limits = httpx.Limits(max_connections=len(load))
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=_REQUEST_SECONDS, trust_env=False) as client:

        async def ask(prompt: Sequence[int], new: int) -> int:
            parameters = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
            body = {"input_ids": list(prompt), "sampling_params": parameters, "return_logprob": True}
            response = await client.post("/generate", json=body | ({"lora_path": adapter} if adapter else {}))
            response.raise_for_status()
            return int(response.json()["meta_info"]["completion_tokens"])

        began = time.monotonic()
        tokens = sum(await asyncio.gather(*(ask(prompt, new) for prompt, new in load if new)))
        seconds = time.monotonic() - began
    return {"tokens": tokens, "seconds": round(seconds, 3), "tokens_per_second": tokens / seconds}
