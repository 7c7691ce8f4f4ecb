"""Runs on two engines that are trouble: started as SGLang is, slow to start, killed, hung, robbed of their adapters. Each step
completes, and everything in it happens once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from activities.engine_http import EngineClient
from activities.fleet import read_notice
from activities.records import RolloutRecord, StepReport
from activities.run_store import RunStore
from tests.system import SHORT_TIMEOUTS, System, coordinates
from tests.unreliable import Orders

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GROUPS, ROLLOUTS = 2, 6
SEARCH = {"groups": GROUPS, "rollouts": ROLLOUTS, "steps": 1}
REQUEST = {"task": "circle_packing_26", "seed": 7, "timeouts": SHORT_TIMEOUTS, "search": SEARCH}
HUNG_SECONDS = 5


class TwoEngines(System):
    """A system with a second engine worker beside the first, both over stand-ins of SGLang."""

    def __init__(self, home: Path) -> None:
        self.orders = {name: Orders(home.parent / f"orders-{name}") for name in ("here", "there")}
        super().__init__(home, TTTD_ENGINE_KIND="sglang", TTTD_ENGINE_HUNG_SECONDS=str(HUNG_SECONDS))

    def start_all(self) -> None:
        self.start_temporal()
        self.start("control", "sample", "judge", "train")
        for engine in self.orders:
            self.start_engine(engine)

    def start_engine(self, engine: str) -> None:
        before = dict(self._environment)
        unreliable = self.orders[engine].settings()["engine_environment"]
        self._environment |= {"TTTD_ENGINE_ID": engine, "TTTD_ENGINE_ENVIRONMENT": json.dumps(unreliable)}
        self._spawn(f"engine-{engine}", [sys.executable, "-m", "console.main", "worker", "engine"])
        self._environment = before

    def engine_pid(self, engine: str) -> int:
        """Of the process that samples, not of the worker that keeps it."""
        return int(self.orders[engine].starts()[-1]["pid"])

    def engines_of(self, run: str) -> set[str]:
        """Engines that a run's rollouts came from."""
        store = RunStore(self.blobs, run)
        return {store.load(RolloutRecord, digest).engine for digest in self.entries(run, 1, "/rollout").values()}

    def sampled_by(self, run: str, engine: str) -> bool:
        return engine in self.engines_of(run)

    def wait_for_engines(self) -> None:
        for engine in self.orders:
            self.wait_for(f"engine {engine}", lambda engine=engine: read_notice(self.blobs, engine) is not None)  # type: ignore[misc]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoEngines]:
    system = TwoEngines(tmp_path_factory.mktemp("two-engines") / "home")
    system.orders["there"].give("slow", 3)
    system.start_all()
    system.wait_for_engines()
    yield system
    system.stop()


async def disturbed(system: TwoEngines, run: str, seed: int, disturb: Callable[[], None]) -> StepReport:
    """Run one step, disturb it once some rollouts are stored, and check that it is whole."""
    stored: dict[str, str] = {}
    seen = 0

    def in_the_middle() -> None:
        nonlocal seen
        system.wait_for("the middle of sampling", lambda: len(system.entries(run, 1, "/rollout")) >= 2)
        disturb()
        stored.update(system.entries(run, 1, "/rollout") | system.entries(run, 1, "/verdict"))
        seen = len(system.events("sample", "rollout_sampled"))
        assert not system.has(run, 1, "commit"), "disturbed too late to prove anything"

    result = await system.run(run, {**REQUEST, "seed": seed}, in_the_middle)
    assert (result.state, result.step) == ("completed", 1)
    rows = system.chain(run)[1].rows
    assert sorted((row.group, row.rollout) for row in rows) == [(g, r) for g in range(GROUPS) for r in range(ROLLOUTS)]
    # What was recorded stays as it was, and nobody paid for it twice.
    after = system.entries(run, 1, "/rollout") | system.entries(run, 1, "/verdict")
    assert stored.items() <= after.items()
    redone = coordinates(system.events("sample", "rollout_sampled")[seen:], run)
    assert not {f"runs/{run}/steps/{s:06d}/g{g:02d}/r{r:02d}/rollout" for s, g, r in redone} & stored.keys()
    report = RunStore(system.blobs, run).read(StepReport, f"runs/{run}/steps/000001/report")
    assert report is not None
    assert all(published.passed for published in report.publish)
    return report


async def test_both_engines_sample_and_are_published_to(system: TwoEngines) -> None:
    result = await system.run("undisturbed", {**REQUEST, "seed": 1})
    assert result.state == "completed"
    assert system.engines_of("undisturbed") == {"here", "there"}
    report = RunStore(system.blobs, "undisturbed").read(StepReport, "runs/undisturbed/steps/000001/report")
    assert report is not None
    assert {published.engine for published in report.publish} == {"here", "there"}
    for engine in ("here", "there"):
        (start,) = system.orders[engine].starts()
        assert "--enable-lora" in start["argv"]


async def test_an_engine_killed_in_the_middle(system: TwoEngines) -> None:
    starts = len(system.orders["here"].starts())
    await disturbed(system, "killed", 2, lambda: os.kill(system.engine_pid("here"), signal.SIGKILL))
    system.wait_for("it came back", lambda: len(system.orders["here"].starts()) > starts)


async def test_an_engine_that_hangs_in_the_middle(system: TwoEngines) -> None:
    """It holds its requests until it is found out; then they are sampled elsewhere, and it is started again."""
    starts = len(system.orders["there"].starts())
    began = time.monotonic()
    await disturbed(system, "hung", 3, lambda: os.kill(system.engine_pid("there"), signal.SIGSTOP))
    assert time.monotonic() - began < 300
    system.wait_for("it was started again", lambda: len(system.orders["there"].starts()) > starts)


async def test_an_engine_worker_killed_in_the_middle(system: TwoEngines) -> None:
    """Its engine dies with it; the other one does the rest, and the worker's successor starts an engine of its own."""

    def kill() -> None:
        system.kill("engine-here")
        system.start_engine("here")

    starts = len(system.orders["here"].starts())
    await disturbed(system, "worker-killed", 4, kill)
    system.wait_for("it came back", lambda: len(system.orders["here"].starts()) > starts)


async def test_engines_that_lose_their_adapters_in_the_middle(system: TwoEngines) -> None:
    system.wait_for_engines()

    def rob() -> None:
        for engine in system.orders:
            notice = read_notice(system.blobs, engine)
            if notice is None:
                continue
            client = EngineClient(notice.url)
            for name in client.loaded_adapters():
                client.unload_adapter(name)
            client.close()

    boots = {engine: len(orders.starts()) for engine, orders in system.orders.items()}
    await disturbed(system, "robbed", 5, rob)

    def noticed() -> bool:
        return any(system.events(f"engine-{engine}", "adapters_lost") for engine in system.orders)

    # Their workers look every few seconds; the run itself may have ended in between, on what was loaded meanwhile.
    system.wait_for("a worker noticed", noticed)
    assert boots == {engine: len(orders.starts()) for engine, orders in system.orders.items()}, "for that none is restarted"
