"""A worker's health: what counts as alive and as ready, and that probes get an answer when the event loop does not turn."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from workers.health import CONDITIONS, STALLED_SECONDS, Health
from workers.probes import Answer, health_pages, metrics_page, serve
from workers.roles import _ROLES


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def everything_holds(health: Health) -> None:
    for name in CONDITIONS[health.role]:
        health.mark(name, True)


def test_every_role_has_conditions() -> None:
    assert CONDITIONS.keys() == _ROLES.keys()


@pytest.mark.parametrize("role", CONDITIONS)
def test_a_worker_is_ready_when_all_that_it_needs_holds_and_not_before(role: str) -> None:
    health = Health(role, Clock())
    for name in CONDITIONS[role]:
        assert not health.ready()[0], f"ready without {name}"
        health.mark(name, True)
    assert health.ready()[0]


def test_a_condition_that_breaks_is_named_with_its_reason_and_age() -> None:
    clock = Clock()
    health = Health("judge", clock)
    everything_holds(health)
    clock.now += 7
    health.mark("store", False, "connection refused")
    clock.now += 3
    health.beat()
    health.mark("store", False, "connection refused")
    ready, told = health.ready()
    assert not ready
    assert told["conditions"]["store"] == {"holds": False, "for_seconds": 3.0, "detail": "connection refused"}
    assert told["conditions"]["sandbox"] == {"holds": True, "for_seconds": 10.0, "detail": ""}


def test_a_draining_worker_lives_and_is_not_ready() -> None:
    health = Health("sample", Clock())
    everything_holds(health)
    health.drain()
    assert health.live()[0]
    assert health.ready()[0] is False
    assert health.ready()[1]["draining"] is True


def test_a_silent_event_loop_is_death() -> None:
    clock = Clock()
    health = Health("train", clock)
    everything_holds(health)
    clock.now += STALLED_SECONDS - 1
    assert health.live()[0]
    clock.now += 1
    assert not health.live()[0]
    assert not health.ready()[0]
    health.beat()
    assert health.live()[0]
    assert health.ready()[0]


def test_a_condition_of_another_role_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        Health("sample").mark("sandbox", True)


Start = Callable[[dict[str, Callable[[str], Answer]]], str]


@pytest.fixture
def start() -> Iterator[Start]:
    """Serves pages; returns their address."""
    servers = []

    def begin(pages: dict[str, Callable[[str], Answer]]) -> str:
        server = serve("127.0.0.1", 0, pages)
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def get(url: str, accept: str = "") -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=10) as response:
            return response.status, response.headers["Content-Type"], response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


def test_probes_answer_with_status_and_reasons(start: Start) -> None:
    health = Health("control", Clock())
    url = start(health_pages(health))
    assert get(f"{url}/healthz")[0] == 200
    status, kind, body = get(f"{url}/readyz")
    assert (status, kind) == (503, "application/json")
    assert json.loads(body)["conditions"].keys() == set(CONDITIONS["control"])
    everything_holds(health)
    assert get(f"{url}/readyz?verbose")[0] == 200
    assert get(f"{url}/metrics")[0] == 404, "metrics have a port of their own"


def test_metrics_come_in_the_format_that_is_asked_for(start: Start) -> None:
    registry = CollectorRegistry()
    Gauge("tttd_test", "A number.", registry=registry).set(3)
    url = start(metrics_page(registry))
    assert b"tttd_test 3.0" in get(f"{url}/metrics")[2]
    status, kind, body = get(f"{url}/metrics", "application/openmetrics-text; version=1.0.0")
    assert status == 200
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_a_broken_collector_is_told_and_does_not_end_the_server(start: Start) -> None:
    class Broken(Collector):
        broken = False

        def collect(self) -> Iterator[Metric]:
            if self.broken:
                raise RuntimeError("the engine's numbers are gone")
            yield from ()

    registry, broken = CollectorRegistry(), Broken()
    registry.register(broken)
    url = start(metrics_page(registry) | health_pages(Health("train", Clock())))
    broken.broken = True
    status, _, body = get(f"{url}/metrics")
    assert (status, body) == (500, b"the engine's numbers are gone\n")
    assert get(f"{url}/healthz")[0] == 200


def test_a_taken_port_is_named(start: Start) -> None:
    url = start({})
    port = int(url.rpartition(":")[2])
    with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{port} for /healthz, /readyz"):
        serve("127.0.0.1", port, health_pages(Health("train", Clock())))


def test_marks_and_probes_may_come_from_different_threads() -> None:
    """The event loop marks while the probe's thread reads; neither sees half of a change."""
    health = Health("judge")
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            health.mark("store", False, "away")
            health.mark("store", True, "here")

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        seen = {(c["holds"], c["detail"]) for _ in range(2000) for c in [health.ready()[1]["conditions"]["store"]]}
    finally:
        stop.set()
        thread.join()
    assert seen <= {(False, "not yet"), (False, "away"), (True, "here")}


def test_logs_hold_no_values_of_local_variables(tmp_path: Path) -> None:
    """A client's frames hold its credentials; an error in it is logged with where it happened, and with nothing it knew."""
    program = (
        "import logging, pathlib, structlog\n"
        "from workers.logs import configure_logging\n"
        f"configure_logging('INFO', role='judge', file=pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "def connect():\n"
        "    secret_key = 'a secret ' + 'of a test'\n"
        "    raise RuntimeError('the store refused')\n"
        "for log in (structlog.get_logger(), logging.getLogger('library')):\n"
        "    try:\n"
        "        connect()\n"
        "    except RuntimeError:\n"
        "        log.exception('failed')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    text = (tmp_path / "log").read_text()
    assert text.count("the store refused") >= 2
    assert "connect" in text
    assert "a secret of a test" not in text
