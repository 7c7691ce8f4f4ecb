"""Fifteen kills at random over three steps: the chain is that of an undisturbed run. Prints every fault.

`python -m tests.faults chaos --kills 30 --steps 6` does the same for longer (docs/faults.md).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from tests.faults.chaos import CHAOS, Chaos, run_calm, run_chaos, verdict
from tests.faults.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS, STEPS = 15, 3
SEED = 394
"""Of a sequence in which every part is killed twice at least, and engine and trainer are frozen too."""


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("chaos"))
    try:
        world.start_all()
        yield world
    finally:
        world.stop()


async def test_whatever_is_killed_the_chain_is_the_same(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    reference = await run_calm(world, STEPS)

    def say(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    say("")
    chaos = Chaos(world, CHAOS, KILLS, STEPS, random.Random(SEED), say)
    began = time.monotonic()
    problems = await run_chaos(world, chaos, reference)
    say(verdict(chaos, problems, time.monotonic() - began))
    assert not problems, "\n".join(problems)
    assert chaos.killed >= KILLS
