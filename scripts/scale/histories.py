"""What Temporal keeps of a run: events and bytes of each workflow's history, and the payloads in it."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError

_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Execution:
    """One closed or running execution of a workflow."""

    id: str
    events: int
    bytes: int
    """As the server counts them, against its limit of 50 MB (and 51 200 events)."""
    started: float
    closed: float | None
    """Unix seconds."""


@dataclass
class Payloads:
    """Of one history."""

    count: int = 0
    bytes: int = 0
    largest: int = 0
    largest_in: str = ""
    """Type of the event that holds the largest one."""
    events: dict[str, int] = field(default_factory=dict)
    """By type."""
    event_bytes_median: float = 0.0


async def execution(client: Client, workflow_id: str, run_id: str | None = None) -> Execution:
    """Describe an execution; the newest of its id by default."""
    found = await client.get_workflow_handle(workflow_id, run_id=run_id).describe()
    info = found.raw_description.workflow_execution_info
    return Execution(
        id=workflow_id,
        events=int(info.history_length),
        bytes=int(info.history_size_bytes),
        started=found.start_time.timestamp(),
        closed=found.close_time.timestamp() if found.close_time else None,
    )


async def closed_execution(client: Client, workflow_id: str) -> Execution:
    """Wait until an execution has begun and ended, and describe it.

    Raises:
        TimeoutError: it has not within two minutes.
    """
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while True:
            try:
                found = await execution(client, workflow_id)
            except RPCError:  # not there yet
                found = None
            if found is not None and found.closed is not None:
                return found
            await asyncio.sleep(0.1)


async def executions_of(client: Client, workflow_id: str) -> list[Execution]:
    """All executions of one id, oldest first: one for each time that it continued as new."""
    listed = [w async for w in client.list_workflows(f'WorkflowId = "{workflow_id}"')]
    found = [await execution(client, workflow_id, w.run_id) for w in listed]
    return sorted(found, key=lambda e: e.started)


async def continued(client: Client, workflow_id: str) -> int:
    """How many executions of the id ended by continuing as new."""
    listed = [w async for w in client.list_workflows(f'WorkflowId = "{workflow_id}"')]
    return sum(w.status is WorkflowExecutionStatus.CONTINUED_AS_NEW for w in listed)


async def payloads(client: Client, workflow_id: str) -> Payloads:
    """Read the newest history of an id and look at every payload in it."""
    found, sizes = Payloads(), []
    types: Counter[str] = Counter()
    async for event in client.get_workflow_handle(workflow_id).fetch_history_events():
        name = EventType.Name(event.event_type).removeprefix("EVENT_TYPE_").lower()
        types[name] += 1
        sizes.append(event.ByteSize())
        for payload in _payloads_in(event):
            found.count += 1
            found.bytes += len(payload.data)
            if len(payload.data) > found.largest:
                found.largest, found.largest_in = len(payload.data), name
    found.events = dict(types.most_common())
    found.event_bytes_median = statistics.median(sizes) if sizes else 0.0
    return found


def _payloads_in(message: Any) -> Iterator[Payload]:
    if isinstance(message, Payload):
        yield message
        return
    for descriptor, value in message.ListFields():
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            yield from (p for item in _messages(descriptor, value) for p in _payloads_in(item))


def _messages(descriptor: Any, value: Any) -> Iterator[Any]:
    """A field's messages: one, several, or the values of a map."""
    if isinstance(value, Message):
        yield value
    elif descriptor.message_type.GetOptions().map_entry:
        yield from (item for item in value.values() if isinstance(item, Message))
    else:
        yield from value
