"""Tables and curves of the ablations, from their numbers alone: every run is shown, and nothing is averaged over seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.learning.curves import LAST_STEPS, CurvePoint, Experiment, best_cell, drawing, table

Variant = tuple[str, str]
"""(strategy, train)"""

VARIANTS: tuple[Variant, ...] = (
    ("puct", "on"),
    ("puct", "off"),
    ("best_of_n", "on"),
    ("best_of_n", "off"),
    ("greedy", "on"),
    ("epsilon_greedy", "on"),
)

COMPARISONS: tuple[tuple[str, Variant, Variant], ...] = (
    ("training, with PUCT", ("puct", "on"), ("puct", "off")),
    ("training, without reuse", ("best_of_n", "on"), ("best_of_n", "off")),
    ("PUCT over no reuse, with training", ("puct", "on"), ("best_of_n", "on")),
    ("PUCT over no reuse, without training", ("puct", "off"), ("best_of_n", "off")),
    ("PUCT over greedy, with training", ("puct", "on"), ("greedy", "on")),
    ("PUCT over ε-greedy, with training", ("puct", "on"), ("epsilon_greedy", "on")),
)
"""(what is asked, with it, without it)"""


@dataclass(frozen=True)
class Ablation(Experiment):
    """One run of one strategy."""

    strategy: str

    @property
    def variant(self) -> Variant:
        return self.strategy, self.train

    @property
    def last_valid(self) -> float:
        """Share of valid programs over the last three steps."""
        last = self.curve[-LAST_STEPS:]
        return sum(p.valid for p in last) / sum(p.rollouts for p in last)

    @property
    def best(self) -> float | None:
        return self.curve[-1].best


@dataclass(frozen=True)
class _Measure:
    """One number of a step, how a table shows it, and what its axis says."""

    title: str
    axis: str
    of: Callable[[CurvePoint], float | None]
    shown: Callable[[CurvePoint], str]


MEASURES = (
    _Measure("Grid mean per step", "mean reward of the grid", lambda p: p.mean_reward, lambda p: f"{p.mean_reward:.2f}"),
    _Measure("Best so far per step", "best so far", lambda p: p.best, lambda p: "" if p.best is None else f"{p.best:.4f}"),
    _Measure("Valid programs per step", "valid fraction", lambda p: p.valid / p.rollouts, lambda p: f"{p.valid / p.rollouts:.0%}"),
)


def write_results(out: Path, ablations: list[Ablation], command: str, hardware: str) -> None:
    """Write README.md (:func:`report_of`), results.json (all numbers) and curves.svg below `out`.

    Raises:
        ValueError: as :func:`report_of`.
    """
    text = report_of(ablations, command, hardware)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps({"runs": [asdict(a) for a in ablations]}, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(text, encoding="utf-8")
    _plot(_one_budget(ablations), out / "curves.svg")


def report_of(ablations: list[Ablation], command: str, hardware: str) -> str:
    """The tables, in Markdown.

    Raises:
        ValueError: a run has no committed step, or its grid has another size than the others'.
    """
    shared = _one_budget(ablations)
    steps, rollouts = len(shared[0].curve), shared[0].curve[0].rollouts
    cut = any(len(a.curve) > steps for a in ablations)
    seeds = sorted({a.seed for a in shared})
    ordered = sorted(shared, key=lambda a: (VARIANTS.index(a.variant), a.seed))
    parts = [
        "# The search or the training?",
        f"Made by `{command}` on {hardware}. Every run has the same budget: {steps} steps of {rollouts} programs"
        + (" (some runs have more steps; they are cut to the shortest, results.json has all)." if cut else ".")
        + " What the strategies do stands in docs/strategies.md.",
        _how_to_read(len(seeds)),
        "## Compared, seed by seed",
        _comparison_table(ordered, seeds),
        "## Every run",
        _summary_table(ordered),
        "![grid mean, best so far and valid fraction of every run](curves.svg)",
        "One column a variant, its runs in colour with the seed as marker; all other runs are behind it in gray.",
        *(part for measure in MEASURES for part in (f"## {measure.title}", _steps_table(ordered, measure))),
    ]
    return "\n\n".join(parts) + "\n"


def _one_budget(ablations: list[Ablation]) -> list[Ablation]:
    """The runs over the steps that all of them have."""
    lengths = {len(a.curve) for a in ablations}
    grids = {p.rollouts for a in ablations for p in a.curve}
    if 0 in lengths or len(grids) != 1:
        raise ValueError(
            f"runs of one budget have the same grid and at least one step; these have {sorted(grids)} rollouts a step and between "
            f"{min(lengths)} and {max(lengths)} steps. Choose another --home, or pass the same --set to both commands."
        )
    return [replace(a, curve=a.curve[: min(lengths)]) for a in ablations]


def _how_to_read(seeds: int) -> str:
    """What these numbers can show and what they cannot."""
    if seeds == 1:
        chance = "There is one seed, which shows that the command works, and nothing about strategies."
    else:
        chance = (
            f"Between variants without any difference, all {seeds} seeds would still agree on a sign in {2 ** (1 - seeds):.0%} of "
            f"all comparisons, and the table has {2 * len(COMPARISONS)}: agreement is a hint and no proof."
        )
    return (
        f"Every seed is shown, and nothing is averaged over seeds. {chance} Batches are decoded together, so numbers move from run "
        "to run: in step 1 all variants of a seed sample the same parents with the same policy, and what differs there is that "
        "noise.\n\n"
        "*Grid mean* is the mean reward of all programs of a step, 0 for those that are not valid. It depends on the parents as "
        "much as on the policy: a strategy that starts from better parents has a higher mean without having learned anything. Only "
        "without reuse (`best_of_n`) are the parents the same in every step, so there on against off is training alone. *Best so "
        "far* is the best certified answer, the seed program included. The demo's model recombines what its generator taught it, "
        "and more sampling of that generator comes as far; a strategy that wins here need not win with a real language model."
    )


def _comparison_table(ablations: list[Ablation], seeds: list[int]) -> str:
    """Differences with − without, one entry a seed, in the order of the seeds."""
    found = {(a.variant, a.seed): a for a in ablations}
    rows = []
    for question, one, other in COMPARISONS:
        pairs = [(found[one, s], found[other, s]) for s in seeds if (one, s) in found and (other, s) in found]
        means = [a.last_mean - b.last_mean for a, b in pairs]
        bests = [a.best - b.best for a, b in pairs if a.best is not None and b.best is not None]
        rows.append([question, _signed(means, 3), _higher(means), _signed(bests, 4), _higher(bests)])
    shown = ", ".join(str(seed) for seed in seeds)
    header = (
        "what",
        f"grid mean of the last {LAST_STEPS} steps, difference for seed {shown}",
        "higher",
        f"best at the end, difference for seed {shown}",
        "higher",
    )
    return table(header, rows)


def _signed(differences: list[float], digits: int) -> str:
    return ", ".join(f"{d:+.{digits}f}".replace("-", "−") for d in differences)


def _higher(differences: list[float]) -> str:
    return f"{sum(d > 0 for d in differences)} of {len(differences)}"


def _summary_table(ablations: list[Ablation]) -> str:
    header = ("strategy", "train", "seed", "grid mean, last 3", "valid, last 3", "best", "since step", "seconds")
    rows = []
    for a in ablations:
        since = next(p.step for p in a.curve if p.best == a.best)
        seconds = sum(p.seconds for p in a.curve)
        numbers = [f"{a.last_mean:.3f}", f"{a.last_valid:.0%}", best_cell(a.best), "" if a.best is None else str(since)]
        rows.append([a.strategy, a.train, str(a.seed), *numbers, f"{seconds:.0f}"])
    return table(header, rows)


def _steps_table(ablations: list[Ablation], measure: _Measure) -> str:
    header = ["strategy", "train", "seed", *(str(p.step) for p in ablations[0].curve)]
    return table(header, [[a.strategy, a.train, str(a.seed), *(measure.shown(p) for p in a.curve)] for a in ablations])


def _plot(ablations: list[Ablation], file: Path) -> None:
    """A row a measure, a column a variant."""
    colors = {seed: f"C{i}" for i, seed in enumerate(sorted({a.seed for a in ablations}))}
    with drawing(file, len(MEASURES), len(VARIANTS), (15, 8)) as panels:
        for row, measure in zip(panels, MEASURES, strict=True):
            row[0].set_ylabel(measure.axis)
            for axis, variant in zip(row, VARIANTS, strict=True):
                # Its own runs last, so that they lie above the others.
                for a in sorted(ablations, key=lambda a: a.variant == variant):
                    steps = [p.step for p in a.curve]
                    values = [float("nan") if (value := measure.of(p)) is None else value for p in a.curve]
                    if a.variant == variant:
                        axis.plot(steps, values, color=colors[a.seed], marker=f"${a.seed}$")
                    else:
                        axis.plot(steps, values, color="0.85", linewidth=0.7)
        for axis, (strategy, train) in zip(panels[0], VARIANTS, strict=True):
            axis.set_title(f"{strategy}, train {train}")
        for axis in panels[-1]:
            axis.set_xlabel("step")
