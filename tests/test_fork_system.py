"""Forks, retention and bundles on the whole system: real engine, trainer and judge, in separate processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.blobs import Blobs, LocalStore
from activities.records import Checkpoint, ForkOrigin, StepCommit
from activities.run_store import RunStore
from console.storage.checking import check_run
from console.storage.retention import kept_steps, read_history
from tests.system import SHORT_TIMEOUTS, System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUEST = {"task": "circle_packing_26", "profile": "repeatable", "seed": 7, "timeouts": SHORT_TIMEOUTS, "search": {"steps": 3}}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("fork") / "home")
    system._environment["TEMPORAL_ADDRESS"] = f"127.0.0.1:{system.settings.temporal_port}"
    system.start_all()
    yield system
    system.stop()


@pytest.fixture(scope="module")
async def original(system: System) -> str:
    """Name of a run with three steps."""
    assert (await system.run("original", REQUEST)).step == 3
    return "original"


def forks(step: int, **changes: object) -> dict[str, object]:
    return {**REQUEST, "fork": {"run": "original", "step": step}, **changes}


def commit_of(system: System, run: str, step: int) -> StepCommit:
    commit = RunStore(system.blobs, run).read(StepCommit, f"runs/{run}/steps/{step:06d}/commit")
    assert commit is not None
    return commit


async def test_a_fork_started_by_the_temporal_cli_goes_on_from_the_middle_of_a_run(system: System, original: str) -> None:
    request = forks(2, optimizer={"learning_rate": 1e-3})
    common = ["--workflow-id", "run/branch", "--task-queue", "tttd-control"]
    started = system.temporal("workflow", "start", "--type", "DiscoveryRun", *common, "--input", json.dumps(request))
    assert started.returncode == 0, started.stderr
    system.wait_for("the fork's step", lambda: system.has("branch", 3, "commit"))
    result = system.temporal("workflow", "result", "--workflow-id", "run/branch", "--output", "json")
    assert json.loads(result.stdout)["result"]["state"] == "completed"
    opening, last = commit_of(system, "branch", 2), commit_of(system, "branch", 3)
    left = commit_of(system, original, 2)
    store = RunStore(system.blobs, "branch")
    assert opening.origin == ForkOrigin(step=2, commit=RunStore(system.blobs, original).commit_digest(2) or "")
    assert (opening.archive, opening.policy.checkpoint) == (left.archive, left.policy.checkpoint)
    assert not system.has("branch", 1, "commit")
    # The same seed, step, adapter and archive: the same programs as the run's own third step; only the optimizer stepped otherwise.
    assert [row.tokens for row in last.rows] == [row.tokens for row in commit_of(system, original, 3).rows]
    assert last.policy.version == 3
    assert last.policy.checkpoint != commit_of(system, original, 3).policy.checkpoint
    assert store.load(Checkpoint, last.policy.checkpoint).step == 3
    checked = check_run(system.blobs, "branch")
    assert (checked.problems, checked.replayed) == ([], 2)


async def test_a_fork_that_changes_nothing_finds_what_the_run_found(system: System, original: str) -> None:
    result = await system.run("same", forks(1))
    assert result.step == 3
    for step in (2, 3):
        ours, theirs = commit_of(system, "same", step), commit_of(system, original, step)
        assert ours.rows == theirs.rows
        assert ours.archive == theirs.archive
        assert ours.policy.adapter == theirs.policy.adapter, "moments and all went along"


def test_the_command_forks_and_follows_and_the_same_command_goes_on(system: System, original: str) -> None:
    command = ["fork", original, "--at-step", "2", "--name", "by-command", "--set", "seed=9", "--json"]
    done = system.tttd(*command, "--set", "search.steps=3", timeout=400)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 3
    assert "by-command is a fork of original at step 2" in done.stderr
    assert json.loads(done.stdout)["best"]["fork_of"]["run"] == "original"
    again = system.tttd(*command, "--set", "search.steps=4", timeout=400)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["step"] == 4
    changed = system.tttd(*command, "--set", "search.steps=5", "--set", "optimizer.learning_rate=0.5")
    assert changed.returncode == 1
    assert "optimizer.learning_rate: 0.003 -> 0.5" in changed.stderr
    status = json.loads(system.tttd("status", "by-command", "--json").stdout)
    assert (status["fork_of"], status["step"], status["state"]) == ("original@2", 4, "completed")
    assert system.tttd("verify", "by-command").returncode == 0
    (third, fourth) = map(json.loads, system.tttd("metrics", "by-command").stdout.splitlines())
    assert (third["step"], fourth["step"], third["fork_of"]) == (3, 4, "original@2")


def test_the_original_can_still_be_extended(system: System, original: str) -> None:
    assert system.tttd("extend", original, "--steps", "1").returncode == 0
    system.wait_for("the fourth step", lambda: system.has(original, 4, "report"))
    assert system.tttd("extend", "by-command", "--steps", "1").returncode == 0, "and so can a fork"
    system.wait_for("the fork's fifth step", lambda: system.has("by-command", 5, "report"))
    assert commit_of(system, "by-command", 5).policy.version == 5


def test_a_retired_step_is_refused_and_everything_else_goes_on(system: System, original: str, tmp_path: Path) -> None:
    store = RunStore(system.blobs, original)

    def losing() -> list[int]:
        commits = read_history(store).commits
        return sorted({commit.step for commit in commits} - kept_steps(store, commits, 1).keys())

    last = 4
    while not (gone := losing()):
        last += 1
        assert last < 12, "every step improves the best, and is kept"
        assert system.tttd("extend", original, "--steps", "1").returncode == 0
        system.wait_for("one more step", lambda step=last: system.has(original, step, "report"))
    whole = tmp_path / "whole.tar"
    assert system.tttd("export", original, "--out", str(whole)).returncode == 0
    collected = system.tttd("storage", "gc", "--run", original, "--keep-checkpoints", "1", "--grace-hours", "0", "--json")
    assert collected.returncode == 0, collected.stderr
    assert json.loads(collected.stdout)["retired_bytes"] > 0
    refused = system.tttd("fork", original, "--at-step", str(gone[0]), "--set", "search.steps=20", "--name", "late")
    assert refused.returncode == 1
    assert f"step {gone[0]} of run original was retired (retention)" in refused.stderr
    common = ["--workflow-id", "run/late", "--task-queue", "tttd-control"]
    system.temporal(
        "workflow", "start", "--type", "DiscoveryRun", *common, "--input", json.dumps(forks(gone[0], search={"steps": 20}))
    )
    ended = system.temporal("workflow", "result", "--workflow-id", "run/late")
    assert f"step {gone[0]} of run original was retired" in ended.stdout + ended.stderr
    for command in (("status", original), ("best", original), ("metrics", original), ("verify", original), ("storage", "check")):
        done = system.tttd(*command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert system.tttd("extend", original, "--steps", "1").returncode == 0
    system.wait_for("the next step", lambda: system.has(original, last + 1, "report"))
    assert system.tttd("import", str(whole)).returncode == 0
    again = system.tttd("fork", original, "--at-step", str(gone[0]), "--set", f"search.steps={gone[0]}", "--name", "late")
    assert "has nothing to do" in again.stderr, "the bundle brought the step back"


def test_a_bundle_opens_elsewhere_and_goes_on(system: System, original: str, tmp_path: Path) -> None:
    """Another home, another store: the run is imported, verified, and gone on with by workers there."""
    bundle = tmp_path / "by-command.tar"
    assert system.tttd("export", "by-command", "--out", str(bundle)).returncode == 0
    other = tmp_path / "other"
    system.kill("control")
    for role in ("sample", "judge", "train", "engine"):
        system.kill(role)
    system._environment |= {"TTTD_STORE": str(other)}
    system.start("control", "sample", "judge", "train", "engine")
    imported = system.tttd("import", str(bundle))
    assert imported.returncode == 0, imported.stderr
    blobs = Blobs(LocalStore(other))
    last = RunStore(blobs, "by-command").last_step()
    assert last is not None
    assert system.tttd("verify", "by-command").returncode == 0
    assert system.tttd("extend", "by-command", "--steps", "1").returncode == 0
    system.wait_for("a step in the other store", lambda: RunStore(blobs, "by-command").last_step() == last + 1)
    checked = check_run(blobs, "by-command")
    assert (checked.problems, checked.replayed) == ([], checked.steps)
