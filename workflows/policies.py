"""Every time-out and retry policy, once. Numbers come from the run's `timeouts`, which are never part of its identity."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from temporalio.common import RetryPolicy

from workflows.contracts.request import Timeouts

NEVER_RETRIED: Final = (
    "InputError",
    "IdentityChanged",
    "Retired",
    "ConflictError",
    "ArchiveFork",
    "TrainConflict",
    "IncompleteGrid",
    "TrainCheckFailed",
    "PublishRefused",
    "CorruptBlob",
)
"""Types of ``activities/errors.py`` that another attempt cannot mend."""


def _retry(t: Timeouts, attempts: int = 0) -> RetryPolicy:
    """attempts = 0: without limit, since a worker or an engine may be away for hours and nothing is lost by waiting."""
    return RetryPolicy(
        initial_interval=timedelta(seconds=t.retry_seconds),
        maximum_interval=timedelta(seconds=30 * t.retry_seconds),
        maximum_attempts=attempts,
        non_retryable_error_types=list(NEVER_RETRIED),
    )


def _options(t: Timeouts, seconds: float, heartbeat: float | None, attempts: int = 0) -> dict[str, Any]:
    return {
        "start_to_close_timeout": timedelta(seconds=seconds),
        "heartbeat_timeout": timedelta(seconds=heartbeat) if heartbeat else None,
        "retry_policy": _retry(t, attempts),
    }


def control(t: Timeouts) -> dict[str, Any]:
    """open, select, assemble, list engines, commit: short, on the control queue."""
    return _options(t, t.control_seconds, t.heartbeat_seconds)


def sample(t: Timeouts) -> dict[str, Any]:
    return _options(t, t.sample_seconds, t.heartbeat_seconds)


def judge(t: Timeouts) -> dict[str, Any]:
    """A program's crash or time-out is a result, not a failure; only infrastructure is retried."""
    return _options(t, t.judge_seconds, t.judge_heartbeat_seconds)


def train(t: Timeouts) -> dict[str, Any]:
    return _options(t, t.train_seconds, t.heartbeat_seconds)


def publish(t: Timeouts) -> dict[str, Any]:
    """On one engine's own queue. If nobody serves it for `engine_wait_seconds`, engines are listed anew."""
    return _options(t, t.publish_seconds, t.heartbeat_seconds) | {
        "schedule_to_start_timeout": timedelta(seconds=t.engine_wait_seconds)
    }
