"""The replay of verifiers excuses a difference only when it is the documented one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.verifiers import replay_verifiers

FILE = Path(__file__).parent.parent / "data" / "golden" / "verifiers.json"


def kinds_after(group: str, name: str, **changes: Any) -> set[str]:
    """Kinds of difference in one case of the file after some of its fields are replaced."""
    record = copy.deepcopy(json.loads(FILE.read_text(encoding="utf-8"))[group][name])
    data: dict[str, dict[str, Any]] = {"erdos": {}, "circle_packing": {}, "autocorrelation": {}}
    data[group][name] = record | changes
    (case,) = replay_verifiers(data)
    return case.kinds


def paid(value: Any) -> dict[str, Any]:
    return {"ok": True, "value": value}


REFUSED = {"ok": False, "error": "ValueError"}


@pytest.mark.parametrize(
    ("group", "name", "changes"),
    [
        ("erdos", "random_60", {"nanodiscover_returns": paid(0.4920644)}),
        ("erdos", "random_60", {"original_returns": REFUSED}),
        ("erdos", "reported_low_by_9e-5", {"original_returns": paid(0.49197)}),
        ("erdos", "nan_entry", {"original_returns": paid(0.5)}),
        ("circle_packing", "quad_tight", {"sum_radii": 1.1}),
        ("circle_packing", "quad_tight", {"nanodiscover_correct": paid(False)}),
        ("circle_packing", "negative_radius", {"nanodiscover_correct": paid(True)}),
        ("autocorrelation", "random_100", {"ac1_original": paid(2.13988)}),
        ("autocorrelation", "single", {"ac2_nanodiscover": REFUSED}),
        ("autocorrelation", "negative_clipped", {"ac2_original": paid(0.5)}),
        ("autocorrelation", "over_1000_clipped", {"ac1_original": paid(2.0)}),
        ("autocorrelation", "with_nan", {"ac1_original": paid(2.0)}),
    ],
)
def test_a_changed_verdict_is_not_excused(group: str, name: str, changes: dict[str, Any]) -> None:
    assert "" not in kinds_after(group, name)
    assert "" in kinds_after(group, name, **changes)


def test_documented_differences_that_the_file_does_not_show() -> None:
    short = [0.5, 0.5, 1.0, 0.0, 0.5, 0.4999]
    refused = {"original_returns": REFUSED, "nanodiscover_returns": REFUSED}
    assert kinds_after("erdos", "box", h_values=short, n_points=6, reported_c5=0.5, **refused) == {"erdos_repair"}
    rescaled = {"original_returns": paid(0.5), "nanodiscover_returns": paid(0.5)}
    assert kinds_after("erdos", "box", h_values=[0.4] * 6, n_points=6, **rescaled) == {"erdos_mass"}
    assert kinds_after("erdos", "box", h_values=[0.5], n_points=1, **rescaled) == {"verifier_size"}
    references = {f"{task}_{who}": REFUSED for task in ("ac1", "ac2") for who in ("original", "nanodiscover")}
    assert kinds_after("autocorrelation", "single", note="float32 elements", **references) == {"types"}
