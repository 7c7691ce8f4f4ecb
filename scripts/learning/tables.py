"""Tables and curves of the learning experiment, from its numbers alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from scripts.learning.curves import Experiment, curve_table, drawing, table
from scripts.learning.fixed_parents import PolicyResult

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
        *(curve_table(f"Seed {e.seed}, train {e.train}", e.curve) for e in experiments),
    ]
    return "\n\n".join(parts) + "\n"


def _fixed_table(fixed: Fixed) -> str:
    header = ("seed", "policy", "samples", "mean reward", "valid", "valid and new", "improved over parent", "best")
    rows = []
    for (seed, label), r in sorted(fixed.items()):
        shares = [f"{n / r.samples:.0%}" for n in (r.valid, r.valid_and_new, r.improved)]
        reward = f"{r.mean_reward:.3f} ± {r.standard_error:.3f}"
        rows.append([str(seed), label, str(r.samples), reward, *shares, f"{r.best:.5f}"])
    return table(header, rows)


def _verdict(fixed: Fixed) -> str:
    seeds = sorted({seed for seed, _ in fixed})
    better = [s for s in seeds if fixed[s, "last"].mean_reward > fixed[s, "first"].mean_reward]
    return f"Training beats no training on the fixed parents (mean reward) for {len(better)} of {len(seeds)} seeds."


def _means_table(experiments: list[Experiment]) -> str:
    steps = max(len(e.curve) for e in experiments)
    header = ["seed", "train", *(str(s) for s in range(1, steps + 1)), "last 3"]
    return table(
        header,
        [[str(e.seed), e.train, *(f"{p.mean_reward:.2f}" for p in e.curve), f"{e.last_mean:.2f}"] for e in experiments],
    )


def _plot(experiments: list[Experiment], file: Path) -> None:
    with drawing(file, 1, 1, (7, 4)) as [[axis]]:
        for e in experiments:
            color, line = ("tab:blue", "-") if e.train == "on" else ("tab:gray", "--")
            steps = [p.step for p in e.curve]
            axis.plot(steps, [p.mean_reward for p in e.curve], marker=f"${e.seed}$", color=color, linestyle=line)
        title = "training on (blue) and off (gray); the marker is the seed"
        axis.set(xlabel="step", ylabel="mean reward of the grid", title=title)
