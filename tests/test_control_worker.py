"""How much a control worker takes upon itself at once: Temporal's time for a workflow task runs from the moment it is taken."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.system import System
from workers.ports import free_port
from workers.roles import WORKFLOW_TASKS


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    system = System(tmp_path / "home", TTTD_TEMPORAL_METRICS_PORT=str(free_port()))
    yield system
    system.stop()


def workflow_slots(port: int) -> float | None:
    """Workflow tasks that the worker would hold at once, taken and free, as Temporal's SDK tells; None while it does not tell."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
            text = response.read().decode()
    except OSError:
        return None
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in ("temporal_worker_task_slots_available", "temporal_worker_task_slots_used")
        and sample.labels.get("worker_type") == "WorkflowWorker"
    ]
    return sum(found) if len(found) == 2 else None


@pytest.mark.slow
def test_few_workflow_tasks_share_the_time_that_each_has(system: System) -> None:
    system.start_temporal()
    system.start("control")
    port = int(system._environment["TTTD_TEMPORAL_METRICS_PORT"])
    deadline = time.monotonic() + 120
    while (slots := workflow_slots(port)) is None:
        assert time.monotonic() < deadline, system.log_tails()
        time.sleep(0.2)
    # Processed in Python, on one core: each of them takes as long as all together.
    assert slots == WORKFLOW_TASKS <= 16
