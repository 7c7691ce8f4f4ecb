"""What workers tell Prometheus: activities are counted around, from their messages, and a run's numbers follow its commits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput

from activities.blobs import Blobs, digest_of
from activities.commit.metrics import describe
from activities.records import StepReport
from tests.chain import Chain
from workers.metrics import MetricsInterceptor, WorkerMetrics
from workers.step_numbers import RUNS_SHOWN, StepNumbers, gauge_name
from workflows.contracts.base import Outcome, RunRef
from workflows.contracts.messages import CommitRequest, Judged, Sampled, StepSummary

D = digest_of(b"")


class Body(ActivityInboundInterceptor):
    """The innermost link of the chain: the activity itself."""

    def __init__(self, run: Callable[[], Awaitable[Any]]) -> None:
        self._run = run

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        return await self._run()


async def attempt(interceptor: MetricsInterceptor, body: Callable[[], Awaitable[Any]], request: object = None) -> Any:
    """Run a body as an activity named `unknown` through the interceptor."""
    chain = interceptor.intercept_activity(Body(body))
    call = ExecuteActivityInput(fn=lambda: None, args=[request], executor=None, headers={})
    return await ActivityEnvironment().run(chain.execute_activity, call)


def answer(result: object) -> Callable[[], Awaitable[object]]:
    async def body() -> object:
        return result

    return body


def failure(error: BaseException) -> Callable[[], Awaitable[object]]:
    async def body() -> object:
        raise error

    return body


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def activity_name() -> str:
    return ActivityEnvironment.default_info().activity_type


async def test_attempts_are_timed_by_how_they_ended(activity_name: str) -> None:
    metrics = WorkerMetrics("train")
    interceptor = MetricsInterceptor(metrics, lambda run, step: None)
    seen: list[float | None] = []

    async def body() -> str:
        seen.append(value(metrics, "tttd_activities_running", activity=activity_name))
        return "done"

    assert await attempt(interceptor, body) == "done"
    with pytest.raises(ApplicationError):
        await attempt(interceptor, failure(ApplicationError("two histories", type="TrainConflict")))
    with pytest.raises(ZeroDivisionError):
        await attempt(interceptor, failure(ZeroDivisionError()))
    with pytest.raises(asyncio.CancelledError):
        await attempt(interceptor, failure(asyncio.CancelledError()))
    assert seen == [1]
    assert value(metrics, "tttd_activities_running", activity=activity_name) == 0
    counts = {
        r: value(metrics, "tttd_activity_seconds_count", activity=activity_name, result=r) for r in ("ok", "failed", "cancelled")
    }
    assert counts == {"ok": 1, "failed": 2, "cancelled": 1}
    assert value(metrics, "tttd_activity_failures_total", activity=activity_name, error="TrainConflict") == 1
    assert value(metrics, "tttd_activity_failures_total", activity=activity_name, error="crash") == 1


async def test_samplers_count_responses_and_tokens() -> None:
    metrics = WorkerMetrics("sample")
    interceptor = MetricsInterceptor(metrics, lambda run, step: None)
    for tokens, program in ((100, True), (50, True), (7, False)):
        await attempt(interceptor, answer(Sampled(rollout=D, response_tokens=tokens, has_program=program)))
    assert value(metrics, "tttd_rollouts_sampled_total", program="yes") == 2
    assert value(metrics, "tttd_rollouts_sampled_total", program="no") == 1
    assert value(metrics, "tttd_response_tokens_total") == 157


async def test_judges_count_outcomes_and_starved_programs(activity_name: str) -> None:
    metrics = WorkerMetrics("judge")
    interceptor = MetricsInterceptor(metrics, lambda run, step: None)
    for outcome in (Outcome.VALID, Outcome.VALID, Outcome.TIMED_OUT):
        await attempt(interceptor, answer(Judged(verdict=D, outcome=outcome, score=None, reward=0.0)))
    for kind in ("JudgeStarved", "JudgeError"):
        with pytest.raises(ApplicationError):
            await attempt(interceptor, failure(ApplicationError("", type=kind)))
    assert value(metrics, "tttd_programs_judged_total", outcome="valid") == 2
    assert value(metrics, "tttd_programs_judged_total", outcome="timed_out") == 1
    assert value(metrics, "tttd_programs_starved_total") == 1


async def test_a_commit_shows_the_numbers_of_its_step(blobs: Blobs, tmp_path: Path) -> None:
    """Real documents of a real commit: what the control worker's interceptor sees, and then reads."""
    chain = Chain.fresh(blobs, tmp_path)
    run, opened = chain.open()
    plan = chain.select(run, opened.head).plan
    for at in chain.coordinates(plan, 1):
        chain.write(plan, at, opened.head.policy, 1.0 + at.rollout)
    batch = chain.assemble(run, 1, plan, opened.head.policy).batch
    request = CommitRequest(run=run, step=1, head=opened.head, plan=plan, batch=batch, policy=opened.head.policy)
    committed = chain.commit(request)
    metrics, numbers, told = WorkerMetrics("control"), StepNumbers(blobs), asyncio.Event()
    metrics.registry.register(numbers)
    loop = asyncio.get_running_loop()

    def on_step(run: RunRef, step: int) -> None:
        numbers.read(run, step)
        loop.call_soon_threadsafe(told.set)

    await attempt(MetricsInterceptor(metrics, on_step), answer(committed), request)
    await asyncio.wait_for(told.wait(), 30)
    labels = {"run": run.run_id, "task": chain.store.spec(run).task}
    report = chain.store.read(StepReport, chain.store.step_key(1, "report"))
    assert report is not None
    assert value(metrics, "tttd_commits_total") == 1
    assert value(metrics, "tttd_step", **labels) == 1
    shown = {d.name: value(metrics, gauge_name(d.name), **labels) for d in describe()}
    assert shown == {d.name: report.metrics.get(d.name) for d in describe()}
    assert shown["reward/mean"] is not None
    assert shown["train/loss"] is None, "what was not measured has no sample, and is not 0"


async def test_a_run_whose_report_cannot_be_read_harms_nobody(blobs: Blobs) -> None:
    numbers = StepNumbers(blobs)
    numbers.read(RunRef(run_id="gone", identity=D, spec=D), 3)
    assert not [sample for family in numbers.collect() for sample in family.samples]


def report(step: int) -> StepReport:
    summary = StepSummary(
        step=step, rollouts=1, valid=1, valid_and_new=1, improved=0, mean_reward=1.0, step_best=None, best=None, previous_best=None,
        kl=None, gap=None, policy_version=step,
    )  # fmt: skip
    return StepReport(step=step, commit=D, metrics={"reward/mean": 0.5}, best_score=None, best_node=None, summary=summary)


def test_the_number_of_labelled_runs_is_bounded(blobs: Blobs) -> None:
    numbers = StepNumbers(blobs)
    for i in range(RUNS_SHOWN + 3):
        numbers.show(f"run-{i}", "task", report(1), now=float(i))
    numbers.show("run-3", "task", report(2), now=99.0)
    numbers.show("another", "task", report(1), now=100.0)
    steps = {s.labels["run"]: s.value for f in numbers.collect() if f.name == "tttd_step" for s in f.samples}
    assert len(steps) == RUNS_SHOWN
    assert "run-4" not in steps, "its step is the oldest"
    assert steps["run-3"] == 2


@pytest.mark.parametrize("role", ["control", "sample", "judge", "train", "engine"])
def test_every_role_shows_itself_in_valid_text(role: str) -> None:
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(WorkerMetrics(role).registry).decode())}
    (build,) = families["tttd_build_info"].samples
    assert build.labels["role"] == role
    assert families["tttd_ready"].samples[0].value == 0
    assert "process_resident_memory_bytes" in families
