"""Asks Temporal how a run is doing: its execution, its status query, the step and the groups below it.

Queries are answered by control workers, so they fail while those restart; a snapshot then says who is missing instead of failing.
Knows no terminal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar
from urllib.parse import quote

from pydantic import BaseModel
from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError, RPCStatusCode

from console.status import GridReport
from workflows import names
from workflows.contracts.messages import GroupProgress, RunStatus, StepStatus

M = TypeVar("M", bound=BaseModel)

_MODEL = SearchAttributeKey.for_keyword(names.ATTRIBUTE_MODEL)

RPC_TIMEOUT = timedelta(seconds=5)
_CONCURRENT_QUERIES = 16

NO_SUCH_RUN = "no such run"
NO_SERVER = "the Temporal server"
NO_CONTROL = "a control worker"
"""What a snapshot without status waits for."""


@dataclass(frozen=True)
class Snapshot:
    """One look at a run."""

    execution: str | None
    """RUNNING, COMPLETED, FAILED, ...; None if the server could not be asked or has no such run."""
    status: RunStatus | None = None
    step: StepStatus | None = None
    """Of the step in progress, if there is one."""
    grid: GridReport | None = None
    missing: str | None = None
    """Why there is no status: NO_SUCH_RUN, NO_SERVER or NO_CONTROL."""
    started: str | None = None
    model: str = ""
    """Its short name, from the search attributes; empty before the run was opened."""
    workflow_id: str = ""
    """`run/NAME`, or NAME alone for a run that was started under it; empty if Temporal has neither."""

    @property
    def is_running(self) -> bool:
        return self.execution == "RUNNING"


@dataclass
class GroupCache:
    """Groups that are done answer no new questions: each query of a closed workflow may cost a replay."""

    key: tuple[int, str] = (0, "")
    done: dict[int, GroupProgress] = field(default_factory=dict)


async def look(client: Client, run_id: str, cache: GroupCache | None = None) -> Snapshot:
    """One snapshot of a run; never raises for an absent server, worker or run."""
    try:
        description = await describe_run(client, run_id)
    except RPCError:
        return Snapshot(None, missing=NO_SERVER)
    if description is None:
        return Snapshot(None, missing=NO_SUCH_RUN)
    execution = description.status.name if description.status else "UNKNOWN"
    started, workflow_id = description.start_time.isoformat(), description.id
    status = await _query(client, workflow_id, RunStatus)
    if status is None:
        return Snapshot(execution, missing=NO_CONTROL, started=started, workflow_id=workflow_id)
    step = grid = None
    if execution == WorkflowExecutionStatus.RUNNING.name and status.state == "running" and status.phase.name == "step":
        step = await _query(client, step_id(workflow_id, status.step + 1), StepStatus)
        if step is not None and step.phase.name == "sample+judge":
            grid = await _grid(client, workflow_id, step, status.higher_is_better, cache or GroupCache())
    model = description.typed_search_attributes.get(_MODEL) or ""
    return Snapshot(execution, status, step, grid, started=started, model=model, workflow_id=workflow_id)


async def describe_run(client: Client, run_id: str) -> WorkflowExecutionDescription | None:
    """The newest execution of a run: `run/NAME`, or the one that somebody started as NAME if it is under way, or the only one.

    Raises:
        RPCError: the server does not answer.
    """
    found = await _describe(client, names.run_workflow_id(run_id))
    if found is not None and found.status is WorkflowExecutionStatus.RUNNING:
        return found
    bare = await _describe(client, run_id)
    if bare is None or bare.workflow_type != names.DISCOVERY_RUN:
        return found
    return bare if found is None or bare.status is WorkflowExecutionStatus.RUNNING else found


async def _describe(client: Client, workflow_id: str) -> WorkflowExecutionDescription | None:
    try:
        return await client.get_workflow_handle(workflow_id).describe(rpc_timeout=RPC_TIMEOUT)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None
        raise


def step_id(workflow_id: str, step: int) -> str:
    """A step's workflow id, below whatever id its run has."""
    return f"{workflow_id}/step/{step:06d}"


def group_id(workflow_id: str, step: int, group: int) -> str:
    """A group's workflow id, below whatever id its run has."""
    return f"{step_id(workflow_id, step)}/group/{group:02d}"


async def _query(client: Client, workflow_id: str, answer: type[M]) -> M | None:
    """The status query of a workflow; None when nobody answers."""
    handle = client.get_workflow_handle(workflow_id)
    try:
        found: M = await handle.query(names.STATUS, result_type=answer, rpc_timeout=RPC_TIMEOUT)
    except (RPCError, WorkflowQueryFailedError, WorkflowQueryRejectedError):
        return None
    return found


async def _grid(client: Client, workflow_id: str, step: StepStatus, higher: bool, cache: GroupCache) -> GridReport:
    key = (step.step, step.phase.since)
    if cache.key != key:
        cache.key, cache.done = key, {}
    limit = asyncio.Semaphore(_CONCURRENT_QUERIES)

    async def ask(group: int) -> GroupProgress | None:
        if group in cache.done:
            return cache.done[group]
        async with limit:
            found = await _query(client, group_id(workflow_id, step.step, group), GroupProgress)
        if found is not None and found.judged == found.rollouts:
            cache.done[group] = found
        return found

    answers = await asyncio.gather(*(ask(group) for group in range(step.groups)))
    return sum_groups([a for a in answers if a is not None], step.groups, step.rollouts, higher)


def sum_groups(found: Sequence[GroupProgress], groups: int, rollouts: int, higher_is_better: bool) -> GridReport:
    """The grid from those groups that answered; a group that has not started yet counts as nothing sampled.

    Args:
        rollouts: per group.
    """
    judged = sum(g.judged for g in found)
    scores = [g.best_score for g in found if g.best_score is not None]
    reward = sum(g.mean_reward * g.judged for g in found if g.mean_reward is not None)
    return GridReport(
        groups=groups,
        rollouts=groups * rollouts,
        sampled=sum(g.sampled for g in found),
        judged=judged,
        valid=sum(g.valid for g in found),
        best_score=(max if higher_is_better else min)(scores, default=None),
        mean_reward=reward / judged if judged else None,
    )


def web_link(ui: str | None, namespace: str, run_id: str, workflow_id: str = "") -> str | None:
    """Address of the run's page in the Web UI, where this machine serves one.

    Args:
        workflow_id: if it is not `run/NAME`.
    """
    page = quote(workflow_id or names.run_workflow_id(run_id), safe="")
    return ui and f"{ui}/namespaces/{quote(namespace, safe='')}/workflows/{page}"
