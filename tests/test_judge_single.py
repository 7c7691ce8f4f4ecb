"""`judge_file`: what the command prints for one program, and the schema that describes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from activities.errors import InputError
from activities.judge.sandbox import Sandbox, open_sandbox
from activities.judge.single import judge_file
from tasks.registry import load_task
from workflows.contracts.base import Outcome

ROOT = Path(__file__).parent.parent
SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "judge-verdict.schema.json").read_text())

GRID = (ROOT / "tasks" / "circle_packing_26" / "seeds" / "grid.py").read_text()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as opened:
        yield opened


def judged(source: str, sandbox: Sandbox, folder: Path, wall_seconds: float = 5) -> dict[str, Any]:
    program = folder / "program.py"
    program.write_text(source)
    answer = judge_file("circle_packing_26", program, sandbox=sandbox, wall_seconds=wall_seconds)
    report: dict[str, Any] = json.loads(json.dumps(answer, allow_nan=False))
    jsonschema.Draft202012Validator(SCHEMA).validate(report)
    return report


def test_schema_is_one_and_closed() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["additionalProperties"] is False
    assert set(SCHEMA["required"]) == set(SCHEMA["properties"])
    results = {outcome.value for outcome in Outcome if outcome.is_result} - {Outcome.NO_PROGRAM}
    assert set(SCHEMA["properties"]["outcome"]["enum"]) == results


def test_a_valid_program_is_reported_with_its_certificate(sandbox: Sandbox, tmp_path: Path) -> None:
    report = judged(GRID, sandbox, tmp_path)
    assert (report["outcome"], report["valid"], report["repaired"]) == ("valid", True, True)
    assert report["score"] == pytest.approx(2.5414213562, abs=1e-9)
    p, q = report["exact"].split("/")
    assert Fraction(report["score"]) <= Fraction(int(p), int(q))
    again = load_task("circle_packing_26").make_judge().verify(report["construction"])
    assert (again.score, again.exact) == (report["score"], Fraction(int(p), int(q)))
    assert report["claimed"] == pytest.approx(report["score"])
    assert report["isolation"].partition(" abi")[0] in ("bwrap", "landlock")
    assert report["resources"]["wall_seconds"] > 0


@pytest.mark.parametrize(
    ("source", "outcome", "words"),
    [
        ("def run_packing(): return None", "invalid", "NoneType"),
        ("def run_packing(): return [[0.5, 0.5]] * 26, [0.1] * 26", "invalid", "worst violation"),
        ("def run_packing(): return 1 / 0", "crashed", "ZeroDivisionError: division by zero"),
        ("def run_packing(:", "crashed", "SyntaxError"),
        ("x = 1", "crashed", "run_packing"),
        ("import os\ndef run_packing(): os.abort()", "crashed", "SIGABRT"),
        ("def run_packing(): return bytearray(10**12)", "memory", "4096 MiB"),
        ("def run_packing(): print('x' * (17 << 20))", "invalid", "printed more than"),
        ("def run_packing(): return [0.1] * (9 << 20)", "invalid", "returned more than"),
        ("# " + "x" * 200_000, "invalid", "200000"),
    ],
)
def test_each_way_to_fail_is_named(source: str, outcome: str, words: str, sandbox: Sandbox, tmp_path: Path) -> None:
    report = judged(source, sandbox, tmp_path)
    assert (report["outcome"], report["valid"], report["score"], report["reward"]) == (outcome, False, None, 0.0)
    assert words in report["reason"]
    assert report["construction"] is None


def test_a_timeout_keeps_what_was_printed(sandbox: Sandbox, tmp_path: Path) -> None:
    source = "def run_packing():\n    print('best so far 2.5')\n    while True: pass"
    report = judged(source, sandbox, tmp_path, wall_seconds=0.2)
    assert report["outcome"] == "timed_out"
    assert report["output_tail"] == "best so far 2.5\n"


def test_a_file_or_task_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.py"):
        judge_file("circle_packing_26", tmp_path / "nowhere.py")
    (tmp_path / "program.py").write_text(GRID)
    with pytest.raises(InputError, match="there are: "):
        judge_file("no_such_task", tmp_path / "program.py")
