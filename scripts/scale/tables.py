"""Markdown tables of measurements: ``python -m scripts.scale.tables FILE...``. Measures nothing."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.scale.records import (
    Measurement,
    Step,
    cpu_ms,
    created_bytes,
    orchestration_ms,
    read,
    requests_per_rollout,
    wall_ms,
)

_SHOWN = (1, 2, 10, 25, 50)
_PHASES = ("select", "sample+judge", "barrier", "train", "publish", "commit")
_MIB = 1 << 20
_TEMPORAL_EVENTS, _TEMPORAL_BYTES = 51_200, 50 * _MIB
"""Temporal ends a workflow whose history grows beyond either."""


def tables(measurements: Sequence[Measurement]) -> list[str]:
    """Lines of all tables."""
    out: list[str] = []
    for m in measurements:
        if not m.steps:
            continue
        out += [f"## {title(m)}", "", f"`{m.command}`, {m.began}, {m.hardware}", ""]
        for part in (_overview(m), _steps(m), _memory(m), _cpu(m), _requests(m), _histories(m), _documents(m)):
            out += [*part, ""]
    return out


def title(m: Measurement) -> str:
    extra = ("" if m.train else ", train=off") + (f", store + {m.store_milliseconds:g} ms" if m.store_milliseconds else "")
    return f"{m.groups} x {m.rollouts} for {len(m.steps)} steps, {m.response_tokens} tokens a response{extra}"


def settled(m: Measurement) -> tuple[Step, ...]:
    """Steps whose numbers hold nothing of the start: all but the first, if there are others."""
    return m.steps[1:] or m.steps


def _overview(m: Measurement) -> list[str]:
    steps = settled(m)
    cost = [orchestration_ms(m, s) for s in steps]
    processes = steps[-1].cpu_seconds
    rows: list[tuple[str, str]] = [
        ("rollouts", str(m.grid * len(m.steps))),
        (
            "orchestration, ms per rollout (median; least to most)",
            f"{statistics.median(cost):.1f}; {min(cost):.1f} to {max(cost):.1f}",
        ),
        ("the same with engine, judge and trainer", f"{statistics.median(wall_ms(m, s) for s in steps):.1f}"),
        ("CPU of all our processes, ms per rollout", f"{sum(cpu_ms(m, steps, p) for p in processes):.1f}"),
        ("load average", f"{min(s.load for s in steps):.2f} to {max(s.load for s in steps):.2f}"),
        ("CPU of everything else on the machine, cores", f"{_others(m):.2f}"),
        ("last step against the second, orchestration", f"{cost[-1] / cost[0]:.2f}"),
        ("last ten steps against steps 2 to 11, CPU", f"{_growth(m):.2f}" if len(m.steps) > 20 else "too few steps"),
        ("workflow tasks of more than 5 s; of more than 10 s, done in vain", _slow_tasks(m)),
        ("activities that needed another attempt", "not counted" if m.retried is None else str(sum(m.retried.values()))),
        ("from the run's start to its first step, s", f"{m.opening_seconds:.1f}"),
    ]
    return _table(("", "value"), rows)


def _slow_tasks(m: Measurement) -> str:
    return "not counted" if m.workflow_tasks_lost is None else f"{m.workflow_tasks_slow}; {m.workflow_tasks_lost}"


def _growth(m: Measurement) -> float:
    first, last = m.steps[1:11], m.steps[-10:]
    processes = m.steps[-1].cpu_seconds
    return sum(cpu_ms(m, last, p) for p in processes) / sum(cpu_ms(m, first, p) for p in processes)


def _others(m: Measurement) -> float:
    steps = settled(m)
    return sum(s.other_cpu_seconds for s in steps) / sum(s.wall_seconds + s.between_seconds for s in steps)


def _steps(m: Measurement) -> list[str]:
    phases = [p for p in _PHASES if p in m.steps[-1].phase_seconds]
    head = ("step", "wall s", "between s", *(f"{p} s" for p in phases), "work s", "orchestration ms", "load")
    rows = [
        (
            str(s.step),
            f"{s.wall_seconds:.2f}",
            f"{s.between_seconds:.2f}",
            *(f"{s.phase_seconds.get(p, 0.0):.2f}" for p in phases),
            f"{sum(s.work_seconds.values()):.2f}",
            f"{orchestration_ms(m, s):.1f}",
            f"{s.load:.2f}",
        )
        for s in _shown(m)
    ]
    return _table(head, rows)


def _memory(m: Measurement) -> list[str]:
    processes = sorted(m.steps[-1].memory_bytes)
    rows = [(str(s.step), *(f"{s.memory_bytes.get(p, 0) / _MIB:.0f}" for p in processes)) for s in _shown(m)]
    return ["Resident memory, MiB:", "", *_table(("step", *processes), rows)]


def _cpu(m: Measurement) -> list[str]:
    processes = sorted(m.steps[-1].cpu_seconds)
    spans = {"all but the first": settled(m)}
    if len(m.steps) > 20:
        spans |= {"2 to 11": m.steps[1:11], "last ten": m.steps[-10:]}
    rows = [(name, *(f"{cpu_ms(m, steps, p):.2f}" for p in processes)) for name, steps in spans.items()]
    return ["CPU, ms per rollout:", "", *_table(("steps", *processes), rows)]


def _requests(m: Measurement) -> list[str]:
    steps = settled(m)
    found = requests_per_rollout(m, steps)
    methods = sorted({method for calls in found.values() for method in calls})
    rows = [(role, *(f"{calls.get(x, 0.0):.2f}" for x in methods)) for role, calls in sorted(found.items())]
    rows.append(("all", *(f"{sum(calls.get(x, 0.0) for calls in found.values()):.2f}" for x in methods)))
    total = sum(sum(calls.values()) for calls in found.values())
    created = sum(created_bytes(s) for s in steps) / (m.grid * len(steps))
    return [
        f"Requests to the object store per rollout, {total:.1f} in all; {created:.0f} bytes created:",
        "",
        *_table(("role", *methods), rows),
    ]


def _histories(m: Measurement) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for kind in m.steps[-1].histories:
        found = [s.histories[kind] for s in m.steps]
        rows.append(_history_row(kind, max(h.events_most for h in found), max(h.bytes_most for h in found)))
    for i, (events, size) in enumerate(m.run_history):
        rows.append(_history_row(f"DiscoveryRun, execution {i + 1}", events, size))
    total = sum(h.bytes_total for s in m.steps for h in s.histories.values()) + sum(size for _, size in m.run_history)
    per_rollout = total / (m.grid * len(m.steps))
    database = m.steps[-1].database_bytes
    lines = [
        f"Histories, the largest of each type; {per_rollout:.0f} bytes of history per rollout, "
        f"database {database / _MIB:.0f} MiB ({database / (m.grid * len(m.steps)):.0f} bytes per rollout):",
        "",
        *_table(("workflow", "events", "of 51 200", "KiB", "of 50 MiB"), rows),
    ]
    if m.payloads:
        payload_rows = [
            (p.workflow, str(p.payloads), f"{p.payload_bytes / 1024:.1f}", str(p.payload_bytes_most), p.payload_most_in)
            for p in m.payloads
        ]
        lines += ["", *_table(("history", "payloads", "KiB of payloads", "largest, bytes", "in event"), payload_rows)]
    return lines


def _history_row(name: str, events: int, size: int) -> tuple[str, ...]:
    return name, str(events), f"{events / _TEMPORAL_EVENTS:.2%}", f"{size / 1024:.1f}", f"{size / _TEMPORAL_BYTES:.2%}"


def _documents(m: Measurement) -> list[str]:
    kinds = list(m.steps[-1].document_bytes)
    rows = [
        (
            str(s.step),
            str(s.archive_nodes),
            *(f"{s.document_bytes.get(k, 0) / 1024:.1f}" for k in kinds),
            f"{s.database_bytes / _MIB:.1f}",
        )
        for s in _shown(m)
    ]
    lines = ["Documents of a step, KiB:", "", *_table(("step", "archive nodes", *kinds, "database MiB"), rows)]
    if m.rollout_bytes:
        sizes = ", ".join(f"{name} {size}" for name, size in m.rollout_bytes.items())
        lines += ["", f"Of one rollout, bytes: {sizes}."]
    if m.store is not None:
        n = m.grid * len(m.steps)
        lines.append(
            f"Store at the end: {m.store.files} files, {m.store.bytes / _MIB:.0f} MiB ({m.store.bytes / n:.0f} bytes and "
            f"{m.store.files / n:.2f} files per rollout), {m.store.disk_bytes / _MIB:.0f} MiB on the disk."
        )
    return lines


def _shown(m: Measurement) -> list[Step]:
    last = m.steps[-1].step
    return [s for s in m.steps if s.step in (*_SHOWN, last)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def main(files: Sequence[str]) -> int:
    """Print the tables of some results."""
    print("\n".join(tables([read(Path(file)) for file in files])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
