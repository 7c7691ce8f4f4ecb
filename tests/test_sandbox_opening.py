"""Which backend is opened, and what a refusal says; the backend that contains nothing, and how it is marked."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from activities.judge.sandbox import (
    Limits,
    Program,
    SandboxSettings,
    SandboxUnavailable,
    Status,
    examine,
    landlock,
    local,
    open_sandbox,
    opening,
    wall,
)
from tests.legit_environment import ROOT, ordinary_python, packages
from tests.sandboxes import opened, value

PROGRAM = Program("def run(): return 1")


def test_auto_takes_the_strongest(monkeypatch: pytest.MonkeyPatch) -> None:
    opened("bwrap").close_blocking()
    with open_sandbox() as sandbox:
        assert sandbox.isolation.backend == "bwrap"
    monkeypatch.setattr(wall, "find_bwrap", lambda: None)
    with open_sandbox() as sandbox:
        assert sandbox.isolation.backend == "landlock"


def test_auto_goes_on_when_a_self_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = opening.self_test
    monkeypatch.setattr(opening, "self_test", lambda s: ["a program can fork"] if s.policy.wall else real(s))
    with open_sandbox() as sandbox:
        assert sandbox.isolation.backend == "landlock"


def test_auto_refuses_with_the_report_and_the_hints_of_each_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall, "find_bwrap", lambda: None)
    monkeypatch.setattr(landlock, "landlock_abi", lambda: 0)
    with pytest.raises(SandboxUnavailable) as refusal:
        open_sandbox()
    text = str(refusal.value)
    assert "bwrap: bubblewrap is not installed" in text
    assert "landlock: the kernel has none" in text
    assert "AppArmor" in text
    assert "lsm=" in text


def test_a_named_backend_is_that_one_or_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall, "find_bwrap", lambda: None)
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed"):
        open_sandbox(SandboxSettings(backend="bwrap"))


def test_opening_refuses_with_report_and_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "self_test", lambda sandbox: ["a program can fork"])
    with pytest.raises(SandboxUnavailable, match="a program can fork") as refusal:
        open_sandbox()
    assert "what to do" in str(refusal.value)


def test_a_wall_without_a_proc_of_its_own_is_the_second_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    opened("bwrap").close_blocking()
    real = opening.self_test
    refusal = "the probe ended as sandbox_error (...): bwrap: Can't mount proc on /newroot/proc: Operation not permitted"
    monkeypatch.setattr(opening, "self_test", lambda s: [refusal] if s.policy.wall.fresh_proc else real(s))
    with open_sandbox(SandboxSettings(backend="bwrap")) as sandbox:
        assert not sandbox.policy.wall.fresh_proc  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "message", ["bwrap: setting up uid map: Permission denied", "bwrap: No permissions to create a new namespace"]
)
def test_a_machine_that_denies_namespaces_gets_a_hint(message: str) -> None:
    hints = " ".join(opening.hints_for([f"the probe ended as sandbox_error: {message}"]))
    assert "AppArmor" in hints
    assert "user.max_user_namespaces" in hints


def test_a_kernel_without_landlock_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "landlock_abi", lambda: 0)
    with pytest.raises(SandboxUnavailable, match="lsm="):
        open_sandbox(SandboxSettings(backend="landlock"))


def test_an_interpreter_that_does_not_run_is_named() -> None:
    with pytest.raises(SandboxUnavailable, match="/nonexistent/python"):
        open_sandbox(SandboxSettings(python=Path("/nonexistent/python")))


def test_a_root_without_capabilities_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(local, "_capabilities", lambda: 0)
    with pytest.raises(SandboxUnavailable, match="CAP_SETUID"):
        open_sandbox()


def test_an_interpreter_that_programs_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(local, "_capabilities", lambda: 1 << 6 | 1 << 7)
    monkeypatch.setattr(landlock, "unreachable", lambda paths: [sys.prefix])
    with pytest.raises(SandboxUnavailable, match="chmod"):
        open_sandbox(SandboxSettings(backend="landlock"))


def test_each_backend_is_examined_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall, "find_bwrap", lambda: None)
    first, second, third = examine(SandboxSettings(), ("bwrap", "landlock", "unsafe"))
    assert first.refusal is not None
    assert second.refusal is None
    assert second.isolation.startswith("landlock abi")
    assert third.refusal is not None


def test_strangers_are_adopted_only_while_a_wall_needs_it() -> None:
    def adopts() -> int:
        answer = ctypes.c_int(-1)
        assert ctypes.CDLL(None).prctl(37, ctypes.byref(answer), 0, 0, 0) == 0  # PR_GET_CHILD_SUBREAPER
        return answer.value

    before = adopts()
    first, second = opened("bwrap"), opened("bwrap")
    first.close_blocking()
    assert adopts() == 1
    second.close_blocking()
    second.close_blocking()
    assert adopts() == before


def test_a_remote_backend_needs_an_address() -> None:
    with pytest.raises(SandboxUnavailable, match="no address"):
        open_sandbox(SandboxSettings(backend="remote"))


def test_nothing_unsafe_happens_unless_it_is_asked_for_twice() -> None:
    with pytest.raises(SandboxUnavailable, match="not accepted"):
        open_sandbox(SandboxSettings(backend="unsafe"))
    with pytest.warns(RuntimeWarning, match="isolation none"):
        open_sandbox(SandboxSettings(backend="unsafe", accept_unsafe=True)).close_blocking()


async def test_unsafe_outcomes_are_marked() -> None:
    with pytest.warns(RuntimeWarning), open_sandbox(SandboxSettings(backend="unsafe", accept_unsafe=True)) as sandbox:
        outcome = await sandbox.run(PROGRAM, Limits(wall_seconds=30))
    assert value(outcome) == 1
    assert outcome.isolation.backend == "unsafe"
    assert str(outcome.isolation) == "unsafe: isolation none"


@pytest.mark.filterwarnings("ignore:the sandbox backend is `unsafe`")
async def test_unsafe_runs_have_the_same_statuses() -> None:
    limits = Limits(wall_seconds=1, grace_seconds=0.5, memory_bytes=256 << 20, result_bytes=1 << 20, log_bytes=1 << 20)
    ends: list[tuple[str, Any]] = [
        ("def run(): return [TEN, 0.5]", Status.OK),
        ("def run(): return 1 / 0", Status.CRASHED),
        ("import os\ndef run(): os.abort()", Status.CRASHED),
        ("def run(): return 'text'", Status.INVALID_OUTPUT),
        ("def run(): return bytearray(1 << 40)", Status.MEMORY),
        ("def run(): return [0.5] * (1 << 20)", Status.OUTPUT_TOO_LARGE),
        ("import os\ndef run():\n    while True: os.write(2, b'1' * 65536)", Status.OUTPUT_TOO_LARGE),
        ("import time\ndef run(): time.sleep(60)", Status.TIMEOUT),
    ]
    with open_sandbox(SandboxSettings(backend="unsafe", accept_unsafe=True)) as sandbox:
        for source, status in ends:
            outcome = await sandbox.run(Program(source, helper="TEN = 10"), limits)
            assert outcome.status is status, (source, outcome)
        failing = await sandbox.run(Program("def run(): return 1", helper="1 / 0"), limits)
        assert failing.status is Status.SANDBOX_ERROR
        fed = await sandbox.run(Program("import sys\ndef run(): return len(sys.stdin.read())", stdin=b"x" * 300_000), limits)
        assert value(fed) == 300_000


def judge_elsewhere(script: str) -> str:
    """What an ordinary user's judge says that is started by a shell script; `$JUDGE` stands for the command."""
    python = ordinary_python()
    if os.geteuid() != 0 or python is None or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("takes root, unshare, setpriv, and a Python that another user can start")
    code = "from activities.judge.sandbox import open_sandbox; s = open_sandbox(); print(s.isolation.backend, s.policy.wall)"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(ROOT), *packages()])}
    command = ["sh", "-c", script.replace("$JUDGE", f"{python} -B -c '{code}'")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_where_namespaces_are_used_up_landlock_is_taken() -> None:
    opened("landlock").close_blocking()
    drop, back = "setpriv --reuid 64100 --regid 64100 --clear-groups", "setpriv --inh-caps=-all --ambient-caps=-all"
    inner = f'echo 0 > /proc/sys/user/max_user_namespaces && exec {back} "$@"'
    script = f"exec {drop} unshare --user --map-user=1000 --map-group=1000 --keep-caps sh -c '{inner}' sh $JUDGE"
    assert judge_elsewhere(script).startswith("landlock None")


def test_where_parts_of_proc_are_masked_the_wall_has_none() -> None:
    opened("bwrap").close_blocking()
    drop = "setpriv --reuid 64100 --regid 64100 --clear-groups"
    script = f"exec unshare --mount sh -c 'mount --bind /dev/null /proc/filesystems && exec {drop} \"$@\"' sh $JUDGE"
    said = judge_elsewhere(script)
    assert said.startswith("bwrap")
    assert "fresh_proc=False" in said
