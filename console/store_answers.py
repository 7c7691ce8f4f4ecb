"""Questions to an object store that may not answer: what Temporal knows of a run must be told all the same, and soon.

Knows no run. Errors that are not the store's are raised as they are.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar, cast

from activities.blobs import Blobs
from activities.errors import CorruptBlob

T = TypeVar("T")

ANSWER_SECONDS = 10.0
"""A host that swallows packets would hold a client for minutes."""
_HINT = "see whether it is up and reachable from here (TTTD_STORE, TTTD_S3_ENDPOINT), and takes these keys"


async def ask_store(blobs: Blobs, question: Callable[[], T]) -> tuple[T | None, str | None]:
    """(answer, None), or (None, why the store does not answer, or what is damaged in it, and what to do)."""
    url = blobs.store.url
    try:
        return await asyncio.wait_for(_in_thread(question), ANSWER_SECONDS), None
    except TimeoutError:
        return None, f"the object store {url} did not answer within {ANSWER_SECONDS:.0f} s: {_HINT}"
    except CorruptBlob as error:
        return None, str(error)
    except Exception as error:
        if not (is_of_s3(error) or isinstance(error, OSError)):
            raise
        return None, silent_text(error, f" {url}")


def is_of_s3(error: BaseException) -> bool:
    """Whether an error is boto3's. Imports nothing that was not needed to raise it."""
    return type(error).__module__.partition(".")[0] in ("botocore", "boto3")


def silent_text(error: BaseException, url: str = "") -> str:
    """Why a store does not answer, for people."""
    return f"the object store{url} does not answer ({' '.join(str(error).split()).rstrip('.')}): {_HINT}"


def _in_thread(question: Callable[[], T]) -> asyncio.Future[T]:
    """Ask in a thread that nobody waits for: the loop's own ones it would wait for at its end, as long as the store is silent."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if answer.done():  # given up
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast(T, value))

    def ask() -> None:
        value, failure = None, None
        try:
            value = question()
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=ask, daemon=True, name="store").start()
    return answer
