"""One whole run on the engines and the trainer that the settings name: who sampled what, who proved what, and where time went.

With deploy/gpu-2.toml one GPU samples and the other trains; with deploy/gpu-2-engines.toml both sample, and one of them trains too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from activities.records import Batch, RolloutRecord, StepReport
from activities.run_store import RunStore
from scripts.gpu.doctor_and_gate import commit_of
from scripts.gpu.lab import Lab

_NUMBERS = ("reward/mean", "judge/valid_fraction", "search/best_score", "train/gap_engine_trainer_rms")


def experiment(lab: Lab) -> None:
    """A run to its end, then what its store says."""
    lab.up()
    run = lab.run("whole-run")
    lines = {line["step"]: line for line in lab.metrics(run.run_id)}
    lab.keep("steps", [_step(run, report, lines[report.step]) for report in lab.reports(run)])
    lab.keep("chain", chain(run, lab.wish.groups * lab.wish.rollouts))
    lab.keep("trainer", {name: getattr(lab.settings, name) for name in ("trainer_kind", "train_device", "train_data_parallel")})
    lab.keep("verify_exit_code", lab.tttd("verify", run.run_id, "--json", check=False).returncode)
    lab.down()


def _step(run: RunStore, report: StepReport, line: dict[str, Any]) -> dict[str, Any]:
    batch = run.read(Batch, run.step_key(report.step, "batch"))
    assert batch is not None, f"step {report.step} of {run.run_id} has no batch"
    return {
        "step": report.step,
        "rollouts_by_engine": dict(Counter(run.load(RolloutRecord, row.rollout).engine for row in batch.rows)),
        "published": [{"engine": p.engine, "passed": p.passed, "seconds": p.seconds, "note": p.note} for p in report.publish],
        "seconds": report.seconds,
        **{name: line.get(name) for name in _NUMBERS},
    }


def chain(run: RunStore, grid: int) -> dict[str, Any]:
    """Every step's commit names the one before, and has each coordinate of the grid once."""
    last = run.last_step() or 0
    commits = [commit_of(run, step) for step in range(last + 1)]
    linked = all(commit.previous == run.commit_digest(commit.step - 1) for commit in commits[1:])
    whole = all(len({(row.group, row.rollout) for row in c.rows}) == len(c.rows) == grid for c in commits[1:])
    return {"steps": last, "linked": linked, "every_coordinate_once": whole, "head": run.commit_digest(last)}
