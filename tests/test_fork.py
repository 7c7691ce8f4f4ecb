"""Forks: a chain that begins after another run's commit, its identity, its lineage, and what it may not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from typer.testing import CliRunner

from activities.blobs import Blobs
from activities.records import Checkpoint, ForkOrigin, RunSpec, StepCommit, canonical_json
from console.cli.metrics import step_lines
from console.forks import ask_fork
from console.launch import continuation
from console.main import app
from console.output import Failure
from console.storage.checking import check_run
from console.storage.collection import Wish, collect
from console.storage.exporting import export_run
from console.storage.importing import import_bundle
from console.stored import best_answer, find_run, lineage_of
from tasks.registry import TaskSource
from tests.console_world import SETTINGS, TASK, World
from tests.trained_chain import TrainedRun
from workflows.contracts.request import parse_request

STEPS = 3


@pytest.fixture
def run(blobs: Blobs, tmp_path: Path) -> TrainedRun:
    return TrainedRun.make(blobs, tmp_path, STEPS)


def forked(run: TrainedRun, step: int, name: str = "fork", **changes: Any) -> TrainedRun:
    fork = TrainedRun(run.chain.with_request(fork={"run": run.chain.run_id, "step": step}, **changes))
    fork.chain.run_id = name
    return fork


def refused(fork: TrainedRun) -> str:
    with pytest.raises(ApplicationError) as caught:
        fork.open()
    assert caught.value.non_retryable
    return f"{caught.value.type}: {caught.value.message}"


# The chain --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_fork_opens_with_what_the_run_had_after_that_step(run: TrainedRun, step: int) -> None:
    fork = forked(run, step)
    head, left = fork.open(), run.heads[step]
    commit = fork.chain.store.load(StepCommit, head.commit)
    assert (head.step, head.archive, head.best) == (step, left.archive, left.best)
    assert (commit.previous, commit.rows, commit.origin) == (None, (), ForkOrigin(step=step, commit=left.commit))
    for ours, theirs in zip(policies(head), policies(left), strict=True):
        assert (ours.version, ours.checkpoint, ours.adapter, ours.gate) == (
            theirs.version, theirs.checkpoint, theirs.adapter, theirs.gate
        )  # fmt: skip
        assert ours.name.startswith(commit.identity[:8]), "engines never confuse two runs' adapters"


def policies(head: Any) -> list[Any]:
    return [p for p in (head.policy, head.previous_policy, head.initial_policy) if p is not None]


def test_a_fork_goes_on_counting_and_both_runs_can_be_gone_on_with(run: TrainedRun) -> None:
    fork = forked(run, 2, seed=5)
    fork.open()
    assert fork.step().step == 3
    assert fork.head.policy.version == 3
    assert fork.chain.store.load(Checkpoint, fork.head.policy.checkpoint).step == 3, "the optimizer counts on, too"
    assert fork.open() == fork.heads[-2], "resuming finds the fork's own last commit"
    assert fork.step().step == 4
    assert run.step().step == STEPS + 1
    archive = fork.chain.archive(fork.head)
    assert archive.total_visits == 4 * 6, "visits of the steps before the fork are kept"
    assert len({node.id for node in archive.nodes}) == len(archive.nodes)
    for checked in (check_run(fork.chain.blobs, "fork"), check_run(run.chain.blobs, "sizes-run")):
        assert checked.problems == []
    assert check_run(fork.chain.blobs, "fork").replayed == 3
    lines = step_lines(fork.chain.blobs, "fork", 4)
    assert [(line["step"], line["fork_of"]) for line in lines] == [(3, "sizes-run@2"), (4, "sizes-run@2")]
    assert "fork_of" not in step_lines(run.chain.blobs, "sizes-run", 1)[0]


def test_a_fork_is_another_identity_and_equal_forks_are_one(run: TrainedRun) -> None:
    heads = {name: forked(run, step, name, **changes).open() for name, step, changes in FORKS}
    identities = {name: load_spec(run, name).identity for name in heads}
    assert run.run is not None
    assert len({*identities.values(), run.run.identity}) == 4
    assert identities["one"] == identities["same"]
    assert heads["one"].commit == heads["same"].commit, "the name of a run is in no chain"
    assert load_spec(run, "one").science["fork"] == {"commit": run.heads[2].commit, "step": 2}


FORKS: list[tuple[str, int, dict[str, Any]]] = [
    ("one", 2, {}),
    ("same", 2, {}),
    ("earlier", 1, {}),
    ("changed", 2, {"optimizer": {"learning_rate": 0.5}}),
]


def load_spec(run: TrainedRun, name: str) -> RunSpec:
    found = find_run(run.chain.blobs, name)
    assert found is not None
    assert found.spec is not None
    return found.spec


def test_a_run_that_is_no_fork_has_the_digests_it_always_had(run: TrainedRun) -> None:
    commit = run.chain.store.load(StepCommit, run.head.commit)
    assert b"origin" not in canonical_json(commit)
    assert "fork" not in load_spec(run, "sizes-run").science


def test_a_fork_of_a_fork(run: TrainedRun) -> None:
    first = forked(run, 1, "first")
    first.open()
    first.step()
    second = forked(first, 2, "second")
    assert second.open().step == 2
    assert second.step().step == 3
    assert check_run(run.chain.blobs, "second").problems == []
    assert "it is a fork itself and begins at step 1" in refused(forked(first, 0, "third"))


def test_resuming_a_fork_does_not_need_the_other_run(run: TrainedRun) -> None:
    fork = forked(run, 2)
    head = fork.open()
    for key in list(run.chain.blobs.store.keys("runs/sizes-run/")):
        run.chain.blobs.store.delete(key)
    assert fork.open() == head


def test_resuming_a_fork_with_another_origin_is_refused_naming_it(run: TrainedRun) -> None:
    forked(run, 2).open()
    said = refused(forked(run, 1))
    assert said.startswith("IdentityChanged: ")
    assert "fork.step: 2 -> 1" in said
    assert "optimizer.learning_rate" in refused(forked(run, 2, optimizer={"learning_rate": 0.5}))


# Refusals ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fork": {"run": "nobody", "step": 1}}, "run nobody has no commit of step 1 in .*: there is no such run"),
        ({"fork": {"run": "sizes-run", "step": 9}}, "no commit of step 9 in .*: its last committed step is 3"),
        ({"fork": {"run": "fork", "step": 1}}, "cannot be a fork of itself"),
        ({"fork": {"run": "sizes-run", "step": 1, "commit": "ab" * 32}}, "step 1 of run sizes-run is commit .*, not abab"),
        ({"lora": {"rank": 4}}, "lora.rank: 2 -> 4: its archive and adapter were made with them"),
        ({"lora": {"rank": 2, "alpha": 4}}, "lora.alpha: 32 -> 4"),
    ],
)
def test_what_a_fork_cannot_be(run: TrainedRun, changes: dict[str, Any], says: str) -> None:
    import re

    fork = forked(run, 1)
    fork.chain.request |= changes
    said = refused(fork)
    assert said.startswith("InputError: ")
    assert re.search(says, said), said
    assert find_run(run.chain.blobs, "fork") is None, "nothing of it is stored"


def test_another_task_or_model_is_refused(run: TrainedRun) -> None:
    instruction = run.chain.tasks_directory / "sizes" / "instruction.md"
    kept = instruction.read_text()
    instruction.write_text("Return another size.\n")
    assert "digests.task" in refused(forked(run, 1))
    instruction.write_text(kept)
    config = run.chain.models_directory / "tiny" / "config.json"
    config.write_text(config.read_text().replace("qwen3", "llama"))
    assert "digests.model" in refused(forked(run, 1))


def test_a_retired_step_is_refused_and_a_kept_one_is_not(blobs: Blobs, tmp_path: Path) -> None:
    run = TrainedRun.make(blobs, tmp_path, 5)
    collect(blobs, Wish(None, 1, 0.0), 1e12, lambda _: False)
    said = refused(forked(run, 3))
    assert said.startswith("Retired: step 3 of run sizes-run was retired (retention)")
    assert find_run(blobs, "fork") is None
    assert forked(run, 2).open().step == 2


def test_a_fork_keeps_its_origin_when_the_other_run_is_collected(blobs: Blobs, tmp_path: Path) -> None:
    run = TrainedRun.make(blobs, tmp_path, 5)
    fork = forked(run, 3)
    fork.open()
    fork.step()
    collect(blobs, Wish(None, 1, 0.0), 1e12, lambda _: False)
    assert check_run(blobs, "fork").problems == []
    assert forked(fork, 3, "again").open().step == 3, "the first commit of any run is kept whole"


def test_a_fork_travels_alone(run: TrainedRun, tmp_path: Path) -> None:
    from activities.blobs import LocalStore

    fork = forked(run, 2)
    fork.open()
    export_run(run.chain.blobs, "fork", tmp_path / "fork.tar")
    other = Blobs(LocalStore(tmp_path / "other"))
    import_bundle(other, tmp_path / "fork.tar")
    assert check_run(other, "fork").problems == []
    tasks = TaskSource((run.chain.tasks_directory,))
    answer = best_answer(other, "fork", tasks)
    assert answer == best_answer(run.chain.blobs, "fork", tasks)
    assert answer.exact == "2000/1000", "found in a commit of the other run, which is not there by name"


# The console ------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World.make(tmp_path / "home")
    world.commit_steps(*world.open_run("small"), 2)
    return world


@pytest.fixture
def tttd(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_CONFIG_FILE", "TEMPORAL_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TTTD_TEMPORAL_PORT", "1")
    monkeypatch.chdir(tmp_path)
    return CliRunner()


def test_the_request_of_a_fork_is_the_runs_with_changes(world: World) -> None:
    changes = ["optimizer.learning_rate=0.25", "search.steps=5"]
    asked = ask_fork(world.blobs, world.settings, TaskSource(), "small", 1, name=None, changes=changes)
    store_commit = find_run(world.blobs, "small")
    assert store_commit is not None
    assert asked.request.fork is not None
    assert (asked.request.fork.run, asked.request.fork.step) == ("small", 1)
    assert (asked.request.optimizer.learning_rate, asked.request.search.steps, asked.request.search.groups) == (0.25, 5, 2)
    assert asked.run_id == f"{TASK}-{asked.spec.identity[:8]}"
    assert parse_request(asked.raw) == asked.request, "what the workflow gets names the commit"
    again = parse_request(continuation(asked.spec, 7))
    assert again.fork == asked.request.fork, "and so does whatever goes on with it later"


def test_a_fork_with_nothing_to_do_or_of_nothing_is_refused(world: World) -> None:
    for run, step, changes, says in [
        ("small", 2, [], "search.steps=2 counts the steps up to 2 too"),
        ("nobody", 1, [], "no run 'nobody'"),
        ("small", 1, ["lora.rank=3", "search.steps=4"], "lora.rank: 32 -> 3"),
        ("small", 1, ["optimizer.lr=3"], "optimizer.lr: unknown field"),
        ("small", 1, ["fork.step=3"], "`tttd fork RUN --at-step K` makes forks"),
    ]:
        with pytest.raises(Exception, match=says) as caught:
            ask_fork(world.blobs, world.settings, TaskSource(), run, step, name="x", changes=changes)
        assert isinstance(caught.value, Failure) or "lora" in says


def test_status_best_and_metrics_say_where_a_fork_comes_from(world: World, tttd: CliRunner) -> None:
    search = {**SETTINGS["search"], "steps": 3}  # type: ignore[dict-item]
    world.open_run("branch", fork={"run": "small", "step": 1}, search=search)
    fork = find_run(world.blobs, "branch")
    assert fork is not None
    assert (lineage := lineage_of(fork.spec)) is not None
    assert (lineage.run, lineage.step) == ("small", 1)
    # Before a step of its own, its best answer is one of the other run's, exact value and all.
    best = json.loads(tttd.invoke(app, ["best", "branch", "--json"]).stdout)
    assert (best["found_step"], best["step"]) == (1, 1)
    assert best["exact"]
    assert best["fork_of"]["run"] == "small"
    assert tttd.invoke(app, ["metrics", "branch"]).stdout == ""
    status = tttd.invoke(app, ["status", "branch"])
    assert "lineage   fork of small at step 1" in status.stdout, status.output
    assert json.loads(tttd.invoke(app, ["status", "branch", "--json"]).stdout)["fork_of"] == "small@1"
    assert "fork of small at step 1" in tttd.invoke(app, ["best", "branch"]).stderr
    verified = tttd.invoke(app, ["verify", "branch"])
    assert verified.exit_code == 0, verified.output
