"""A problem outside the repository: only whoever starts the run has its folder; every room takes it from the bundle."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.blobs import Blobs
from activities.judge.activity import JudgeActivities
from activities.judge.sandbox import Isolation, Limits, Outcome, Program, Sandbox, Status
from activities.judge.slots import Slots
from activities.records import Verdict
from activities.run_store import SEED, RunStore
from console.launch import ask, launch
from console.stored import best_answer
from console.task_new import new_task
from tasks.bundles import BundleCache, pack
from tasks.registry import TaskSource
from tests.chain import Chain, spread
from tests.system import ROLES, SHORT_TIMEOUTS, System
from workers.connect import connect_temporal
from workflows.contracts.base import Outcome as Ended
from workflows.contracts.messages import JudgeSeedRequest, OpenRequest, RunResult


def test_a_control_host_stores_the_folder_that_only_it_has(blobs: Blobs, tmp_path: Path) -> None:
    """As `temporal workflow start` asks for it: the request names no bundle."""
    chain = Chain.fresh(blobs, tmp_path)
    folder = chain.tasks_directory / "sizes"
    before = pack(folder)
    run = chain.prepare().run
    spec = chain.store.spec(run)
    assert spec.bundle is not None
    assert blobs.get(spec.bundle) == before
    shutil.rmtree(folder)
    (chain.tasks_directory / "sizes").mkdir()  # what is left in a checkout that moved on
    elsewhere = replace(chain, tasks_directory=tmp_path / "another-host" / "tasks")
    head = ActivityEnvironment().run(elsewhere._open_activities().open_run, OpenRequest(run=run)).head
    _, committed = elsewhere.step(run, head, spread)
    assert committed.head.step == 1


def test_the_bundle_is_what_counts_and_not_what_the_folder_became(blobs: Blobs, tmp_path: Path) -> None:
    chain = Chain.fresh(blobs, tmp_path)
    run, opened = chain.open()
    file = chain.tasks_directory / "sizes" / "task.toml"
    file.write_text(file.read_text().replace('direction = "maximize"', 'direction = "minimize"'))
    _, committed = chain.step(run, opened.head, spread)
    scores = [node.score for node in chain.archive(committed.head).nodes if node.score is not None]
    assert committed.head.best == max(scores)


class Answering(Sandbox):
    """Answers every program with the same text, so that a test of bundles needs no sandbox."""

    isolation = Isolation(backend="none", landlock_abi=0, uids="own", policy_hash="0" * 16)

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.programs: list[Program] = []

    async def run(self, program: Program, limits: Limits) -> Outcome:
        self.programs.append(program)
        return Outcome(Status.OK, "", self.text, 0, None, 0.1, 0.1, 0.0, 1, "", "", 0, 0, isolation=self.isolation)

    async def close(self) -> None: ...

    def close_blocking(self) -> None: ...


async def test_a_judge_of_another_host_judges_with_the_users_own_code(blobs: Blobs, tmp_path: Path) -> None:
    folder = new_task("mine", tmp_path / "here").folder
    (folder / "environment" / "requirements.txt").unlink()
    (folder / "tests" / "judge.py").write_text("def score(result):\n    return 42.5\n")
    chain = Chain.fresh(blobs, tmp_path / "chain")
    here = replace(chain, tasks_directory=tmp_path / "here", request={**chain.request, "task": "mine"})
    run = here.prepare().run
    shutil.rmtree(folder)
    sandbox = Answering(b"[1, 2]")
    tasks = TaskSource([], BundleCache(tmp_path / "there" / "bundles", blobs.get))
    room = JudgeActivities(blobs, tasks, sandbox, Slots(cores=1))
    judged = await ActivityEnvironment().run(room.judge_seed, JudgeSeedRequest(run=run))
    assert (judged.outcome, judged.score) == (Ended.VALID, 42.5)
    assert "run_packing" in sandbox.programs[0].source
    store = RunStore(blobs, here.run_id)
    verdict = store.read(Verdict, store.rollout_key(SEED, "verdict"))
    assert verdict is not None
    assert verdict.exact == "85/2"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_workers_without_the_folder_search_on_it(tmp_path: Path) -> None:
    """The whole system: five processes that were never told where the problem lies, and a folder that is gone when they need it."""
    folder = new_task("far_away", tmp_path / "mine").folder
    system = System(tmp_path / "home")
    try:
        system.start_temporal()
        system.start(*ROLES)
        settings = system.settings.model_copy(update={"task_dirs": (tmp_path / "mine",)})
        search = {"groups": 1, "rollouts": 4, "steps": 1}
        raw = {"task": "far_away", "profile": "repeatable", "name": "far", "search": search, "timeouts": SHORT_TIMEOUTS}
        client = await connect_temporal(settings)
        launched = await launch(client, system.blobs, ask(raw, settings))
        assert launched.how == "started"
        shutil.rmtree(folder)
        result = await client.get_workflow_handle("run/far", result_type=RunResult).result()
        assert (result.state, result.step) == ("completed", 1)
        (_, last) = system.chain("far")
        assert len(last.rows) == 4
        answer = best_answer(system.blobs, "far", TaskSource([], BundleCache(tmp_path / "shown", system.blobs.get)))
        assert answer.score_name == "sum of radii"
        assert answer.score >= 1.7914
        shown = system.tttd("best", "far", "--json")
        assert json.loads(shown.stdout)["best_known"] == answer.best_known == 2.6359830849176076
    finally:
        system.stop()
