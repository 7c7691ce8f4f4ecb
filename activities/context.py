"""What every activity shares with Temporal: errors, heartbeats and log fields. Knows no room's business.

A room's ``activity.py`` wraps its methods in :func:`translate_errors` and its long parts in :func:`beating`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError, CancelledError

from activities.errors import InputError, TttdError
from tasks.errors import JudgeFault, TaskError
from workflows.contracts.base import Coordinate

P = ParamSpec("P")
R = TypeVar("R")

log: structlog.stdlib.BoundLogger = structlog.get_logger()


def to_application_error(error: TttdError) -> ApplicationError:
    """The Temporal form of one of our errors: its class name is the type, its `retryable` decides about another attempt."""
    return ApplicationError(str(error), type=type(error).__name__, non_retryable=not error.retryable)


def translate_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Turn a TttdError into an ApplicationError, and log every failure with the activity's coordinates."""
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def run_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            with _logged(args):
                return await cast(Awaitable[Any], method(*args, **kwargs))

        return cast(Callable[P, R], run_async)

    @functools.wraps(method)
    def run_sync(*args: P.args, **kwargs: P.kwargs) -> R:
        with _logged(args):
            return method(*args, **kwargs)

    return run_sync


def control_activity(method: Callable[P, R]) -> Callable[P, R]:
    """:func:`translate_errors`, with a heartbeat while the blocking body runs: a killed control worker is noticed in time."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with beating():
            return method(*args, **kwargs)

    return translate_errors(run)


@contextlib.contextmanager
def _logged(args: tuple[Any, ...]) -> Iterator[None]:
    info = activity.info()
    fields: dict[str, Any] = {"activity": info.activity_type, "attempt": info.attempt, "workflow": info.workflow_id}
    request = args[-1] if args else None
    at = getattr(request, "at", None)
    if isinstance(at, Coordinate):
        fields |= at.model_dump()
    elif isinstance(step := getattr(request, "step", None), int):
        fields["step"] = step
    with structlog.contextvars.bound_contextvars(**fields):
        try:
            yield
        except TttdError as error:
            log.warning("activity_failed", error=type(error).__name__, message=str(error), retryable=error.retryable)
            raise to_application_error(error) from error
        except (TaskError, JudgeFault) as error:  # the task's own mistake: another attempt would find the same
            log.warning("activity_failed", error=type(error).__name__, message=str(error), retryable=False)
            raise to_application_error(InputError(str(error))) from error
        except (CancelledError, asyncio.CancelledError):
            log.info("activity_cancelled")
            raise
        except Exception:
            log.exception("activity_crashed")
            raise


def _interval() -> float:
    timeout = activity.info().heartbeat_timeout
    return max(0.2, timeout.total_seconds() / 3) if timeout else 20.0


@contextlib.asynccontextmanager
async def beating_async(progress: Callable[[], Any] = lambda: None) -> AsyncIterator[None]:
    """Heartbeat from a task while the body runs; `progress()` is sent along (tokens so far, phase)."""

    async def beat() -> None:
        while True:
            activity.heartbeat(progress())
            await asyncio.sleep(_interval())

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.contextmanager
def beating(progress: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Heartbeat from a thread while a blocking body runs."""
    stop = threading.Event()
    interval = _interval()

    def beat() -> None:
        while not stop.is_set():
            activity.heartbeat(progress())
            stop.wait(interval)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(beat,), daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
