"""One process of a kind per home directory. The lock ends with the process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from workers.settings import Settings


@contextlib.contextmanager
def alone(settings: Settings, name: str) -> Iterator[None]:
    """Hold a named lock.

    Raises:
        SystemExit: another process holds it; says which file, and what to change.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    file = settings.home / f"{name}.lock"
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"tttd: {name} runs already ({file.resolve()} is locked); give this one another TTTD_ENGINE_ID"
            ) from None
        yield
