"""Which engine a rollout goes to: one that has proved the policy, the least loaded by this worker's own count.

Every sample worker counts its own requests only. That balances a fleet all the same: slow engines keep their requests longer, and
every worker spreads what it has. Knows nothing of prompts; what it reads of engines are their notices (``fleet.py``).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from activities.blobs import Blobs
from activities.engine_http import AsyncEngineClient
from activities.errors import EngineError, NotReady
from activities.fleet import is_live, live_engines, read_notice
from activities.records import EngineNotice
from workflows.contracts.base import PolicyRef

T = TypeVar("T")

WAIT_SECONDS = 30.0
"""How long one attempt waits for a verified engine before it lets Temporal count another attempt."""
LISTING_SECONDS = 0.5
"""Age up to which hundreds of rollouts that begin together share one look at the fleet."""
WATCH_SECONDS = 3.0
"""Between two looks at the notice of an engine that is answering us."""
SHUNNED_SECONDS = 5.0
"""An engine that has just failed is left alone for so long if there is another one: a dead engine answers fastest of all, and would
draw every rollout until its worker says that it is gone."""


class EnginePool:
    """The fleet as one sample worker sees it. Lives on one event loop.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, blobs: Blobs, clock: Callable[[], float]) -> None:
        self._blobs = blobs
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._failed: dict[str, float] = {}
        self._clients: dict[str, AsyncEngineClient] = {}
        self._turn = itertools.count()
        self._listings: dict[str, tuple[float, list[EngineNotice]]] = {}
        self._notices: dict[str, tuple[float, EngineNotice | None]] = {}
        self._looking = asyncio.Lock()

    async def acquire(self, model_digest: str, policy: PolicyRef, *, repeatable: bool = False) -> EngineNotice:
        """Wait for an engine whose present boot has passed the gate for this policy, and count one more request there.

        Args:
            repeatable: only an engine that decodes each request alone will do.

        Raises:
            NotReady: none within 30 s; says how many engines there are and what they lack.
        """
        deadline = self._clock() + WAIT_SECONDS
        while True:
            engines = await self._engines(model_digest)
            able = [e for e in engines if e.repeatable or not repeatable]
            ready = [e for e in able if policy.name in e.verified]
            if ready:
                return self._choose(ready)
            if self._clock() > deadline:
                raise NotReady(_nobody(policy, model_digest, len(engines), len(able), repeatable))
            await asyncio.sleep(0.5)

    def _choose(self, ready: list[EngineNotice]) -> EngineNotice:
        now, turn = self._clock(), next(self._turn)

        def burden(place: int) -> tuple[bool, int, int]:
            engine = ready[place].engine
            shunned = now - self._failed.get(engine, -SHUNNED_SECONDS) < SHUNNED_SECONDS
            return shunned, self._running[engine], (place + turn) % len(ready)

        chosen = ready[min(range(len(ready)), key=burden)]
        self._running[chosen.engine] += 1
        return chosen

    async def _engines(self, model_digest: str) -> list[EngineNotice]:
        async with self._looking:
            seen = self._listings.get(model_digest)
            if seen is None or not 0 <= self._clock() - seen[0] < LISTING_SECONDS:
                found = await asyncio.to_thread(live_engines, self._blobs, model_digest, self._clock())
                seen = self._listings[model_digest] = (self._clock(), found)
            return seen[1]

    def release(self, notice: EngineNotice) -> None:
        self._running[notice.engine] -= 1

    def running(self, engine: str) -> int:
        """Requests of this worker that the engine is answering."""
        return self._running[engine]

    def client(self, notice: EngineNotice) -> AsyncEngineClient:
        if notice.url not in self._clients:
            self._clients[notice.url] = AsyncEngineClient(notice.url)
        return self._clients[notice.url]

    async def ask(self, notice: EngineNotice, answer: Awaitable[T]) -> T:
        """Wait for an engine's answer, but not for one that cannot come any more.

        A host that vanishes closes no connection, so its notice is watched as well: when that goes stale or tells of another boot,
        the request is dropped.

        Raises:
            NotReady: the engine is gone, or is another process by now.
            EngineError: as the request itself says.
        """
        request = asyncio.ensure_future(answer)
        gone = 0
        try:
            while not request.done():
                await asyncio.wait({request}, timeout=WATCH_SECONDS)
                if request.done():
                    break
                # Twice in a row: after an outage of the store every notice is old until its worker has written again.
                gone = gone + 1 if await self._is_gone(notice) else 0
                if gone > 1:
                    raise NotReady(f"engine {notice.engine} went away, or restarted, while it was asked; another one is asked")
            return request.result()
        except (EngineError, NotReady):
            self._failed[notice.engine] = self._clock()
            self._listings.clear()
            raise
        finally:
            request.cancel()

    async def _is_gone(self, notice: EngineNotice) -> bool:
        async with self._looking:
            seen = self._notices.get(notice.engine)
            if seen is None or not 0 <= self._clock() - seen[0] < WATCH_SECONDS / 2:
                try:
                    found = await asyncio.to_thread(read_notice, self._blobs, notice.engine)
                except Exception:  # a store that is away says nothing about engines, and the answer is paid for
                    return False
                seen = self._notices[notice.engine] = (self._clock(), found)
        now = seen[1]
        return now is None or now.boot_id != notice.boot_id or not is_live(now, self._clock())

    async def same_boot(self, notice: EngineNotice, policy: PolicyRef) -> bool:
        """Whether the engine is still the process that passed the gate: a restart in between could have served anything."""
        now = await asyncio.to_thread(read_notice, self._blobs, notice.engine)
        return now is not None and now.boot_id == notice.boot_id and policy.name in now.verified


def _nobody(policy: PolicyRef, model_digest: str, engines: int, able: int, repeatable: bool) -> str:
    if repeatable and engines and not able:
        return (
            f"decode=repeatable needs an engine that decodes each request alone, and none of the {engines} for model "
            f"{model_digest[:12]} does: start one with TTTD_ENGINE_KIND=embedded, or leave decode out"
        )
    return (
        f"no engine has proved that it serves {policy.name}: {engines} engines are up for model {model_digest[:12]}; see "
        "`tttd status`, and start one with `tttd worker engine` if there is none"
    )
