"""What commands share: settings, store, Temporal, and the services of this machine. Heavy modules are imported when called."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from console.output import USAGE, Failure, say

if TYPE_CHECKING:
    from temporalio.client import Client

    from activities.blobs import Blobs
    from console.launch import Asked
    from tasks.registry import TaskSource
    from workers.settings import Settings

T = TypeVar("T")

TaskDirOption = Annotated[
    list[Path] | None,
    typer.Option("--task-dir", metavar="DIR", help="A directory with task folders, or one task folder; may be repeated."),
]

CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Session:
    """One command's surroundings."""

    settings: Settings
    blobs: Blobs

    @property
    def tasks(self) -> TaskSource:
        """The tasks that this command knows."""
        from workers.connect import connect_tasks

        return connect_tasks(self.settings, self.blobs)


def open_session(task_dirs: Sequence[Path] = ()) -> Session:
    """Read the settings, keep logs out of the way, open the store.

    Args:
        task_dirs: more directories with task folders, searched before those of the settings.

    Raises:
        SystemExit: a setting is wrong; names it.
        InputError: the store's address is none.
    """
    from workers.connect import connect_blobs
    from workers.settings import load_settings

    settings = with_task_dirs(load_settings(), task_dirs)
    quiet_logs(settings)
    return Session(settings, connect_blobs(settings))


def with_task_dirs(settings: Settings, task_dirs: Sequence[Path]) -> Settings:
    """The settings with a command's `--task-dir` before their own directories.

    Raises:
        Failure: one of them is no directory; usage.
    """
    if missing := [directory for directory in task_dirs if not directory.is_dir()]:
        raise Failure(f"--task-dir {missing[0]}: there is no such directory", USAGE)
    return settings.model_copy(update={"task_dirs": (*(d.resolve() for d in task_dirs), *settings.task_dirs)})


def quiet_logs(settings: Settings) -> None:
    """Log warnings of ours to stderr, and nothing of Temporal's: a command says itself what it waits for."""
    from workers.logs import configure_logging

    configure_logging(settings.log_level if settings.debug else "WARNING", role="console")
    if not settings.debug:
        logging.getLogger("temporal_core").setLevel(logging.CRITICAL)


async def connect(settings: Settings) -> Client:
    """Connect to Temporal.

    Raises:
        Failure: it does not answer; says where it should be and what to do.
    """
    from workers.connect import connect_options, connect_temporal

    try:
        return await asyncio.wait_for(connect_temporal(settings), CONNECT_SECONDS)
    except RuntimeError as error:
        raise Failure(str(error).partition(" (Failed client connect")[0]) from None
    except TimeoutError:
        host = connect_options(settings)["target_host"]
        raise Failure(f"no Temporal server answered at {host} within {CONNECT_SECONDS:.0f} s; is TEMPORAL_ADDRESS right?") from None


def has_foreign_temporal(settings: Settings) -> bool:
    """Whether Temporal is somebody else's server. One of `tttd up` that the environment happens to name is still ours."""
    from workers import temporal_server
    from workers.connect import connect_options
    from workers.settings import temporal_is_configured

    return temporal_is_configured() and connect_options(settings)["target_host"] != temporal_server.address(settings)


def check_environment(session: Session, asked: Asked) -> None:
    """Whether judges of this machine can run the task's programs; those of a foreign Temporal server are elsewhere.

    Raises:
        Failure: the environment is not built; names the command that builds it.
    """
    from tasks.errors import TaskError

    if has_foreign_temporal(session.settings):
        return
    try:
        brought = asked.bundle is None and asked.request.bundle is not None  # by an earlier run; it is in the store
        task = session.tasks.of(asked.request) if brought else session.tasks.load(asked.request.task)
        task.program_python(session.settings.environments)
    except TaskError as error:
        raise Failure(f"task {asked.request.task}: {error}", USAGE) from None


def ui_of(settings: Settings) -> str | None:
    """The Web UI's address, if `tttd up` serves it."""
    from workers import temporal_server

    return None if has_foreign_temporal(settings) else temporal_server.ui_url(settings)


def ensure_services(settings: Settings, model: str | None = None) -> None:
    """Bring the services up unless they are, or Temporal is somebody else's: then workers are too.

    Args:
        model: the run's; an engine that is started now serves it. None: as the settings say.

    Raises:
        Failure: the services run, with an engine for another model.
    """
    from workers import services

    if has_foreign_temporal(settings):
        return
    if services.read_state(settings) is not None:
        services.up(settings, ())  # whoever started them chose which workers run; only wait until they are ready
        state = services.read_state(settings) or {}
        serves = state.get("engine_model", model)
        if model is not None and "engine" in state.get("services", {}) and serves != model:
            raise Failure(
                f"the engine here serves model {serves}, this run needs {model}: `tttd down`, then the same command again"
            )
        return
    if _somebody_serves(settings):
        _accept_stranger(settings)
        return
    say("starting services (Temporal and five workers) ...")
    began = time.monotonic()
    services.up(settings, engine_model=model)
    say(f"services are up after {time.monotonic() - began:.0f} s; Web UI {ui_of(settings)}")


def _accept_stranger(settings: Settings) -> None:
    """Use a server that `tttd up` would collide with only if the user names it: its workers may have another store.

    Raises:
        Failure: nobody named it; says how to do so, and how to avoid it.
    """
    from workers import temporal_server
    from workers.settings import temporal_is_configured

    where = temporal_server.address(settings)
    if not temporal_is_configured():
        raise Failure(
            f"a Temporal server that `tttd up` of {settings.home.resolve()} did not start answers at {where}: set "
            f"TEMPORAL_ADDRESS={where} to use it with workers of your own, or TTTD_TEMPORAL_PORT and TTTD_TEMPORAL_UI_PORT "
            "to start another one beside it"
        )
    say(f"using the Temporal server at {where}, which `tttd up` did not start; starting workers is up to you")


def _somebody_serves(settings: Settings) -> bool:
    """Whether a Temporal server answers where `tttd up` would start one: a second one could not take the port."""
    try:
        run_async(connect(settings))
    except Failure:
        return False
    return True


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's asynchronous part. Ctrl-C cancels it and raises KeyboardInterrupt."""
    return asyncio.run(_interruptible(main))


async def _interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Cancel `main` at Ctrl-C, again and again until it hears: Python 3.11's `wait_for` can swallow a cancellation."""
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    task, waiter = loop.create_task(main), loop.create_task(interrupted.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=0.5)
        raise KeyboardInterrupt
    finally:
        waiter.cancel()
        loop.remove_signal_handler(signal.SIGINT)
