"""Tests that need this machine: run by pytest, with their outcome and the words of those that failed.

python -m scripts.gpu.experiment parity --out OUT --tests tests/test_megatron_parity.py tests/gpu
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as Xml
from pathlib import Path
from typing import Any

from scripts.gpu.lab import Lab


def experiment(lab: Lab) -> None:
    """Run the tests that the command names."""
    if not lab.wish.tests:
        raise SystemExit("parity needs --tests: files or node ids for pytest")
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *lab.wish.tests]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        cases = read_cases(report) if report.exists() else []
    lab.keep("tests", {"exit_code": done.returncode, "summary": done.stdout.strip().splitlines()[-1:], "cases": cases})


def read_cases(report: Path) -> list[dict[str, Any]]:
    """Name, outcome, seconds and, where it failed, the message of each test."""
    cases = []
    for case in Xml.parse(report).getroot().iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        cases.append(
            {
                "test": f"{case.get('classname')}::{case.get('name')}",
                "outcome": "passed" if bad is None else bad.tag,
                "seconds": float(case.get("time") or 0),
                "message": None if bad is None else (bad.get("message") or "")[:500],
            }
        )
    return cases
