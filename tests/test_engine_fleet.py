"""Which engine a rollout goes to: verified, least loaded, not one that has just failed; and what is done when one goes away."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest

from activities.blobs import Blobs, digest_of
from activities.errors import EngineError, NotReady
from activities.fleet import STALE_SECONDS, withdraw_notice, write_notice
from activities.records import EngineNotice
from activities.sample import pool as pool_module
from activities.sample.pool import EnginePool
from workflows.contracts.base import PolicyRef

MODEL = digest_of(b"model")
POLICY = PolicyRef(version=1, name="00000000-v0001-000000000001", checkpoint=digest_of(b"c"), adapter=digest_of(b"a"))


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Fleet:
    """Notices of engines, and a pool that reads them."""

    blobs: Blobs
    clock: Clock = field(default_factory=Clock)
    pool: EnginePool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = EnginePool(self.blobs, self.clock)

    def announce(self, engine: str, *, boot: str = "one", verified: bool = True, repeatable: bool = False) -> EngineNotice:
        notice = EngineNotice(
            engine=engine,
            url=f"http://{engine}",
            boot_id=boot,
            model_digest=MODEL,
            verified={POLICY.name: 1} if verified else {},
            updated=self.clock.now,
            repeatable=repeatable,
        )
        write_notice(self.blobs, notice)
        self.clock.now += 1  # past the age up to which a listing is shared
        return notice

    async def acquire(self, count: int = 1, **options: bool) -> list[EngineNotice]:
        return [await self.pool.acquire(MODEL, POLICY, **options) for _ in range(count)]


@pytest.fixture
def fleet(blobs: Blobs) -> Fleet:
    return Fleet(blobs)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WATCH_SECONDS", 0.02)


def engines(notices: list[EngineNotice]) -> Counter[str]:
    return Counter(notice.engine for notice in notices)


async def test_rollouts_are_spread_evenly_and_follow_what_ends(fleet: Fleet) -> None:
    for name in ("a", "b", "c"):
        fleet.announce(name)
    taken = await fleet.acquire(30)
    assert engines(taken) == {"a": 10, "b": 10, "c": 10}
    # A fast engine finishes and is given more, until all have the same number.
    for notice in [n for n in taken if n.engine == "b"]:
        fleet.pool.release(notice)
    assert engines(await fleet.acquire(6)) == {"b": 6}
    assert [fleet.pool.running(name) for name in ("a", "b", "c")] == [10, 6, 10]


async def test_only_verified_engines_are_asked(fleet: Fleet) -> None:
    fleet.announce("proved")
    fleet.announce("starting", verified=False)
    assert engines(await fleet.acquire(4)) == {"proved": 4}


async def test_a_repeatable_run_waits_for_an_engine_that_can(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WAIT_SECONDS", 0.0)
    fleet.announce("sglang")
    with pytest.raises(NotReady, match=r"decode=repeatable.*none of the 1.*TTTD_ENGINE_KIND=embedded"):
        await asyncio.gather(fleet.acquire(repeatable=True), advance(fleet.clock))
    fleet.announce("embedded", repeatable=True)
    assert engines(await fleet.acquire(3, repeatable=True)) == {"embedded": 3}


async def advance(clock: Clock) -> None:
    await asyncio.sleep(0.05)
    clock.now += 1


async def fail() -> None:
    raise EngineError("it is gone")


async def test_an_engine_that_fails_is_left_alone_for_a_while(fleet: Fleet) -> None:
    """A dead engine has the fewest requests of all, since every one ends at once."""
    dead, alive = fleet.announce("dead"), fleet.announce("alive")
    with pytest.raises(EngineError):
        await fleet.pool.ask(dead, fail())
    assert engines(await fleet.acquire(5)) == {"alive": 5}
    fleet.clock.now += pool_module.SHUNNED_SECONDS + 1
    fleet.announce("alive"), fleet.announce("dead")
    assert engines(await fleet.acquire(5)) == {"dead": 5}
    assert alive.engine == "alive"


async def test_a_failed_engine_is_asked_all_the_same_if_there_is_no_other(fleet: Fleet) -> None:
    only = fleet.announce("only")
    with pytest.raises(EngineError):
        await fleet.pool.ask(only, fail())
    assert engines(await fleet.acquire(2)) == {"only": 2}


async def answer(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "answer"


async def test_an_answer_is_waited_for_while_its_engine_is_there(fleet: Fleet) -> None:
    notice = fleet.announce("a")
    assert await fleet.pool.ask(notice, answer(0.2)) == "answer"


@pytest.mark.parametrize("how", ["withdrawn", "restarted", "silent"])
async def test_nobody_waits_for_an_engine_that_went_away(fleet: Fleet, how: str) -> None:
    """A host that vanishes closes no connection: without this, the request would hang until its attempt's time is up."""
    notice = fleet.announce("a")

    async def go_away() -> None:
        await asyncio.sleep(0.05)
        if how == "withdrawn":
            withdraw_notice(fleet.blobs, "a")
        elif how == "restarted":
            fleet.announce("a", boot="two")
        else:
            fleet.clock.now += STALE_SECONDS + 1
        for _ in range(100):  # notices are looked at again as time passes
            await asyncio.sleep(0.01)
            fleet.clock.now += 0.05

    with pytest.raises(NotReady, match="engine a went away"):
        await asyncio.wait_for(asyncio.gather(fleet.pool.ask(notice, answer(60)), go_away()), 20)


async def test_a_store_that_is_away_ends_no_request(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    notice = fleet.announce("a")

    def broken(*_: object) -> None:
        raise ConnectionError("no store")

    monkeypatch.setattr(pool_module, "read_notice", broken)
    assert await fleet.pool.ask(notice, answer(0.3)) == "answer"


async def test_many_rollouts_share_one_look_at_the_fleet(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.announce("a")
    looks = 0
    listing = pool_module.live_engines

    def counted(*arguments: object) -> list[EngineNotice]:
        nonlocal looks
        looks += 1
        return listing(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pool_module, "live_engines", counted)
    await asyncio.gather(*(fleet.pool.acquire(MODEL, POLICY) for _ in range(64)))
    assert looks == 1
