"""Hostile and honest answers through the real sandbox and the real judge: each gets the verdict that it must get."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from activities.judge.sandbox import Sandbox, open_sandbox
from activities.judge.single import judge_file

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "attacks" / "outputs.json").read_text())
CASES = {case["name"]: case for case in DATA["cases"]}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_answer_gets_its_verdict(name: str, sandbox: Sandbox, tmp_path: Path) -> None:
    case = CASES[name]
    program = tmp_path / "program.py"
    program.write_text(DATA["preludes"][case["task"]] + case["program"])
    report = judge_file(case["task"], program, sandbox=sandbox, wall_seconds=20)
    if case["expect"] is None:
        assert not report["valid"], report
        assert (report["score"], report["exact"], report["value"], report["reward"]) == (None, None, None, 0.0)
        assert report["reason"]
    elif case["expect"] != "any":
        low, high = case["expect"]
        assert report["valid"], report
        assert low <= report["score"] <= high
        assert report["reward"] == report["value"] == report["score"]
