"""Opens the strongest sandbox that this machine can prove, or refuses. Source: spec sandbox 9.

Refusing names each failed check and what to do. There is no weaker mode to fall back to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from activities.judge.sandbox import landlock
from activities.judge.sandbox.backend import LandlockSandbox, Policy
from activities.judge.sandbox.filter import FilterUnavailable, compile_filter, number_of, read_list
from activities.judge.sandbox.interpreter import ask
from activities.judge.sandbox.selftest import self_test
from activities.judge.sandbox.types import Sandbox, SandboxSettings, SandboxUnavailable

_HINT = "this kernel or container lets something through; report the lines above with the output of `uname -r`"

_CAP_DAC_READ_SEARCH, _CAP_SETGID, _CAP_SETUID = 2, 6, 7


def open_sandbox(settings: SandboxSettings | None = None) -> Sandbox:
    """A sandbox that has passed its self-test; takes about half a second.

    Raises:
        SandboxUnavailable: no backend is safe here; lists what failed and what to do.
    """
    settings = settings or SandboxSettings()
    sandbox = LandlockSandbox(_policy(settings))
    try:
        failures = self_test(sandbox)
    except OSError as error:
        sandbox.close_blocking()
        raise SandboxUnavailable(
            [f"landlock: the self-test cannot plant its canaries: {error}"],
            ["give the judge a writable temporary directory (TMPDIR) and a loopback interface"],
        ) from None
    if failures:
        sandbox.close_blocking()
        raise SandboxUnavailable([f"landlock: {failure}" for failure in failures], [_HINT])
    return sandbox


def _policy(settings: SandboxSettings) -> Policy:
    python = settings.python or Path(sys.executable)
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable(
            [f"landlock: this is {sys.platform}, not Linux"], ["run the judge in the project's Linux container"]
        )
    abi = landlock.landlock_abi()
    if abi < 1:
        raise SandboxUnavailable(
            ["landlock: the kernel has none, or did not turn it on"],
            ["boot with `landlock` in `lsm=`, or use Linux 5.13 or newer; gVisor and macOS containers have no Landlock"],
        )
    try:
        code, seccomp = compile_filter(read_list()), number_of("seccomp")
    except FilterUnavailable as error:
        raise SandboxUnavailable([f"landlock: {error}"], ["install libseccomp2 (Debian, Ubuntu) or libseccomp (others)"]) from None
    if seccomp is None:
        raise SandboxUnavailable(["landlock: this architecture has no seccomp(2)"], ["judge on x86-64 or arm64"])
    try:
        interpreter = ask(python)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(
            [f"landlock: the interpreter {python} does not run: {error}"], ["name a Python 3.11 or newer in the judge's settings"]
        ) from None
    rules = landlock.make_rules(abi, interpreter.readable)
    as_root = os.geteuid() == 0
    return Policy(
        interpreter=interpreter,
        rules=rules,
        filter=code,
        seccomp_number=seccomp,
        uid_base=settings.uid_base if as_root else None,
        reads_as_root=_must_read_as_root(rules) if as_root else False,
        pin=settings.pin,
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )


def _must_read_as_root(rules: landlock.Rules) -> bool:
    """Whether programs need CAP_DAC_READ_SEARCH to import anything, since the interpreter lies below a closed directory.

    Raises:
        SandboxUnavailable: root without the capabilities that this takes, or that a uid of its own takes.
    """
    held = _capabilities()
    if not (held >> _CAP_SETUID & 1 and held >> _CAP_SETGID & 1):
        raise SandboxUnavailable(
            ["landlock: the judge is root but cannot give programs a uid of their own (no CAP_SETUID, CAP_SETGID)"],
            ["run the judge as an ordinary user, or leave it these two capabilities"],
        )
    closed = landlock.unreachable([path for path, _ in rules.grants])
    if closed and not held >> _CAP_DAC_READ_SEARCH & 1:
        raise SandboxUnavailable(
            [f"landlock: a program's own uid cannot reach {', '.join(closed)}"],
            ["install Python and the packages where every user can read them, or open the directories above them (chmod o+rx)"],
        )
    return bool(closed)


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
