"""What no program may reach while it is tested, and how it is noticed that one did. Used by ``tests/attacks.py``."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

CANARIES = Path("/tmp/canary")
"""Where the programs look for them."""

SECRET = "CANARY-7f3a"


class Canaries:
    """Files and listeners that no program may reach; remembers who knocked."""

    def __init__(self, owner: int) -> None:
        self.contacts: list[str] = []
        self.heap = SECRET * 64
        os.environ["JUDGE_SECRET"] = SECRET
        self._plant(owner)
        self._before = self.fingerprint()
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            self._serve(socket.create_server((address, 7233), family=family), f"tcp {address}")
        for name, where in (("abstract", "\0sbx-canary"), ("path", str(CANARIES / "sock"))):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(where)
            listener.listen()
            self._serve(listener, f"unix {name}")
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 5300))
        self._thread(lambda: self._answer(udp))

    def _plant(self, owner: int) -> None:
        for name in ("judge.key", "answers.json", "victim.txt", "home/.aws/credentials", "run-other/program.py"):
            file = CANARIES / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{SECRET} {name}\n")
            file.chmod(0o600)
        for path in (CANARIES, *CANARIES.rglob("*")):
            os.chown(path, owner, owner)

    def _serve(self, listener: socket.socket, name: str) -> None:
        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                self.contacts.append(name)
                connection.sendall(SECRET.encode())
                connection.close()

        self._thread(accept)

    def _answer(self, udp: socket.socket) -> None:
        while True:
            _, sender = udp.recvfrom(64)
            self.contacts.append("udp")
            udp.sendto(b"CANARY-DNS", sender)

    @staticmethod
    def _thread(target: Callable[[], None]) -> None:
        threading.Thread(target=target, daemon=True).start()

    def fingerprint(self) -> dict[str, tuple[int, int, str]]:
        files = (path for path in sorted(CANARIES.rglob("*")) if path.is_file())
        found = {str(f): (f.stat().st_mode, int(f.stat().st_mtime_ns), f.read_text()) for f in files}
        return found | {str(CANARIES): (CANARIES.stat().st_mode, 0, "")}

    def harm(self) -> list[str]:
        """What happened to the canaries since the start."""
        changed = [] if self.fingerprint() == self._before else ["a canary file was changed"]
        return changed + [f"{name} was contacted" for name in self.contacts]


def litter(uids: range) -> set[str]:
    """Files of the programs' uids in the places where one might leave something; others use the same machine."""
    places = [Path(p) for p in ("/", "/tmp", "/var/tmp", "/dev/shm", "/dev", "/run", os.path.expanduser("~"))]
    files = (path for place in places if os.access(place, os.R_OK) for path in place.iterdir() if path != CANARIES)
    return {str(path) for path in files if _owner(path) in uids}


def _owner(path: Path) -> int:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:
        return 0


def strangers() -> set[int]:
    """Processes in this pid namespace that are neither the judge nor its ancestors."""
    own = {os.getpid(), os.getppid(), 1}
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} - own
