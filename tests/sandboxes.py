"""Sandboxes for tests: each backend that this machine can run, opened and tested as a judge does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from activities.judge.sandbox import AUTO, Outcome, Sandbox, SandboxSettings, SandboxUnavailable, Status, open_sandbox

BACKENDS = AUTO


def opened(backend: Any) -> Sandbox:
    """The backend; skips the test where the machine cannot run it."""
    try:
        return open_sandbox(SandboxSettings(backend=backend))
    except SandboxUnavailable as refusal:
        pytest.skip(str(refusal))


def value(outcome: Outcome) -> Any:
    """What a program returned; fails with its words if it returned nothing."""
    assert outcome.status is Status.OK, (outcome.status, outcome.reason, outcome.stderr_tail)
    assert outcome.result is not None
    return json.loads(outcome.result)
