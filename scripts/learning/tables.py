"""Tables and curves of the learning experiment, from its numbers alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from activities.records import StepReport
from scripts.learning.fixed_parents import PolicyResult


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
        last = self.curve[-3:]
        return sum(p.mean_reward for p in last) / len(last)


Fixed = dict[tuple[int, str], PolicyResult]


def write_results(out: Path, experiments: list[Experiment], fixed: Fixed, command: str, hardware: str) -> None:
    """Write README.md (tables), results.json (numbers) and curves.svg below `out`."""
    out.mkdir(parents=True, exist_ok=True)
    numbers = {
        "runs": [asdict(e) for e in experiments],
        "fixed_parents": [{"seed": seed, "policy": label, **asdict(result)} for (seed, label), result in fixed.items()],
    }
    (out / "results.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(_report(experiments, fixed, command, hardware), encoding="utf-8")
    _plot(experiments, out / "curves.svg")


def _report(experiments: list[Experiment], fixed: Fixed, command: str, hardware: str) -> str:
    parts = [
        "# Does the demo learn?",
        f"Made by `{command}` on {hardware}. Machines differ and batches are decoded together, so numbers move from run "
        "to run; what should come back is the sign of each comparison.",
        "## On fixed parents",
        "The same held-out parents and sampling seeds before and after training, judged by the real judge. *First* is policy "
        "version 0 (the base model), *last* the last published adapter. Without training the last policy is the first.",
        _fixed_table(fixed),
        _verdict(fixed),
        "## Mean reward per step",
        "Grid mean, invalid programs counted as 0. Better parents alone move it too: compare on with off.",
        _means_table(experiments),
        "![mean reward per step](curves.svg)",
        "## Every step",
        *(_curve_table(e) for e in experiments),
    ]
    return "\n\n".join(parts) + "\n"


def _fixed_table(fixed: Fixed) -> str:
    lines = ["| seed | policy | samples | mean reward | valid | valid and new | improved over parent | best |", "|" + "---|" * 8]
    for (seed, label), r in sorted(fixed.items()):
        lines.append(
            f"| {seed} | {label} | {r.samples} | {r.mean_reward:.3f} ± {r.standard_error:.3f} | {r.valid / r.samples:.0%} "
            f"| {r.valid_and_new / r.samples:.0%} | {r.improved / r.samples:.0%} | {r.best:.5f} |"
        )
    return "\n".join(lines)


def _verdict(fixed: Fixed) -> str:
    seeds = sorted({seed for seed, _ in fixed})
    better = [s for s in seeds if fixed[s, "last"].mean_reward > fixed[s, "first"].mean_reward]
    return f"Training beats no training on the fixed parents (mean reward) for {len(better)} of {len(seeds)} seeds."


def _means_table(experiments: list[Experiment]) -> str:
    steps = max(len(e.curve) for e in experiments)
    header = "| seed | train | " + " | ".join(str(s) for s in range(1, steps + 1)) + " | last 3 |"
    lines = [header, "|" + "---|" * (steps + 3)]
    for e in experiments:
        cells = " | ".join(f"{p.mean_reward:.2f}" for p in e.curve)
        lines.append(f"| {e.seed} | {e.train} | {cells} | {e.last_mean:.2f} |")
    return "\n".join(lines)


def _curve_table(e: Experiment) -> str:
    lines = [
        f"### Seed {e.seed}, train {e.train}",
        "",
        "| step | mean reward | valid | valid and new | improved over parent | best so far | KL | seconds |",
        "|" + "---|" * 8,
    ]
    for p in e.curve:
        best = "" if p.best is None else f"{p.best:.6f}"
        kl = "" if p.kl is None else f"{p.kl:.4f}"
        counts = " | ".join(f"{n}/{p.rollouts}" for n in (p.valid, p.valid_and_new, p.improved))
        lines.append(f"| {p.step} | {p.mean_reward:.3f} | {counts} | {best} | {kl} | {p.seconds:.0f} |")
    return "\n".join(lines)


def _plot(experiments: list[Experiment], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "tttd"
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4))
    for e in experiments:
        color, line = ("tab:blue", "-") if e.train == "on" else ("tab:gray", "--")
        steps = [p.step for p in e.curve]
        axis.plot(steps, [p.mean_reward for p in e.curve], marker=f"${e.seed}$", color=color, linestyle=line)
    axis.set(xlabel="step", ylabel="mean reward of the grid", title="training on (blue) and off (gray); the marker is the seed")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
