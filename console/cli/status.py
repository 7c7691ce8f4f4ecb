"""`tttd status [RUN]`: services, runs, and for one run what it does and what it waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from console.cli.control import run_name
from console.output import OK, Failure, command, emit, emit_json

if TYPE_CHECKING:
    from console.cli.session import Session
    from console.picture import Surroundings
    from console.status import RunReport, ServicesReport, StatusList, StatusReport


@command
def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", callback=run_name, help="Run id; without one, all runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON (docs/status.schema.json).")] = False,
) -> int:
    """Show services and runs, or one run with everything it waits for. Works from the store when nobody answers."""
    from console.cli.session import open_session, run_async
    from console.stored import unknown_run

    session = open_session()
    if run is None:
        everything = run_async(_everything(session))
        if as_json:
            emit_json(everything)
        else:
            emit("\n".join([*service_lines(everything.services), *list_lines(everything)]))
        return OK
    report = run_async(_one(session, run))
    if report is None:
        raise Failure(unknown_run(session.blobs, run))
    if as_json:
        emit_json(report)
    else:
        emit("\n".join(run_lines(report, report.services.store_problem)))
    return OK


async def _everything(session: Session) -> StatusList:
    from console.picture import whole_picture

    return await whole_picture(await surroundings(session))


async def _one(session: Session, run: str) -> StatusReport | None:
    from console.picture import one_run

    return await one_run(await surroundings(session), run)


async def surroundings(session: Session) -> Surroundings:
    """Connect to Temporal if it can be reached."""
    from console.cli.session import connect, ui_of
    from console.picture import Surroundings

    ui = ui_of(session.settings)
    try:
        client = await connect(session.settings)
    except Failure as error:
        return Surroundings(session.settings, session.blobs, None, ui, str(error))
    return Surroundings(session.settings, session.blobs, client, ui)


def service_lines(services: ServicesReport) -> list[str]:
    reach = "reachable" if services.reachable else f"not reachable: {services.problem}"
    processes = ", ".join(
        f"{p.name}{'' if p.pid else ' (down)'}{f' (started {p.starts} times)' if p.starts > 1 else ''}" for p in services.processes
    )
    lines = [f"Temporal  {services.temporal} ({reach})"]
    if services.ui and services.reachable:
        lines.append(f"Web UI    {services.ui}")
    running = (processes or "starting") if services.supervised else "none of `tttd up` on this machine"
    lines += [f"services  {running}", f"store     {services.store}"]
    lines += [f"note      {services.store_problem}"] if services.store_problem else []
    return [*lines, f"logs      {services.logs}"]


def list_lines(report: StatusList) -> list[str]:
    """All runs as a table."""
    if not report.runs:
        return ["", "no runs yet; `tttd demo` makes one"]
    rows = [("RUN", "STATE", "STEP", "BEST", "VERSION")]
    for run in report.runs:
        state = run.state if run.source != "store" else f"{run.state} (store)"
        rows.append((run.run_id, state, _step(run), _number(run.best_score), _count(run.policy_version)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["", *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)]


def run_lines(run: RunReport, store_problem: str | None = None) -> list[str]:
    """One run for people: where it is, what it does, what it waits for and what to do.

    Args:
        store_problem: why the object store could not be asked.
    """
    from console.lines import SEPARATOR, grid_parts, note_lines, step_line
    from console.waits import wait_text

    lines = [f"run       {run.run_id} ({run.task or 'task not known yet'})", f"state     {_state(run)}", f"step      {_step(run)}"]
    if run.fork_of:
        lines.append("lineage   fork of {} at step {}".format(*run.fork_of.rsplit("@", 1)))
    known = "" if run.best_known is None else f" (best known {run.best_known:.10f})"
    lines.append(f"best      {'none yet' if run.best_score is None else f'{run.best_score:.17g}'}{known}, {run.score_name}")
    if run.policy_version is not None:
        model = f" of {run.model}" if run.model else ""
        lines.append(f"policy    version {run.policy_version}{model}")
    if run.commit:
        lines.append(f"chain     {run.commit}")
    if run.web:
        lines.append(f"Web UI    {run.web}")
    if run.phase and run.state in ("opening", "running"):
        lines.append(f"now       {run.phase.name} {run.phase.detail}".rstrip() + f", since {run.phase.since[:19]}")
    if run.grid:
        lines.append(f"grid      {SEPARATOR.join(grid_parts(run.grid))}")
    if run.error:
        lines.append(f"error     {run.error}")
    if run.phase and run.state in ("paused", "blocked"):
        lines.append(f"waits     for a person since {run.phase.since[:19]}")
    if run.state == "paused":
        lines.append(f"          `tttd resume {run.run_id}` lets it go on; `tttd stop {run.run_id}` ends it here")
    if run.state == "blocked":
        lines.append(f"          mend the cause, then `tttd retry {run.run_id}`; `tttd stop {run.run_id}` ends it here")
    lines += [f"note      {problem}" for problem in (run.problem, store_problem) if problem]
    for wait in run.waits:
        lines.append(f"waits     {wait_text(wait)}")
        lines += [f"          {wait.advice}"] if wait.advice else []
    if run.recent:
        lines.append("")
    for summary in run.recent:
        lines += [step_line(summary, run.steps or summary.step), *note_lines(summary)]
    return lines


def _state(run: RunReport) -> str:
    extra = ", pauses after this step" if run.pause_requested and run.state == "running" else ""
    return f"{run.state}{extra}" + (f" ({run.execution})" if run.execution else "")


def _step(run: RunReport) -> str:
    if run.step is None:
        return "-"
    return f"{run.step}/{max(run.step, run.steps)}" if run.steps is not None else str(run.step)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.8f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def register(app: typer.Typer) -> None:
    app.command()(status)
