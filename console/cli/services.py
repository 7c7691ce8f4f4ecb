"""`tttd up`, `tttd down`, `tttd worker`: the processes of one machine."""

from __future__ import annotations

from typing import Annotated

import typer

from console.output import OK, USAGE, Failure, command, emit, say

ROLES = ("control", "sample", "judge", "train", "engine")


@command
def up(
    no_workers: Annotated[bool, typer.Option("--no-workers", help="Start Temporal alone; start workers yourself.")] = False,
) -> int:
    """Start Temporal and one worker per role on this machine, and keep them running."""
    from console.cli.session import has_foreign_temporal, ui_of
    from workers import services, temporal_server
    from workers.connect import connect_options
    from workers.settings import load_settings

    settings = load_settings()
    if has_foreign_temporal(settings):
        raise Failure(
            f"TEMPORAL_* names a server of your own ({connect_options(settings)['target_host']}): start workers for it with "
            "`tttd worker ROLE`, or unset TEMPORAL_* to have `tttd up` run one here"
        )
    started = services.up(settings, () if no_workers else services.ROLES)
    emit("services are up" if started else "services were up already")
    emit(f"  Temporal  {temporal_server.address(settings)}")
    emit(f"  Web UI    {ui_of(settings)}")
    emit(f"  data      {settings.home.resolve()} (store: {settings.store_url})")
    emit(f"  logs      {settings.logs.resolve()}")
    return OK


@command
def down() -> int:
    """Stop what `tttd up` started. Runs stay as they are, and go on at the next `tttd up`."""
    from workers import services
    from workers.settings import load_settings

    settings = load_settings()
    say("stopping services ...")
    stopped = services.down(settings)
    emit("services are down; runs go on at the next `tttd up`" if stopped else f"no services run from {settings.home.resolve()}")
    return OK


@command
def worker(role: Annotated[str, typer.Argument(help="control, sample, judge, train or engine.")]) -> int:
    """Run one worker role in the foreground until SIGTERM or Ctrl-C."""
    if role not in ROLES:
        raise Failure(f"no role {role!r}; roles are {', '.join(ROLES)}", USAGE)
    from workers.roles import run_role
    from workers.settings import load_settings

    return run_role(role, load_settings()) or OK


def register(app: typer.Typer) -> None:
    app.command()(up)
    app.command()(down)
    app.command()(worker)
