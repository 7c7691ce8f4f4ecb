"""An engine that dies while the object store is away: its worker ends what is left of it and starts another, store or no store."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from activities.blobs import Blobs, LocalStore
from activities.fleet import read_notice
from activities.train.fake import make_model
from tests.unreliable import Orders
from workers.engine import host as host_module
from workers.engine.host import EngineHost, keep_running
from workers.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Outage(LocalStore):
    """A store that answers as S3's client does when nobody listens."""

    away = False

    def get(self, key: str) -> bytes:
        self._answer()
        return super().get(key)

    def put(self, key: str, data: bytes) -> None:
        self._answer()
        super().put(key, data)

    def delete(self, key: str) -> None:
        self._answer()
        super().delete(key)

    def _answer(self) -> None:
        if self.away:
            raise EndpointConnectionError(endpoint_url="http://127.0.0.1:9")


async def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 90
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
async def test_the_loss_of_an_engine_is_survived_without_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(host_module, "NOTICE_SECONDS", 0.2)
    store, orders = Outage(tmp_path / "store"), Orders(tmp_path / "orders")
    model = make_model(tmp_path / "tiny")
    chosen = {"home": tmp_path / "home", "engine_id": "box", "engine_model": str(model), "engine_hung_seconds": 2}
    host = EngineHost(Settings.model_validate(chosen | orders.settings()), Blobs(store))
    stop = asyncio.Event()
    task = asyncio.create_task(keep_running(host, stop))
    try:
        await until(lambda: host.current or task.done(), "the engine came up")
        first = orders.starts()[0]["pid"]
        store.away = True
        os.kill(first, how)
        await until(lambda: len(orders.starts()) > 1 or task.done(), "another one was started")
        assert not task.done(), task.exception()
        assert not Path(f"/proc/{first}").exists(), "what hung is gone: on a GPU, two would not fit"
        await until(lambda: host.current, "the other one answers")
        store.away = False
        await until(lambda: read_notice(Blobs(store), "box"), "it is announced once the store is back")
    finally:
        stop.set()
        await task
    assert read_notice(Blobs(store), "box") is None


async def test_a_worker_that_is_told_to_stop_ends_its_engine_without_a_store(tmp_path: Path) -> None:
    store, orders = Outage(tmp_path / "store"), Orders(tmp_path / "orders")
    chosen = {"home": tmp_path / "home", "engine_id": "box", "engine_model": str(make_model(tmp_path / "tiny"))}
    host = EngineHost(Settings.model_validate(chosen | orders.settings()), Blobs(store))
    stop = asyncio.Event()
    task = asyncio.create_task(keep_running(host, stop))
    await until(lambda: host.current or task.done(), "the engine came up")
    store.away = True
    stop.set()
    await task
    assert not Path(f"/proc/{orders.starts()[0]['pid']}").exists()
