"""The `judge` activity without a server: one verdict per coordinate, whatever is retried, cancelled or raced."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.blobs import Blobs
from activities.errors import JudgeError
from activities.judge.activity import JudgeActivities
from activities.judge.judging import Case, judge, limits_of_task, reward_of
from activities.judge.sandbox import Limits, Outcome, Program, Sandbox, Status, open_sandbox
from activities.judge.slots import Slots
from activities.records import Node, ParentPick, PlannedGroup, RolloutRecord, RunSpec, StepPlan, Verdict
from activities.run_store import RunStore
from scripts.scale.counting import CountingStore
from tasks.registry import TaskSource, judge_digest, load_task
from workflows.contracts.base import Coordinate, RunRef
from workflows.contracts.base import Outcome as Result
from workflows.contracts.messages import JudgeRequest, JudgeSeedRequest
from workflows.contracts.request import parse_request

TASK = load_task("circle_packing_26")
AT = Coordinate(step=1, group=0, rollout=3)
ANY_DIGEST = "0" * 64

GOOD = "def run_packing():\n    c = [(0.1 + 0.2 * i, 0.1 + 0.2 * j) for i in range(5) for j in range(5)]\n"
GOOD += "    return c + [(0.2, 0.2)], [0.1] * 25 + [0.04], 0"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as opened:
        yield opened


class Run:
    """A stored run with one planned group, into which rollouts can be put."""

    def __init__(self, blobs: Blobs, **changes: Any) -> None:
        self.store = RunStore(blobs, "run")
        request = parse_request({"task": TASK.name, "judge": {"wall_seconds": 10}, **changes})
        spec = RunSpec(
            run_id="run",
            request=request,
            identity=ANY_DIGEST,
            task=TASK.name,
            start="grid",
            task_digest=ANY_DIGEST,
            judge_digest=judge_digest(TASK),
            model_digest=ANY_DIGEST,
            prompt_digest=ANY_DIGEST,
            wall_seconds=request.judge.wall_seconds or 10,
            cores=1,
            memory_bytes=1 << 30,
            result_bytes=1 << 20,
            science={},
        )
        self.spec = spec

    def ref(self, **changes: Any) -> RunRef:
        return RunRef(run_id="run", identity=ANY_DIGEST, spec=self.store.put(self.spec.model_copy(update=changes)))

    def request(self, program: str | None, construction: Any = None, **changes: Any) -> JudgeRequest:
        digest = None if construction is None else self.store.put(construction)
        parent = Node(id="seed-00", step=0, value=0.0, score=None, code="", construction=digest)
        pick = ParentPick(node=parent.id, visits=0, q=0, prior=1, bonus=0, score=0)
        group = PlannedGroup(group=AT.group, pick=pick, parent=parent)
        plan = StepPlan(step=1, archive=ANY_DIGEST, groups=(group,), scale=1.0)
        rollout = RolloutRecord(
            at=AT,
            parent=parent.id,
            policy_version=0,
            policy_name="p",
            engine="e",
            boot_id="b",
            seed=11,
            prompt_tokens=(1,),
            response_tokens=(2,),
            log_probs=(0.0,),
            mask=(1,),
            finish_reason="stop",
            text="",
            program=program,
        )
        return JudgeRequest(run=self.ref(**changes), at=AT, plan=self.store.put(plan), rollout=self.store.put(rollout))

    def verdict(self) -> Verdict:
        found = self.store.read(Verdict, self.store.rollout_key(AT, "verdict"))
        assert found is not None
        return found


@pytest.fixture
def run(blobs: Blobs) -> Run:
    return Run(blobs)


def room(run: Run, sandbox: Sandbox) -> JudgeActivities:
    return JudgeActivities(run.store.blobs, TaskSource(), sandbox, Slots(cores=1))


class Counting(Sandbox):
    """The real sandbox, counting runs; or one that answers what it is told to."""

    def __init__(self, inner: Sandbox, **changes: Any) -> None:
        self.inner = inner
        self.isolation = inner.isolation
        self.changes = changes
        self.runs = 0

    async def run(self, program: Program, limits: Limits) -> Outcome:
        self.runs += 1
        return replace(await self.inner.run(program, limits), **self.changes)

    async def close(self) -> None: ...
    def close_blocking(self) -> None: ...


async def test_a_valid_program_is_certified_and_stored(run: Run, sandbox: Sandbox) -> None:
    judged = await ActivityEnvironment().run(room(run, sandbox).judge, run.request(GOOD))
    verdict = run.verdict()
    assert (judged.outcome, judged.score, judged.reward) == (Result.VALID, verdict.score, verdict.reward)
    assert verdict.at == AT
    assert verdict.value == verdict.score == verdict.reward == pytest.approx(2.54)
    assert verdict.exact is not None
    p, q = verdict.exact.split("/")
    assert verdict.construction is not None
    construction = json.loads(run.store.blobs.get(verdict.construction))
    assert TASK.make_judge().verify(construction).exact == Fraction(int(p), int(q))
    assert verdict.claimed == 0
    assert verdict.resources is not None
    assert verdict.isolation.partition(" ")[0] in ("bwrap", "landlock")


async def test_a_stored_verdict_is_returned_without_running_anything(run: Run, sandbox: Sandbox) -> None:
    counting = Counting(sandbox)
    request = run.request(GOOD)
    first = await ActivityEnvironment().run(room(run, counting).judge, request)
    second = await ActivityEnvironment().run(room(run, counting).judge, request)
    assert first == second
    assert counting.runs == 1


async def test_a_slot_waits_for_as_few_reads_as_there_can_be(blobs: Blobs, sandbox: Sandbox) -> None:
    store = CountingStore(blobs.store)
    run = Run(Blobs(store))
    judges = room(run, sandbox)
    request = run.request(None)
    first, second = request, request.model_copy(update={"at": AT.model_copy(update={"rollout": AT.rollout + 1})})
    await ActivityEnvironment().run(judges.judge, first)
    before = store.counts()
    await ActivityEnvironment().run(judges.judge, second)
    calls = {name: count.calls - before[name].calls for name, count in store.counts().items()}
    assert {name: n for name, n in calls.items() if n} == {
        "get entry": 1,  # is there a verdict?
        "get blob": 2,  # the rollout, and whether the verdict's bytes are there already
        "create blob": 1,
        "create entry": 1,
    }


async def test_of_two_that_race_one_verdict_counts(run: Run, sandbox: Sandbox) -> None:
    """Two attempts at once, whose verdicts differ in their times: both answer with the stored one."""
    request = run.request(GOOD)
    rooms = [room(run, sandbox), room(run, sandbox)]
    answers = await asyncio.gather(*(ActivityEnvironment().run(r.judge, request) for r in rooms))
    assert answers[0] == answers[1]
    assert answers[0].verdict == run.store.find(run.store.rollout_key(AT, "verdict"))


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (None, Result.NO_PROGRAM),
        ("def run_packing(): return 1", Result.INVALID),
        ("def run_packing(): raise ValueError('no')", Result.CRASHED),
        ("def run_packing(): return bytearray(1 << 40)", Result.MEMORY),
        ("def run_packing(): print('x' * (17 << 20))", Result.INVALID),
    ],
)
async def test_failures_are_results_with_reward_zero(program: str | None, outcome: Result, run: Run, sandbox: Sandbox) -> None:
    judged = await ActivityEnvironment().run(room(run, sandbox).judge, run.request(program))
    assert (judged.outcome, judged.score, judged.reward) == (outcome, None, 0.0)
    verdict = run.verdict()
    assert (verdict.score, verdict.exact, verdict.value, verdict.construction) == (None, None, None, None)
    assert verdict.reason


async def test_a_timeout_is_a_result(blobs: Blobs, sandbox: Sandbox) -> None:
    run = Run(blobs, judge={"wall_seconds": 0.2})
    environment = ActivityEnvironment()
    # A busy machine may starve the program, and then a first attempt asks for another.
    environment.info = replace(environment.info, attempt=2)
    judged = await environment.run(room(run, sandbox).judge, run.request("def run_packing():\n    while True: pass"))
    assert judged.outcome is Result.TIMED_OUT


async def test_a_starved_timeout_is_tried_once_more(run: Run, sandbox: Sandbox) -> None:
    starved = Counting(sandbox, status=Status.TIMEOUT, reason="wall", result=None, wall_seconds=10.0, wait_seconds=5.0)
    request = run.request("def run_packing(): return 1")
    with pytest.raises(ApplicationError, match="more than a tenth") as error:
        await ActivityEnvironment().run(room(run, starved).judge, request)
    assert not error.value.non_retryable
    again = ActivityEnvironment()
    again.info = replace(again.info, attempt=2)
    assert (await again.run(room(run, starved).judge, request)).outcome is Result.TIMED_OUT


async def test_a_failing_sandbox_is_retried_and_never_stored(run: Run, sandbox: Sandbox) -> None:
    broken = Counting(sandbox, status=Status.SANDBOX_ERROR, reason="no more processes", result=None)
    with pytest.raises(ApplicationError, match="no more processes") as error:
        await ActivityEnvironment().run(room(run, broken).judge, run.request(GOOD))
    assert (error.value.type, error.value.non_retryable) == ("JudgeError", False)
    assert run.store.find(run.store.rollout_key(AT, "verdict")) is None


async def test_another_judge_refuses_the_run(run: Run, sandbox: Sandbox) -> None:
    with pytest.raises(ApplicationError, match="deploy the judge workers"):
        await ActivityEnvironment().run(room(run, sandbox).judge, run.request(GOOD, judge_digest="1" * 64))
    assert run.store.find(run.store.rollout_key(AT, "verdict")) is None


def children() -> set[str]:
    task = f"/proc/{os.getpid()}/task"
    return {pid for thread in os.listdir(task) for pid in Path(f"{task}/{thread}/children").read_text().split()}


async def test_a_cancelled_program_is_killed(run: Run, sandbox: Sandbox) -> None:
    before = children()
    environment = ActivityEnvironment()
    running = asyncio.create_task(
        environment.run(room(run, sandbox).judge, run.request("import time\ndef run_packing(): time.sleep(60)"))
    )
    while not children() - before:
        await asyncio.sleep(0.01)
    environment.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert children() == before
    assert run.store.find(run.store.rollout_key(AT, "verdict")) is None


async def test_it_beats_while_a_program_runs(run: Run, sandbox: Sandbox) -> None:
    environment = ActivityEnvironment()
    beats: list[Any] = []
    environment.on_heartbeat = lambda *details: beats.append(details)
    await environment.run(room(run, sandbox).judge, run.request(GOOD))
    assert beats


OFFERED = "def run_packing():\n    return parent_circles[:, :2], parent_circles[:, 2], len(parent_circles.shape)"


async def test_the_parents_construction_is_offered_only_if_the_run_says_so(blobs: Blobs, sandbox: Sandbox) -> None:
    rows = [[0.1 + 0.2 * (k % 5), 0.1 + 0.2 * (k // 5), 0.09] for k in range(25)] + [[0.2, 0.2, 0.0]]
    text = json.dumps([[row[:2] for row in rows], [row[2] for row in rows]]).encode()
    construction = TASK.make_judge().grade(text).construction
    with_it = Run(blobs, search={"offer_construction": True})
    judged = await ActivityEnvironment().run(room(with_it, sandbox).judge, with_it.request(OFFERED, construction))
    assert judged.outcome is Result.VALID
    assert judged.score == pytest.approx(25 * 0.09)
    assert with_it.verdict().claimed == 2


async def test_no_construction_without_the_setting(run: Run, sandbox: Sandbox) -> None:
    judged = await ActivityEnvironment().run(room(run, sandbox).judge, run.request(OFFERED, {"anything": 1}))
    assert judged.outcome is Result.CRASHED
    assert "parent_circles" in run.verdict().reason


async def test_the_rollouts_seed_reaches_the_program(run: Run, sandbox: Sandbox) -> None:
    source = "def run_packing(seed, budget_s):\n    return [(0.5, 0.5)] * 26, [0.0] * 26, seed + budget_s"
    await ActivityEnvironment().run(room(run, sandbox).judge, run.request(source))
    assert run.verdict().claimed == 11 + 10


async def test_the_seed_program_is_certified(run: Run, sandbox: Sandbox) -> None:
    judged = await ActivityEnvironment().run(room(run, sandbox).judge_seed, JudgeSeedRequest(run=run.ref()))
    assert judged.outcome is Result.VALID
    assert judged.score == pytest.approx(2.5414, abs=1e-4)


def test_rewards_rise_with_what_is_better() -> None:
    assert reward_of(TASK, 2.5) == 2.5
    minimised = TASK.model_copy(update={"direction": "minimize"})
    assert reward_of(minimised, 0.5) == 2.0
    assert reward_of(minimised, 0.4) > reward_of(minimised, 0.5) > 0
    for task, score in ((TASK, -1.0), (minimised, 0.0)):
        with pytest.raises(JudgeError, match="fix"):
            reward_of(task, score)


async def test_an_oversized_program_never_runs(sandbox: Sandbox) -> None:
    counting = Counting(sandbox)
    limits = limits_of_task(TASK, wall_seconds=1)
    judgement = await judge(TASK, TASK.make_judge(), Case("#" * 200_001), limits, counting)
    assert (judgement.outcome, counting.runs) == (Result.INVALID, 0)
