"""How numbers become lines: what a person reads about steps, phases and exact values."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from console.lines import best_text, duration, exact_digits, note_lines, phase_line, small, step_line
from console.status import GridReport
from workflows.contracts.messages import Phase, RunStatus, StepStatus, StepSummary


def summary(**changes: Any) -> StepSummary:
    fields: dict[str, Any] = {
        "step": 3,
        "rollouts": 32,
        "valid": 21,
        "valid_and_new": 20,
        "improved": 6,
        "mean_reward": 1.21084,
        "step_best": 2.61,
        "best": 2.6123,
        "previous_best": 2.6102,
        "kl": 0.00123,
        "gap": 3.14e-6,
        "policy_version": 3,
        "seconds": {"select": 0.1, "sample+judge": 11.2, "barrier": 0.1, "train": 4.4, "publish": 2.0},
    }
    return StepSummary(**(fields | changes))


def status(**changes: Any) -> RunStatus:
    fields: dict[str, Any] = {
        "run_id": "r",
        "task": "t",
        "state": "running",
        "step": 3,
        "steps": 8,
        "best_score": 2.6,
        "best_known": None,
        "score_name": "sum",
        "policy_version": 3,
        "commit": None,
        "phase": Phase(name="step", since="2026-01-01T00:00:00+00:00"),
    }
    return RunStatus(**(fields | changes))


def in_phase(name: str, detail: str = "") -> StepStatus:
    return StepStatus(step=4, groups=4, rollouts=8, phase=Phase(name=name, since="2026-01-01T00:00:00+00:00", detail=detail))


def test_step_line_tells_best_from_mean() -> None:
    assert step_line(summary(), 8) == (
        "step 3/8 · best 2.6123 (+0.0021) · grid mean 1.2108 · valid 21/32 · new 20 · improved 6 · kl 0.0012 · gap 3.1e-6 · v3 · "
        "18 s (sample+judge 11, train 4, publish 2)"
    )


def test_step_line_without_training_has_no_kl_and_no_gap() -> None:
    line = step_line(summary(kl=None, gap=None, seconds={"sample+judge": 200.0}), 2)
    assert line.startswith("step 3/3 ·")
    assert "kl" not in line
    assert "gap" not in line
    assert line.endswith("3m20s (sample+judge 200)")


@pytest.mark.parametrize(
    ("best", "previous", "text"),
    [
        (None, None, "best none yet"),
        (2.5, None, "best 2.5000 (first)"),
        (2.5, 2.5, "best 2.5000 (+0)"),
        (2.635983, 2.635979, "best 2.635983 (+0.000004)"),
        (1.5, 1.75, "best 1.5000 (-0.2500)"),
    ],
)
def test_best_shows_its_change(best: float | None, previous: float | None, text: str) -> None:
    assert best_text(best, previous) == text


@pytest.mark.parametrize(("seconds", "text"), [(-3, "0 s"), (17.6, "18 s"), (119, "119 s"), (1264, "21m04s"), (11220, "3h07m")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_small_numbers_have_two_digits() -> None:
    assert [small(x) for x in (3.14e-6, 0.25, 1.2e-12, 123.0)] == ["3.1e-6", "2.5e-1", "1.2e-12", "1.2e+2"]


def test_notes_stand_under_the_line() -> None:
    assert note_lines(summary(notes=("collapsed: none of 32 programs is valid",))) == [
        "  note: collapsed: none of 32 programs is valid"
    ]


def test_phase_line_while_sampling_counts_and_tells_best_from_mean() -> None:
    grid = GridReport(groups=4, rollouts=32, sampled=20, judged=14, valid=9, best_score=2.55311, mean_reward=1.01)
    line = phase_line(status(), in_phase("sample+judge"), grid, 12.2, "http://ui/run")
    assert line == (
        "step 4/8 · sampling 20/32 · judged 14/32 · valid 9 · best of this step 2.5531 · mean so far 1.0100 · 12 s · http://ui/run"
    )


def test_phase_line_of_other_phases() -> None:
    assert phase_line(status(), in_phase("train", "one optimizer step on 32 rollouts"), None, 4, None) == (
        "step 4/8 · training one optimizer step on 32 rollouts · 4 s"
    )
    asked = status(pause_requested=True)
    assert phase_line(asked, in_phase("commit"), None, 0, None) == "step 4/8 · committing · 0 s · pauses after this step"
    paused = status(
        state="paused", phase=Phase(name="paused", since="2026-01-01T00:00:00+00:00", detail="waiting for `tttd resume`")
    )
    assert phase_line(paused, None, None, 60, None) == "after step 3/8 · waiting for `tttd resume` · 60 s"
    opening = status(state="opening", step=0, steps=0, phase=Phase(name="opening", since="2026-01-01T00:00:00+00:00"))
    assert phase_line(opening, None, None, 1, None) == "before step 1 · opening · 1 s"


def test_exact_digits_are_cut_off_and_never_rounded_up() -> None:
    assert exact_digits("2/3", 5) == "0.66666…"
    assert exact_digits("-5/4") == "-1.25"
    assert exact_digits("7") == "7.0"
    assert exact_digits(str(Fraction(1, 10**6)), 4) == "0.0000…"
    assert exact_digits(None) is None
    assert exact_digits("9" * 5000) is None
