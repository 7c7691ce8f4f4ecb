"""`tttd storage check`: what is damaged or missing is named and mended from a bundle; tampering with a chain is found out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from activities.blobs import Blobs
from activities.errors import InputError
from activities.records import AdapterManifest, Batch, RolloutRecord, StepCommit, Verdict, canonical_json
from activities.run_store import RunStore
from console.main import app
from console.storage.bundle import BundleStore
from console.storage.checking import Checked, check_run
from console.storage.exporting import export_run
from tasks.registry import load_task
from tests.trained_chain import TrainedRun

STEPS = 3


@pytest.fixture
def run(blobs: Blobs, tmp_path: Path) -> TrainedRun:
    return TrainedRun.make(blobs, tmp_path, STEPS)


def check(run: TrainedRun) -> Checked:
    return check_run(run.chain.blobs, run.chain.run_id)


def batch_of(run: TrainedRun, step: int) -> Batch:
    batch = run.chain.store.read(Batch, run.chain.store.step_key(step, "batch"))
    assert batch is not None
    return batch


def weights_of(run: TrainedRun, step: int) -> str:
    return run.chain.store.load(AdapterManifest, run.heads[step].policy.adapter).weights


def damage(run: TrainedRun, digest: str) -> None:
    store = run.chain.blobs.store
    data = bytearray(store.get(Blobs.key(digest)))
    data[len(data) // 2] ^= 1
    store.put(Blobs.key(digest), bytes(data))


def replace_entry(run: TrainedRun, key: str, document: object) -> None:
    """What somebody with write access could do: another document under a name, with a digest that is right."""
    run.chain.blobs.store.put(key, run.chain.blobs.put(canonical_json(document)).encode())


def test_an_intact_run_is_replayed_to_the_same_digests(run: TrainedRun) -> None:
    task = load_task("sizes", (run.chain.tasks_directory,))
    checked = check_run(run.chain.blobs, run.chain.run_id, lambda _: task)
    assert checked.problems == []
    assert (checked.last_step, checked.steps, checked.replayed, checked.absent) == (STEPS, STEPS + 1, STEPS + 1, 0)
    assert checked.blobs == len(list(run.chain.blobs.store.keys("blobs/")))
    assert checked.bytes == sum(entry.size for entry in run.chain.blobs.store.entries("blobs/"))


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_blob_that_is_not_what_it_was_is_named_with_the_documents_that_name_it(run: TrainedRun, how: str) -> None:
    digest = weights_of(run, 2)
    damage(run, digest) if how == "damaged" else run.chain.blobs.store.delete(Blobs.key(digest))
    (problem,) = check(run).problems
    assert problem.where == f"blob {digest}"
    assert problem.what.startswith(f"weights: {how}")
    assert problem.named_by == (f"adapter {run.heads[2].policy.adapter}",)


def test_every_single_blob_of_a_run_is_watched(run: TrainedRun) -> None:
    """One after another is damaged and restored: each is found, and nothing else is."""
    store = run.chain.blobs.store
    for key in list(store.keys("blobs/")):
        kept, digest = store.get(key), key.rpartition("/")[2]
        damage(run, digest)
        assert f"blob {digest}" in [problem.where for problem in check(run).problems], key
        store.put(key, kept)
    assert check(run).problems == []


def test_a_bundle_mends_what_is_damaged_and_what_is_missing_below_it(run: TrainedRun, tmp_path: Path) -> None:
    export_run(run.chain.blobs, run.chain.run_id, tmp_path / "run.tar")
    bundle = BundleStore(tmp_path / "run.tar")
    lost = [run.heads[2].policy.adapter, weights_of(run, 2), batch_of(run, 1).rows[0].rollout, run.heads[1].archive]
    damage(run, lost[0])
    for digest in lost[1:]:
        run.chain.blobs.store.delete(Blobs.key(digest))
    mended = check_run(run.chain.blobs, run.chain.run_id, spare=lambda digest: bundle.get(Blobs.key(digest)))
    assert mended.problems == []
    assert sorted(mended.repaired) == sorted(lost)
    assert check(run).repaired == []
    assert check(run).problems == []


def test_a_copy_that_is_damaged_too_mends_nothing(run: TrainedRun) -> None:
    digest = weights_of(run, 1)
    damage(run, digest)
    checked = check_run(run.chain.blobs, run.chain.run_id, spare=lambda _: b"something else")
    assert [problem.where for problem in checked.problems] == [f"blob {digest}"]
    assert checked.repaired == []


# Intact documents that do not belong together ---------------------------------------------------------------------------------
def test_a_better_verdict_put_in_later_is_found_out(run: TrainedRun) -> None:
    store = run.chain.store
    row = batch_of(run, 2).rows[0]
    better = store.load(Verdict, row.verdict).model_copy(update={"value": 99.0, "score": 99.0, "reward": 99.0})
    replace_entry(run, store.rollout_key(row.at, "verdict"), better)
    (problem,) = check(run).problems
    assert problem.where == "step 2"
    assert "its batch is" in problem.what


def test_a_batch_that_was_changed_with_its_verdict_is_found_out_by_the_archive(run: TrainedRun) -> None:
    store, batch = run.chain.store, batch_of(run, 2)
    row = batch.rows[0]
    better = store.load(Verdict, row.verdict).model_copy(update={"value": 99.0, "score": 99.0, "reward": 99.0})
    replace_entry(run, store.rollout_key(row.at, "verdict"), better)
    changed = row.model_copy(update={"value": 99.0, "score": 99.0, "reward": 99.0, "verdict": store.put(better)})
    replace_entry(run, store.step_key(2, "batch"), batch.model_copy(update={"rows": (changed, *batch.rows[1:])}))
    (problem,) = check(run).problems
    assert (problem.where, "its archive is" in problem.what) == ("step 2", True)


def test_other_tokens_are_found_out_by_the_batch(run: TrainedRun) -> None:
    store = run.chain.store
    row = batch_of(run, 1).rows[1]
    other = store.load(RolloutRecord, row.rollout).model_copy(update={"response_tokens": (9, 9, 9)})
    replace_entry(run, store.rollout_key(row.at, "rollout"), other)
    assert [problem.where for problem in check(run).problems] == ["step 1"]


def test_a_commit_that_does_not_follow_the_one_before_it_is_found_out(run: TrainedRun) -> None:
    store = run.chain.store
    commit = store.load(StepCommit, run.heads[2].commit)
    replace_entry(run, store.step_key(2, "commit"), commit.model_copy(update={"previous": run.heads[0].commit}))
    problems = {problem.where: problem.what for problem in check(run).problems}
    assert problems.keys() == {"step 2", "step 3"}
    assert f"follows {run.heads[0].commit}" in problems["step 2"]


def test_an_adapter_that_training_did_not_make_is_found_out(run: TrainedRun) -> None:
    store = run.chain.store
    commit = store.load(StepCommit, run.heads[3].commit)
    replace_entry(run, store.step_key(3, "commit"), commit.model_copy(update={"policy": run.heads[2].policy}))
    (problem,) = check(run).problems
    assert "training made" in problem.what


def test_another_science_under_the_same_identity_is_found_out(run: TrainedRun) -> None:
    assert run.run is not None
    spec = run.chain.store.spec(run.run)
    replace_entry(run, f"{run.chain.store.root}/open", spec.model_copy(update={"science": spec.science | {"seed": 5}}))
    assert "holds the science of another" in check(run).problems[0].what


def test_a_store_without_the_run_says_so(blobs: Blobs) -> None:
    with pytest.raises(InputError, match="no run 'nobody'"):
        check_run(blobs, "nobody")


# The command ------------------------------------------------------------------------------------------------------------------
def test_the_command_names_what_is_wrong_mends_it_and_ends_with_a_code(
    run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTTD_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("TTTD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TTTD_TEMPORAL_PORT", "1")
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    tttd = CliRunner()
    bundle = tmp_path / "run.tar"
    assert tttd.invoke(app, ["export", "sizes-run", "--out", str(bundle)]).exit_code == 0
    intact = tttd.invoke(app, ["storage", "check"])
    assert (intact.exit_code, "sizes-run: intact:" in intact.stdout) == (0, True), intact.output
    digest = weights_of(run, 1)
    damage(run, digest)
    found = tttd.invoke(app, ["storage", "check", "sizes-run", "--json"])
    assert found.exit_code == 1
    assert json.loads(found.stdout)[0]["problems"][0]["where"] == f"blob {digest}"
    mended = tttd.invoke(app, ["storage", "check", "sizes-run", "--from", str(bundle)])
    assert (mended.exit_code, f"mended blob {digest}" in mended.stdout) == (0, True), mended.output
    assert tttd.invoke(app, ["storage", "check", "nobody"]).exit_code == 1
    listed = tttd.invoke(app, ["storage", "list", "sizes-run"])
    assert listed.stdout.count("whole") == STEPS + 1, listed.output
    assert tttd.invoke(app, ["storage", "gc"]).exit_code == 2, "everything, or one run: somebody has to say so"
    collected = tttd.invoke(app, ["storage", "gc", "--all", "--keep-checkpoints", "1", "--grace-hours", "0", "--json"])
    assert collected.exit_code == 0, collected.output
    assert json.loads(collected.stdout)["retired"] == {}
    store = RunStore(run.chain.blobs, run.chain.run_id)
    assert store.last_step() == STEPS
