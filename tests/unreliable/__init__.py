"""Engines that fail on order, for tests of whoever keeps them running."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Orders:
    """Orders to stand-ins of SGLang, and what they say of themselves (see sglang/launch_server.py)."""

    directory: Path

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)

    def settings(self) -> dict[str, Any]:
        """Settings under which the engine worker starts stand-ins as it would start SGLang."""
        environment = {"PYTHONPATH": str(FOLDER), "UNRELIABLE_DIR": str(self.directory)}
        return {"engine_kind": "sglang", "engine_environment": environment}

    def give(self, name: str, number: float) -> None:
        (self.directory / name).write_text(str(number))

    def starts(self) -> list[dict[str, Any]]:
        """One entry for each start: argv, pid, gpus."""
        file = self.directory / "started"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def children(self) -> list[int]:
        file = self.directory / "children"
        return [int(line) for line in file.read_text().split()] if file.exists() else []
