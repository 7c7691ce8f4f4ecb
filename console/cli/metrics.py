"""`tttd metrics RUN`: every number of every committed step as JSON lines, from the store alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.cli.control import RunArgument
from console.output import OK, Failure, command, emit, say

if TYPE_CHECKING:
    from activities.blobs import Blobs


@command
def metrics(
    run: RunArgument,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the lines to this file.")] = None,
) -> int:
    """Print the metrics of a run, one JSON line a step (names: docs/metrics.md). Needs the store only."""
    from console.cli.session import open_session
    from console.stored import find_run, lineage_of, lineage_text, unknown_run

    blobs = open_session().blobs
    found = find_run(blobs, run)
    if found is None:
        raise Failure(unknown_run(blobs, run))
    if fork := lineage_of(found.spec):
        say(f"{run} is a {lineage_text(fork)}; the steps up to there are those of `tttd metrics {fork.run}`")
    lines = [json.dumps(line, ensure_ascii=False, allow_nan=False) for line in step_lines(blobs, run, found.step or 0)]
    if output is None:
        if lines:
            emit("\n".join(lines))
    else:
        output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        emit(f"{len(lines)} steps of {run} in {output}")
    return OK


def step_lines(blobs: Blobs, run: str, last: int) -> list[dict[str, Any]]:
    """Run, step, commit and all metrics, for steps 1 to `last`; a step whose report was lost in a crash is named and left out.

    A fork's own steps begin after the one at which it left the other run; its lines name that as `fork_of`, RUN@STEP.
    """
    from activities.records import StepReport
    from activities.run_store import RunStore
    from console.stored import find_run, lineage_of

    store = RunStore(blobs, run)
    found = find_run(blobs, run)
    fork = None if found is None else lineage_of(found.spec)
    origin = {} if fork is None else {"fork_of": f"{fork.run}@{fork.step}"}
    lines = []
    for step in range(1 if fork is None else fork.step + 1, last + 1):
        report = store.read(StepReport, store.step_key(step, "report"))
        if report is None:
            say(f"step {step} of {run} is committed, but its report was lost: no metrics")
        else:
            lines.append({"run": run, "step": step, "commit": report.commit, **origin, **report.metrics})
    return lines


def register(app: typer.Typer) -> None:
    app.command()(metrics)
