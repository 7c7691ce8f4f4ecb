"""`tttd fork RUN --at-step K`: a new run that begins after a step of another one."""

from __future__ import annotations

from typing import Annotated

import typer

from console.cli.control import RunArgument
from console.cli.run import JsonOption, NameOption, SetOption, Wish, print_result, run_to_end
from console.output import command, say


@command
def fork(
    run: RunArgument,
    at_step: Annotated[int, typer.Option("--at-step", min=0, metavar="K", help="Last step that both runs have in common.")],
    settings: SetOption = None,
    name: NameOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return as soon as the fork is started.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Begin a new run after a step of another: same archive, adapter and optimizer state. Model, LoRA shape and task must stay.

    Steps count on: the fork's first is K + 1, and search.steps counts those up to K too.
    """
    from console.cli.session import open_session
    from console.forks import ask_fork

    session = open_session()
    asked = ask_fork(session.blobs, session.settings, session.tasks, run, at_step, name=name, changes=settings or ())
    say(f"{asked.run_id} is a fork of {run} at step {at_step}")
    return run_to_end(session, asked, Wish(detach=detach, as_json=as_json), print_result)


def register(app: typer.Typer) -> None:
    app.command()(fork)
