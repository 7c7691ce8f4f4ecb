"""A reset in the middle of a step, to a point before it began: the step is ended and begun anew."""

from __future__ import annotations

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest

from tests.test_console_flows import ALL, Console, console, run_arguments, server  # noqa: F401  two of them are fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def test_a_reset_to_before_the_step_in_progress_starts_that_step_again(console: Console) -> None:  # noqa: F811
    console.world.gate.clear()
    async with console.workers(*ALL):
        await console.tttd(*run_arguments("back", 2), "--detach")
        await console.until("back", lambda r: r.grid is not None)
        handle = console.client.get_workflow_handle("run/back")
        events = [event async for event in handle.fetch_history_events()]
        child = EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED
        begun = next(event.event_id for event in events if event.event_type == child)
        completed = EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
        point = max(event.event_id for event in events if event.event_type == completed and event.event_id < begun)
        await console.client.workflow_service.reset_workflow_execution(
            ResetWorkflowExecutionRequest(
                namespace=console.client.namespace,
                workflow_execution=WorkflowExecution(workflow_id="run/back"),
                reason="the step in progress is to begin anew",
                workflow_task_finish_event_id=point,
                request_id="once",
            )
        )
        console.world.gate.set()
        watched = await console.tttd("watch", "back")
        assert watched.code == 0, watched.err
        assert "run back completed at step 2" in watched.out
