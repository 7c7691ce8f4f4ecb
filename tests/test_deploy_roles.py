"""Workers as processes: they start from settings alone, tell whether they are ready, count, and drain when they are told to."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import system as systems
from workers.ports import free_port
from workers.services import probe_ports
from workers.settings import Settings


class System(systems.System):
    """With environments of single processes, and an orderly end."""

    def start_with(self, role: str, **environment: str) -> None:
        usual = dict(self._environment)
        self._environment |= environment
        try:
            self.start(role)
        finally:
            self._environment = usual

    def end(self, name: str, number: int) -> int:
        """Send a signal and wait; the exit code."""
        process = self._processes.pop(name)
        process.send_signal(number)
        return process.wait(60)


PORTS = {role: free_port() for role in ("judge", "sample", "control")}


def get(port: int, path: str) -> tuple[int, str]:
    """Status and text; 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=15) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def conditions(port: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(port, "/readyz")[1])["conditions"]
    return found


def wait_for(what: str, condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.2)


def worker(system: System, role: str, **environment: str) -> None:
    """Start a role with both ports on one, and the Temporal SDK's numbers on another."""
    port = str(PORTS[role])
    system.start_with(role, TTTD_HEALTH_PORT=port, TTTD_METRICS_PORT=port, **environment)


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    system = System(tmp_path / "home")
    yield system
    system.stop()


@pytest.mark.slow
def test_a_judge_is_ready_once_all_holds_and_drains_on_sigterm(system: System) -> None:
    core = free_port()
    worker(system, "judge", TTTD_TEMPORAL_METRICS_PORT=str(core))
    port = PORTS["judge"]
    wait_for("a probe is answered before Temporal is there", lambda: get(port, "/healthz")[0] == 200)
    assert get(port, "/readyz")[0] == 503
    assert not conditions(port)["temporal"]["holds"]
    system.start_temporal()
    wait_for("the judge is ready", lambda: get(port, "/readyz")[0] == 200)
    assert "seccomp" in conditions(port)["sandbox"]["detail"]
    numbers = get(port, "/metrics")[1]
    assert 'tttd_build_info{role="judge"' in numbers
    assert "tttd_ready 1.0" in numbers
    assert "tttd_judge_slots_in_use 0.0" in numbers
    assert "temporal_num_pollers" in get(core, "/metrics")[1]

    system.kill("temporal")
    wait_for("a lost server is noticed", lambda: get(port, "/readyz")[0] == 503)
    assert not conditions(port)["temporal"]["holds"]
    assert get(port, "/healthz")[0] == 200, "a judge that waits for its server must not be restarted"
    system.start_temporal()
    wait_for("a server that came back is found", lambda: get(port, "/readyz")[0] == 200)

    assert system.end("judge", signal.SIGTERM) == 0
    assert get(port, "/healthz")[0] == 0


@pytest.mark.slow
def test_a_store_that_is_away_is_named(system: System) -> None:
    system.start_temporal()
    worker(
        system,
        "sample",
        TTTD_STORE="s3://bucket/prefix",
        TTTD_S3_ENDPOINT=f"http://127.0.0.1:{free_port()}",
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret of a test",
        AWS_DEFAULT_REGION="us-east-1",
    )
    port = PORTS["sample"]
    wait_for("the worker polls", lambda: get(port, "/readyz")[0] == 503 and conditions(port)["polling"]["holds"])
    wait_for("the store's absence is told", lambda: conditions(port)["store"]["detail"] != "not yet")
    assert not conditions(port)["store"]["holds"]
    assert "secret of a test" not in get(port, "/readyz")[1]


def test_workers_of_one_host_have_ports_of_their_own() -> None:
    settings = Settings(health_port=9000, metrics_port=9001)
    found = [probe_ports(settings, index) for index in range(5)]
    assert found[0] == {"TTTD_HEALTH_PORT": "9000", "TTTD_METRICS_PORT": "9001"}
    assert len({port for ports in found for port in ports.values()}) == 10
    assert probe_ports(Settings(), 3) == {}
