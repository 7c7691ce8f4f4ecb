"""The self-test must notice each layer that is missing, and the sandbox must refuse to open without it."""

from __future__ import annotations

import os
import struct
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from activities.judge.sandbox import SandboxSettings, SandboxUnavailable, backend, landlock, open_sandbox, opening
from activities.judge.sandbox.backend import LandlockSandbox, Policy
from activities.judge.sandbox.filter import compile_filter, read_list
from activities.judge.sandbox.selftest import self_test

ALLOW_EVERYTHING = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
"""A filter of one instruction: return ALLOW."""


def failures_of(policy: Policy) -> str:
    sandbox = LandlockSandbox(policy)
    try:
        return "\n".join(self_test(sandbox))
    finally:
        sandbox.close_blocking()


@pytest.fixture(scope="module")
def policy() -> Policy:
    with open_sandbox() as sandbox:
        assert isinstance(sandbox, LandlockSandbox)
        return sandbox.policy


def test_the_whole_policy_passes(policy: Policy) -> None:
    assert failures_of(policy) == ""


def test_a_filter_that_lets_everything_through_is_noticed(policy: Policy) -> None:
    failures = failures_of(replace(policy, filter=ALLOW_EVERYTHING))
    for attempt in ("fork", "signal the judge through F_SETOWN", "set its own limits", "make a namespace"):
        assert f"a program can {attempt}" in failures
    assert "a program can read a file" not in failures  # the other layers still hold


def test_a_wrong_process_id_in_the_filter_is_noticed(policy: Policy) -> None:
    # kill() allowed for every process: a rule compiled for "any" instead of "own".
    rules = read_list()
    opened = [rule for rule in rules.arguments if "kill" not in rule.calls]
    allow = {**rules.allow, "loose": ["kill", "tgkill"]}
    loose = compile_filter(rules.model_copy(update={"arguments": opened, "allow": allow}))
    scopeless = replace(policy.rules, scopes=0)
    failures = failures_of(replace(policy, filter=loose, rules=scopeless, uid_base=None))
    assert "a program can signal the judge" in failures


def test_landlock_rules_that_grant_the_root_are_noticed(policy: Policy) -> None:
    everything = replace(policy.rules, grants=(*policy.rules.grants, ("/", policy.rules.files)))
    failures = failures_of(replace(policy, rules=everything))
    for attempt in ("read a file", "list a directory", "write a file", "create a file"):
        assert f"a program can {attempt}" in failures
    assert "fork" not in failures  # the other layers still hold


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user cannot be root in the sandbox")
def test_a_judge_that_stays_root_is_noticed(policy: Policy) -> None:
    assert "a program can be root" in failures_of(replace(policy, uid_base=None))


def test_a_layer_that_cannot_be_applied_is_a_sandbox_error_and_refused(policy: Policy) -> None:
    broken = replace(policy.rules, grants=(("/nonexistent", 4), *policy.rules.grants))
    failures = failures_of(replace(policy, rules=broken))
    assert "sandbox_error" in failures
    assert "/nonexistent" in failures


def test_opening_refuses_with_report_and_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "self_test", lambda sandbox: ["a program can fork"])
    with pytest.raises(SandboxUnavailable, match="a program can fork") as refusal:
        open_sandbox()
    assert "what to do" in str(refusal.value)


def test_a_kernel_without_landlock_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "landlock_abi", lambda: 0)
    with pytest.raises(SandboxUnavailable, match="lsm="):
        open_sandbox()


def test_an_interpreter_that_does_not_run_is_named() -> None:
    with pytest.raises(SandboxUnavailable, match="/nonexistent/python"):
        open_sandbox(SandboxSettings(python=Path("/nonexistent/python")))


def test_a_root_without_capabilities_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(opening, "_capabilities", lambda: 0)
    with pytest.raises(SandboxUnavailable, match="CAP_SETUID"):
        open_sandbox()


def test_an_interpreter_that_programs_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(opening, "_capabilities", lambda: 1 << 6 | 1 << 7)
    monkeypatch.setattr(landlock, "unreachable", lambda paths: [sys.prefix])
    with pytest.raises(SandboxUnavailable, match="chmod"):
        open_sandbox()


def test_permission_bits_of_the_whole_path_count() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        closed = Path(folder)
        inner = closed / "inner"
        inner.mkdir(mode=0o755)
        closed.chmod(0o755)
        assert landlock.unreachable([str(inner)]) == []
        closed.chmod(0o700)
        assert landlock.unreachable([str(inner)]) == [str(inner)]


@pytest.mark.parametrize(("abi", "bits"), [(1, 13), (2, 14), (3, 15), (4, 15), (5, 16), (7, 16), (9, 16)])
def test_each_abi_handles_all_rights_that_it_knows(abi: int, bits: int) -> None:
    rules = landlock.make_rules(abi, [sys.prefix])
    assert rules.files == (1 << bits) - 1
    assert (rules.network != 0, rules.scopes != 0) == (abi >= 4, abi >= 6)
    writable = [path for path, rights in rules.grants if rights & ~(1 << 2 | 1 << 3)]
    assert writable == ["/dev/null"]


def test_an_ordinary_users_tasks_are_counted_by_thread() -> None:
    assert backend.tasks_of(os.getuid()) >= 1
