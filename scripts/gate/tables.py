"""Rates of false accepts and rejects as a table, for the gate's bounds and for others in their place."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from activities.publish import gate
from activities.records import GateComparison


@dataclass(frozen=True)
class Trial:
    """One served adapter before the gate."""

    run: str
    step: int
    case: str
    """`right`, or what was served instead."""
    passed: bool
    noise: float
    """Nats per token between engine and trainer, as the gate measured it."""
    gap: float
    comparisons: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Bounds:
    """The gate's numbers, or others."""

    slope_low: float = gate.SLOPE_LOW
    slope_high: float = gate.SLOPE_HIGH
    z: float = gate.Z_NEEDED
    residual_floor: float = gate.RESIDUAL_FLOOR
    noise_factor: float = gate.NOISE_FACTOR
    residual: bool = True
    """False: slope and z alone decide, as the gate would be without its residual test."""

    def accept(self, trial: Trial) -> bool:
        return all(self._accept(c, trial.noise) for c in trial.comparisons)

    def _accept(self, c: dict[str, Any], noise: float) -> bool:
        if c["trainer_rms"] == 0:
            return bool(c["passed"])
        bound = max(self.residual_floor, self.noise_factor * max(noise, gate.NOISE_FLOOR) ** 2 / c["trainer_rms"] ** 2)
        in_range = self.slope_low <= c["slope"] <= self.slope_high and c["z"] > self.z
        return bool(in_range and (not self.residual or c["residual"] <= bound))


ALTERNATIVES = {
    "as chosen": Bounds(),
    "no residual test": Bounds(residual=False),
    "slope 0.3 to 1.7": Bounds(slope_low=0.3, slope_high=1.7),
    "slope 0.7 to 1.3": Bounds(slope_low=0.7, slope_high=1.3),
    "z above 3": Bounds(z=3.0),
    "z above 8": Bounds(z=8.0),
    "residual floor 0.1": Bounds(residual_floor=0.1),
    "residual floor 0.5": Bounds(residual_floor=0.5),
    "noise factor 2": Bounds(noise_factor=2.0),
}


def trial_of(run: str, step: int, case: str, result: gate.GateResult) -> Trial:
    comparisons: Sequence[GateComparison] = result.comparisons
    return Trial(
        run, step, case, result.passed, result.noise, result.engine_gap, tuple(c.model_dump(mode="json") for c in comparisons)
    )


def interval(hits: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate."""
    z = 1.96
    rate, scale = hits / trials, 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def rate_rows(trials: Iterable[Trial]) -> list[list[str]]:
    """Per served adapter: trials, wrongly decided, interval, and where its slope and residual lie."""
    rows = []
    for case, found in _by_case(trials).items():
        wrong = sum(t.passed != (case == "right") for t in found)
        low, high = interval(wrong, len(found))
        slopes = [t.comparisons[0]["slope"] for t in found]
        residuals = [t.comparisons[0]["residual"] for t in found]
        kind = "false reject" if case == "right" else "false accept"
        rows.append([case, str(len(found)), f"{wrong} {kind}", f"{low:.1%} to {high:.1%}", _spread(slopes), _spread(residuals)])
    return rows


def alternative_rows(trials: Sequence[Trial]) -> list[list[str]]:
    """The same trials under other bounds: false rejects, and false accepts by case."""
    cases = _by_case(trials)
    return [
        [name, *(str(sum(bounds.accept(t) != (case == "right") for t in found)) for case, found in cases.items())]
        for name, bounds in ALTERNATIVES.items()
    ]


def _by_case(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    out: dict[str, list[Trial]] = {}
    for trial in trials:
        out.setdefault(trial.case, []).append(trial)
    return out


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f} / {statistics.median(values):.2f} / {max(values):.2f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def report(trials: Sequence[Trial], about: dict[str, str]) -> str:
    """The section of one model and engine."""
    updates = len({(t.run, t.step, i) for i, t in enumerate(t for t in trials if t.case == "right")})
    noise = statistics.median(t.noise for t in trials)
    moved = statistics.median(t.comparisons[0]["trainer_rms"] for t in trials)
    tokens = statistics.median(t.comparisons[0]["tokens"] for t in trials)
    head = [
        f"- model {about['model']}, engine {about['engine']}, learning rate {about['rate']}",
        f"- {updates} single steps, each on half of a stored grid; evidence of {tokens:.0f} tokens (median)",
        f"- one step moves a log-prob by {moved:.2g} nats (rms, median); engine and trainer differ by {noise:.2g} a token",
        f"- hardware: {about['hardware']}",
    ]
    cases = list(_by_case(trials))
    return "\n\n".join(
        [
            "\n".join(head),
            markdown(
                ["served under the new name", "trials", "wrong", "95 % interval", "slope min/median/max", "residual"],
                rate_rows(trials),
            ),
            "The same trials, decided by other bounds (number of wrong decisions):",
            markdown(["bounds", *cases], alternative_rows(trials)),
        ]
    )


def write(folder: Path, name: str, trials: Sequence[Trial], about: dict[str, str]) -> None:
    """`NAME.json` with every trial, and `NAME.md` with the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"about": about, "trials": [asdict(t) for t in trials]}
    (folder / f"{name}.json").write_text(json.dumps(_rounded(data), separators=(",", ":")) + "\n")
    title = f"# False accepts and false rejects of the publish gate: {name}"
    (folder / f"{name}.md").write_text(f"{title}\n\nMade by `{about['command']}`.\n\n{report(trials, about)}\n")


def _rounded(value: Any) -> Any:
    """Six digits are more than the tables show."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value
