"""The corpus of hostile and legitimate programs against live canaries, behind an outer wall (``tests/attacks.py``)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.attacks import EXPECTED_TO_ESCAPE, behind_wall, wall_is_possible

ATTACKS = Path(__file__).parent / "data" / "attacks"
HOSTILE = list(json.loads((ATTACKS / "programs" / "manifest.json").read_text()))
LEGITIMATE = sorted(path.stem for path in (ATTACKS / "legit").glob("*.py"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not wall_is_possible(), reason="hostile programs run behind namespaces only, which take root and unshare"),
]

Cases = dict[str, dict[str, Any]]


def cases_of(arguments: list[str], python: str = sys.executable) -> Cases:
    return {case["name"]: case for case in behind_wall(arguments, python)["cases"]}


@pytest.fixture(scope="module")
def hostile() -> Cases:
    return cases_of([str(ATTACKS / "programs")])


@pytest.fixture(scope="module")
def hostile_in_the_judges_name() -> Cases:
    python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not os.path.exists(python):
        pytest.skip(f"no {python} that an ordinary user could start")
    return cases_of([str(ATTACKS / "programs"), "--as-user"], python)


@pytest.fixture(scope="module")
def legitimate() -> Cases:
    return cases_of([str(ATTACKS / "legit")])


def check_contained(case: dict[str, Any]) -> None:
    assert case["unexpected"] == ""
    known = EXPECTED_TO_ESCAPE["landlock"].get(case["name"])
    if known is None:
        assert case["escapes"] == []
    else:
        assert len(case["escapes"]) == 1, f"no longer escapes, take it out of the table: {known}"
        assert case["escapes"][0].startswith("reports ")


@pytest.mark.parametrize("name", HOSTILE)
def test_contained(name: str, hostile: Cases) -> None:
    check_contained(hostile[name])


@pytest.mark.parametrize("name", HOSTILE)
def test_contained_with_the_judges_own_uid(name: str, hostile_in_the_judges_name: Cases) -> None:
    check_contained(hostile_in_the_judges_name[name])


@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_programs_work(name: str, legitimate: Cases) -> None:
    case = legitimate[name]
    if "not installed" in case["reason"]:
        pytest.skip(case["reason"])
    assert case["unexpected"] == ""
