"""Ports for servers that bind later: outside the range of outgoing connections, and of nobody else."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from workers import ports
from workers.ports import free_port


def test_ports_lie_below_those_of_outgoing_connections() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest <= 10_000:
        pytest.skip(f"connections of this host have ports from {lowest} on")
    found = [free_port() for _ in range(200)]
    assert min(found) >= 10_000
    assert max(found) < lowest
    assert max(free_port(below=10_100) for _ in range(50)) < 10_100


def test_a_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ports are left to choose from, and one is taken: the other is found every time."""
    first = next(port for port in range(10_000, 20_000) if _is_free(port) and _is_free(port + 1))
    monkeypatch.setattr(ports, "_FIRST", first)
    with socket.socket() as held:
        held.bind(("127.0.0.1", first))
        assert {free_port(below=first + 2) for _ in range(20)} == {first + 1}


@pytest.mark.parametrize("text", ["1024 65535", "", "much"])
def test_where_the_range_leaves_no_room_any_port_will_do(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


def _is_free(port: int) -> bool:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
