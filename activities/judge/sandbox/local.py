"""What this machine offers to the backends `landlock` and `bwrap`: their policies, or why there can be none."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from activities.judge.sandbox import landlock, wall
from activities.judge.sandbox.backend import PolicyFor
from activities.judge.sandbox.filter import Extra, FilterUnavailable, compile_filter, number_of, read_list
from activities.judge.sandbox.interpreter import Interpreter, ask
from activities.judge.sandbox.policy import EXTRAS, Policy
from activities.judge.sandbox.types import BackendName, SandboxSettings, SandboxUnavailable
from activities.judge.sandbox.wall import Wall

_CAP_DAC_READ_SEARCH, _CAP_SETGID, _CAP_SETUID = 2, 6, 7
_TASKS_PER_NAMESPACE: Final = (5, 14)
"""Linux release from which RLIMIT_NPROC counts per user namespace."""


@dataclass(frozen=True)
class _Machine:
    """What the policies of all interpreters have in common."""

    backend: BackendName
    settings: SandboxSettings
    abi: int
    """Of Landlock; 0: none."""
    filters: dict[frozenset[Extra], bytes]
    seccomp_number: int
    wall: Wall | None = None


def local_policies(settings: SandboxSettings, backend: BackendName) -> Iterator[tuple[Policy, PolicyFor]]:
    """Policies to try, the best first, each with a way to the policy of another interpreter.

    Raises:
        SandboxUnavailable: this machine lacks what the backend is made of.
    """
    machine = _look(settings, backend)
    python = settings.python or Path(sys.executable)
    for candidate in _walls() if backend == "bwrap" else [None]:
        here = replace(machine, wall=candidate)

        def policy_for(path: Path, here: _Machine = here) -> Policy:
            return _policy(here, path)

        yield policy_for(python), policy_for


def _look(settings: SandboxSettings, backend: BackendName) -> _Machine:
    abi = landlock.landlock_abi()
    if abi < 1 and backend == "landlock":
        raise SandboxUnavailable(
            ["landlock: the kernel has none, or did not turn it on"],
            ["boot with `landlock` in `lsm=`, or use Linux 5.13 or newer; gVisor and macOS containers have no Landlock"],
        )
    if os.geteuid() == 0 and not (_holds(_CAP_SETUID) and _holds(_CAP_SETGID)):
        raise SandboxUnavailable(
            [f"{backend}: the judge is root but cannot give programs a uid of their own (no CAP_SETUID, CAP_SETGID)"],
            ["run the judge as an ordinary user, or leave it these two capabilities"],
        )
    try:
        listed, number = read_list(), number_of("seccomp")
        filters = {extras: compile_filter(listed.with_extras(extras)) for extras in EXTRAS}
    except FilterUnavailable as error:
        hint = "install libseccomp2 (Debian, Ubuntu) or libseccomp (others)"
        raise SandboxUnavailable([f"{backend}: {error}"], [hint]) from None
    if number is None:
        raise SandboxUnavailable([f"{backend}: this architecture has no seccomp(2)"], ["judge on x86-64 or arm64"])
    return _Machine(backend, settings, abi, filters, number)


def _walls() -> list[Wall]:
    bwrap = wall.find_bwrap()
    if bwrap is None:
        raise SandboxUnavailable(
            ["bwrap: bubblewrap is not installed"],
            ["install the distribution's package bubblewrap (on Ubuntu with its AppArmor profile); it must be /usr/bin/bwrap"],
        )
    best = Wall(bwrap, as_root=os.geteuid() == 0)
    return [best, replace(best, fresh_proc=False)]


def _policy(machine: _Machine, python: Path) -> Policy:
    interpreter = _ask(python, machine.backend)
    paths = landlock.existing(interpreter.readable)
    as_root = os.geteuid() == 0
    reads_as_root = _must_read_as_root(paths, machine) if as_root else False
    return Policy(
        interpreter=interpreter,
        rules=_rules(machine, interpreter),
        filters=machine.filters,
        seccomp_number=machine.seccomp_number,
        uid_base=machine.settings.uid_base if as_root else None,
        reads_as_root=reads_as_root,
        pin=machine.settings.pin,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        wall=machine.wall and replace(machine.wall, reads_as_root=reads_as_root, mounts=tuple(wall.mounts_of(paths))),
        tasks_per_namespace=machine.wall is not None and not as_root and _release() >= _TASKS_PER_NAMESPACE,
    )


def _ask(python: Path, backend: BackendName) -> Interpreter:
    try:
        return ask(python)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(
            [f"{backend}: the interpreter {python} does not run: {error}"], ["name a Python 3.11 or newer in the judge's settings"]
        ) from None


def _rules(machine: _Machine, interpreter: Interpreter) -> landlock.Rules | None:
    if machine.abi < 1:
        return None
    rules = landlock.make_rules(machine.abi, interpreter.readable)
    if machine.wall is not None and not machine.wall.fresh_proc:
        rules = rules.granting([grant for grant in rules.grants if not grant[0].startswith("/proc/")])
    return rules


def _must_read_as_root(paths: list[str], machine: _Machine) -> bool:
    """Whether programs need CAP_DAC_READ_SEARCH to import anything, since the interpreter lies below a closed directory.

    Behind a wall only what is mounted counts: the directories above it are the wall's own.

    Raises:
        SandboxUnavailable: root without this capability.
    """
    closed = [path for path in paths if not _is_open(path)] if machine.wall else landlock.unreachable(paths)
    if closed and not _holds(_CAP_DAC_READ_SEARCH):
        raise SandboxUnavailable(
            [f"{machine.backend}: a program's own uid cannot reach {', '.join(closed)}"],
            ["install Python and the packages where every user can read them, or open the directories above them (chmod o+rx)"],
        )
    return bool(closed)


def _is_open(path: str) -> bool:
    mode = os.stat(path).st_mode
    wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
    return mode & wanted == wanted


def _holds(capability: int) -> bool:
    return bool(_capabilities() >> capability & 1)


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _release() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
