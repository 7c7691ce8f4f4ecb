"""Rates of false accepts and rejects as a table, for the gate's bounds and for others in their place."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.publish import gate
from scripts.gate.serving import Decision

RIGHT = "right"


@dataclass(frozen=True)
class Trial:
    """One served adapter before the gate."""

    run: str
    step: int
    number: int
    """Of its chain, from 0."""
    evidence: int
    """Which of the update's sets of evidence."""
    case: str
    """`right`, or what was wrong."""
    passed: bool
    factor: float
    """By which adapters were amplified."""
    noise: float
    """Nats per token between engine and trainer, as the gate measured it."""
    comparisons: tuple[dict[str, Any], ...]
    served_share: float | None
    name_gap: float | None
    name_bound: float | None
    name_cause: str

    @property
    def is_wrong(self) -> bool:
        return self.passed != (self.case == RIGHT)


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
    name: bool = True
    """False: without the comparison of names."""

    def accept(self, trial: Trial) -> bool:
        weights = all(self._accept(c, trial.noise) for c in trial.comparisons)
        return weights and not (self.name and trial.name_cause)

    def _accept(self, c: dict[str, Any], noise: float) -> bool:
        if c["trainer_rms"] == 0:
            return bool(c["passed"])
        bound = max(self.residual_floor, self.noise_factor * max(noise, gate.NOISE_FLOOR) ** 2 / c["trainer_rms"] ** 2)
        in_range = self.slope_low <= c["slope"] <= self.slope_high and c["z"] > self.z
        return bool(in_range and (not self.residual or c["residual"] <= bound))


ALTERNATIVES = {
    "as chosen": Bounds(),
    "no residual test": Bounds(residual=False),
    "no comparison of names": Bounds(name=False),
    "slope 0.3 to 1.7": Bounds(slope_low=0.3, slope_high=1.7),
    "slope 0.6 to 1.4": Bounds(slope_low=0.6, slope_high=1.4),
    "slope 0.7 to 1.3": Bounds(slope_low=0.7, slope_high=1.3),
    "slope 0.8 to 1.2": Bounds(slope_low=0.8, slope_high=1.2),
    "z above 3": Bounds(z=3.0),
    "z above 8": Bounds(z=8.0),
    "residual floor 0.1": Bounds(residual_floor=0.1),
    "residual floor 0.5": Bounds(residual_floor=0.5),
    "noise factor 2": Bounds(noise_factor=2.0),
}


def trial_of(run: str, step: int, number: int, evidence: int, case: str, factor: float, decision: Decision) -> Trial:
    weights, name = decision.weights, decision.name
    return Trial(
        run=run,
        step=step,
        number=number,
        evidence=evidence,
        case=case,
        passed=decision.passed,
        factor=factor,
        noise=weights.noise,
        comparisons=tuple(c.model_dump(mode="json", exclude={"reason"}) for c in weights.comparisons),
        served_share=decision.served_share,
        name_gap=name.gap if name else None,
        name_bound=name.bound if name else None,
        name_cause=name.cause if name else "",
    )


def interval(hits: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate."""
    z = 1.96
    rate, scale = hits / trials, 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def rate_rows(trials: Iterable[Trial]) -> list[list[str]]:
    """Per case: trials, wrongly decided, interval, and where its slope and residual against version v lie."""
    rows = []
    for case, found in _by_case(trials).items():
        wrong = sum(t.is_wrong for t in found)
        low, high = interval(wrong, len(found))
        kind = "false reject" if case == RIGHT else "false accept"
        spreads = [_spread([t.comparisons[0][key] for t in found]) for key in ("slope", "residual")]
        rows.append([case, str(len(found)), f"{wrong} {kind}", f"{low:.1%} to {high:.1%}", *spreads])
    return rows


def alternative_rows(trials: Sequence[Trial]) -> list[list[str]]:
    """The same trials under other bounds: false rejects, and false accepts by case."""
    cases = _by_case(trials)
    return [
        [name, *(str(sum(bounds.accept(t) != (case == RIGHT) for t in found)) for case, found in cases.items())]
        for name, bounds in ALTERNATIVES.items()
    ]


def share_rows(trials: Iterable[Trial]) -> list[list[str]]:
    """By the number of steps since version v: how much of a step the engine serves, and how it is compared."""
    groups: dict[tuple[int, int], list[Trial]] = {}
    for trial in trials:
        if trial.case == RIGHT:
            groups.setdefault((trial.step, trial.number), []).append(trial)

    def row(key: tuple[int, int], found: list[Trial]) -> list[str]:
        first, last = [t.comparisons[0] for t in found], [t.comparisons[-1] for t in found]
        columns: list[Callable[[Trial], float]] = [lambda t: t.factor, lambda t: t.served_share or 0.0]
        amplified = [_spread([column(t) for t in found]) for column in columns]
        compared = [
            _spread([c["trainer_rms"] for c in first]),
            _spread([c["slope"] for c in first]),
            _spread([c["slope"] for c in last]),
        ]
        return [f"{key[0] - 1} + {key[1] + 1}", str(len(found)), *amplified, *compared]

    return [row(key, groups[key]) for key in sorted(groups)]


def _by_case(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    out: dict[str, list[Trial]] = {}
    for trial in trials:
        out.setdefault(trial.case, []).append(trial)
    return {case: out[case] for case in sorted(out, key=lambda c: (c != RIGHT, c))}


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.3g} / {statistics.median(values):.3g} / {max(values):.3g}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def report(trials: Sequence[Trial], about: dict[str, str]) -> str:
    """The section of one model and engine."""
    updates = len({(t.run, t.step, t.number, t.factor, t.comparisons[0]["trainer_rms"]) for t in trials if t.case == RIGHT})
    noise = statistics.median(t.noise for t in trials)
    tokens = statistics.median(t.comparisons[0]["tokens"] for t in trials)
    gaps = [t.name_gap for t in trials if t.case == RIGHT and t.name_gap is not None]
    head = [
        f"- model {about['model']}, engine {about['engine']}, learning rate {about['rate']}",
        f"- {about['updates']} single steps on parts of grids; {updates} sets of evidence, {tokens:.0f} tokens each (median)",
        f"- engine and trainer differ by {noise:.2g} nats a token (rms, median) under the reference adapters",
        f"- the same files under two names: {_spread(gaps)} nats apart (rms)" if gaps else "- no adapter was amplified",
        f"- hardware: {about['hardware']}",
    ]
    cases = list(_by_case(trials))
    return "\n\n".join(
        [
            "\n".join(head),
            "Three numbers in a column are the least, the median and the largest.",
            markdown(["what is wrong", "trials", "decided wrongly", "95 % interval", "slope", "residual"], rate_rows(trials)),
            "The same trials, decided by other bounds (number of wrong decisions):",
            markdown(["bounds", *cases], alternative_rows(trials)),
            "The right adapter, by the steps taken: those of the run, then those of the trial at its own rate.",
            markdown(
                [
                    "steps",
                    "trials",
                    "amplified",
                    "share of the step that is served",
                    "update rms as compared",
                    "slope to v",
                    "to 0",
                ],
                share_rows(trials),
            ),
        ]
    )


def write(folder: Path, name: str, trials: Sequence[Trial], about: dict[str, str]) -> None:
    """`NAME.json` with every trial as a row, and `NAME.md` with the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(_row(trial), separators=(",", ":")) for trial in trials)
    head = f'"about":{json.dumps(about)},"columns":{json.dumps(COLUMNS)}'
    (folder / f"{name}.json").write_text(f'{{{head},"trials":[\n{lines}\n]}}\n')
    title = f"# False accepts and false rejects of the publish gate: {name}"
    (folder / f"{name}.md").write_text(f"{title}\n\nMade by `{about['command']}`.\n\n{report(trials, about)}\n")


_COMPARED = ("tokens", "slope", "z", "residual", "residual_bound", "trainer_rms")
COLUMNS = [
    *("run", "step", "number", "evidence", "case", "passed", "factor", "noise"),
    *("served_share", "name_gap", "name_bound", "name_cause"),
    *(f"{against}.{key}" for against in ("previous", "initial") for key in _COMPARED),
]
"""Of a row; version 0 is not compared again where it is the version before."""


def _row(t: Trial) -> list[Any]:
    own = [t.run, t.step, t.number, t.evidence, t.case, int(t.passed), t.factor, t.noise]
    own += [t.served_share, t.name_gap, t.name_bound, t.name_cause]
    return [_rounded(v) for v in [*own, *(c[key] for c in t.comparisons for key in _COMPARED)]]


def _rounded(value: Any) -> Any:
    """Four digits are more than the tables show."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
