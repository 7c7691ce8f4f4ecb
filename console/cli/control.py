"""`tttd pause | resume | stop | retry | extend RUN`: the updates of a run. A refusal is a sentence and exit code 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.output import OK, Failure, command, emit

if TYPE_CHECKING:
    from temporalio.client import Client

    from console.cli.session import Session

ANSWER_SECONDS = 20.0


def run_name(given: str | None) -> str | None:
    """A run's name from what people copy: also its workflow id `run/NAME`, or that of one of its steps or groups."""
    return None if given is None else given.removeprefix("run/").partition("/step/")[0]


RunArgument = Annotated[str, typer.Argument(metavar="RUN", callback=run_name, help="Run id, as `tttd status` lists it.")]


@command
def pause(run: RunArgument) -> int:
    """Pause a run when the step in progress is committed."""
    return _update(run, "pause")


@command
def resume(run: RunArgument) -> int:
    """Let a paused run go on."""
    return _update(run, "resume")


@command
def stop(run: RunArgument) -> int:
    """End a run when the step in progress is committed; `tttd run` can go on with it later."""
    return _update(run, "stop")


@command
def retry(run: RunArgument) -> int:
    """Let a blocked run try its step again; stored rollouts and verdicts are used, not made again."""
    return _update(run, "retry")


@command
def extend(
    run: RunArgument,
    steps: Annotated[int, typer.Option("--steps", min=1, max=100_000, help="Steps to add to the total.")],
) -> int:
    """Add steps to a run. One that has ended goes on in a new execution from its last commit."""
    from console.cli.session import ensure_services, open_session, run_async
    from console.stored import find_run

    session = open_session()
    stored = find_run(session.blobs, run)
    ensure_services(session.settings, stored.spec.request.model if stored and stored.spec else None)
    emit(run_async(_extend(session, run, steps)))
    return OK


def _update(run: str, name: str) -> int:
    from console.cli.session import open_session, run_async

    emit(run_async(_ask(open_session(), run, name)))
    return OK


async def _ask(session: Session, run: str, name: str) -> str:
    from console.cli.session import connect

    client = await connect(session.settings)
    return f"{run}: {await send_update(client, session, run, name)}"


async def _extend(session: Session, run: str, steps: int) -> str:
    from console.cli.session import connect
    from console.inquiry import look

    client = await connect(session.settings)
    if (await look(client, run)).is_running:
        total = await send_update(client, session, run, "extend", {"steps": steps})
        return f"{run}: the run now has {total} steps in total"
    return await go_on(client, session, run, steps)


async def go_on(client: Client, session: Session, run: str, steps: int) -> str:
    """Start a new execution of a closed run, `steps` steps beyond its last commit."""
    from console.launch import continuation, start
    from console.stored import find_run, unknown_run

    stored = find_run(session.blobs, run)
    if stored is None:
        raise Failure(unknown_run(session.blobs, run))
    if stored.spec is None or stored.step is None:
        raise Failure(f"run {run} has nothing committed yet, so there is nothing to extend: start it again with `tttd run`")
    total = stored.step + steps
    if not await start(client, run, continuation(stored.spec, total), task=stored.spec.task, steps=total):
        raise Failure(f"run {run} was started by somebody else at this moment; extend it again")
    return f"{run}: goes on from step {stored.step} to step {total} in a new execution; follow it with `tttd watch {run}`"


async def send_update(client: Client, session: Session, run: str, name: str, argument: Any = None) -> Any:
    """Send an update and return its answer.

    Raises:
        Failure: the run refuses, has ended, does not exist, or no control worker answers.
    """
    import asyncio

    from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
    from temporalio.service import RPCError

    from console.inquiry import describe_run
    from workflows import names
    from workflows.publishing import explain

    arguments = [] if argument is None else [argument]
    try:
        found = await describe_run(client, run)
        handle = client.get_workflow_handle(names.run_workflow_id(run) if found is None else found.id)
        return await asyncio.wait_for(handle.execute_update(name, args=arguments), ANSWER_SECONDS)
    except WorkflowUpdateFailedError as error:
        raise Failure(f"{run}: {explain(error).removeprefix('UpdateRefused: ')}") from None
    except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError):
        raise Failure(
            f"{run}: no control worker answered within {ANSWER_SECONDS:.0f} s, so it is not known whether `{name}` will be done; "
            f"see `tttd status {run}`"
        ) from None
    except RPCError as error:
        raise Failure(await why_not(client, session, run, error)) from None


async def why_not(client: Client, session: Session, run: str, error: Exception) -> str:
    """Why an update could not even be delivered."""
    from console.inquiry import NO_SERVER, NO_SUCH_RUN, look
    from console.stored import find_run, unknown_run

    seen = await look(client, run)
    if seen.missing == NO_SERVER:
        return f"{run}: the Temporal server does not answer ({error})"
    stored = find_run(session.blobs, run)
    if seen.missing == NO_SUCH_RUN and stored is None:
        return unknown_run(session.blobs, run)
    if seen.missing == NO_SUCH_RUN or not seen.is_running:
        at = "" if stored is None or stored.step is None else f" at step {stored.step}"
        how = "not under way" if seen.execution is None else seen.execution.lower()
        return f"{run}: the run is {how}{at}; `tttd extend {run} --steps N` or the same `tttd run` command goes on with it"
    return f"{run}: {error}"


def register(app: typer.Typer) -> None:
    for function in (pause, resume, stop, retry, extend):
        app.command()(function)
