"""The measurement of the sandbox's cost measures what it says. Its numbers are not judged here."""

from __future__ import annotations

import pytest

from scripts import bench_sandbox
from tests.sandboxes import opened


@pytest.mark.slow
async def test_a_row_has_both_sides_of_a_pair() -> None:
    with opened("landlock") as sandbox:
        row = await bench_sandbox.measure(sandbox, "trivial", 2)
    assert 1 < row.plain_ms < 2_000
    assert 1 < row.hardened_ms < 2_000
    assert row.judge_ms > 0
    assert row.runs_per_second > 0
    text = bench_sandbox.page([row], 2)
    assert f"\n| trivial | landlock | {row.plain_ms:.1f} | {row.hardened_ms:.1f} | {row.added_ms:.1f} |" in text
    assert bench_sandbox.hardware() in text
