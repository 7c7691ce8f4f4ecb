"""`tttd export RUN` and `tttd import FILE`: a run as one file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.cli.control import RunArgument
from console.cli.storage import size_text
from console.output import OK, Failure, command, emit


@command
def export(
    run: RunArgument,
    output: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="The bundle; by default RUN.tar.")] = None,
    with_rollouts: Annotated[
        bool,
        typer.Option(
            "--with-rollouts/--light",
            help="Everything, or only what answers, certificates and metrics need: such a run cannot be gone on with.",
        ),
    ] = True,
) -> int:
    """Write a run into one self-contained file: a plain tar of JSON documents and files by digest."""
    from console.cli.session import open_session
    from console.storage.exporting import export_run

    path = output or Path(f"{run}.tar")
    try:
        exported = export_run(open_session().blobs, run, path, light=not with_rollouts)
    except OSError as error:
        raise Failure(f"the bundle cannot be written: {error}") from None
    left = f", {exported.absent} left out or dropped before" if exported.absent else ""
    emit(f"{path}: {run} up to step {exported.step}, {exported.blobs} blobs, {size_text(exported.bytes)}{left}")
    return OK


@command
def import_run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A bundle of `tttd export`.")],
) -> int:
    """Check a bundle and put its run into the store. Nothing that is there is overwritten."""
    from console.cli.session import open_session
    from console.storage.importing import import_bundle
    from console.stored import task_of

    session = open_session()
    done = import_bundle(session.blobs, file, lambda spec: task_of(spec, session.tasks))
    light = "; it is a light bundle, so the run cannot be gone on with" if done.light else ""
    new = f"{done.entries} entries and {done.blobs} blobs are new" if done.entries else "all of it was there already"
    emit(f"{done.run_id}: up to step {done.step}; {new}{light}")
    return OK


def register(app: typer.Typer) -> None:
    app.command()(export)
    app.command("import")(import_run)
