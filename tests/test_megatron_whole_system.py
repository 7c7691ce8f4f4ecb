"""A real run with the Megatron trainer, as separate processes: the settings choose it, a killed train worker does not hurt it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.records import StepReport
from activities.run_store import RunStore
from tests.system import SHORT_TIMEOUTS, System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUEST = {"task": "circle_packing_26", "profile": "repeatable", "seed": 7, "timeouts": SHORT_TIMEOUTS, "search": {"steps": 2}}
RANKS = 2


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("system") / "home", TTTD_TRAINER_KIND="megatron", TTTD_TRAIN_TENSOR_PARALLEL=str(RANKS))
    system.start_all()
    yield system
    system.stop()


def children(pid: int) -> list[int]:
    """Processes started by a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


async def test_two_steps_with_the_train_worker_killed_in_the_first(system: System) -> None:
    ranks: list[int] = []

    def disturb() -> None:
        system.wait_for("the batch of step 1", lambda: system.has("killed", 1, "batch"))
        system.wait_for("rank processes", lambda: len(children(system.pid("train"))) == RANKS)
        ranks.extend(children(system.pid("train")))
        system.kill("train")
        assert not system.has("killed", 1, "train"), "killed too late to prove anything"
        system.wait_for("the ranks' end", lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 20)
        system.start("train")

    result = await system.run("killed", REQUEST, disturb)
    assert (result.state, result.step) == ("completed", 2)
    assert [commit.step for commit in system.chain("killed")] == [0, 1, 2]
    store = RunStore(system.blobs, "killed")
    for step in (1, 2):  # the engine serves what the ranks have trained
        report = store.read(StepReport, f"runs/killed/steps/{step:06d}/report")
        assert report is not None
        assert report.publish[0].passed
    after = children(system.pid("train"))
    assert len(after) == RANKS

    # One seed, one chain: what was killed leaves no trace. And the base stays loaded from run to run.
    again = await system.run("undisturbed", REQUEST)
    assert again.commit == result.commit
    assert children(system.pid("train")) == after
