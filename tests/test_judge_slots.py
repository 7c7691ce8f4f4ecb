"""How many programs run at once, and in which order."""

from __future__ import annotations

import asyncio

import pytest

from activities.judge.slots import Slots, default_slots, usable_cores, usable_memory_bytes

PLENTY = 1 << 40


@pytest.mark.parametrize(
    ("cores", "per_run", "slots"), [(1, 1, 1), (2, 1, 1), (3, 1, 2), (16, 1, 15), (16, 2, 7), (64, 2, 31), (2, 2, 1), (1.5, 1, 1)]
)
def test_one_core_stays_with_the_judge(cores: float, per_run: int, slots: int) -> None:
    assert default_slots(per_run, cores) == slots


def test_the_machine_is_measured() -> None:
    assert usable_cores() >= 1
    assert usable_memory_bytes() > 64 << 20
    assert Slots().cores == default_slots()


def test_no_core_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Slots(cores=0)


class Load:
    """Counts what runs at once."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.cores = 0
        self.most = 0
        self.order: list[str] = []

    async def run(self, name: str, cores: int, memory_bytes: int = 0) -> None:
        async with self.slots.take(cores, memory_bytes):
            self.cores += min(cores, self.slots.cores)
            self.most = max(self.most, self.cores)
            self.order.append(name)
            await asyncio.sleep(0.005)
            self.cores -= min(cores, self.slots.cores)


async def test_cores_are_never_promised_twice() -> None:
    load = Load(Slots(cores=4, memory_bytes=PLENTY))
    await asyncio.gather(*(load.run(str(k), cores=1 + k % 3) for k in range(20)))
    assert len(load.order) == 20
    assert load.most == 4


async def test_memory_is_never_promised_twice() -> None:
    load = Load(Slots(cores=8, memory_bytes=2200 << 20))
    await asyncio.gather(*(load.run(str(k), 1, memory_bytes=1000 << 20) for k in range(6)))
    assert load.most == 2


async def test_a_run_larger_than_everything_runs_alone() -> None:
    load = Load(Slots(cores=2, memory_bytes=1 << 20))
    await asyncio.wait_for(asyncio.gather(*(load.run(str(k), 64, PLENTY) for k in range(3))), 5)
    assert load.most == 2
    assert len(load.order) == 3


async def test_first_come_first_served_even_for_wide_runs() -> None:
    load = Load(Slots(cores=2, memory_bytes=PLENTY))
    await asyncio.gather(load.run("a", 1), load.run("wide", 2), load.run("b", 1), load.run("c", 1))
    assert load.order == ["a", "wide", "b", "c"]


async def test_a_cancelled_wait_gives_its_place_up() -> None:
    slots = Slots(cores=1, memory_bytes=PLENTY)
    load = Load(slots)
    async with slots.take(1, 0):
        waiting = asyncio.create_task(load.run("cancelled", 1))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await asyncio.wait_for(load.run("next", 1), 5)
    assert load.order == ["next"]


async def test_a_wait_cancelled_in_the_moment_of_its_turn_leaks_nothing() -> None:
    slots = Slots(cores=1, memory_bytes=PLENTY)
    load = Load(slots)
    async with slots.take(1, 0):
        waiting = asyncio.create_task(load.run("cancelled", 1))
        await asyncio.sleep(0)
    waiting.cancel()  # its turn is set, but it has not woken up yet
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(load.run("next", 1), 5)
    assert load.order == ["next"]
