"""`tttd run TASK`: start a run, go on with it, or join it, and follow it to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.cli.session import TaskDirOption
from console.output import OK, RUN_FAILED, Failure, command, emit, emit_json, say

if TYPE_CHECKING:
    from temporalio.client import Client

    from console.cli.session import Session
    from console.follow import Ending
    from console.launch import Asked, Launched

TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="Name of a task folder, for example circle_packing_26.")]
ProfileOption = Annotated[str, typer.Option("--profile", help="Preset that fills every setting left out.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, for example search.steps=4; may be repeated."),
]
NameOption = Annotated[str | None, typer.Option("--name", help="Run id; by default TASK-IDENTITY8.")]
NewOption = Annotated[bool, typer.Option("--new", help="Start another run instead of going on with the one of this name.")]
Present = Callable[["Session", str, str, bool], int]
"""Prints the result of a run: (session, run id, state, as JSON) -> exit code."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@command
def run(
    task: TaskArgument,
    profile: ProfileOption = "laptop",
    settings: SetOption = None,
    name: NameOption = None,
    new: NewOption = False,
    task_dirs: TaskDirOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return as soon as the run is started.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved request, its identity and run id; start nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Run a task. The same command again goes on with the same run, whatever happened in between."""
    from console.cli.session import open_session
    from console.launch import ask, build_raw

    session = open_session(task_dirs or ())
    asked = ask(build_raw(task, profile, settings or [], name), session.settings)
    if dry_run:
        return _dry_run(session, asked, new)
    return run_to_end(session, asked, Wish(new, detach, as_json), print_result)


def _dry_run(session: Session, asked: Asked, new: bool) -> int:
    from console.cli.session import run_async
    from console.launch import with_free_name

    if new:
        asked = run_async(with_free_name(asked, session.blobs, None))
    if asked.bundle is not None:  # what is printed below as the input must work where it is pasted
        session.blobs.put(asked.bundle)
    emit_json(
        {
            "run_id": asked.run_id,
            "identity": asked.spec.identity,
            "input": asked.raw,
            "request": asked.request.model_dump(mode="json"),
            "science": asked.spec.science,
        }
    )
    return OK


@dataclass(frozen=True)
class Wish:
    """How a run is to be launched and shown."""

    new: bool = False
    detach: bool = False
    as_json: bool = False


def run_to_end(session: Session, asked: Asked, wish: Wish, present: Present) -> int:
    """Launch, follow, and present the result. Returns the command's exit code."""
    from console.cli.session import check_environment, ensure_services, run_async
    from console.launch import is_finished, stored_run
    from workers.services import read_state

    # A finished run needs no services. With services it may have been extended and be under way again.
    finished = is_finished(stored_run(session.blobs, asked), asked.request.search.steps)
    if finished and not wish.new and not read_state(session.settings):
        return _already_finished(session, asked, wish, present)
    check_environment(session, asked)
    ensure_services(session.settings, asked.request.model)
    joined: dict[str, Any] = {}
    try:
        return run_async(_run(session, asked, wish, present, joined))
    except KeyboardInterrupt:
        if not joined:
            raise
        say(detached_text(joined["run_id"]))
        return OK


async def _run(session: Session, asked: Asked, wish: Wish, present: Present, joined: dict[str, Any]) -> int:
    from console.cli.session import connect
    from console.launch import launch, with_free_name

    client = await connect(session.settings)
    if wish.new:
        asked = await with_free_name(asked, session.blobs, client)
    launched = await launch(client, session.blobs, asked)
    if launched.how == "finished":
        return _already_finished(session, asked, wish, present)
    joined["run_id"] = asked.run_id
    say(launched_text(asked, launched))
    if wish.detach:
        return _print_detached(session, client, asked, launched, wish.as_json)
    return finish(session, asked.run_id, await follow_run(session, client, asked.run_id), wish, present)


async def follow_run(session: Session, client: Client, run_id: str, *, leave_blocked: bool = True) -> Ending:
    """Follow a run on stderr until it ends."""
    import time

    from console.cli.session import ui_of
    from console.follow import Follower, Watched
    from console.inquiry import look, web_link
    from console.screen import open_screen
    from console.stored import summary_of

    with open_screen(say, time.monotonic) as screen:
        watched = Watched(
            client=client,
            run_id=run_id,
            screen=screen,
            link=web_link(ui_of(session.settings), client.namespace, run_id, (await look(client, run_id)).workflow_id),
            summary_of=lambda step: summary_of(session.blobs, run_id, step),
            wall=time.time,
            clock=time.monotonic,
            leave_blocked=leave_blocked,
        )
        return await Follower(watched).follow()


def launched_text(asked: Asked, launched: Launched) -> str:
    """What became of the request, in a sentence."""
    steps, run_id = asked.request.search.steps, asked.run_id
    if launched.how == "started":
        return f"started run {run_id}: {steps} steps"
    if launched.how == "resumed":
        return f"resuming run {run_id} at step {launched.step}, to step {steps}"
    more = f"resuming run {run_id} at step {launched.step}: it is under way, joining it"
    return f"{more} (its own number of steps stands; `tttd extend {run_id} --steps N` adds to it)"


def detached_text(run_id: str) -> str:
    """After Ctrl-C: the run lives in Temporal."""
    return (
        f"detached: run {run_id} goes on. Watch it with `tttd watch {run_id}`, pause it with `tttd pause {run_id}`, "
        f"end it with `tttd stop {run_id}`."
    )


def _print_detached(session: Session, client: Client, asked: Asked, launched: Launched, as_json: bool) -> int:
    from console.cli.session import ui_of
    from console.inquiry import web_link

    link = web_link(ui_of(session.settings), client.namespace, asked.run_id)
    if as_json:
        emit_json(
            {"run_id": asked.run_id, "how": launched.how, "step": launched.step, "identity": asked.spec.identity, "web": link}
        )
    else:
        emit(asked.run_id)
        say(f"follow it with `tttd watch {asked.run_id}`" + (f" or at {link}" if link else ""))
    return OK


def _already_finished(session: Session, asked: Asked, wish: Wish, present: Present) -> int:
    say(f"run {asked.run_id} has all {asked.request.search.steps} steps; this is its result (`--new` starts another)")
    return present(session, asked.run_id, "completed", wish.as_json)


def finish(session: Session, run_id: str, ending: Ending, wish: Wish, present: Present) -> int:
    """Turn the way a run ended into output and an exit code."""
    if ending.state in ("completed", "stopped"):
        return present(session, run_id, ending.state, wish.as_json)
    if wish.as_json:
        emit_json({"run_id": run_id, "state": ending.state, "error": ending.error})
    if ending.state == "blocked":  # the screen has said why and what to do
        return RUN_FAILED
    raise Failure(f"run {run_id} {ending.state}: {ending.error}", RUN_FAILED)


def print_result(session: Session, run_id: str, state: str, as_json: bool) -> int:
    """The result of a run from the store, with its best program written below home."""
    from activities.errors import InputError
    from console.stored import best_answer, find_run, write_best

    stored = find_run(session.blobs, run_id)
    if stored is None or stored.step is None:
        raise Failure(
            f"run {run_id} ended, but the store {session.blobs.store.url} has no commit of it; is TTTD_STORE the workers'?"
        )
    try:
        answer = best_answer(session.blobs, run_id, session.tasks)
    except InputError as error:
        say(str(error))
        if as_json:
            emit_json({"run_id": run_id, "state": state, "step": stored.step, "commit": stored.commit, "best": None})
        return OK
    program = write_best(answer, session.settings.home.resolve())
    if as_json:
        best = answer.model_dump(mode="json", exclude={"program"}) | {"file": str(program)}
        emit_json({"run_id": run_id, "state": state, "step": stored.step, "commit": stored.commit, "best": best})
        return OK
    emit(f"run {run_id} {state} at step {stored.step}")
    emit(f"  best certified {answer.score_name}  {answer.score:.17g} (found in step {answer.found_step})")
    if answer.exact_digits:
        emit(f"  exact value  {answer.exact_digits}")
    emit(f"  chain  {answer.commit}")
    emit(f"  program  {program}" if answer.program else "  program  none: the search began from this answer")
    return OK


def register(app: typer.Typer) -> None:
    app.command()(run)
