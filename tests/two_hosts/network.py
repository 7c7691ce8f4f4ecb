"""Two hosts and the cable between them: this process is on host A, host B is another network, and a switch joins the two.

The networks have no names. The kernel removes each of them, with its links, when the last process in it ends; all of those end with
this one. So nothing is left behind, not even after kill -9. Knows no tttd.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.two_hosts import on_host

A_ADDRESS = "192.0.2.1"
B_ADDRESS = "192.0.2.2"
"""Of TEST-NET-1, which nobody has."""
_PREFIX = 24
_ON_HOST = [sys.executable, "-I", "-S", on_host.__file__]


class Unavailable(Exception):
    """This machine does not let us make networks; says why."""


def on_host_command(*options: str) -> list[str]:
    """The beginning of a command line that puts the rest on a host, and ends it with this process."""
    return [*_ON_HOST, *options, str(os.getpid())]


@dataclass
class Network:
    """The switch's ports are `port-a` and `port-b`; the hosts' own ends are called `cable`."""

    switch: subprocess.Popen[bytes]
    host_b: subprocess.Popen[bytes]
    ip: str

    def on_b(self, hidden: Path | None = None) -> list[str]:
        """The beginning of a command line that runs on host B.

        Args:
            hidden: a folder of host A, which host B does not see.
        """
        options = ["--network-of", str(self.host_b.pid)]
        return on_host_command(*options, *(["--hide", str(hidden.resolve())] if hidden is not None else []))

    def cut(self) -> None:
        """Pull host B's cable out of the switch. Both hosts keep carrier and routes; packets just vanish, and nobody is told."""
        self._on_switch("link", "set", "port-b", "nomaster")

    def mend(self) -> None:
        """Plug it in again."""
        self._on_switch("link", "set", "port-b", "master", "switch")

    def _on_switch(self, *arguments: str) -> None:
        _run([*on_host_command("--network-of", str(self.switch.pid)), self.ip, *arguments])

    def build(self) -> None:
        """Lay the cables and give the hosts their addresses."""
        self._on_switch("link", "add", "switch", "type", "bridge")
        self._on_switch("link", "set", "switch", "up")
        for port, host in (("port-a", os.getpid()), ("port-b", self.host_b.pid)):
            self._on_switch("link", "add", port, "type", "veth", "peer", "name", "cable", "netns", str(host))
            self._on_switch("link", "set", port, "master", "switch", "up")
        for prefix, address in (([], A_ADDRESS), (self.on_b(), B_ADDRESS)):
            _run([*prefix, self.ip, "link", "set", "lo", "up"])
            _run([*prefix, self.ip, "address", "add", f"{address}/{_PREFIX}", "dev", "cable"])
            _run([*prefix, self.ip, "link", "set", "cable", "up"])


@contextlib.contextmanager
def two_hosts() -> Iterator[Network]:
    """Move this process to host A, and make host B. There is no way back: a process that calls this is for nothing else.

    Raises:
        Unavailable: the tools or the rights for it are missing.
    """
    ip = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin")
    if ip is None:
        raise Unavailable("no `ip` command: install iproute2")
    assert threading.active_count() == 1, "a network is one thread's; become a host before there are others"
    try:
        on_host.new_network()
    except OSError as error:
        raise Unavailable(f"no networks of our own ({error.strerror}): this needs root with CAP_SYS_ADMIN") from None
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(_holder()) for _ in range(2)]
        network = Network(holders[0], holders[1], ip)
        try:
            network.build()
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"`ip {' '.join(error.cmd[error.cmd.index(ip) + 1 :])}` failed: {error.stderr.strip()}") from None
        yield network


@contextlib.contextmanager
def _holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose only purpose is that its network exists."""
    command = [*on_host_command("--new-network"), "sh", "-c", "echo there; exec sleep 1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"there\n":
                raise Unavailable("a process with a network of its own did not start")
            yield process
        finally:
            process.kill()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


@dataclass(frozen=True)
class LinkReport:
    """What an established connection from B to A met."""

    before: bool
    """An answer came before the cut."""
    silent: bool
    """While the cable was out there was neither an answer nor an error."""
    after: bool
    """The same connection went on afterwards."""


def try_link(network: Network, silent_seconds: float = 2.0) -> LinkReport:
    """Prove that the cut is a cut: a connection that is open across it sees silence, not an error, and lives on."""
    echo = (
        "import socket, sys\n"
        f"s = socket.create_connection(('{A_ADDRESS}', int(sys.argv[1])), 10)\n"
        "s.settimeout(None)\n"
        "while data := s.recv(64): s.sendall(data)\n"
    )
    with socket.create_server(("0.0.0.0", 0)) as server:
        server.settimeout(10)
        command = [*network.on_b(), sys.executable, "-I", "-c", echo, str(server.getsockname()[1])]
        with subprocess.Popen(command) as peer:
            connection, (address, _) = server.accept()
            with connection:
                assert address == B_ADDRESS
                before = _answers(connection, b"1", 5)
                network.cut()
                silent = not _answers(connection, b"2", silent_seconds)
                network.mend()
                connection.settimeout(30)
                after = connection.recv(64) == b"2"
            peer.wait(30)
    return LinkReport(before, silent, after)


def _answers(connection: socket.socket, word: bytes, seconds: float) -> bool:
    connection.settimeout(seconds)
    connection.sendall(word)
    try:
        return connection.recv(64) == word
    except TimeoutError:
        return False
