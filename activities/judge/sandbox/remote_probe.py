"""A hostile program that a judge sends to a sandbox service before it trusts it: the service itself is the canary.

Sent as source, so it imports nothing of this project. Every answer is 1 if the attempt was refused; :data:`CHECKS` names them.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CHECKS = (
    "connect to the service that runs it",
    "signal the service",
    "read the service's environment",
    "read the service's memory",
    "write a file in /tmp",
    "write a file beside itself",
    "read its host's passwords",
    "fork",
    "execute a program",
    "be root",
)


def refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, RuntimeError, ValueError):
        return True
    return False


def connect(port: int) -> None:
    import socket

    socket.create_connection(("127.0.0.1", port), timeout=2).close()


def write(path: str) -> None:
    with open(path, "w") as file:
        file.write("x")
    os.unlink(path)


def fork() -> None:
    if os.fork() == 0:
        os._exit(0)
    os.wait()


def run(port: int, pid: int) -> list[int]:
    answers = [
        refused(lambda: connect(port)),
        refused(lambda: os.kill(pid, 0)),
        refused(lambda: open(f"/proc/{pid}/environ", "rb").close()),
        refused(lambda: open(f"/proc/{pid}/mem", "rb").close()),
        refused(lambda: write("/tmp/tttd-remote-probe")),
        refused(lambda: write("tttd-remote-probe")),
        refused(lambda: open("/etc/shadow", "rb").close()),
        refused(fork),
        refused(lambda: os.execv("/bin/true", ["/bin/true"])),
        os.getuid() != 0 and os.geteuid() != 0,
    ]
    return [int(answer) for answer in answers]
