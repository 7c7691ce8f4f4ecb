"""How an engine is started: its command line and environment, from settings alone. Starts nothing itself.

Both kinds are told the same things in SGLang's own words, so that one supervisor and one client serve them. Source of the SGLang
flags: its 0.5.17 server arguments (docs/engines.md).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from activities.models import PROJECTIONS
from workers.settings import Settings

RUNS_REMEMBERED = 4
"""Runs whose adapters an engine gets back after a restart: those that published last."""
_VERSIONS_PER_RUN = 3
"""Version 0, the served one and the one before it."""


@dataclass(frozen=True)
class Launch:
    """One engine process to be."""

    command: list[str]
    url: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside what the worker's own environment has."""
    start_seconds: float = 600.0
    hung_seconds: float = 60.0


def engine_launch(settings: Settings, model: Path, port: int) -> Launch:
    """The engine that the settings ask for."""
    command = sglang_command(settings, model, port) if settings.engine_kind == "sglang" else embedded_command(settings, model, port)
    return Launch(
        command=[*command, *settings.engine_args],
        url=f"http://{settings.engine_host}:{port}",
        environment=engine_environment(settings),
        start_seconds=settings.engine_start_seconds,
        hung_seconds=settings.engine_hung_seconds,
    )


def embedded_command(settings: Settings, model: Path, port: int) -> list[str]:
    """Command line of the embedded engine."""
    where = ["--model-path", str(model), "--host", settings.engine_host, "--port", str(port)]
    threads = ["--threads", str(settings.engine_threads)]
    return [sys.executable, "-m", "workers.engine.embedded", *where, *threads, "--die-with-parent"]


def sglang_command(settings: Settings, model: Path, port: int) -> list[str]:
    """Command line of real SGLang. Its prefix cache is on by default: siblings share their prompt's keys and values."""
    command = [str(settings.engine_python), "-m", "sglang.launch_server"]
    command += ["--model-path", str(model), "--host", settings.engine_host, "--port", str(port)]
    command += ["--tp-size", str(tensor_parallel(settings)), "--mem-fraction-static", f"{settings.engine_memory_fraction:g}"]
    if settings.engine_context_tokens is not None:
        command += ["--context-length", str(settings.engine_context_tokens)]
    if settings.engine_concurrency is not None:
        command += ["--max-running-requests", str(settings.engine_concurrency)]
    # Without adapters at the start, SGLang must be told what may come. Loaded ones lie in host memory: enough for every run that is
    # remembered, a new version and a copy for its proof, so that none that was proved is ever evicted behind our back.
    loaded = max(RUNS_REMEMBERED * _VERSIONS_PER_RUN + 2, settings.engine_lora_slots)
    command += ["--enable-lora", "--max-lora-rank", str(settings.engine_lora_rank), "--lora-target-modules", *PROJECTIONS]
    command += ["--max-loras-per-batch", str(settings.engine_lora_slots), "--max-loaded-loras", str(loaded)]
    return [*command, "--enable-metrics"]  # its worker passes them on


def engine_environment(settings: Settings) -> dict[str, str]:
    """Nothing is fetched, and only the chosen GPUs are seen. NCCL_NVLS_ENABLE and the like pass through from the worker."""
    gpus = {"CUDA_VISIBLE_DEVICES": settings.engine_gpus[0]} if settings.engine_gpus else {}
    # `python -m` would look for SGLang's imports in the working directory first, where our own packages may lie.
    safe = {"PYTHONSAFEPATH": "1"} if settings.engine_kind == "sglang" else {}
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **safe, **gpus, **settings.engine_environment}


def tensor_parallel(settings: Settings) -> int:
    """GPUs of this engine; 1 where none is named."""
    return len(settings.engine_gpus[0].split(",")) if settings.engine_gpus else 1


def engine_ids(settings: Settings) -> list[str]:
    """Ids of all engines of this host: the first has the host's own id."""
    return [settings.engine_id, *(f"{settings.engine_id}-{i}" for i in range(2, settings.engines + 1))]


def engine_variables(settings: Settings) -> list[dict[str, str]]:
    """For each engine of this host the environment of its worker: which engine it keeps, and where.

    Raises:
        ValueError: engines and GPUs do not match in number.
    """
    gpus = settings.engine_gpus
    if gpus and len(gpus) != settings.engines:
        raise ValueError(
            f"engine_gpus names GPUs for {len(gpus)} engines, and engines={settings.engines}: set both to the same number "
            '(TTTD_ENGINES, TTTD_ENGINE_GPUS=\'["0","1"]\')'
        )
    return [
        {
            "TTTD_ENGINE_ID": name,
            "TTTD_ENGINES": "1",
            "TTTD_ENGINE_GPUS": f'["{gpus[i]}"]' if gpus else "[]",
            "TTTD_ENGINE_PORT": str(settings.engine_port + i if settings.engine_port else 0),
        }
        for i, name in enumerate(engine_ids(settings))
    ]
