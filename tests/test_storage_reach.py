"""Reachability, retention and garbage collection on small real runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from activities.blobs import Blobs, LocalStore
from activities.errors import InputError, Retired
from activities.open.whole import check_whole
from activities.records import AdapterManifest, ArchiveState, Batch, Checkpoint, StepCommit, canonical_json
from activities.run_store import RunStore
from console.storage.checking import check_run
from console.storage.collection import Collected, Wish, collect
from console.storage.reach import Kind, Reach, reach, read_entries
from console.storage.retention import kept_steps, read_history, retirable
from tests.trained_chain import TrainedRun
from workflows.contracts.messages import PublishRequest

LATER = 1e12
"""Seconds: everything is older than any grace then."""
STEPS = 7


@pytest.fixture
def run(blobs: Blobs, tmp_path: Path) -> TrainedRun:
    return TrainedRun.make(blobs, tmp_path, STEPS)


def reached(store: RunStore) -> Reach:
    return reach(store.root, read_entries(store), store.blobs.get)


def blob_digests(blobs: Blobs) -> set[str]:
    return {key.rpartition("/")[2] for key in blobs.store.keys("blobs/")}


def everything(keep: int = 1, *, dry_run: bool = False, grace: float = 0.0) -> Wish:
    return Wish(None, keep, grace, dry_run)


def whole_steps(run: TrainedRun) -> list[int]:
    store, whole = run.chain.store, []
    for head in run.heads:
        try:
            check_whole(store, store.load(StepCommit, head.commit))
            whole.append(head.step)
        except Retired:
            continue
    return whole


# Reachability -----------------------------------------------------------------------------------------------------------------
def test_a_run_reaches_every_blob_that_it_stored(run: TrainedRun) -> None:
    found = reached(run.chain.store)
    assert found.problems == {}
    assert found.blobs.keys() == blob_digests(run.chain.blobs)
    kinds = {kind for blob in found.blobs.values() for kind in blob.kinds}
    assert kinds == set(Kind) - {Kind.RETIRED, Kind.ORIGIN}


def test_what_names_a_blob_is_told(run: TrainedRun) -> None:
    store, head = run.chain.store, run.heads[3]
    found = reached(store)
    manifest = store.load(AdapterManifest, head.policy.adapter)
    assert found.blobs[manifest.weights].named_by == [f"adapter {head.policy.adapter}"]
    assert f"{store.root}/steps/000003/commit" in found.blobs[head.commit].named_by


def test_a_construction_of_an_open_step_is_reached_without_a_batch(run: TrainedRun) -> None:
    assert run.run is not None
    chain = run.chain
    plan = chain.select(run.run, run.head).plan
    at = chain.coordinates(plan, STEPS + 1)[0]
    chain.write(plan, at, run.head.policy, 9.75)
    construction = chain.blobs.put(canonical_json({"size": 9.75}))
    assert reached(chain.store).blobs[construction].kinds == {Kind.CONSTRUCTION}


def test_a_stray_entry_and_a_document_that_is_none_are_problems(run: TrainedRun) -> None:
    store = run.chain.store
    store.blobs.store.put(f"{store.root}/steps/000001/notes", b"x")
    store.blobs.store.put(f"{store.root}/steps/000002/commit", store.blobs.put(b"{}").encode())
    problems = reached(store).problems
    assert f"{store.root}/steps/000001/notes" in problems
    assert any("is no commit document" in why for why in problems.values())


# Retention --------------------------------------------------------------------------------------------------------------------
def test_kept_are_the_first_every_best_and_the_latest(run: TrainedRun) -> None:
    commits = read_history(run.chain.store).commits
    assert kept_steps(run.chain.store, commits, 1) == {0: "first", 1: "best", 2: "best", 5: "best", 7: "latest"}
    assert kept_steps(run.chain.store, commits, 3) == {0: "first", 1: "best", 2: "best", 5: "best", 6: "latest", 7: "latest"}
    assert set(kept_steps(run.chain.store, commits, 0)) == {0, 1, 2, 5, 7}, (
        "a run goes on from its last step, whatever is asked for"
    )


def test_what_goes_are_moments_weights_and_evidence_of_the_others(run: TrainedRun) -> None:
    store = run.chain.store
    found = retirable(store, 1)
    assert sorted(found) == [3, 4, 6]
    # The gate compares a version with the one before it, so the weights before a kept step stay: those of 4 for 5, of 6 for 7.
    assert {step: sorted(what.values()) for step, what in found.items()} == {
        3: ["gate", "optimizer", "weights"],
        4: ["gate", "optimizer"],
        6: ["gate", "optimizer"],
    }


def test_a_step_in_progress_keeps_what_it_trained(run: TrainedRun) -> None:
    assert run.run is not None
    chain, head = run.chain, run.head
    plan = chain.select(run.run, head).plan
    for at in chain.coordinates(plan, STEPS + 1):
        chain.write(plan, at, head.policy, 1.0 + at.rollout / 8)
    run.train(STEPS + 1, chain.assemble(run.run, STEPS + 1, plan, head.policy).batch)
    before = reached(chain.store).blobs.keys()
    collect(chain.blobs, everything(), LATER, lambda _: False)
    lost = before - blob_digests(chain.blobs)
    assert lost == {digest for step in (3, 4, 6) for digest in retired(run, step)}


def retired(run: TrainedRun, step: int) -> tuple[str, ...]:
    record = run.chain.store.retired(step)
    return () if record is None else record.blobs


# Collection -------------------------------------------------------------------------------------------------------------------
def test_collecting_frees_exactly_what_retention_says_and_the_chain_stays_whole(run: TrainedRun) -> None:
    chain = run.chain
    sizes = {entry.key.rpartition("/")[2]: entry.size for entry in chain.blobs.store.entries("blobs/")}
    expected = {digest for lost in retirable(chain.store, 1).values() for digest in lost}
    planned = collect(chain.blobs, everything(dry_run=True), LATER, lambda _: False)
    assert blob_digests(chain.blobs) == sizes.keys(), "a dry run deletes nothing"
    done = collect(chain.blobs, everything(), LATER, lambda _: False)
    assert sizes.keys() - blob_digests(chain.blobs) == expected
    assert planned == done
    assert (done.retired, done.orphans) == ({"sizes-run": {3: 3, 4: 2, 6: 2}}, 0)
    assert done.bytes == sum(sizes[digest] for digest in expected)
    assert whole_steps(run) == [0, 1, 2, 5, 7]
    checked = check_run(chain.blobs, chain.run_id)
    assert (checked.problems, checked.absent, checked.replayed) == ([], len(expected), STEPS)
    assert collect(chain.blobs, everything(), LATER, lambda _: False) == Collected(), "once is enough"


def test_a_run_goes_on_after_a_collection(run: TrainedRun) -> None:
    collect(run.chain.blobs, everything(), LATER, lambda _: False)
    assert run.open() == run.heads[-2]
    assert run.step().step == STEPS + 1


def test_a_retired_step_is_refused_by_name(run: TrainedRun) -> None:
    collect(run.chain.blobs, everything(), LATER, lambda _: False)
    store = run.chain.store
    with pytest.raises(
        Retired, match=r"step 3 of run sizes-run was retired \(retention\): its optimizer state, evidence for the gate, adapter"
    ):
        check_whole(store, store.load(StepCommit, run.heads[3].commit))


def test_orphans_go_when_they_are_older_than_the_grace(run: TrainedRun) -> None:
    blobs = run.chain.blobs
    orphan = blobs.put(b"of a zombie")
    now = next(entry.modified for entry in blobs.store.entries(Blobs.key(orphan)))
    assert collect(blobs, everything(keep=99, grace=60), now + 30, lambda _: False).spared == 1
    assert orphan in blob_digests(blobs)
    done = collect(blobs, everything(keep=99, grace=60), now + 90, lambda _: False)
    assert (done.orphans, done.orphan_bytes) == (1, len(b"of a zombie"))
    assert orphan not in blob_digests(blobs)


def test_storing_bytes_again_makes_them_young(run: TrainedRun, tmp_path: Path) -> None:
    """An attempt that is repeated finds what the first one stored long ago, and means to name it in a moment."""
    blobs = run.chain.blobs
    orphan = blobs.put(b"of a first attempt")
    path = tmp_path / "store" / Blobs.key(orphan)
    os.utime(path, (1000.0, 1000.0))
    now = path.with_name("now")
    now.write_bytes(b"")
    seconds = now.stat().st_mtime
    now.unlink()
    blobs.put(b"of a first attempt")
    collect(blobs, everything(keep=99, grace=60), seconds + 30, lambda _: False)
    assert orphan in blob_digests(blobs)


def test_what_a_busy_run_may_have_made_since_its_step_began_is_spared(run: TrainedRun) -> None:
    assert run.run is not None
    chain = run.chain
    chain.select(run.run, run.head)  # step 8 has begun
    orphan = chain.blobs.put(b"a report that only a history names")
    assert collect(chain.blobs, everything(keep=99), LATER).spared == 1
    assert orphan in blob_digests(chain.blobs)
    collect(chain.blobs, everything(keep=99), LATER, lambda _: False)
    assert orphan not in blob_digests(chain.blobs), "nobody works on it, so nobody will name it"


def test_what_two_runs_share_stays_while_one_of_them_keeps_it(run: TrainedRun, tmp_path: Path) -> None:
    """Two runs of one request have one chain, and so one adapter a step; only one of them is collected."""
    chain = run.chain
    twin = TrainedRun(chain.with_request())
    twin.chain.run_id = "twin"
    twin.open()
    for _ in range(STEPS):
        twin.step()
    assert [h.commit for h in twin.heads] == [h.commit for h in run.heads]
    before = blob_digests(chain.blobs)
    collect(chain.blobs, Wish(("twin",), 1, 0.0), LATER, lambda _: False)
    assert blob_digests(chain.blobs) == before
    assert whole_steps(twin) == list(range(STEPS + 1)), "nothing of it is called retired either"
    collect(chain.blobs, Wish(("twin", "sizes-run"), 1, 0.0), LATER, lambda _: False)
    assert whole_steps(twin) == whole_steps(run) == [0, 1, 2, 5, 7]


def test_what_an_engine_gives_back_to_itself_stays(run: TrainedRun) -> None:
    assert run.run is not None
    chain, head = run.chain, run.heads[3]
    request = PublishRequest(run=run.run, engine="e", policy=head.policy, previous=run.heads[2].policy, initial=head.initial_policy)
    chain.blobs.store.put("fleet/published/e", canonical_json({"requests": [request.model_dump(mode="json")]}))
    collect(chain.blobs, everything(), LATER, lambda _: False)
    store = chain.store
    assert chain.blobs.get(store.load(AdapterManifest, head.policy.adapter).weights)
    assert head.policy.gate in blob_digests(chain.blobs)
    assert store.load(Checkpoint, head.policy.checkpoint).optimizer not in blob_digests(chain.blobs)


def test_nothing_is_deleted_while_a_document_cannot_be_read(run: TrainedRun, tmp_path: Path) -> None:
    chain = run.chain
    orphan = chain.blobs.put(b"orphan")
    archive = run.heads[4].archive
    chain.store.load(ArchiveState, archive)
    chain.blobs.store.delete(Blobs.key(archive))
    with pytest.raises(InputError, match=f"nothing is collected: {archive} of run sizes-run: .*missing"):
        collect(chain.blobs, everything(), LATER, lambda _: False)
    assert orphan in blob_digests(chain.blobs)


def test_an_unknown_run_is_named(run: TrainedRun) -> None:
    with pytest.raises(InputError, match=r"no run nobody in .*; runs there: sizes-run"):
        collect(run.chain.blobs, Wish(("nobody",), 1, 0.0), LATER)


def test_unfinished_files_of_killed_writers_are_swept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.create("blobs/ab/x", b"x")
    left = tmp_path / "store" / "blobs" / "ab" / ".tmp-1-2-3"
    left.write_bytes(b"12345")
    fresh = tmp_path / "store" / "blobs" / ".tmp-4-5-6"
    fresh.write_bytes(b"1")
    os.utime(left, (1000.0, 1000.0))
    assert store.remove_unfinished(2000.0) == (1, 5)
    assert fresh.exists()
    assert not left.exists()
    assert list(store.keys("")) == ["blobs/ab/x"]


class _Racing(LocalStore):
    """A store in which a fork is asked for at the very moment when a collection has written down what it will delete."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.on_retired: list[object] = []

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        if key.endswith("/retired") and self.on_retired:
            self.on_retired.pop()()  # type: ignore[operator]


def test_a_fork_asked_for_while_its_step_is_about_to_go_keeps_it(tmp_path: Path) -> None:
    store = _Racing(tmp_path / "store")
    blobs = Blobs(store)
    run = TrainedRun.make(blobs, tmp_path, STEPS)
    fork = run.chain.with_request(fork={"run": "sizes-run", "step": 3})
    fork.run_id = "fork"
    store.on_retired.append(fork.prepare)
    done = collect(blobs, everything(), LATER, lambda _: False)
    assert done.retired == {"sizes-run": {4: 2, 6: 2}}
    _, opened = fork.open()
    assert opened.head.step == 3
    assert whole_steps(run) == [0, 1, 2, 3, 5, 7]
    assert run.chain.store.retired(3) is None


def test_rollouts_and_batches_are_never_dropped(run: TrainedRun) -> None:
    collect(run.chain.blobs, everything(), LATER, lambda _: False)
    for step in range(1, STEPS + 1):
        batch = run.chain.store.read(Batch, run.chain.store.step_key(step, "batch"))
        assert batch is not None
        for row in batch.rows:
            assert run.chain.blobs.get(row.rollout)
            assert run.chain.blobs.get(row.verdict)
