"""The engine worker: keeps one engine process running, gives a restarted one its adapters back, and says what is proved.

Desired state lies in the object store (`fleet/published/<engine>`), so it survives this worker too. After every boot each adapter
is loaded and proved again by the gate before samplers may see it, and so is one that a running engine has lost. Knows nothing of
steps or archives, and nothing of how an engine is started (``launch.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from activities.blobs import Blobs, MissingKey
from activities.engine_http import AsyncEngineClient
from activities.errors import EngineError, TttdError
from activities.fleet import withdraw_notice, write_notice
from activities.models import find_model, model_digest
from activities.records import Document, EngineNotice, canonical_json
from workers.engine.launch import RUNS_REMEMBERED, engine_launch
from workers.engine.orphans import end_orphans
from workers.engine.process import EngineProcess, launch_engine
from workers.ports import free_port
from workers.settings import Settings
from workflows.contracts.messages import PublishRequest

log: structlog.stdlib.BoundLogger = structlog.get_logger()

NOTICE_SECONDS = 3.0
SILENT_SECONDS = 45.0
"""More than SGLang's own /health may take; a notice that is not renewed goes stale, and samplers look for another engine."""
LOST_SECONDS = 10.0
"""Between two looks at what the engine lists: one that lost an adapter would refuse every rollout, or let in a stranger's."""
STEADY_SECONDS = 60.0
"""An engine that lived so long is started again at once; one that keeps falling over is given growing pauses."""
LONGEST_PAUSE_SECONDS = 30.0
LONGEST_RESTORE_PAUSE_SECONDS = 300.0
"""A gate that refuses costs the engine thousands of tokens each time."""


class PublishedRuns(Document):
    """What an engine must serve: the last publish of each run, newest last."""

    requests: tuple[PublishRequest, ...] = ()

    def with_request(self, request: PublishRequest) -> PublishedRuns:
        others = [r for r in self.requests if r.run.run_id != request.run.run_id]
        return PublishedRuns(requests=(*others, request)[-RUNS_REMEMBERED:])


class EngineHost:
    """One engine and all that this host knows about it.

    Also the "engine access" of the publish room: address, boot id, a directory for adapters, and the place to report proofs.
    """

    def __init__(self, settings: Settings, blobs: Blobs) -> None:
        self._settings = settings
        self._blobs = blobs
        self._model = find_model(settings.engine_model, settings.model_directories)
        self._model_digest = model_digest(self._model)
        self._engine: EngineProcess | None = None
        self._verified: dict[str, int] = {}
        self._published_key = f"fleet/published/{settings.engine_id}"
        self.adapter_directory: Path = settings.home.resolve() / "adapters" / settings.engine_id
        self._pidfile = settings.home.resolve() / "engines" / f"{settings.engine_id}.pid"
        self._log_file = settings.logs.resolve() / f"engine-process-{settings.engine_id}.log"

    @property
    def engine_id(self) -> str:
        return self._settings.engine_id

    @property
    def current(self) -> EngineProcess | None:
        """The engine process that answers now; None while one is starting."""
        return self._engine

    @property
    def verified_count(self) -> int:
        """Adapters that were proved in this boot."""
        return len(self._verified)

    # Keeping it running ---------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Start, serve, and start again, until cancelled."""
        pause = 0.5
        try:
            while True:
                began = time.monotonic()
                try:
                    reason = await self._one_boot()
                except (RuntimeError, OSError) as error:
                    reason = str(error)
                pause = 0.5 if time.monotonic() - began > STEADY_SECONDS else min(LONGEST_PAUSE_SECONDS, pause * 2)
                log.warning("engine_down", engine=self.engine_id, reason=reason, again_in_seconds=pause)
                await asyncio.sleep(pause)
        finally:
            await self._withdraw_notice()

    async def _one_boot(self) -> str:
        await asyncio.to_thread(end_orphans, self._pidfile)
        port = self._settings.engine_port or free_port(self._settings.engine_host)
        launch = engine_launch(self._settings, self._model, port)
        began = time.monotonic()
        engine = launch_engine(launch, self._log_file, self._pidfile)
        try:
            await engine.ready()
            self._engine, self._verified = engine, {}
            seconds = round(time.monotonic() - began, 2)
            log.info("engine_ready", engine=self.engine_id, url=engine.url, boot=engine.boot_id, seconds=seconds)
            background = [asyncio.create_task(self._announce()), asyncio.create_task(self._keep_adapters(engine))]
            try:
                return await engine.ended()
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
        finally:
            self._engine, self._verified = None, {}
            await self._withdraw_notice()
            await asyncio.to_thread(engine.stop)

    async def _withdraw_notice(self) -> None:
        """Tell samplers that the engine is gone. Where the store is away too, the notice goes stale by itself, and that must keep
        neither what hangs from being killed nor the next engine from being started."""
        try:
            await asyncio.to_thread(withdraw_notice, self._blobs, self.engine_id)
        except Exception:
            log.exception("notice_not_withdrawn")

    async def _announce(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.write_notice)
            except Exception:  # a store that is away for a moment must not silence this engine for good
                log.exception("notice_not_written")
            await asyncio.sleep(NOTICE_SECONDS)

    def write_notice(self) -> None:
        """Tell samplers where the engine is and what it has proved; say nothing of one that has fallen silent."""
        engine = self._engine
        if engine is None or time.monotonic() - engine.heard > SILENT_SECONDS:
            return
        write_notice(
            self._blobs,
            EngineNotice(
                engine=self.engine_id,
                url=engine.url,
                boot_id=engine.boot_id,
                model_digest=self._model_digest,
                verified=dict(self._verified),
                updated=time.time(),
                repeatable=self._settings.engine_kind == "embedded",
            ),
        )

    # What it serves -------------------------------------------------------------------------------------------------------
    def on_verified(self, request: PublishRequest, boot_id: str, served: dict[str, int]) -> None:
        """The gate passed: remember it for the next boot, and let samplers come.

        Args:
            served: policy name -> version of every adapter of this run that the engine now serves with proof.
        """
        remembered = self._published().with_request(request)
        self._blobs.store.put(self._published_key, canonical_json(remembered))
        engine = self._engine
        if engine is not None and engine.boot_id == boot_id:
            self._verified |= served
            self.write_notice()

    def on_unloaded(self, names: tuple[str, ...]) -> None:
        """Adapters were unloaded: samplers must not ask for them here any more."""
        for name in names:
            self._verified.pop(name, None)
        self.write_notice()

    def _published(self) -> PublishedRuns:
        try:
            return PublishedRuns.model_validate_json(self._blobs.store.get(self._published_key))
        except MissingKey:
            return PublishedRuns()

    async def _keep_adapters(self, engine: EngineProcess) -> None:
        """Give a fresh boot the adapters that runs need, and a running one those that it has lost or refused."""
        later: dict[str, _Later] = {}
        client = AsyncEngineClient(engine.url)
        try:
            while True:
                try:
                    await self._restore_missing(engine, later)
                except Exception:  # a store that is away for a moment must not end this for good
                    log.exception("published_versions_unknown")
                await asyncio.sleep(LOST_SECONDS)
                await self._drop_lost(engine, client)
        finally:
            await client.close()

    async def _restore_missing(self, engine: EngineProcess, later: dict[str, _Later]) -> None:
        for request in (await asyncio.to_thread(self._published)).requests:
            name = request.policy.name
            if name in self._verified:
                later.pop(name, None)
            elif later.setdefault(name, _Later()).is_due():
                await self._restore(engine, request)

    async def _drop_lost(self, engine: EngineProcess, client: AsyncEngineClient) -> None:
        """Stop samplers from asking for adapters that the engine does not list any more."""
        before = set(self._verified)  # one that is published while the engine answers is not in its answer
        try:
            listed = await client.loaded_adapters()
        except EngineError:
            return  # whether it is well is somebody else's question
        if lost := before & self._verified.keys() - listed.keys():
            log.warning("adapters_lost", engine=self.engine_id, boot=engine.boot_id, names=sorted(lost))
            await asyncio.to_thread(self.on_unloaded, tuple(lost))

    async def _restore(self, engine: EngineProcess, request: PublishRequest) -> None:
        """Load and prove what was published; what fails is tried again later, or by its run's next publish."""
        from activities.publish.publishing import publish

        try:
            await asyncio.to_thread(publish, self._blobs, self, request)
            log.info("adapter_restored", policy=request.policy.name, boot=engine.boot_id)
        except TttdError as error:
            log.warning("adapter_not_restored", policy=request.policy.name, error=str(error))
        except Exception:
            log.exception("adapter_restore_crashed", policy=request.policy.name)


@dataclass
class _Later:
    """When something that failed is worth another attempt: after pauses that double."""

    _pause: float = LOST_SECONDS
    _next: float = 0.0

    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next, self._pause = now + self._pause, min(LONGEST_RESTORE_PAUSE_SECONDS, 2 * self._pause)
        return True


async def keep_running(host: EngineHost, stop: asyncio.Event) -> None:
    """Run the host until `stop` is set; the engine is ended with it."""
    task = asyncio.create_task(host.run())
    waiter = asyncio.create_task(stop.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    waiter.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
