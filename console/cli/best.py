"""`tttd best RUN`: the best certified program, from the store alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from console.cli.control import RunArgument
from console.output import OK, command, emit, emit_json, say

if TYPE_CHECKING:
    from console.stored import BestAnswer


@command
def best(
    run: RunArgument,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the program to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print program and certificate as JSON.")] = False,
) -> int:
    """Print the best certified program of a run. Needs the store only: no server, no worker."""
    from console.cli.session import open_session
    from console.stored import best_answer

    session = open_session()
    answer = best_answer(session.blobs, run, session.tasks)
    if output is not None:
        output.write_text(answer.program, encoding="utf-8")
    if as_json:
        emit_json(answer)
        return OK
    certificate = "\n".join(certificate_lines(answer))
    if output is not None:
        emit(f"{certificate}\nprogram       {output}")
        return OK
    say(certificate)
    if not answer.program:
        say(f"no program made it: the search began from this construction; `tttd verify {run} --out FILE` writes it down")
        return OK
    emit(answer.program.rstrip("\n"))
    return OK


def certificate_lines(answer: BestAnswer) -> list[str]:
    """What is certified, and where it stands."""
    from console.stored import lineage_text

    known = "" if answer.best_known is None else f" (best known {answer.best_known:.17g})"
    fraction = answer.exact_digits or "not in the store"
    return [
        f"run           {answer.run_id} ({answer.task})",
        *([f"lineage       {lineage_text(answer.fork_of)}"] if answer.fork_of else []),
        f"{answer.score_name:<13} {answer.score:.17g}{known}",
        f"exact         {fraction}",
        f"found         in step {answer.found_step} of {answer.step} ({answer.node})",
        f"construction  {answer.construction}",
        f"chain         {answer.commit}",
        f"policy        version {answer.policy_version} ({answer.policy})",
    ]


def register(app: typer.Typer) -> None:
    app.command()(best)
