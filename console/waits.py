"""What a run waits for: pending activities of the run, its step and its groups, who polls their queues, and what to do.

Knows Temporal's descriptions and the names of roles; asks no workflow, so it works while no worker answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from temporalio.api.enums.v1 import EventType, PendingActivityState, TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client, WorkflowExecutionDescription
from temporalio.service import RPCError

from console.inquiry import RPC_TIMEOUT, group_id, step_id
from console.status import Wait
from workflows import names

POLLER_SECONDS = 90.0
"""A worker's long poll is renewed every minute; the server remembers dead pollers for five."""
IGNORED_SECONDS = 5.0
"""An idle worker is given ready work at once; waiting longer means that nobody asks."""
_CONCURRENT_REQUESTS = 16

_ROLES: Final = {
    names.SAMPLE: ("sample", names.SAMPLE_QUEUE),
    names.JUDGE: ("judge", names.JUDGE_QUEUE),
    names.JUDGE_SEED: ("judge", names.JUDGE_QUEUE),
    names.SCORE_BASE: ("train", names.TRAIN_QUEUE),
    names.TRAIN: ("train", names.TRAIN_QUEUE),
    names.PUBLISH: ("engine", "tttd-engine-*"),
}
_CONTROL: Final = ("control", names.CONTROL_QUEUE)
_STORE_FAILURES: Final = (
    "ClientError",
    "ConnectionClosedError",
    "ConnectionError",
    "ConnectTimeoutError",
    "EndpointConnectionError",
    "HTTPClientError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProxyConnectionError",
    "ReadTimeoutError",
    "SSLError",
)
"""Types of boto3's exceptions: of all that an activity does, only the object store is reached through it."""


@dataclass(frozen=True)
class Pending:
    """One activity that Temporal holds."""

    kind: str
    queue: str
    running: bool
    attempt: int
    scheduled: datetime | None
    """This attempt: in the future while it pauses before the next."""
    failure: str | None
    progress: str | None = None
    """What its worker told of it last."""
    workflow_id: str = ""
    activity_id: str = ""
    first: datetime | None = None
    """The first attempt, where it was looked up."""


@dataclass(frozen=True)
class Pollers:
    """Who asks a queue for work."""

    count: int
    """Workers that asked in the last :data:`POLLER_SECONDS`."""
    last: datetime | None = None
    """When the last of them asked."""


async def find_waits(client: Client, workflow_id: str, step: int | None, groups: int, *, answered: bool = True) -> tuple[Wait, ...]:
    """Everything pending below a run, by activity type and queue, and the run's own progress if no control worker is there.

    Args:
        workflow_id: of the run.
        step: the step in progress, if any.
        groups: its number of groups; 0 before they started.
        answered: whether the run has just answered a query.
    """
    ids = [workflow_id]
    if step is not None:
        ids += [step_id(workflow_id, step), *(group_id(workflow_id, step, g) for g in range(groups))]
    limit = asyncio.Semaphore(_CONCURRENT_REQUESTS)

    async def describe(id_: str) -> WorkflowExecutionDescription | None:
        async with limit:
            try:
                return await client.get_workflow_handle(id_).describe(rpc_timeout=RPC_TIMEOUT)
            except RPCError:
                return None

    described = [d for d in await asyncio.gather(*(describe(i) for i in ids)) if d is not None]
    pending = [_pending(activity, d.id) for d in described for activity in d.raw_description.pending_activities]
    pending = await _with_first_attempts(client, pending)
    stuck = [d for d in described if d.raw_description.HasField("pending_workflow_task")]
    queues = {p.queue for p in pending}
    pollers = dict(zip(queues, await asyncio.gather(*(find_pollers(client, q) for q in queues)), strict=True))
    control = await find_pollers(client, names.CONTROL_QUEUE, workflows=True)
    own = _workflow_wait(stuck, control, answered)
    return (*([own] if own else []), *summarise(pending, pollers, datetime.now(UTC)))


async def _with_first_attempts(client: Client, pending: list[Pending]) -> list[Pending]:
    """Look up in histories when retried work was scheduled at first: of each kind and queue, for what was tried most."""
    worst: dict[tuple[str, str], int] = {}
    for i, activity in enumerate(pending):
        most = worst.setdefault((activity.kind, activity.queue), i)
        if activity.attempt > pending[most].attempt:
            worst[activity.kind, activity.queue] = i
    retried = [i for i in worst.values() if pending[i].attempt > 1]
    found = await asyncio.gather(*(_first_scheduled(client, pending[i]) for i in retried))
    first = dict(zip(retried, found, strict=True))
    return [replace(activity, first=first.get(i)) for i, activity in enumerate(pending)]


async def _first_scheduled(client: Client, activity: Pending) -> datetime | None:
    handle = client.get_workflow_handle(activity.workflow_id)
    found = None
    try:
        async for event in handle.fetch_history_events(rpc_timeout=RPC_TIMEOUT):
            if (
                event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
                and event.activity_task_scheduled_event_attributes.activity_id == activity.activity_id
            ):
                found = event.event_time.ToDatetime(UTC)
    except RPCError:
        return None
    return found


async def find_pollers(client: Client, queue: str, *, workflows: bool = False) -> Pollers:
    """Workers that asked a queue for work lately; none if the server cannot be asked."""
    kind = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW if workflows else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    request = DescribeTaskQueueRequest(namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind)
    try:
        answer = await client.workflow_service.describe_task_queue(request, timeout=RPC_TIMEOUT)
    except RPCError:
        return Pollers(0)
    oldest = datetime.now(UTC) - timedelta(seconds=POLLER_SECONDS)
    seen = [(p.identity, p.last_access_time.ToDatetime(UTC)) for p in answer.pollers]
    return Pollers(len({who for who, when in seen if when >= oldest}), max((when for _, when in seen), default=None))


def summarise(pending: Iterable[Pending], pollers: Mapping[str, Pollers], now: datetime) -> list[Wait]:
    """One entry per activity type and queue, with advice where a person can do something."""
    by_place: dict[tuple[str, str], list[Pending]] = {}
    for activity in pending:
        by_place.setdefault((activity.kind, activity.queue), []).append(activity)
    waits = []
    for (kind, queue), found in sorted(by_place.items()):
        role, _ = _ROLES.get(kind, _CONTROL)
        since = min((when for p in found if (when := p.first or p.scheduled) is not None), default=None)
        worst = max(found, key=lambda p: (p.failure is not None, p.attempt))
        running = sum(p.running for p in found)
        told = next((p.progress for p in found if p.running and p.progress), None)
        asked = pollers.get(queue, Pollers(0))
        ignored = running == 0 and any(_is_ignored(p, asked, now) for p in found)
        waits.append(
            Wait(
                kind=kind,
                role=role,
                queue=queue,
                pollers=asked.count,
                last_poll=asked.last.isoformat(timespec="seconds") if asked.last else None,
                waiting=len(found) - running,
                running=running,
                attempts=max(p.attempt for p in found),
                since=since.isoformat() if since else None,
                failure=worst.failure,
                progress=told,
                advice=advise(role, queue, asked, worst.failure, running=running, ignored=ignored),
            )
        )
    return waits


def _is_ignored(activity: Pending, asked: Pollers, now: datetime) -> bool:
    """Whether no worker has asked since the activity was ready: an idle one would have been given it at once."""
    if activity.running or activity.scheduled is None or asked.last is None:
        return False
    return activity.scheduled < now - timedelta(seconds=IGNORED_SECONDS) and asked.last < activity.scheduled


def advise(role: str, queue: str, asked: Pollers, failure: str | None, *, running: int = 0, ignored: bool = False) -> str | None:
    """What to do about a wait; None when time alone will do.

    Args:
        ignored: no worker has asked since the work was ready. It may be gone, or busy with something else.
    """
    start = f"start one with `tttd worker {role}`"
    if asked.count == 0 and running == 0:
        return f"no {role} worker is polling {queue}: {start}, or everything with `tttd up`"
    if ignored and asked.last is not None:
        since = asked.last.isoformat(timespec="seconds")
        return f"no {role} worker has asked {queue} for work since {since}: wait if it is busy; if it is gone or cut off, {start}"
    if failure is None:
        return None
    again = "it is tried again by itself"
    kind = failure.partition(":")[0]
    if kind in ("NotReady", "EngineError"):
        return f"{again}; see whether the engine is well: `tttd doctor`, and the log of the engine worker"
    if kind == "JudgeError":
        return f"{again}; see whether the sandbox works on the judge's host: `tttd doctor`, and the log of the judge worker"
    if kind == "NewerDocument":
        return f"{again}; a newer tttd wrote what this {role} worker cannot read: install that version on its host too"
    if kind in _STORE_FAILURES:
        return f"{again}; see whether the object store is well, reachable from the {role} worker's host, and takes its keys"
    return f"{again}; the log of the {role} worker says more"


def wait_text(wait: Wait) -> str:
    """One wait as a line for people."""
    counts = [f"{wait.waiting} waiting"] if wait.waiting else []
    counts += [f"{wait.running} running"] if wait.running else []
    parts = [f"{wait.kind}: {', '.join(counts) or 'pending'} on {wait.queue} ({wait.pollers} workers)"]
    if wait.attempts > 1:
        parts.append(f"attempt {wait.attempts}")
    if wait.progress:
        parts.append(f"at {wait.progress}")
    if wait.since:
        parts.append(f"since {wait.since[:19]}")
    if wait.failure:
        parts.append(wait.failure)
    return " · ".join(parts)


def _workflow_wait(stuck: list[WorkflowExecutionDescription], control: Pollers, answered: bool) -> Wait | None:
    """The run itself does not move: nobody replays its workflows, or doing so fails again and again."""
    tasks = [d.raw_description.pending_workflow_task for d in stuck]
    attempts = max((t.attempt for t in tasks), default=1)
    if control.count > 0 and attempts < 3 and answered:
        return None
    times = [t.original_scheduled_time.ToDatetime(UTC) for t in tasks if t.HasField("original_scheduled_time")]
    since = min(times, default=None if answered else control.last)
    advice = advise("control", names.CONTROL_QUEUE, control, None)
    if advice is None and attempts < 3:
        last = control.last.isoformat(timespec="seconds") if control.last else "an unknown time"
        advice = (
            f"no control worker answers; one asked {names.CONTROL_QUEUE} for work last at {last}: wait if it is busy or starting; "
            "if it is gone or cut off, start one with `tttd worker control`"
        )
    elif advice is None:
        advice = (
            "the workflow's own code fails here; the log of the control worker says where, and a new worker version can mend it"
        )
    return Wait(
        kind="workflow",
        role="control",
        queue=names.CONTROL_QUEUE,
        pollers=control.count,
        last_poll=control.last.isoformat(timespec="seconds") if control.last else None,
        waiting=len(tasks),
        running=0,
        attempts=attempts,
        since=since.isoformat() if since else None,
        advice=advice,
    )


def _pending(activity: Any, workflow_id: str) -> Pending:
    kind = activity.activity_type.name
    role_queue = _ROLES.get(kind, _CONTROL)[1]
    return Pending(
        kind=kind,
        queue=activity.activity_options.task_queue.name or role_queue,
        running=activity.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED,
        attempt=max(1, activity.attempt),
        scheduled=activity.scheduled_time.ToDatetime(UTC) if activity.HasField("scheduled_time") else None,
        failure=_failure(activity.last_failure) if activity.HasField("last_failure") else None,
        progress=_progress(activity.heartbeat_details.payloads),
        workflow_id=workflow_id,
        activity_id=activity.activity_id,
    )


def _progress(payloads: Any) -> str | None:
    """The words of the last heartbeat; None for one that only says that the worker lives."""
    for payload in payloads:
        if payload.metadata.get("encoding") == b"json/plain" and isinstance(told := json.loads(payload.data), str):
            return told
    return None


def _failure(failure: Any) -> str:
    """The innermost message with its type: what a person needs, without Temporal's wrapping."""
    while failure.HasField("cause"):
        failure = failure.cause
    if failure.HasField("timeout_failure_info"):
        return "Timeout: no answer from the worker in time"
    kind = failure.application_failure_info.type if failure.HasField("application_failure_info") else ""
    text = " ".join(failure.message.split())
    return f"{kind}: {text}" if kind else text
