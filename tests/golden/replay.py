"""Recognises a golden file by its shape and replays every case in it. Knows no comparison itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.golden.archive import replay_scenario, replay_simulation
from tests.golden.guidance import replay_guidance_file
from tests.golden.objective import replay_adaptive, replay_baselines, replay_shaping
from tests.golden.outcome import Case, UnknownFormat
from tests.golden.programs import TARGETS, replay_program
from tests.golden.verifiers import KEYS as VERIFIERS
from tests.golden.verifiers import replay_verifiers
from tests.golden.verl import replay_verl

FORMATS = (
    "archive scenarios and simulations, open-ttt-verl's archive, advantages (adaptive, baselines, KL shaping), program extraction, "
    "guidance and executor responses, verifiers"
)


def replay_file(path: Path) -> list[Case]:
    """Replay all cases of a file.

    Raises:
        UnknownFormat: not JSON, or none of the shapes that can be replayed; names those.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownFormat(f"{path}: {error}") from None
    cases = _cases(data) if isinstance(data, dict) else None
    if not cases:
        raise UnknownFormat(f"{path}: not a golden file that is replayed here; those hold {FORMATS}")
    return cases


def _cases(data: dict[str, Any]) -> list[Case] | None:
    if "scenarios" in data:
        return [replay_scenario(scenario) for scenario in data["scenarios"]]
    if "runs" in data:
        return [replay_simulation(run) for run in data["runs"]]
    if {"guidance", "executor"} <= data.keys():
        return replay_guidance_file(data)
    if data.keys() >= VERIFIERS:
        return replay_verifiers(data)
    if "cases" in data:
        return [(replay_baselines if "mean_baseline" in record else replay_adaptive)(record) for record in data["cases"]]
    return _named_cases({name: record for name, record in data.items() if isinstance(record, dict)})


def _named_cases(records: dict[str, dict[str, Any]]) -> list[Case] | None:
    shapes: list[tuple[set[str], Callable[[str, dict[str, Any]], Case]]] = [
        ({"seeds", "trace"}, replay_verl),
        ({"kl_coef", "sequences"}, replay_shaping),
        ({"text", TARGETS[0]}, replay_program),
    ]
    for keys, replay in shapes:
        if records and all(keys <= record.keys() for record in records.values()):
            return [replay(name, record) for name, record in records.items()]
    return None
