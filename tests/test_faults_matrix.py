"""The kill matrix: every part of the whole system at every point of its work, and zombies of trainer and judge. Prints a table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.cases import CASES, by_run
from tests.faults.checks import Reference
from tests.faults.matrix import Result, run_cases, run_undisturbed, table
from tests.faults.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUNS = by_run(CASES)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One system for all cases; each finds every part of it up."""
    world = World(tmp_path_factory.mktemp("faults"))
    try:
        world.start_all()
        yield world
    finally:
        world.stop()


@pytest.fixture(scope="module")
async def reference(world: World) -> Reference:
    return await run_undisturbed(world)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[list[Result]]:
    """What came of the cases; printed at the end, past pytest's capture, whether they passed or not."""
    found: list[Result] = []
    yield found
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{table(found)}")


@pytest.mark.parametrize("run", RUNS)
async def test_faults_change_nothing(world: World, reference: Reference, results: list[Result], run: str) -> None:
    found = await run_cases(world, RUNS[run], reference)
    results += found
    problems = [f"{result.case.name}: {problem}" for result in found for problem in result.problems]
    assert not problems, "\n".join(problems)
