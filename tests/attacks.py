"""Runs folders of hostile and legitimate programs through the real sandbox, against live canaries, and says what got out.

    python -m tests.attacks DIR [--backend bwrap] [--processes 16] [--as-user] [--only NAME ...] [--json FILE]

DIR holds programs (with a manifest.json if they are hostile), or folders `programs`, `legit`, `cpp` of them and an outputs.json of
answers and the verdict that each must get. Exit code 1: something was not as expected. The programs run in the sandbox as
ever; around it stands an outer wall of their own pid, mount, network and ipc namespaces, so that a sandbox that fails harms nothing
(``tests/data/attacks/README.md``). That takes root.
``--as-user`` judges as an ordinary user, so that judge and program share one uid: the worst case.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from activities.judge.sandbox import Limits, Outcome, Program, Sandbox, SandboxSettings, SandboxUnavailable, Status, open_sandbox
from tests.attack_canaries import CANARIES, SECRET, Canaries, litter, strangers
from tests.attack_folders import SEVERAL, Entry, entries_of, parts_of
from tests.attack_outputs import Answer, answers_of, decide
from tests.legit_environment import legit_python, ordinary_python, packages

FIRST_UID = 62_000
"""Of the programs when root judges; judges that run elsewhere on this machine use others."""
USER = FIRST_UID + 345


def _uids() -> range:
    """In whose name programs run."""
    return range(FIRST_UID, FIRST_UID + 256) if os.getuid() == 0 else range(os.getuid(), os.getuid() + 1)


ATTACK_LIMITS = Limits(wall_seconds=2, grace_seconds=0.5, memory_bytes=1 << 30, result_bytes=2 << 20, log_bytes=8 << 20, threads=64)
LEGIT_LIMITS = Limits(wall_seconds=120, memory_bytes=4 << 30, cores=2)

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

    part: str
    name: str
    status: str = ""
    reason: str = ""
    seconds: float = 0.0
    report: Any = None
    escapes: list[str] = field(default_factory=list)
    """What got out, in words; empty if contained."""
    known: str = ""
    """Why this backend is known not to contain it."""
    unexpected: str = ""
    """Set if the end is not one that the manifest allows."""
    stderr_tail: str = ""

    @property
    def bad(self) -> bool:
        return bool(self.unexpected or (self.escapes and not self.known))


async def attack(sandbox: Sandbox, canaries: Canaries, entry: Entry, limits: Limits) -> Case:
    """Run one hostile program and look for whatever it did."""
    before = litter(_uids())
    began = time.monotonic()
    outcome = await sandbox.run(_program(entry), limits)
    case = _case(entry, outcome, time.monotonic() - began)
    case.known = entry.known.get(sandbox.isolation.backend, "")
    if isinstance(case.report, dict) and case.report.get("escaped"):
        case.escapes.append(f"reports {json.dumps(case.report)[:200]}")
    if entry.escaped_if and re.fullmatch(entry.escaped_if, str(case.report).strip()):
        case.escapes.append(f"prints {str(case.report)[:200]}")
    if SECRET in json.dumps(asdict(case)) or SECRET in outcome.stdout_tail + outcome.stderr_tail:
        case.escapes.append("read a secret")
    case.escapes += canaries.harm()
    case.escapes += [f"left {path}" for path in sorted(litter(_uids()) - before)]
    case.escapes += [f"left process {pid}" for pid in sorted(strangers())]
    # A compiler has a limit of its own.
    if entry.language == "python" and case.seconds > limits.kill_seconds + 5:
        case.escapes.append(f"held its slot for {case.seconds:.1f} s of {limits.kill_seconds} s")
    if any(not (c.isprintable() or c in "\n\t") for c in outcome.stdout_tail + outcome.stderr_tail + outcome.reason):
        case.escapes.append("control characters in the log")
    if outcome.status is Status.SANDBOX_ERROR or (entry.expect is not None and outcome.status not in entry.expect):
        case.unexpected = f"ended as {outcome.status} ({outcome.reason}), allowed: {entry.expect or 'any result'}"
    elif case.known and not case.escapes:
        case.unexpected = f"no longer escapes, take it out of the manifest: {case.known}"
    return case


async def serve(sandbox: Sandbox, entry: Entry, python: Path | None) -> Case:
    """Run one legitimate program: it must work, unless the backend has no processes and it needs some."""
    several = min(SEVERAL, sandbox.isolation.processes)
    limits = replace(LEGIT_LIMITS, processes=several)
    began = time.monotonic()
    outcome = await sandbox.run(replace(_program(entry), python=python), limits)
    case = _case(entry, outcome, time.monotonic() - began)
    refused = sandbox.isolation.backend in entry.refused
    wanted = {Status.CRASHED} if refused and not entry.perhaps_refused else {Status.CRASHED, Status.OK} if refused else {Status.OK}
    if outcome.status not in wanted:
        case.unexpected = f"ended as {outcome.status} ({outcome.reason}), wanted {' or '.join(sorted(wanted))}"
    return case


def _program(entry: Entry) -> Program:
    source = entry.path.read_text()
    if entry.language == "cpp17":
        return Program(source, language="cpp17")
    return Program(source + _ADAPTER, entry="_reported")


def _case(entry: Entry, outcome: Outcome, seconds: float) -> Case:
    case = Case(entry.path.parent.name, entry.name, str(outcome.status), outcome.reason, round(seconds, 3))
    case.stderr_tail = outcome.stderr_tail[-300:]
    if outcome.result is not None:
        try:
            case.report = json.loads(outcome.result)
        except ValueError:
            case.report = outcome.result.decode("utf-8", "backslashreplace")
        with suppress(TypeError, ValueError):
            case.report = json.loads(bytes(case.report))
    return case


async def run_all(arguments: argparse.Namespace, sandbox: Sandbox, owner: int) -> list[Case]:
    """Every program that is asked for, one after the other."""
    canaries = Canaries(owner)
    limits = replace(ATTACK_LIMITS, processes=arguments.processes)
    cases = []
    entries = selected(arguments.folder, arguments.only)
    if any(entry.language == "cpp17" for entry in entries):  # makes the judge's own directory of binaries, which is no litter
        await sandbox.run(Program("int main() {}", language="cpp17"), limits)
    for entry in entries:
        if entry.kind == "legit":
            cases.append(await serve(sandbox, entry, arguments.environment))
        else:
            cases.append(await attack(sandbox, canaries, entry, limits))
    for answer in answers_of(arguments.folder, arguments.only):
        cases.append(await judged(sandbox, canaries, answer, arguments.environment))
    return cases


async def judged(sandbox: Sandbox, canaries: Canaries, answer: Answer, python: Path | None) -> Case:
    """One answer of outputs.json."""
    before, began = litter(_uids()), time.monotonic()
    outcome, said, wrong = await decide(sandbox, answer, python)
    verdict, _, reason = said.partition(" ")
    seconds = round(time.monotonic() - began, 3)
    case = Case("outputs", f"{answer.task}: {answer.name}", verdict, f"{outcome.status}; {reason}", seconds)
    case.escapes = [*canaries.harm(), *(f"left {path}" for path in sorted(litter(_uids()) - before))]
    case.escapes += [f"left process {pid}" for pid in sorted(strangers())]
    case.unexpected = wrong
    return case


def selected(folder: Path, only: list[str]) -> list[Entry]:
    return [entry for part in parts_of(folder) for entry in entries_of(part) if not only or entry.name in only]


def inside(arguments: argparse.Namespace) -> int:
    """Behind the outer wall: plant canaries, open the sandbox, run."""
    owner = USER if arguments.as_user else 0
    _prepare_namespace()
    if arguments.as_user:
        os.chown(CANARIES, USER, USER)
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    # Alone on its cores, so that one core means one core.
    try:
        sandbox = open_sandbox(SandboxSettings(backend=arguments.backend, uid_base=FIRST_UID, pin=True))
    except SandboxUnavailable as error:
        sys.exit(str(error))
    cases = asyncio.run(run_all(arguments, sandbox, owner))
    sandbox.close_blocking()
    result = {"isolation": str(sandbox.isolation), "cases": [{**asdict(case), "bad": case.bad} for case in cases]}
    sys.stdout.write(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # listeners' threads are still waiting


def _prepare_namespace() -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "canary", str(CANARIES)], check=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # a new network namespace has its loopback down
        request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)
        fcntl.ioctl(s, 0x8914, request)


def behind_wall(arguments: list[str], as_user: bool = False) -> dict[str, Any]:
    """Run this module's inside part below its own namespaces; returns its JSON.

    Raises:
        RuntimeError: it ended without an answer, as when a program killed the judge; with the end of its messages.
    """
    python = ordinary_python() if as_user else sys.executable
    if python is None:
        raise RuntimeError("no Python of this version that an ordinary user can start")
    wall = ["unshare", "--pid", "--mount", "--net", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    # Programs spare pids up to 3, which they take for the furniture of a pid namespace: the judge must come after.
    script = 'for i in 1 2 3 4 5; do /bin/true; done; "$@"; exit $?'
    command = [*wall, "sh", "-c", script, "sh", python, "-P", "-B", "-m", "tests.attacks", "--inside", *arguments]
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *packages()])}
    with _canary_folder():
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    if done.returncode != 0 or not done.stdout:
        raise RuntimeError(f"the judge ended with {done.returncode}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@contextmanager
def _canary_folder() -> Iterator[None]:
    """An empty folder to mount on. Two of these at once, each behind its own wall, share it: removing it would undo both mounts."""
    while True:
        CANARIES.mkdir(exist_ok=True)
        held = os.open(CANARIES, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_SH)
        if CANARIES.exists() and os.path.samestat(os.fstat(held), CANARIES.stat()):
            break
        os.close(held)  # the last one's end came between
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            CANARIES.rmdir()
        os.close(held)


def wall_is_possible() -> bool:
    """Whether this process may make the outer wall."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--pid", "--mount", "--net", "--ipc", "--fork", "true"], capture_output=True).returncode == 0


def _line(case: dict[str, Any]) -> str:
    mark = "held" if not case["escapes"] else "known" if case["known"] else "ESCAPED"
    remarks = " ".join([case["unexpected"], *case["escapes"]])
    return f"{mark:8} {case['part']:9} {case['name']:22} {case['status']:17} {case['seconds']:6.2f} s  {remarks}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, help="programs, or a folder with the parts programs, legit and cpp")
    made.add_argument("--backend", default="auto", choices=["auto", "bwrap", "landlock"], help="sandbox backend to test")
    made.add_argument("--as-user", action="store_true", help=f"judge as uid {USER}, in whose name the programs then run too")
    made.add_argument("--processes", type=int, default=1, help="how many a hostile program may have (bwrap only)")
    made.add_argument("--only", nargs="*", default=[], help="names of programs")
    made.add_argument("--json", type=Path, help="write the cases to this file")
    made.add_argument("--environment", type=Path, help="interpreter of the legitimate programs; one is built by default")
    made.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return made


def main() -> int:
    arguments = parser().parse_args()
    if arguments.inside:
        return inside(arguments)
    if not wall_is_possible():
        sys.exit("hostile programs run behind namespaces only, which take root and the command `unshare`")
    passed = sys.argv[1:]
    needs_packages = any(entry.kind == "legit" for entry in selected(arguments.folder, arguments.only))
    if arguments.environment is None and (needs_packages or answers_of(arguments.folder, arguments.only)):
        passed += ["--environment", str(legit_python())]
    answer = behind_wall(passed, arguments.as_user)
    if arguments.json:
        arguments.json.write_text(json.dumps(answer, indent=1))
    print(answer["isolation"])
    for case in answer["cases"]:
        print(_line(case))
    bad = [case for case in answer["cases"] if case["bad"]]
    print(f"{len(answer['cases']) - len(bad)} of {len(answer['cases'])} as expected")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
