"""What a worker tells Prometheus, counted around its activities. The rooms themselves know nothing of it.

An interceptor of the Temporal worker sees each activity's request, and its result or error, and counts from these messages alone.
Labels are few on purpose: `activity`, `result`, `error` and `outcome` are closed sets. `run` stands on the numbers of the last step
only, and for at most sixteen runs of a process (``step_numbers.py``). What is no number for an alarm or a curve stays in the logs
and in the step's report.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import temporalio.client
import temporalio.worker
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from temporalio import activity
from temporalio.exceptions import ApplicationError, CancelledError
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput

from workflows.contracts.base import RunRef
from workflows.contracts.messages import Committed, Judged, Opened, Sampled

# A second series for every counter, with the time of its first value: nobody reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
"""From a control activity to the longest training step."""


class WorkerMetrics:
    """All numbers of one worker process.

    Args:
        role: becomes a label of `tttd_build_info`; Prometheus joins it through the instance.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        on: dict[str, Any] = {"registry": self.registry}
        Gauge("tttd_build_info", "1, with the role and the version of this process.", ["role", "version"], **on).labels(
            role, _version()
        ).set(1)
        self.ready = Gauge("tttd_ready", "1 while /readyz says yes.", **on)
        self.running = Gauge("tttd_activities_running", "Activities that run now.", ["activity"], **on)
        self.seconds = Histogram(
            "tttd_activity_seconds", "Attempts, by how they ended.", ["activity", "result"], buckets=_SECONDS, **on
        )
        self.failures = Counter("tttd_activity_failures", "Failed attempts by type of error.", ["activity", "error"], **on)
        if role == "sample":
            self.sampled = Counter("tttd_rollouts_sampled", "Responses, by whether they hold a program.", ["program"], **on)
            self.tokens = Counter("tttd_response_tokens", "Tokens of these responses.", **on)
        if role == "judge":
            self.judged = Counter("tttd_programs_judged", "Verdicts by outcome.", ["outcome"], **on)
            self.starved = Counter("tttd_programs_starved", "Attempts given up because the program waited for a core.", **on)
            self.slots = Gauge("tttd_judge_slots", "Cores for programs on this host.", **on)
            self.slots_in_use = Gauge("tttd_judge_slots_in_use", "Of these, taken now.", **on)
        if role == "control":
            self.commits = Counter("tttd_commits", "Steps committed by this process.", **on)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Time one attempt at an activity, and count how it ends."""
        began, result = time.monotonic(), "failed"
        self.running.labels(name).inc()
        try:
            yield
            result = "ok"
        except (asyncio.CancelledError, CancelledError):
            result = "cancelled"
            raise
        except Exception as error:
            kind = error_kind(error)
            self.failures.labels(name, kind).inc()
            if kind == "JudgeStarved" and self.role == "judge":
                self.starved.inc()
            raise
        finally:
            self.running.labels(name).dec()
            self.seconds.labels(name, result).observe(time.monotonic() - began)

    def count(self, result: object) -> None:
        """Count what an activity answered. A record that was found, not made, counts as an answer too."""
        match result:
            case Sampled() if self.role == "sample":
                self.sampled.labels("yes" if result.has_program else "no").inc()
                self.tokens.inc(result.response_tokens)
            case Judged() if self.role == "judge":
                self.judged.labels(result.outcome.value).inc()
            case Committed() if self.role == "control":
                self.commits.inc()


def error_kind(error: BaseException) -> str:
    """Our own type of error, or `crash` for one that nobody raised on purpose: a closed set, fit for a label."""
    return error.type or "crash" if isinstance(error, ApplicationError) else "crash"


class MetricsInterceptor(temporalio.client.Interceptor, temporalio.worker.Interceptor):
    """Counts around every activity. Given to a client, it comes to every worker that is made with it, so none can forget it.

    Args:
        on_step: told of a run and its last committed step, in a thread of its own; must not raise.
    """

    def __init__(self, metrics: WorkerMetrics, on_step: Callable[[RunRef, int], None] | None = None) -> None:
        self._metrics = metrics
        self._on_step = on_step
        self._telling: set[asyncio.Task[None]] = set()

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Counting(next, self._metrics, self._on_result)

    def _on_result(self, request: object, result: object) -> None:
        self._metrics.count(result)
        run = getattr(request, "run", None)
        if self._on_step is None or not isinstance(run, RunRef) or not isinstance(result, Committed | Opened):
            return
        # In the background: the workflow does not wait for numbers that are for people.
        task = asyncio.create_task(asyncio.to_thread(self._on_step, run, result.head.step))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


class _Counting(ActivityInboundInterceptor):
    def __init__(
        self, next: ActivityInboundInterceptor, metrics: WorkerMetrics, on_result: Callable[[object, object], None]
    ) -> None:
        super().__init__(next)
        self._metrics = metrics
        self._on_result = on_result

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        with self._metrics.attempt(activity.info().activity_type):
            result = await self.next.execute_activity(input)
        self._on_result(input.args[-1] if input.args else None, result)
        return result


def _version() -> str:
    try:
        return version("tttd")
    except PackageNotFoundError:
        return "unknown"
