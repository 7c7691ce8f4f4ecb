"""The engine worker: keeps one engine process running, gives a restarted one its adapters back, and says what is proved.

Desired state lies in the object store (`fleet/published/<engine>`), so it survives this worker too. After every boot each adapter
is loaded and proved again by the gate before samplers may see it. Knows nothing of steps or archives.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import structlog

from activities.blobs import Blobs, MissingKey
from activities.errors import TttdError
from activities.fleet import withdraw_notice, write_notice
from activities.models import find_model, model_digest
from activities.records import Document, EngineNotice, canonical_json
from workers.engine.process import EngineProcess, embedded_command, free_port, start_engine
from workers.settings import Settings
from workflows.contracts.messages import PublishRequest

log: structlog.stdlib.BoundLogger = structlog.get_logger()

NOTICE_SECONDS = 3.0
RUNS_REMEMBERED = 4
"""Published versions given back after a restart: those of the last runs."""


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

    @property
    def engine_id(self) -> str:
        return self._settings.engine_id

    @property
    def current(self) -> EngineProcess | None:
        """The engine process that answers now; None while one is starting."""
        return self._engine

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
                log.warning("engine_down", engine=self.engine_id, reason=reason)
                pause = 0.5 if time.monotonic() - began > 60 else min(30.0, pause * 2)
                await asyncio.sleep(pause)
        finally:
            await asyncio.to_thread(withdraw_notice, self._blobs, self.engine_id)

    async def _one_boot(self) -> str:
        port = self._settings.engine_port or free_port(self._settings.engine_host)
        url = f"http://{self._settings.engine_host}:{port}"
        engine = start_engine(embedded_command(self._settings, self._model, port), url, self._settings.logs / "engine-process.log")
        try:
            await engine.ready()
            self._engine, self._verified = engine, {}
            log.info("engine_ready", engine=self.engine_id, url=url, boot=engine.boot_id)
            background = [asyncio.create_task(self._announce()), asyncio.create_task(self._reconcile(engine))]
            try:
                return await engine.ended()
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
        finally:
            self._engine, self._verified = None, {}
            await asyncio.to_thread(withdraw_notice, self._blobs, self.engine_id)
            await asyncio.to_thread(engine.stop)

    async def _announce(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.write_notice)
            except Exception:  # a store that is away for a moment must not silence this engine for good
                log.exception("notice_not_written")
            await asyncio.sleep(NOTICE_SECONDS)

    def write_notice(self) -> None:
        """Tell samplers where the engine is and what it has proved."""
        engine = self._engine
        if engine is None:
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

    async def _reconcile(self, engine: EngineProcess) -> None:
        """Give a fresh boot the adapters that runs need, each proved first. A failed one waits for its run's next publish."""
        from activities.publish.publishing import publish

        for request in (await asyncio.to_thread(self._published)).requests:
            try:
                await asyncio.to_thread(publish, self._blobs, self, request)
                log.info("adapter_restored", policy=request.policy.name, boot=engine.boot_id)
            except TttdError as error:
                log.warning("adapter_not_restored", policy=request.policy.name, error=str(error))
            except Exception:
                log.exception("adapter_restore_crashed", policy=request.policy.name)


async def keep_running(host: EngineHost, stop: asyncio.Event) -> None:
    """Run the host until `stop` is set; the engine is ended with it."""
    task = asyncio.create_task(host.run())
    waiter = asyncio.create_task(stop.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    waiter.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
