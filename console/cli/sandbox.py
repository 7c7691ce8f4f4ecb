"""`tttd sandbox serve`: lend this host's sandbox to judges that have none."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from console.output import FAILED, OK, USAGE, Failure, command, emit

if TYPE_CHECKING:
    from activities.judge.sandbox import Sandbox

app = typer.Typer(
    name="sandbox",
    help="The sandbox of judged programs: serve it to other hosts.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def sandbox() -> None:
    """The sandbox of judged programs: serve it to other hosts."""


@app.command()
@command
def serve(
    token_file: Annotated[Path, typer.Option("--token-file", metavar="FILE", help="File with the secret that clients must send.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8790,
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, help="Cores for programs; by default one less than there are.")
    ] = None,
    drain_seconds: Annotated[
        float | None, typer.Option("--drain-seconds", min=0, help="Time for runs to end after SIGTERM; by default the settings'.")
    ] = None,
) -> int:
    """Run programs of other hosts in this host's sandbox, until SIGTERM.

    The strongest sandbox whose self-test passes here is used; without one the service does not start. A judge uses it with
    TTTD_JUDGE_BACKEND=remote, TTTD_JUDGE_REMOTE_URL and TTTD_JUDGE_REMOTE_TOKEN_FILE. The token crosses the network as it is:
    use a private network, or a proxy that speaks https.
    """
    from activities.judge.sandbox import SandboxUnavailable
    from workers.logs import configure_logging
    from workers.sandbox_service import ServiceOptions, read_token
    from workers.sandbox_service import serve as serve_sandbox
    from workers.sandboxes import sandbox_settings
    from workers.settings import load_settings

    settings = load_settings()
    configure_logging(settings.log_level, role="sandbox")
    wanted = sandbox_settings(settings.model_copy(update={"judge_remote_token_file": None}))
    if wanted.backend in ("remote", "unsafe"):  # a service that lends another one's sandbox, or none at all
        wanted = replace(wanted, backend="auto")
    try:
        options = ServiceOptions(
            token=read_token(token_file),
            sandbox=wanted,
            environments=settings.environments,
            slots=settings.judge_slots if slots is None else slots,
            drain_seconds=settings.drain_seconds if drain_seconds is None else drain_seconds,
        )
    except ValueError as error:
        raise Failure(str(error), USAGE) from None
    try:
        listener = socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise Failure(f"cannot listen on {host}:{port}: {error}", FAILED) from None
    with listener:
        try:
            serve_sandbox(options, listener, _say_where)
        except SandboxUnavailable as error:
            raise Failure(str(error), FAILED) from None
    return OK


def _say_where(address: str, sandbox: Sandbox) -> None:
    emit(f"sandbox service at {address}: {sandbox.isolation}")


def register(parent: typer.Typer) -> None:
    parent.add_typer(app)
