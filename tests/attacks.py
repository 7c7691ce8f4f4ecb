"""Runs a folder of hostile or legitimate programs through the real sandbox, against live canaries, and says what got out.

    python -m tests.attacks DIR [--backend landlock] [--as-user] [--only NAME ...] [--json FILE]

The programs run in the sandbox as ever; around it stands an outer wall of their own pid, mount, network and ipc namespaces, so
that a sandbox that fails harms nothing (``tests/data/attacks/README.md``). That takes root. ``--as-user`` judges as an ordinary
user, so that judge and program share one uid: the worst case.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from activities.judge.sandbox import Limits, Outcome, Program, Sandbox, SandboxSettings, Status, open_sandbox

CANARIES = Path("/tmp/canary")
"""Where the programs look for them."""

FIRST_UID = SandboxSettings().uid_base
USER = FIRST_UID + 4_100
SECRET = "CANARY-7f3a"

ATTACK_LIMITS = Limits(wall_seconds=2, grace_seconds=0.5, memory_bytes=1 << 30, result_bytes=2 << 20, log_bytes=8 << 20, threads=64)
LEGIT_LIMITS = Limits(wall_seconds=60, memory_bytes=4 << 30)

EXPECTED_TO_ESCAPE = {
    "landlock": {
        "stat_secrets": "Landlock does not cover stat: existence and size of guessed paths stay visible (spec sandbox 5.1)",
    }
}
"""By backend: programs whose escape is known and documented. One that no longer escapes fails too, so that the table stays true."""

NEEDS_PROCESSES = ("mp_pool", "mp_shared_memory", "processpool_fork")
"""Legitimate programs that a single-process backend cannot run; it must refuse them cleanly."""

_ADAPTER = """

def _reported():
    result = run()
    if not isinstance(result, (dict, str, list, tuple)) or not _mixed(result):
        return result
    import json
    return list(json.dumps(result, default=lambda o: o.tolist() if hasattr(o, "tolist") else repr(o)).encode())

def _mixed(value):
    if isinstance(value, (dict, str)):
        return True
    return isinstance(value, (list, tuple)) and any(_mixed(v) for v in value[:64])
"""
"""The wire carries numbers only; the programs report dictionaries. Their reports cross as bytes."""


@dataclass
class Case:
    """What happened to one program."""

    name: str
    status: str = ""
    reason: str = ""
    seconds: float = 0.0
    report: Any = None
    escapes: list[str] = field(default_factory=list)
    """What got out, in words; empty if contained."""
    unexpected: str = ""
    """Set if the status is not one that the manifest allows."""
    stderr_tail: str = ""


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


def litter() -> set[str]:
    """Files of the programs' uids in the places where one might leave something; others use the same machine."""
    places = [Path(p) for p in ("/", "/tmp", "/var/tmp", "/dev/shm", "/dev", "/run", os.path.expanduser("~"))]
    files = (path for place in places if os.access(place, os.R_OK) for path in place.iterdir() if path != CANARIES)
    return {str(path) for path in files if _owner(path) >= FIRST_UID}


def _owner(path: Path) -> int:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:
        return 0


def strangers() -> set[int]:
    """Processes in this pid namespace that are neither the judge nor its ancestors."""
    own = {os.getpid(), os.getppid(), 1}
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} - own


async def attack(sandbox: Sandbox, canaries: Canaries, name: str, source: str, expect: list[str] | None) -> Case:
    """Run one hostile program and look for whatever it did."""
    before = litter()
    began = time.monotonic()
    outcome = await sandbox.run(Program(source + _ADAPTER, entry="_reported"), ATTACK_LIMITS)
    case = _case(name, outcome, time.monotonic() - began)
    if isinstance(case.report, dict) and case.report.get("escaped"):
        case.escapes.append(f"reports {json.dumps(case.report)[:200]}")
    if SECRET in json.dumps(asdict(case)) or SECRET in outcome.stdout_tail:
        case.escapes.append("read a secret")
    case.escapes += canaries.harm()
    case.escapes += [f"left {path}" for path in sorted(litter() - before)]
    case.escapes += [f"left process {pid}" for pid in sorted(strangers())]
    if case.seconds > ATTACK_LIMITS.kill_seconds + 5:
        case.escapes.append(f"held its slot for {case.seconds:.1f} s of {ATTACK_LIMITS.kill_seconds} s")
    if any(not (c.isprintable() or c in "\n\t") for c in outcome.stdout_tail + outcome.stderr_tail + outcome.reason):
        case.escapes.append("control characters in the log")
    if outcome.status is Status.SANDBOX_ERROR or (expect is not None and outcome.status not in expect):
        case.unexpected = f"ended as {outcome.status} ({outcome.reason}), allowed: {expect or 'any result'}"
    return case


def _case(name: str, outcome: Outcome, seconds: float) -> Case:
    case = Case(name, str(outcome.status), outcome.reason, round(seconds, 3), stderr_tail=outcome.stderr_tail[-300:])
    if outcome.result is not None:
        case.report = json.loads(outcome.result)
        with suppress(TypeError, ValueError):
            case.report = json.loads(bytes(case.report))
    return case


async def serve(sandbox: Sandbox, name: str, source: str) -> Case:
    """Run one legitimate program: it must work, unless it needs processes and the backend has none."""
    began = time.monotonic()
    outcome = await sandbox.run(Program(source + _ADAPTER, entry="_reported"), LEGIT_LIMITS)
    case = _case(name, outcome, time.monotonic() - began)
    refused = name in NEEDS_PROCESSES and sandbox.isolation.processes == 1
    wanted = Status.CRASHED if refused else Status.OK
    if "ModuleNotFoundError" in outcome.stderr_tail:
        case.reason = "needs a package that is not installed here"
    elif outcome.status is not wanted:
        case.unexpected = f"ended as {outcome.status} ({outcome.reason}), wanted {wanted}"
    return case


async def run_folder(folder: Path, sandbox: Sandbox, owner: int, only: list[str]) -> list[Case]:
    """Every program of a folder; one with a manifest.json is hostile, one without is legitimate."""
    manifest = folder / "manifest.json"
    if not manifest.exists():
        names = [(p.stem, p) for p in sorted(folder.glob("*.py")) if not only or p.stem in only]
        return [await serve(sandbox, name, path.read_text()) for name, path in names]
    canaries = Canaries(owner)
    cases = []
    for name, entry in json.loads(manifest.read_text()).items():
        if not only or name in only:
            cases.append(await attack(sandbox, canaries, name, (folder / entry["file"]).read_text(), entry["expect"]))
    return cases


def inside(arguments: argparse.Namespace) -> int:
    """Behind the outer wall: plant canaries, open the sandbox, run."""
    owner = USER if arguments.as_user else 0
    with _prepared_namespace():
        if arguments.as_user:
            os.chown(CANARIES, USER, USER)
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
        # Alone on its cores, so that one core means one core.
        sandbox = open_sandbox(SandboxSettings(backend=arguments.backend, pin=True))
        cases = asyncio.run(run_folder(arguments.folder, sandbox, owner, arguments.only))
    result = {"isolation": str(sandbox.isolation), "cases": [asdict(case) for case in cases]}
    sys.stdout.write(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # listeners' threads are still waiting


@contextmanager
def _prepared_namespace() -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "canary", str(CANARIES)], check=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # a new network namespace has its loopback down
        request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)
        fcntl.ioctl(s, 0x8914, request)
    yield


def behind_wall(arguments: list[str], python: str = sys.executable) -> dict[str, Any]:
    """Run this module's inside part below its own namespaces; returns its JSON.

    Raises:
        RuntimeError: it ended without an answer, as when a program killed the judge; with the end of its messages.
    """
    CANARIES.mkdir(exist_ok=True)
    wall = ["unshare", "--pid", "--mount", "--net", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    # Programs spare pids up to 3, which they take for the furniture of a pid namespace: the judge must come after.
    script = 'for i in 1 2 3 4 5; do /bin/true; done; "$@"; exit $?'
    command = [*wall, "sh", "-c", script, "sh", python, "-P", "-m", "tests.attacks", "--inside", *arguments]
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *_packages(python)])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=900)
    finally:
        with suppress(OSError):
            CANARIES.rmdir()
    if done.returncode != 0 or not done.stdout:
        raise RuntimeError(f"the judge ended with {done.returncode}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _packages(python: str) -> list[str]:
    """The judge's own packages, for another interpreter of the same version."""
    return [] if python == sys.executable else [path for path in sys.path if path.endswith("site-packages")]


def wall_is_possible() -> bool:
    """Whether this process may make the outer wall."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--pid", "--mount", "--net", "--ipc", "--fork", "true"], capture_output=True).returncode == 0


def _line(case: dict[str, Any], known: dict[str, str]) -> str:
    mark = "held" if not case["escapes"] else "known" if case["name"] in known else "ESCAPED"
    remarks = " ".join([case["unexpected"], *case["escapes"]])
    return f"{mark:8} {case['name']:22} {case['status']:17} {case['seconds']:6.2f} s  {remarks}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="programs, with a manifest.json if they are hostile")
    parser.add_argument("--backend", default="landlock", help="sandbox backend to test")
    parser.add_argument("--as-user", action="store_true", help=f"judge as uid {USER}, in whose name the programs then run too")
    parser.add_argument("--only", nargs="*", default=[], help="names of programs")
    parser.add_argument("--json", type=Path, help="write the cases to this file")
    parser.add_argument("--python", default=sys.executable, help="the judge's interpreter, one that --as-user can reach")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return inside(arguments)
    answer = behind_wall(sys.argv[1:], arguments.python)
    if arguments.json:
        arguments.json.write_text(json.dumps(answer, indent=1))
    known = EXPECTED_TO_ESCAPE.get(arguments.backend, {})
    print(answer["isolation"])
    for case in answer["cases"]:
        print(_line(case, known))
    bad = [c for c in answer["cases"] if c["unexpected"] or (c["escapes"] and c["name"] not in known)]
    print(f"{len(answer['cases']) - len(bad)} of {len(answer['cases'])} as expected")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
