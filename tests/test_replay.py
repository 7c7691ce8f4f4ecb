"""Stored histories replay on today's workflow code: a change that would break a running workflow fails here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from workers.connect import use_quiet_runtime, workflow_runner
from workflows import names
from workflows.contracts.messages import RunResult
from workflows.discovery_run import DiscoveryRun
from workflows.discovery_step import DiscoveryStep
from workflows.rollout_group import RolloutGroup

HISTORIES = sorted((Path(__file__).parent / "data" / "histories").glob("*.json.gz"))


def test_every_workflow_has_a_stored_history() -> None:
    stored = {file.name.partition("-")[0] for file in HISTORIES}
    assert stored == {names.DISCOVERY_RUN, names.DISCOVERY_STEP, names.ROLLOUT_GROUP}


def load(file: Path) -> WorkflowHistory:
    text = gzip.decompress(file.read_bytes()).decode()
    started = json.loads(text)["events"][0]["workflowExecutionStartedEventAttributes"]
    return WorkflowHistory.from_json(started["workflowId"], text)  # child workflows are named after it


@pytest.mark.parametrize("file", HISTORIES, ids=lambda file: file.name)
async def test_a_stored_history_replays(file: Path) -> None:
    use_quiet_runtime()
    replayer = Replayer(
        workflows=[DiscoveryRun, DiscoveryStep, RolloutGroup],
        data_converter=pydantic_data_converter,
        workflow_runner=workflow_runner(),
    )
    await replayer.replay_workflow(load(file))


@workflow.defn(name=names.DISCOVERY_RUN, sandboxed=False)
class Changed:
    """A DiscoveryRun that begins with a timer."""

    @workflow.run
    async def run(self, raw: dict[str, object]) -> RunResult:
        await workflow.sleep(1)
        raise AssertionError("never reached")


async def test_a_workflow_that_does_something_else_fails_its_replay() -> None:
    """The test above can fail."""
    history = next(file for file in HISTORIES if file.name.startswith(names.DISCOVERY_RUN))
    replayer = Replayer(workflows=[Changed], data_converter=pydantic_data_converter)
    with pytest.raises(workflow.NondeterminismError):
        await replayer.replay_workflow(load(history))


def test_histories_hold_references_and_no_bytes() -> None:
    """Programs, tokens and log-probs stay in the object store: a payload of a history is small."""
    for file in HISTORIES:
        for event in json.loads(gzip.decompress(file.read_bytes()))["events"]:
            assert len(json.dumps(event)) < 32_000, f"{file.name}: event {event['eventId']} is large"
