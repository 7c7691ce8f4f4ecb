"""The numbers of each run's last step, as Prometheus gauges: what docs/metrics.md lists, under `tttd_step_...`.

Control workers have them: from the commit they made, or from the step that a run was opened at. Two control workers may show one
run; the newest step is the true one (``deploy/prometheus/rules.yml`` picks it).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from activities.blobs import Blobs
from activities.commit.metrics import describe
from activities.records import StepReport
from activities.run_store import RunStore
from workflows.contracts.base import RunRef

log: structlog.stdlib.BoundLogger = structlog.get_logger()

RUNS_SHOWN: Final = 16
"""Runs that one process shows; the one whose step is oldest goes first."""
_LABELS: Final = ("run", "task")


def gauge_name(name: str) -> str:
    """Prometheus' name of a number of a step's report: `train/loss` is `tttd_step_train_loss`."""
    return "tttd_step_" + name.replace("/", "_")


class StepNumbers(Collector):
    """The report of each run's last step."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._steps: OrderedDict[tuple[str, str], tuple[StepReport, float]] = OrderedDict()

    def read(self, run: RunRef, step: int) -> None:
        """Read a committed step's report and show it. Never raises: numbers for people must not harm a run."""
        try:
            store = RunStore(self._blobs, run.run_id)
            report = store.read(StepReport, store.step_key(step, "report"))
            if report is not None:  # the opening commit has none
                self.show(run.run_id, store.spec(run).task, report, time.time())
        except Exception as error:
            log.warning("step_numbers_not_shown", run=run.run_id, step=step, error=str(error))

    def show(self, run: str, task: str, report: StepReport, now: float) -> None:
        """Args:
        now: Unix seconds.
        """
        self._steps[(run, task)] = (report, now)
        self._steps.move_to_end((run, task))
        while len(self._steps) > RUNS_SHOWN:
            self._steps.popitem(last=False)

    def collect(self) -> Iterable[Metric]:
        number = GaugeMetricFamily("tttd_step", "Number of the last committed step.", labels=_LABELS)
        version = GaugeMetricFamily("tttd_step_policy_version", "Version of the policy after that step.", labels=_LABELS)
        seen = GaugeMetricFamily("tttd_step_timestamp_seconds", "Unix time at which this process showed it first.", labels=_LABELS)
        families = {
            d.name: GaugeMetricFamily(gauge_name(d.name), f"{d.meaning} Unit: {d.unit}.", labels=_LABELS) for d in describe()
        }
        for key, (report, now) in list(self._steps.items()):
            number.add_metric(key, report.step)
            version.add_metric(key, report.summary.policy_version)
            seen.add_metric(key, now)
            for name, family in families.items():
                # Unknown is not 0: what was not measured has no sample.
                if (value := report.metrics.get(name)) is not None:
                    family.add_metric(key, value)
        yield from (number, version, seen, *families.values())
