"""Gathers the status report: from workflows where they answer, from Temporal's list, and from the store where nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, cast

from temporalio.client import Client, WorkflowExecution, WorkflowFailureError
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError

from console import stored
from console.inquiry import NO_CONTROL, NO_SERVER, NO_SUCH_RUN, Snapshot, look, web_link
from console.output import Failure
from console.status import RunReport, ServiceReport, ServicesReport, State, StatusList, StatusReport
from console.store_answers import ask_store
from console.waits import find_waits
from workers import services
from workers.connect import connect_options, connect_tasks
from workers.settings import Settings
from workflows import names
from workflows.contracts.messages import RunResult
from workflows.publishing import explain

if TYPE_CHECKING:
    from activities.blobs import Blobs

RECENT_STEPS = 20
LISTED_RUNS = 200
_CLOSED: Final[dict[str, State]] = {"FAILED": "failed", "TIMED_OUT": "failed", "TERMINATED": "terminated", "CANCELED": "terminated"}
_RESULT_SECONDS = 5.0
_STORED_FIELDS: Final = ("step", "best_score", "best_known", "score_name", "policy_version", "commit", "recent")
"""Of a report: what a run has achieved, whichever execution did it."""
_GOES_ON: Final = "what is shown comes from the store, and runs go on by themselves when the server is back"
_MISSING_SENTENCES: Final = {
    NO_SUCH_RUN: "Temporal knows no workflow run/{run} and none called {run}",
    NO_SERVER: "the Temporal server does not answer",
    NO_CONTROL: "no control worker answers",
}


@dataclass(frozen=True)
class Surroundings:
    """Where to ask.

    Args:
        client: None if Temporal cannot be reached; `problem` says why.
        ui: address of the Web UI, if this machine serves it.
    """

    settings: Settings
    blobs: Blobs
    client: Client | None
    ui: str | None
    problem: str | None = None


async def whole_picture(where: Surroundings) -> StatusList:
    """Services and every run."""
    listed = await _listed(where) if where.client is not None else []
    known = {run.run_id for run in listed}

    def only_stored() -> list[RunReport]:
        # Runs that only the store has are old ones, or all of them while Temporal is away.
        others = [run for run in stored.run_ids(where.blobs) if run not in known]
        return [report for run in reversed(others) if (report := _from_store(where, run)) is not None]

    rest, problem = await ask_store(where.blobs, only_stored)
    services = services_report(where).model_copy(update={"store_problem": problem})
    return StatusList(at=_now(), services=services, runs=(*listed, *(rest or ())))


async def one_run(where: Surroundings, run_id: str) -> StatusReport | None:
    """One run in detail; None if neither Temporal nor the store knows it.

    Raises:
        Failure: Temporal does not know it, or cannot be asked, and the store cannot be asked either.
    """

    def from_store() -> tuple[RunReport | None, str | None]:
        kept = stored.find_run(where.blobs, run_id)
        fork = None if kept is None else stored.lineage_of(kept.spec)
        return _from_store(where, run_id), None if fork is None else f"{fork.run}@{fork.step}"

    found, silent = await ask_store(where.blobs, from_store)
    kept, fork_of = found or (None, None)
    if where.client is not None:
        run = await _from_workflow(where, where.client, run_id, kept)
    else:
        run = kept and kept.model_copy(update={"problem": f"{where.problem}; {_GOES_ON}"})
    services = services_report(where).model_copy(update={"store_problem": silent})
    if run is None:
        if silent is not None:
            raise Failure(f"{run_id}: {where.problem or _MISSING_SENTENCES[NO_SUCH_RUN].format(run=run_id)}; {silent}")
        return None
    fields = {name: getattr(run, name) for name in RunReport.model_fields}
    return StatusReport(at=_now(), services=services, **(fields | {"fork_of": fork_of}))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def services_report(where: Surroundings) -> ServicesReport:
    """The supervisor's own notes, and the addresses that our settings name."""
    options = connect_options(where.settings)
    state = services.read_state(where.settings)
    processes = (state or {}).get("services", {})
    return ServicesReport(
        temporal=options["target_host"],
        namespace=options.get("namespace", "default"),
        reachable=where.client is not None,
        problem=where.problem,
        ui=where.ui,
        supervised=state is not None,
        processes=tuple(ServiceReport(name=name, pid=p["pid"], starts=p["starts"]) for name, p in processes.items()),
        home=str(where.settings.home.resolve()),
        store=where.blobs.store.url,
        logs=str(where.settings.logs.resolve()),
    )


# One run ------------------------------------------------------------------------------------------------------------------
async def _from_workflow(where: Surroundings, client: Client, run_id: str, kept: RunReport | None) -> RunReport | None:
    """Args:
    kept: what the store says of it, if it can be asked.
    """
    seen = await look(client, run_id)
    if seen.status is None:
        why = _MISSING_SENTENCES.get(seen.missing or "", "").format(run=run_id)
        report = kept and kept.model_copy(update={"problem": f"{why}; what is shown comes from the store"})
        report = _unopened(run_id) if report is None and seen.execution is not None else report
        if report is None:
            return None
        extra: dict[str, Any] = {"execution": seen.execution, "started": seen.started, "web": _web(where, run_id, seen)}
        if seen.execution is not None:
            extra["state"] = _CLOSED.get(seen.execution, "unknown" if seen.is_running else report.state)
    else:
        report, extra = _from_status(where, seen, run_id), {}
        if report.commit is None and kept is not None:
            # The last execution never opened (a refused resume, say): what earlier ones committed is still there.
            stood = {name: getattr(kept, name) for name in _STORED_FIELDS}
            report = report.model_copy(update=stood)
    if seen.is_running:
        step = seen.step.step if seen.step else (report.step or 0) + 1
        groups = seen.step.groups if seen.step else 0
        extra["waits"] = await find_waits(client, seen.workflow_id, step, groups, answered=seen.status is not None)
    elif seen.execution in ("FAILED", "TIMED_OUT"):
        extra["error"] = await _why_failed(client, seen.workflow_id)
    return report.model_copy(update=extra)


def _from_status(where: Surroundings, seen: Snapshot, run_id: str) -> RunReport:
    status = seen.status
    assert status is not None
    closed = _CLOSED.get(seen.execution or "")
    return RunReport(
        run_id=run_id,
        source="workflow",
        state=closed or status.state,
        execution=seen.execution,
        started=seen.started,
        task=status.task,
        model=seen.model,
        score_name=status.score_name,
        step=status.step if status.commit else None,
        steps=status.steps or None,
        best_score=status.best_score,
        best_known=status.best_known,
        policy_version=status.policy_version if status.commit else None,
        commit=status.commit,
        pause_requested=status.pause_requested,
        phase=seen.step.phase if seen.step else status.phase,
        error=status.error,
        web=_web(where, run_id, seen),
        grid=seen.grid,
        recent=status.recent,
    )


def _web(where: Surroundings, run_id: str, seen: Snapshot) -> str | None:
    if where.client is None or seen.execution is None:
        return None
    return web_link(where.ui, where.client.namespace, run_id, seen.workflow_id)


async def _why_failed(client: Client, workflow_id: str) -> str | None:
    handle = client.get_workflow_handle(workflow_id, result_type=RunResult)
    try:
        await asyncio.wait_for(handle.result(), _RESULT_SECONDS)
    except WorkflowFailureError as error:
        return explain(error)
    except (TimeoutError, RPCError):
        return None
    return None


def _from_store(where: Surroundings, run_id: str) -> RunReport | None:
    run = stored.find_run(where.blobs, run_id)
    if run is None:
        return None
    task = stored.task_of(run.spec, connect_tasks(where.settings, where.blobs))
    steps = run.spec.request.search.steps if run.spec else None
    recent = stored.summaries(where.blobs, run_id, range(max(1, (run.step or 0) - RECENT_STEPS + 1), (run.step or 0) + 1))
    return RunReport(
        run_id=run_id,
        source="store",
        # The store cannot tell a run that waits from one that was stopped; it knows only when all is done.
        state="completed" if run.step is not None and steps is not None and run.step >= steps else "unknown",
        execution=None,
        task=run.spec.task if run.spec else "",
        model=run.spec.request.model if run.spec else "",
        score_name=task.score_name if task else "score",
        step=run.step,
        steps=steps,
        best_score=stored.best_score(where.blobs, run),
        best_known=task.best_known if task else None,
        policy_version=run.head.policy.version if run.head else None,
        commit=run.commit,
        recent=recent,
    )


def _unopened(run_id: str) -> RunReport:
    """A run that Temporal holds and the store has never heard of: nobody has opened it yet."""
    return RunReport(
        run_id=run_id,
        source="list",
        state="opening",
        execution=None,
        task="",
        step=None,
        steps=None,
        best_score=None,
        policy_version=None,
        problem="no control worker has opened this run yet",
    )


# The list -----------------------------------------------------------------------------------------------------------------
async def _listed(where: Surroundings) -> list[RunReport]:
    assert where.client is not None
    found: dict[str, WorkflowExecution] = {}
    try:
        async for execution in where.client.list_workflows(f'WorkflowType = "{names.DISCOVERY_RUN}"', limit=LISTED_RUNS):
            last = found.get(execution.id)
            if last is None or execution.start_time > last.start_time:
                found[execution.id] = execution
    except RPCError:
        return []
    newest = sorted(found.values(), key=lambda e: e.start_time, reverse=True)
    return [_from_list(where, execution) for execution in newest]


def _from_list(where: Surroundings, execution: WorkflowExecution) -> RunReport:
    run_id = execution.id.removeprefix("run/")
    status = execution.status.name if execution.status else "UNKNOWN"
    attributes = _attributes(execution)
    state = _CLOSED.get(status) or cast(State, attributes.get(names.ATTRIBUTE_STATE) or "opening")
    return RunReport(
        run_id=run_id,
        source="list",
        state=state,
        execution=status,
        started=execution.start_time.isoformat(),
        task=attributes.get(names.ATTRIBUTE_TASK) or "",
        model=attributes.get(names.ATTRIBUTE_MODEL) or "",
        step=attributes.get(names.ATTRIBUTE_STEP),
        steps=None,
        best_score=attributes.get(names.ATTRIBUTE_BEST),
        policy_version=attributes.get(names.ATTRIBUTE_VERSION),
        web=web_link(where.ui, execution.namespace, run_id, execution.id),
    )


_KEYS: Final[dict[str, Callable[[str], SearchAttributeKey[Any]]]] = {
    "Keyword": SearchAttributeKey.for_keyword,
    "Int": SearchAttributeKey.for_int,
    "Double": SearchAttributeKey.for_float,
}


def _attributes(execution: WorkflowExecution) -> dict[str, Any]:
    return {name: execution.typed_search_attributes.get(_KEYS[kind](name)) for name, kind in names.SEARCH_ATTRIBUTES.items()}
