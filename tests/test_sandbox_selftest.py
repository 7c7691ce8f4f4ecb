"""The self-test must notice each layer that is missing, and the sandbox must refuse to open without it."""

from __future__ import annotations

import os
import struct
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from activities.judge.sandbox import landlock, policy
from activities.judge.sandbox.backend import LocalSandbox
from activities.judge.sandbox.filter import PLACEHOLDERS, compile_filter, read_list
from activities.judge.sandbox.policy import EXTRAS, Policy
from activities.judge.sandbox.selftest import self_test
from tests.sandboxes import BACKENDS, opened

ALLOW_EVERYTHING = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
"""A filter of one instruction: return ALLOW."""


def failures_of(policy: Policy) -> str:
    sandbox = LocalSandbox(policy)
    try:
        return "\n".join(self_test(sandbox))
    finally:
        sandbox.close_blocking()


def policy_of(backend: str) -> Policy:
    with opened(backend) as sandbox:
        assert isinstance(sandbox, LocalSandbox)
        return sandbox.policy


@pytest.fixture(scope="module")
def alone() -> Policy:
    """Of the backend landlock: every layer shows when it is missing."""
    return policy_of("landlock")


@pytest.fixture(scope="module")
def walled() -> Policy:
    return policy_of("bwrap")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_policy_passes(backend: str) -> None:
    assert failures_of(policy_of(backend)) == ""


@pytest.mark.parametrize("abi", [1, 3, 6])
def test_older_landlocks_pass(abi: int, alone: Policy) -> None:
    assert alone.rules is not None
    known = landlock.make_rules(abi, alone.interpreter.readable)
    assert failures_of(replace(alone, rules=known)) == ""


def test_the_wall_passes_without_landlock_and_without_a_proc_of_its_own(walled: Policy) -> None:
    assert failures_of(replace(walled, rules=None)) == ""
    assert walled.wall is not None
    assert walled.rules is not None
    without = [grant for grant in walled.rules.grants if not grant[0].startswith("/proc/")]
    bare = replace(walled, rules=walled.rules.granting(without), wall=replace(walled.wall, fresh_proc=False))
    assert failures_of(bare) == ""


def test_a_filter_that_lets_everything_through_is_noticed(alone: Policy) -> None:
    failures = failures_of(replace(alone, filters=dict.fromkeys(EXTRAS, ALLOW_EVERYTHING)))
    for attempt in ("fork", "signal the judge through F_SETOWN", "set its own limits", "make a namespace"):
        assert f"a program can {attempt}" in failures
    assert "a program can read a file" not in failures  # the other layers still hold


def test_behind_a_wall_a_filter_is_needed_all_the_same(walled: Policy) -> None:
    failures = failures_of(replace(walled, filters=dict.fromkeys(EXTRAS, ALLOW_EVERYTHING), rules=None))
    for attempt in ("open a vsock", "set its own limits", "use userfaultfd", "fork"):
        assert f"a program can {attempt}" in failures
    assert "a program can read a file" not in failures


def test_a_hole_in_the_filter_of_several_processes_is_noticed(walled: Policy) -> None:
    several = frozenset(("write", "processes", "talk"))
    filters = {**walled.filters, several: ALLOW_EVERYTHING}  # type: ignore[dict-item]  # the names are literals
    failures = failures_of(replace(walled, filters=filters))
    assert "with several processes, a program can set its own limits" in failures


def test_a_wrong_process_id_in_the_filter_is_noticed(alone: Policy) -> None:
    # kill() allowed for every process: a rule compiled for "any" instead of "own".
    rules = read_list()
    opened = [rule for rule in rules.arguments if "kill" not in rule.calls]
    allow = {**rules.allow, "loose": ["kill", "tgkill"]}
    loose = compile_filter(rules.model_copy(update={"arguments": opened, "allow": allow}))
    assert alone.rules is not None
    scopeless = replace(alone.rules, scopes=0)
    failures = failures_of(replace(alone, filters=dict.fromkeys(EXTRAS, loose), rules=scopeless, uid_base=None))
    assert "a program can signal the judge" in failures


def test_landlock_rules_that_grant_the_root_are_noticed(alone: Policy) -> None:
    assert alone.rules is not None
    everything = replace(alone.rules, grants=(*alone.rules.grants, ("/", alone.rules.files)))
    failures = failures_of(replace(alone, rules=everything))
    for attempt in ("read a file", "list a directory", "write a file", "create a file"):
        assert f"a program can {attempt}" in failures
    assert "fork" not in failures  # the other layers still hold


def test_a_mount_too_many_is_noticed(walled: Policy) -> None:
    assert walled.wall is not None
    open_wall = replace(walled.wall, mounts=(*walled.wall.mounts, "--bind", "/tmp", "/tmp"))
    failures = failures_of(replace(walled, wall=open_wall, rules=None))
    for attempt in ("read a file", "write a file", "see that a file exists"):
        assert f"a program can {attempt}" in failures


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user cannot be root in the sandbox")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_judge_that_stays_root_is_noticed(backend: str) -> None:
    assert "a program can be root" in failures_of(replace(policy_of(backend), uid_base=None))


def test_a_layer_that_cannot_be_applied_is_a_sandbox_error_and_refused(alone: Policy) -> None:
    assert alone.rules is not None
    broken = replace(alone.rules, grants=(("/nonexistent", 4), *alone.rules.grants))
    failures = failures_of(replace(alone, rules=broken))
    assert "sandbox_error" in failures
    assert "/nonexistent" in failures


def test_a_wall_that_cannot_be_made_is_a_sandbox_error_in_its_own_words(walled: Policy) -> None:
    assert walled.wall is not None
    broken = replace(walled.wall, mounts=("--ro-bind", "/nonexistent", "/nonexistent", *walled.wall.mounts))
    failures = failures_of(replace(walled, wall=broken))
    assert "sandbox_error" in failures
    assert "bwrap: Can't find source path /nonexistent" in failures


def test_every_placeholder_in_a_filter_is_one_that_the_child_replaces(alone: Policy) -> None:
    halves = {half for pair in PLACEHOLDERS.values() for half in pair}
    for extras, code in alone.filters.items():
        constants = {struct.unpack("I", code[at + 4 : at + 8])[0] for at in range(0, len(code), 8)}
        assert {c for c in constants if c >> 8 == 0x7ABCDE} <= halves
        assert len(constants & halves) == (7 if "become" in extras else 0 if "talk" in extras else 1)


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
    assert policy.tasks_of(os.getuid()) >= 1
