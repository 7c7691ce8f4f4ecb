"""Opens the strongest sandbox that this machine can prove, or refuses. Source: spec sandbox 9.

Refusing names each failed check and what to do. There is no weaker mode to fall back to: `unsafe` must be asked for twice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from activities.judge.sandbox.backend import LocalSandbox
from activities.judge.sandbox.local import local_policies
from activities.judge.sandbox.selftest import self_test
from activities.judge.sandbox.types import BackendName, Sandbox, SandboxSettings, SandboxUnavailable
from activities.judge.sandbox.unsafe import UnsafeSandbox

_HINT = "this kernel or container lets something through; report the lines above with the output of `uname -r`"


@dataclass(frozen=True)
class Report:
    """What opening one backend came to."""

    backend: str
    refusal: SandboxUnavailable | None
    isolation: str = ""
    """Of the opened sandbox."""


def open_sandbox(settings: SandboxSettings | None = None) -> Sandbox:
    """A sandbox that has passed its self-test; takes about a second.

    Raises:
        SandboxUnavailable: no backend is safe here; lists what failed and what to do.
    """
    settings = settings or SandboxSettings()
    if settings.backend != "auto":
        return _OPENERS[settings.backend](settings)
    refusals = []
    for backend in AUTO:
        try:
            return _OPENERS[backend](settings)
        except SandboxUnavailable as refusal:
            refusals.append(refusal)
    raise SandboxUnavailable([line for r in refusals for line in r.report], [line for r in refusals for line in r.hints])


def examine(settings: SandboxSettings, backends: tuple[BackendName, ...]) -> list[Report]:
    """Open each backend, and close it again."""
    found = []
    for backend in backends:
        try:
            with _OPENERS[backend](settings) as sandbox:
                found.append(Report(backend, None, str(sandbox.isolation)))
        except SandboxUnavailable as refusal:
            found.append(Report(backend, refusal))
    return found


def _open_local(settings: SandboxSettings, backend: BackendName) -> Sandbox:
    if not sys.platform.startswith("linux"):
        hint = "run the judge in the project's Linux container, or on a Linux host (backend remote)"
        raise SandboxUnavailable([f"{backend}: this is {sys.platform}, not Linux"], [hint])
    refusal: SandboxUnavailable | None = None
    for policy, policy_for in local_policies(settings, backend):
        sandbox = LocalSandbox(policy, policy_for)
        try:
            failures = self_test(sandbox)
        except OSError as error:
            sandbox.close_blocking()
            raise SandboxUnavailable(
                [f"{backend}: the self-test cannot plant its canaries: {error}"],
                ["give the judge a writable temporary directory (TMPDIR) and a loopback interface"],
            ) from None
        if not failures:
            return sandbox
        sandbox.close_blocking()
        refusal = refusal or SandboxUnavailable([f"{backend}: {failure}" for failure in failures], hints_for(failures))
    assert refusal is not None
    raise refusal


def hints_for(failures: list[str]) -> list[str]:
    """What to do about a failed self-test."""
    text = " ".join(failures)
    if "bwrap:" not in text:
        return [_HINT]
    hints = [
        "bubblewrap needs user namespaces: on Ubuntu install the distribution's bubblewrap, whose AppArmor profile allows them for "
        "/usr/bin/bwrap; elsewhere look at kernel.unprivileged_userns_clone and user.max_user_namespaces"
    ]
    if os.path.exists("/.dockerenv") or "Operation not permitted" in text or "Permission denied" in text:
        hints.append("in a container the runtime's seccomp or AppArmor profile denies them; the backend landlock needs none")
    return hints


def _open_bwrap(settings: SandboxSettings) -> Sandbox:
    return _open_local(settings, "bwrap")


def _open_landlock(settings: SandboxSettings) -> Sandbox:
    return _open_local(settings, "landlock")


def _open_remote(settings: SandboxSettings) -> Sandbox:
    """A sandbox service on another host; its module is imported only when it is wanted."""
    if not settings.remote_url:
        hint = "set TTTD_JUDGE_REMOTE_URL to a service started with `tttd sandbox serve`"
        raise SandboxUnavailable(["remote: no address of a sandbox service is set"], [hint])
    from activities.judge.sandbox.remote import open_remote

    return open_remote(settings)


def _open_unsafe(settings: SandboxSettings) -> Sandbox:
    if not settings.accept_unsafe:
        raise SandboxUnavailable(
            ["unsafe: programs would run with all of the judge's rights, and that was not accepted"],
            ["use a Linux host or container; or, with programs that you have read yourself, set TTTD_JUDGE_ACCEPT_UNSAFE=true"],
        )
    return UnsafeSandbox(settings.python or Path(sys.executable))


_OPENERS: dict[BackendName, Callable[[SandboxSettings], Sandbox]] = {
    "bwrap": _open_bwrap,
    "landlock": _open_landlock,
    "remote": _open_remote,
    "unsafe": _open_unsafe,
}

AUTO: tuple[BackendName, ...] = ("bwrap", "landlock")
"""Strongest first."""
