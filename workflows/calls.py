"""One way to call an activity: by name, with its message types, its queue and its policy."""

from __future__ import annotations

from typing import Any, TypeVar

from temporalio import workflow

from workflows.contracts.base import Message

R = TypeVar("R", bound=Message)


async def call(
    name: str,
    request: Message,
    result_type: type[R],
    *,
    queue: str,
    options: dict[str, Any],
    summary: str,
    activity_id: str | None = None,
) -> R:
    """Run an activity and return its result; `summary` is the line that the Web UI shows for it."""
    result: R = await workflow.execute_activity(
        name, request, result_type=result_type, task_queue=queue, activity_id=activity_id, summary=summary, **options
    )
    return result
