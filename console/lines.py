"""How numbers become lines: a committed step, a phase, a duration. Pure functions of messages; knows no terminal and no clock.

Best and mean are different things and always have different words: `best` is the best certified score of the archive, `grid mean`
the mean reward of one step's whole grid, with 0 for what is not valid.
"""

from __future__ import annotations

import math
from fractions import Fraction

from console.status import GridReport
from workflows.contracts.messages import RunStatus, StepStatus, StepSummary

SEPARATOR = " · "
_TIMED = ("sample+judge", "train", "publish")
"""Phases that take a step's time; the others are milliseconds."""


def duration(seconds: float) -> str:
    """`18 s`, `21m04s` or `3h07m`."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def small(value: float) -> str:
    """`3.1e-6`: two digits, whatever the size."""
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def best_text(best: float | None, previous: float | None) -> str:
    """Best score and its change, with as many decimals as the change needs to be seen."""
    if best is None:
        return "best none yet"
    if previous is None:
        return f"best {best:.4f} (first)"
    change = best - previous
    if change == 0:
        return f"best {best:.4f} (+0)"
    decimals = min(12, max(4, -math.floor(math.log10(abs(change)))))
    return f"best {best:.{decimals}f} ({change:+.{decimals}f})"


def step_line(summary: StepSummary, steps: int) -> str:
    """The line that stays on the screen for a committed step."""
    s = summary
    parts = [
        f"step {s.step}/{max(steps, s.step)}",
        best_text(s.best, s.previous_best),
        f"grid mean {s.mean_reward:.4f}",
        f"valid {s.valid}/{s.rollouts}",
        f"new {s.valid_and_new}",
        f"improved {s.improved}",
        *([] if s.kl is None else [f"kl {s.kl:.4f}"]),
        *([] if s.gap is None else [f"gap {small(s.gap)}"]),
        f"v{s.policy_version}",
        _times(s.seconds),
    ]
    return SEPARATOR.join(parts)


def _times(seconds: dict[str, float]) -> str:
    phases = ", ".join(f"{name} {seconds[name]:.0f}" for name in _TIMED if name in seconds)
    total = duration(sum(seconds.values()))
    return f"{total} ({phases})" if phases else total


def note_lines(summary: StepSummary) -> list[str]:
    """What a person should know about a step, under its line."""
    return [f"  note: {note}" for note in summary.notes]


def phase_line(status: RunStatus, step: StepStatus | None, grid: GridReport | None, elapsed: float, link: str | None) -> str:
    """The line that changes while a run works.

    Args:
        elapsed: seconds since the phase began.
    """
    parts = [_where(status, step), *_doing(status, step, grid), duration(elapsed)]
    if status.pause_requested and status.state == "running":
        parts.append("pauses after this step")
    return SEPARATOR.join([*parts, *([link] if link else [])])


def _where(status: RunStatus, step: StepStatus | None) -> str:
    if step is not None:
        return f"step {step.step}/{max(status.steps, step.step)}"
    return f"after step {status.step}/{status.steps}" if status.steps else "before step 1"


def _doing(status: RunStatus, step: StepStatus | None, grid: GridReport | None) -> list[str]:
    if status.state not in ("running", "opening") or step is None:
        return [" ".join([status.phase.name, status.phase.detail]).strip()] if status.state != "paused" else [status.phase.detail]
    if step.phase.name == "sample+judge":
        return grid_parts(grid)
    return [" ".join([_PHASES.get(step.phase.name, step.phase.name), step.phase.detail]).strip()]


_PHASES = {
    "starting": "starting",
    "select": "selecting parents",
    "barrier": "collecting the grid",
    "train": "training",
    "publish": "publishing",
    "commit": "committing",
    "done": "committed",
}


def grid_parts(grid: GridReport | None) -> list[str]:
    """Counts of the grid in the making."""
    if grid is None:
        return ["sampling"]
    total = grid.rollouts
    best = "none yet" if grid.best_score is None else f"{grid.best_score:.4f}"
    mean = "none yet" if grid.mean_reward is None else f"{grid.mean_reward:.4f}"
    counts = [f"sampling {grid.sampled}/{total}" if grid.sampled < total else f"sampled {total}/{total}"]
    counts += [f"judged {grid.judged}/{total}", f"valid {grid.valid}"]
    return [*counts, f"best of this step {best}", f"mean so far {mean}"]


def exact_digits(exact: str | None, digits: int = 40) -> str | None:
    """Decimal digits of an exact fraction `p/q`, cut off (not rounded) after `digits` decimals; … says that more follow."""
    if exact is None:
        return None
    try:
        value = Fraction(exact)
    except ValueError:  # Python refuses to parse integers of more than 4300 digits
        return None
    sign = "-" if value < 0 else ""
    whole, rest = divmod(abs(value), 1)
    scaled, remainder = divmod(rest.numerator * 10**digits, rest.denominator)
    decimals = f"{scaled:0{digits}d}"
    return f"{sign}{whole}.{decimals}…" if remainder else f"{sign}{whole}.{decimals.rstrip('0') or '0'}"
