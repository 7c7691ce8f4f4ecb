"""Publishing one policy version to every engine that serves the run's model. Shared by the run (at a resume) and by the step."""

from __future__ import annotations

import asyncio

from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType

from workflows import names, policies
from workflows.calls import call
from workflows.contracts.base import Digest, Head, PolicyRef, RunRef
from workflows.contracts.messages import Engines, ListEnginesRequest, Published, PublishRequest
from workflows.contracts.request import Timeouts


async def publish_everywhere(
    run: RunRef, policy: PolicyRef, previous: PolicyRef | None, initial: PolicyRef, timeouts: Timeouts
) -> tuple[Digest, ...]:
    """Have every engine load the adapter and prove that it serves it. Returns the reports of those that passed.

    An engine whose queue nobody serves is dropped and the engines are listed anew; samplers refuse an engine that has not passed,
    so going on without it is safe. When no engine passes, the first refusal is raised.
    """
    while True:
        listed = await call(
            names.LIST_ENGINES,
            ListEnginesRequest(run=run),
            Engines,
            queue=names.CONTROL_QUEUE,
            options=policies.control(timeouts),
            summary="which engines serve this model",
        )
        results = await asyncio.gather(
            *(_publish(run, engine, policy, previous, initial, timeouts) for engine in listed.engines),
            return_exceptions=True,
        )
        passed = tuple(r.report for r in results if isinstance(r, Published))
        if passed:
            return passed
        errors = [r for r in results if isinstance(r, BaseException)]
        absent = [e for e in errors if _nobody_came(e)]
        if len(absent) < len(errors):
            raise next(e for e in errors if e not in absent)


async def _publish(
    run: RunRef, engine: str, policy: PolicyRef, previous: PolicyRef | None, initial: PolicyRef, timeouts: Timeouts
) -> Published:
    return await call(
        names.PUBLISH,
        PublishRequest(run=run, engine=engine, policy=policy, previous=previous, initial=initial),
        Published,
        queue=names.engine_queue(engine),
        options=policies.publish(timeouts),
        summary=f"publish version {policy.version} to {engine}",
    )


def _nobody_came(error: BaseException) -> bool:
    cause = error.__cause__ if isinstance(error, ActivityError) else None
    return isinstance(cause, TimeoutError) and cause.type == TimeoutType.SCHEDULE_TO_START


def explain(error: BaseException) -> str:
    """The innermost message of a failure: what a person needs, without Temporal's wrapping."""
    while error.__cause__ is not None:
        error = error.__cause__
    kind = error.type if isinstance(error, ApplicationError) and error.type else type(error).__name__
    message = error.message if isinstance(error, ApplicationError) else str(error)
    return f"{kind}: {message}"


def head_policies(head: Head) -> tuple[PolicyRef, PolicyRef | None, PolicyRef]:
    """(served, served before it, version 0) of a commit."""
    return head.policy, head.previous_policy, head.initial_policy
