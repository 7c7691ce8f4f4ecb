"""Ports for servers that bind them a while after they were chosen."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_EPHEMERAL = 32_768
"""Linux's own lower end, where it cannot be read."""
_TRIES = 1000


def free_port(host: str = "127.0.0.1", *, below: int | None = None) -> int:
    """A port that nobody uses and that no outgoing connection is given meanwhile.

    Servers such as Temporal's and SGLang's bind their port seconds after it was chosen. The kernel takes the local ports of
    connections from one range, so a port in it may be gone by then; this one lies below that range if there is room.

    Args:
        below: an upper end (exclusive) of one's own.
    """
    end = min(_lowest_ephemeral(), below or _LOWEST_EPHEMERAL)
    chance = random.SystemRandom()
    for _ in range(_TRIES if end > _FIRST else 0):
        port = chance.randrange(_FIRST, end)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _lowest_ephemeral() -> int:
    try:
        return int(_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _LOWEST_EPHEMERAL
