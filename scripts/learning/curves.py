"""Curves of runs, and how they become tables and pictures. Knows no experiment: what is compared with what stands elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from activities.records import StepReport
from activities.run_store import RunStore

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAST_STEPS = 3
"""Steps at the end of a run that stand for where it got to."""


@dataclass(frozen=True)
class CurvePoint:
    """One committed step."""

    step: int
    rollouts: int
    mean_reward: float
    valid: int
    valid_and_new: int
    improved: int
    best: float | None
    kl: float | None
    seconds: float

    @classmethod
    def of(cls, report: StepReport) -> CurvePoint:
        s = report.summary
        return cls(s.step, s.rollouts, s.mean_reward, s.valid, s.valid_and_new, s.improved, s.best, s.kl, sum(s.seconds.values()))


@dataclass(frozen=True)
class Experiment:
    """One run."""

    seed: int
    train: str
    curve: list[CurvePoint]

    @property
    def last_mean(self) -> float:
        """Mean reward over the last three steps."""
        last = self.curve[-LAST_STEPS:]
        return sum(p.mean_reward for p in last) / len(last)


def read_curve(store: RunStore) -> list[CurvePoint]:
    """Every committed step of a run."""
    points = []
    for step in range(1, (store.last_step() or 0) + 1):
        report = store.read(StepReport, store.step_key(step, "report"))
        assert report is not None
        points.append(CurvePoint.of(report))
    return points


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def curve_table(title: str, curve: list[CurvePoint]) -> str:
    """All numbers of one run, a row a step, under a heading."""
    header = ("step", "mean reward", "valid", "valid and new", "improved over parent", "best so far", "KL", "seconds")
    rows = []
    for p in curve:
        counts = [f"{n}/{p.rollouts}" for n in (p.valid, p.valid_and_new, p.improved)]
        kl = "" if p.kl is None else f"{p.kl:.4f}"
        rows.append([str(p.step), f"{p.mean_reward:.3f}", *counts, best_cell(p.best), kl, f"{p.seconds:.0f}"])
    return f"### {title}\n\n{table(header, rows)}"


def best_cell(best: float | None) -> str:
    return "" if best is None else f"{best:.6f}"


@contextmanager
def drawing(file: Path, rows: int, columns: int, inches: tuple[float, float]) -> Iterator[list[list[Axes]]]:
    """Axes of a grid of panels, a row shares its scale; saved as SVG at the end, the same bytes for the same curves."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "tttd"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=inches, sharey="row", squeeze=False)
    yield axes.tolist()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
