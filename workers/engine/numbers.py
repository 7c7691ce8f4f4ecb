"""An engine's own numbers on its worker's /metrics, under SGLang's names whichever engine it is. Knows the text format only.

The engine's port may change with every start; the worker's does not, so the worker is who is scraped.
"""

from __future__ import annotations

from collections.abc import Iterable

import httpx
import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from workers.engine.host import EngineHost

log: structlog.stdlib.BoundLogger = structlog.get_logger()

_ANSWER_SECONDS = 3.0
_OWN = ("sglang:",)
"""Families that are taken over: the engine process's general ones would collide with the worker's."""


class EngineNumbers(Collector):
    """Asks the engine when Prometheus asks the worker."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    def describe(self) -> Iterable[Metric]:
        return ()  # not known before the engine answers

    def collect(self) -> Iterable[Metric]:
        engine = self._host.current
        yield GaugeMetricFamily("tttd_engine_up", "1 while the engine process answers.", value=float(engine is not None))
        yield GaugeMetricFamily(
            "tttd_engine_adapters_verified", "Adapters that passed the gate in this boot.", value=float(self._host.verified_count)
        )
        if engine is not None:
            yield from _asked(engine.url)


def _asked(url: str) -> list[Metric]:
    """The engine's families; none when it does not answer in time, which `tttd_engine_up` and its supervisor tell better."""
    try:
        response = httpx.get(f"{url}/metrics", timeout=_ANSWER_SECONDS)
        response.raise_for_status()
    except httpx.HTTPError as error:
        log.debug("engine_numbers_missing", url=url, error=str(error))
        return []
    return [family for family in text_string_to_metric_families(response.text) if family.name.startswith(_OWN)]
