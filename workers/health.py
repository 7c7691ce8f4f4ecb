"""Whether a worker lives, and whether it is ready: named conditions with a reason and an age. Knows no HTTP.

live    the event loop turns. A blocking call in it would silence every heartbeat of the process, so it counts as dead.
ready   live, not draining, and every condition of the role holds: Temporal and the store answer, the role polls, and what the
        role needs besides has passed (the sandbox's self-test, the engine's health, the search attributes).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from temporalio.client import Client

from activities.blobs import Blobs

CONDITIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "control": ("temporal", "store", "search_attributes", "polling"),
    "sample": ("temporal", "store", "polling"),
    "judge": ("temporal", "store", "sandbox", "polling"),
    "train": ("temporal", "store", "polling"),
    "engine": ("temporal", "store", "engine", "polling"),
}
STALLED_SECONDS: Final = 60.0
"""Silence of the event loop after which the process counts as dead."""
_BEAT_SECONDS = 1.0
_CHECK_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
_PROBE_KEY = Blobs.key("0" * 64)
"""A blob that does not exist: asking for it needs no more rights than any role has."""


@dataclass(frozen=True)
class Condition:
    """One thing that must hold."""

    holds: bool
    since: float
    """Monotonic seconds of its last change."""
    detail: str = ""


class Health:
    """The state of one worker process; written by its event loop, read by the thread that answers probes.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, role: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.role = role
        self._clock = clock
        self._lock = threading.Lock()
        now = clock()
        self._conditions = {name: Condition(False, now, "not yet") for name in CONDITIONS[role]}
        self._beat = now
        self._draining = False

    def mark(self, name: str, holds: bool, detail: str = "") -> None:
        """Set a condition of the role.

        Raises:
            KeyError: the role has none of that name.
        """
        with self._lock:
            before = self._conditions[name]
            since = before.since if before.holds == holds else self._clock()
            self._conditions[name] = Condition(holds, since, detail)

    def beat(self) -> None:
        """The event loop turns."""
        self._beat = self._clock()

    def drain(self) -> None:
        """From now on no new work is taken: alive, and not ready."""
        self._draining = True

    def live(self) -> tuple[bool, dict[str, Any]]:
        """Whether the process lives, and what to tell."""
        silent = self._clock() - self._beat
        return silent < STALLED_SECONDS, {"role": self.role, "event_loop_silent_seconds": round(silent, 1)}

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether work may be given to it, and why not."""
        now = self._clock()
        with self._lock:
            conditions = dict(self._conditions)
        ready = self.live()[0] and not self._draining and all(c.holds for c in conditions.values())
        return ready, {
            "role": self.role,
            "ready": ready,
            "draining": self._draining,
            "conditions": {
                name: {"holds": c.holds, "for_seconds": round(now - c.since, 1), "detail": c.detail}
                for name, c in conditions.items()
            },
        }


async def keep_watch(health: Health, stop: asyncio.Event) -> None:
    """Beat until told to stop."""
    while not stop.is_set():
        health.beat()
        await asyncio.sleep(_BEAT_SECONDS)


async def watch_outside(health: Health, client: Client, blobs: Blobs, refresh: Callable[[], None]) -> None:
    """Ask Temporal and the store again and again, until cancelled.

    Args:
        refresh: marks what the role itself can tell without waiting.
    """
    while True:
        refresh()
        await asyncio.gather(_check_temporal(health, client), _check_store(health, blobs))
        await asyncio.sleep(_CHECK_SECONDS)


async def _check_temporal(health: Health, client: Client) -> None:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            serves = await client.service_client.check_health()
    except Exception as error:  # whatever keeps it from answering is the reason to tell
        health.mark("temporal", False, _reason(error))
    else:
        health.mark("temporal", serves, client.service_client.config.target_host if serves else "the server is not serving")


async def _check_store(health: Health, blobs: Blobs) -> None:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await asyncio.to_thread(blobs.store.exists, _PROBE_KEY)
    except Exception as error:
        health.mark("store", False, _reason(error))
    else:
        health.mark("store", True, blobs.store.url)


def _reason(error: Exception) -> str:
    return str(error) or f"no answer within {_ANSWER_SECONDS:.0f} s ({type(error).__name__})"
