"""`tttd watch RUN`: follow a run that somebody started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from console.cli.control import RunArgument
from console.cli.run import Wish, detached_text, finish, follow_run, print_result
from console.output import OK, Failure, command, say

if TYPE_CHECKING:
    from console.cli.session import Session


@command
def watch(run: RunArgument) -> int:
    """Follow a run: a line per committed step, and what it does now. Ctrl-C leaves the run alone."""
    from console.cli.session import open_session, run_async

    session = open_session()
    try:
        return run_async(_watch(session, run))
    except KeyboardInterrupt:
        say(detached_text(run))
        return OK


async def _watch(session: Session, run: str) -> int:
    from console.cli.session import connect
    from console.inquiry import NO_SUCH_RUN, look
    from console.stored import find_run, unknown_run

    client = await connect(session.settings)
    if (await look(client, run)).missing == NO_SUCH_RUN:
        stored = find_run(session.blobs, run)
        if stored is None:
            raise Failure(unknown_run(session.blobs, run))
        raise Failure(
            f"nobody works on run {run}: Temporal does not know it, the store has it up to step {stored.step}; "
            f"`tttd extend {run} --steps N` goes on with it, `tttd best {run}` prints its best program"
        )
    ending = await follow_run(session, client, run, leave_blocked=False)
    return finish(session, run, ending, Wish(), print_result)


def register(app: typer.Typer) -> None:
    app.command()(watch)
