"""`tttd up` and `tttd down`: the supervisor, its lock, and that whatever dies is started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers import services, temporal_server
from workers.ports import free_port
from workers.settings import Settings

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    settings = Settings(home=tmp_path / "home", temporal_port=free_port(), temporal_ui_port=free_port())
    monkeypatch.setenv("TTTD_HOME", str(settings.home))
    monkeypatch.setenv("TTTD_TEMPORAL_PORT", str(settings.temporal_port))
    monkeypatch.setenv("TTTD_TEMPORAL_UI_PORT", str(settings.temporal_ui_port))
    yield settings
    services.down(settings)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 60 s"
        time.sleep(0.05)


def test_without_workers_only_temporal_is_started(settings: Settings) -> None:
    assert services.up(settings, ())
    state = services.read_state(settings)
    assert state is not None
    assert list(state["services"]) == ["temporal"]
    assert temporal_server.is_serving(settings)
    assert not services.up(settings, ()), "it runs already"
    with pytest.raises(RuntimeError, match=r"without judge.*tttd down"):
        services.up(settings, ("judge",))
    assert services.down(settings)
    assert services.read_state(settings) is None
    assert not services.down(settings)


def test_a_taken_port_is_refused_by_name(settings: Settings) -> None:
    """A server of somebody else would answer in our server's place, with other runs and other workers."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", settings.temporal_port))
        other.listen()
        with pytest.raises(RuntimeError, match=rf"port {settings.temporal_port} is taken.*TTTD_TEMPORAL_PORT"):
            services.up(settings, ())
    assert services.read_state(settings) is None


def test_down_works_while_services_are_still_coming_up(settings: Settings) -> None:
    process = subprocess.Popen([sys.executable, "-m", "workers.services", "sample"])
    wait_until(lambda: services.read_state(settings) is not None)
    assert services.down(settings)
    assert process.wait(30) is not None
    assert not temporal_server.is_serving(settings)


def test_what_dies_is_started_again(settings: Settings) -> None:
    services.up(settings, ("sample",))
    wait_until(lambda: "sample" in (services.read_state(settings) or {}).get("services", {}))

    def pid(name: str) -> int | None:
        state = services.read_state(settings)
        found: int | None = state["services"][name]["pid"] if state else None
        return found

    wait_until(lambda: pid("sample") is not None)
    for name in ("sample", "temporal"):
        before = pid(name)
        assert before is not None
        os.kill(before, signal.SIGKILL)
        wait_until(lambda name=name, before=before: pid(name) not in (None, before))  # type: ignore[misc]
    wait_until(lambda: temporal_server.is_serving(settings))


def test_a_killed_supervisor_takes_its_services_along_and_up_works_again(settings: Settings) -> None:
    services.up(settings, ())
    state = services.read_state(settings)
    assert state is not None
    server = int(state["services"]["temporal"]["pid"])
    os.kill(int(state["pid"]), signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{server}").exists())
    assert services.read_state(settings) is None
    assert services.up(settings, ())
    assert temporal_server.is_serving(settings)
