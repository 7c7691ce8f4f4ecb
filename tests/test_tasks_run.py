"""A whole small run of a problem that begins from constructions, in separate processes: G roots, each with a value of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from activities.records import ArchiveState, RolloutRecord, StepPlan, Verdict
from activities.run_store import RunStore, seed_at
from activities.sample.tokens import PromptCodec
from tasks.registry import load_task
from tests.system import SHORT_TIMEOUTS, System
from tests.test_tasks_starts import without_environment
from workflows.contracts.base import Coordinate, Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GROUPS = 3
REQUEST = {
    "task": "erdos_min_overlap",
    "profile": "repeatable",
    "seed": 11,
    "timeouts": SHORT_TIMEOUTS,
    "search": {"steps": 1, "groups": GROUPS, "rollouts": 3},
    # The toy model's tokenizer knows packing: it takes this statement almost letter by letter.
    "sampling": {"context_tokens": 2048, "max_new_tokens": 128},
}
PROPOSER = Path(__file__).parent.parent / "tasks" / "proposers" / "packing"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("system")
    without_environment(load_task("erdos_min_overlap"), folder / "tasks")
    system = System(folder / "home", TTTD_TASK_DIRS=json.dumps([str(folder / "tasks")]))
    system.start_all()
    yield system
    system.stop()


async def test_a_run_of_erdos_opens_with_roots_that_differ_and_takes_a_step(system: System) -> None:
    result = await system.run("erdos", REQUEST)
    assert (result.state, result.step) == ("completed", 1)
    store = RunStore(system.blobs, "erdos")
    nodes = store.load(ArchiveState, system.chain("erdos")[0].archive).nodes
    assert len({node.construction for node in nodes}) == len({node.value for node in nodes}) == GROUPS
    for root, node in enumerate(nodes):
        verdict = store.read(Verdict, store.rollout_key(seed_at(root), "verdict"))
        assert verdict is not None
        assert verdict.outcome is Outcome.VALID
        assert (node.value, node.score, node.construction, node.code) == (verdict.value, verdict.score, verdict.construction, "")
        assert node.score is not None
        assert 0.45 < node.score < 0.56
        assert node.value == -node.score
        # The stored construction alone proves the value.
        assert node.construction is not None
        grade = load_task("erdos_min_overlap").make_judge().verify(json.loads(system.blobs.get(node.construction)))
        assert grade.exact == Fraction(verdict.exact or "")
    assert result.best_score is not None
    assert result.best_score <= min(node.score or 1.0 for node in nodes)

    # What the model was told: the root's value, and where its program finds the root's heights.
    plan = store.read(StepPlan, store.step_key(1, "plan"))
    rollout = store.read(RolloutRecord, store.rollout_key(Coordinate(step=1, group=0, rollout=0), "rollout"))
    assert plan is not None
    assert rollout is not None
    told = PromptCodec(PROPOSER).decode(rollout.prompt_tokens)
    assert f"Its C5: {plan.groups[0].parent.score:.8f}" in told
    assert "given to your program as the global `initial_h_values`" in told


async def test_another_run_of_the_same_seed_begins_from_the_same_roots(system: System) -> None:
    same = {**REQUEST, "search": {"steps": 0, "groups": GROUPS, "rollouts": 3}}
    other = {**same, "seed": 12}
    await system.run("again", same)
    await system.run("other", other)
    opened = {name: system.archive(name).nodes for name in ("again", "other")}
    first = RunStore(system.blobs, "erdos").load(ArchiveState, system.chain("erdos")[0].archive).nodes
    assert opened["again"] == first
    assert {n.construction for n in opened["other"]}.isdisjoint({n.construction for n in first})


async def test_best_of_a_run_without_a_program_is_its_best_root(system: System) -> None:
    """`tttd best` and `tttd polish` of a run whose best answer is a construction that it began from."""
    shown = system.tttd("best", "again", "--json")
    assert shown.returncode == 0, shown.stderr
    best = json.loads(shown.stdout)
    roots = [node.score for node in system.archive("again").nodes]
    assert best["score"] == min(score for score in roots if score is not None)
    assert (best["found_step"], best["program"]) == (0, "")
    assert Fraction(best["exact"]) <= Fraction(best["score"])
    polished = system.tttd("polish", "again", "--seconds", "15", "--json")
    assert polished.returncode == 0, polished.stderr
    report = json.loads(polished.stdout)
    assert report["improved"], report
    assert Fraction(report["before"]["exact"]) == Fraction(best["exact"])
    assert Fraction(report["after"]["exact"]) < Fraction(report["before"]["exact"])
