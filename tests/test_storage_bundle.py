"""`tttd export` and `tttd import`: one file, always the same bytes, nothing of the machine in it, and the run again elsewhere."""

from __future__ import annotations

import io
import json
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from activities.blobs import Blobs, LocalStore, digest_of, read_together
from activities.errors import ConflictError, InputError, Retired
from activities.records import RunSpec
from activities.run_store import RunStore
from console.cli.metrics import step_lines
from console.storage.bundle import MANIFEST, BundleStore, Manifest
from console.storage.checking import check_run
from console.storage.collection import Wish, collect
from console.storage.exporting import export_run
from console.storage.importing import Imported, import_bundle
from console.stored import best_answer, find_run
from tasks.bundles import BundleCache
from tasks.registry import TaskSource
from tests.bundles import holding_word, members
from tests.trained_chain import TrainedRun

STEPS = 3


@pytest.fixture
def run(blobs: Blobs, tmp_path: Path) -> TrainedRun:
    return TrainedRun.make(blobs, tmp_path, STEPS)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Blobs:
    return Blobs(LocalStore(tmp_path / "elsewhere"))


@pytest.fixture
def bundle(run: TrainedRun, tmp_path: Path) -> Path:
    path = tmp_path / "run.tar"
    export_run(run.chain.blobs, run.chain.run_id, path)
    return path


def there(run: TrainedRun, blobs: Blobs, **request: object) -> TrainedRun:
    """The run in another store."""
    chain = run.chain.with_request(**request)
    chain.blobs = blobs
    return TrainedRun(chain)


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """The bundle with other members."""
    files = members(path)
    change(files)
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


# The file ---------------------------------------------------------------------------------------------------------------------
def test_the_same_run_gives_the_same_bytes_wherever_it_lies(
    run: TrainedRun, bundle: Path, elsewhere: Blobs, tmp_path: Path
) -> None:
    import_bundle(elsewhere, bundle)
    for number, blobs in enumerate((run.chain.blobs, elsewhere)):
        export_run(blobs, run.chain.run_id, tmp_path / f"{number}.tar")
        assert (tmp_path / f"{number}.tar").read_bytes() == bundle.read_bytes()


def test_a_bundle_is_read_by_many_threads_at_once(bundle: Path) -> None:
    store = BundleStore(bundle)
    keys = [key for key in store.keys("blobs/") for _ in range(20)]
    assert len(set(keys)) > 20
    for key, data in zip(keys, read_together(store.get, keys), strict=True):
        assert key.endswith(digest_of(data))
    store.close()


def test_a_bundle_is_plain_files_and_says_what_they_are(bundle: Path, run: TrainedRun) -> None:
    files = members(bundle)
    manifest = Manifest.model_validate_json(files.pop(MANIFEST))
    assert digest_of(files.pop("README.md")) == manifest.readme
    assert {f"blobs/{d[:2]}/{d}": b.bytes for d, b in manifest.blobs.items()} == {name: len(data) for name, data in files.items()}
    assert all(digest_of(data) == name.rpartition("/")[2] for name, data in files.items())
    assert (manifest.run, manifest.step, manifest.commit) == ("sizes-run", STEPS, run.head.commit)
    # Without tttd: from the manifest to the last commit and to its predecessor.
    commit = json.loads(files[f"blobs/{manifest.commit[:2]}/{manifest.commit}"])
    assert commit["previous"] == run.heads[-2].commit


def test_nothing_of_the_machine_is_in_it(run: TrainedRun, blobs: Blobs, tmp_path: Path) -> None:
    """Opened with a model that the user named by its path on this machine."""
    model = str(run.chain.models_directory / "tiny")
    named = TrainedRun(run.chain.with_request(model=model))
    named.chain.run_id = "by-path"
    named.open()
    named.step()
    export_run(blobs, "by-path", tmp_path / "by-path.tar")
    raw = (tmp_path / "by-path.tar").read_bytes()
    for path in (str(tmp_path), str(Path.home()) + "/", model):
        assert path.encode() not in raw
    assert holding_word(tmp_path / "by-path.tar", socket.gethostname()) == []
    import_bundle(other := Blobs(LocalStore(tmp_path / "other")), tmp_path / "by-path.tar")
    spec = RunStore(other, "by-path").read(RunSpec, "runs/by-path/open")
    assert spec is not None
    assert spec.request.model == "tiny"
    resumed = there(named, other, model="tiny")
    assert resumed.open() == named.head, "the model's folder is found by its name, and is the same by its digest"
    assert resumed.step().step == 2


def test_a_step_in_progress_is_left_out(run: TrainedRun, tmp_path: Path) -> None:
    assert run.run is not None
    plan = run.chain.select(run.run, run.head).plan
    run.chain.write(plan, run.chain.coordinates(plan, STEPS + 1)[0], run.head.policy, 1.0)
    export_run(run.chain.blobs, run.chain.run_id, tmp_path / "run.tar")
    manifest = Manifest.model_validate_json(members(tmp_path / "run.tar")[MANIFEST])
    assert not [key for key in manifest.entries if f"steps/{STEPS + 1:06d}" in key]
    assert plan not in manifest.blobs


def test_what_cannot_be_exported_is_named(run: TrainedRun, blobs: Blobs, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run 'nobody'"):
        export_run(blobs, "nobody", tmp_path / "nobody.tar")
    blobs.store.delete(Blobs.key(run.heads[1].archive))
    with pytest.raises(Exception, match=run.heads[1].archive):
        export_run(blobs, "sizes-run", tmp_path / "broken.tar")
    assert not list(tmp_path.glob("*.tar*")), "half a bundle is none"


# Elsewhere --------------------------------------------------------------------------------------------------------------------
def test_an_imported_run_is_the_run(run: TrainedRun, bundle: Path, elsewhere: Blobs, tmp_path: Path) -> None:
    done = import_bundle(elsewhere, bundle)
    assert done == Imported(
        "sizes-run", STEPS, len(list(elsewhere.store.keys("blobs/"))), len(list(elsewhere.store.keys("runs/"))), False
    )
    assert set(elsewhere.store.keys("runs/")) == set(run.chain.blobs.store.keys("runs/"))
    checked = check_run(elsewhere, "sizes-run")
    assert (checked.problems, checked.replayed) == ([], STEPS)
    # The task's folder came along: this machine needs none of that name.
    answer = best_answer(elsewhere, "sizes-run", TaskSource((), BundleCache(tmp_path / "unpacked", elsewhere.get)))
    assert answer.score_name == "size"
    assert answer == best_answer(run.chain.blobs, "sizes-run", TaskSource((), BundleCache(tmp_path / "ours", run.chain.blobs.get)))
    assert step_lines(elsewhere, "sizes-run", STEPS) == step_lines(run.chain.blobs, "sizes-run", STEPS)


def test_an_imported_run_goes_on_and_can_be_forked(run: TrainedRun, bundle: Path, elsewhere: Blobs) -> None:
    import_bundle(elsewhere, bundle)
    other = there(run, elsewhere)
    assert other.open() == run.head
    assert other.step() == run.step(), "the same step on the same records, wherever they lie"
    fork = there(run, elsewhere, fork={"run": "sizes-run", "step": 1}, seed=3)
    fork.chain.run_id = "fork"
    assert fork.open().step == 1


def test_importing_twice_changes_nothing(bundle: Path, elsewhere: Blobs) -> None:
    import_bundle(elsewhere, bundle)
    before = {key: elsewhere.store.get(key) for key in elsewhere.store.keys("")}
    again = import_bundle(elsewhere, bundle)
    assert (again.blobs, again.entries) == (0, 0)
    assert {key: elsewhere.store.get(key) for key in elsewhere.store.keys("")} == before


def test_a_later_bundle_makes_an_earlier_import_grow(run: TrainedRun, bundle: Path, elsewhere: Blobs, tmp_path: Path) -> None:
    import_bundle(elsewhere, bundle)
    run.step()
    export_run(run.chain.blobs, "sizes-run", tmp_path / "later.tar")
    assert import_bundle(elsewhere, tmp_path / "later.tar").step == STEPS + 1
    assert find_run(elsewhere, "sizes-run") == find_run(run.chain.blobs, "sizes-run")
    assert import_bundle(elsewhere, bundle).step == STEPS + 1, "the earlier one brings nothing new"


def test_an_import_that_was_killed_can_be_repeated(bundle: Path, elsewhere: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed again and again on the way, after nine new writes each; what has a commit is whole at any time."""
    create, killed = LocalStore.create, 0

    def dying(self: LocalStore, key: str, data: bytes) -> bool:
        nonlocal left
        if not self.exists(key):
            if left == 0:
                raise OSError("killed")
            left -= 1
        return create(self, key, data)

    while True:
        left = 9
        monkeypatch.setattr(LocalStore, "create", dying)
        try:
            import_bundle(elsewhere, bundle)
            break
        except OSError:
            killed += 1
        finally:
            monkeypatch.undo()
        last = RunStore(elsewhere, "sizes-run").last_step()
        assert last is None or check_run(elsewhere, "sizes-run").problems == []
    assert killed > 10
    checked = check_run(elsewhere, "sizes-run")
    assert (checked.problems, checked.replayed) == ([], STEPS)


# Refusals ---------------------------------------------------------------------------------------------------------------------
def test_another_run_of_the_same_name_is_refused(run: TrainedRun, bundle: Path, elsewhere: Blobs) -> None:
    there(run, elsewhere, seed=9).open()
    with pytest.raises(ConflictError, match="is another one"):
        import_bundle(elsewhere, bundle)


def test_the_same_science_that_went_another_way_is_refused(run: TrainedRun, bundle: Path, elsewhere: Blobs) -> None:
    other = there(run, elsewhere)
    other.open()
    assert other.run is not None
    other.chain.step(other.run, other.head, lambda at: 0.25)  # the same request, other programs
    with pytest.raises(ConflictError, match="went another way at step 1"):
        import_bundle(elsewhere, bundle)


def test_a_run_with_other_rollouts_in_progress_is_refused(run: TrainedRun, bundle: Path, elsewhere: Blobs) -> None:
    other = there(run, elsewhere)
    other.open()
    assert other.run is not None
    plan = other.chain.select(other.run, other.head).plan
    other.chain.write(plan, other.chain.coordinates(plan, 1)[0], other.head.policy, 0.125)
    with pytest.raises(ConflictError, match="step 1 in progress with a verdict of its own"):
        import_bundle(elsewhere, bundle)


def _flip_a_blob(files: dict[str, bytes]) -> None:
    name = max(files, key=lambda n: len(files[n]) if n.startswith("blobs/") else 0)
    files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])


def _drop_a_blob(files: dict[str, bytes]) -> None:
    del files[max(name for name in files if name.startswith("blobs/"))]


def _add_a_file(files: dict[str, bytes]) -> None:
    files["../outside"] = b"x"


def _rename_entries(files: dict[str, bytes]) -> None:
    files[MANIFEST] = files[MANIFEST].replace(b'"runs/sizes-run/open"', b'"fleet/published/e"')


def _cut_the_chain(files: dict[str, bytes]) -> None:
    manifest = json.loads(files[MANIFEST])
    del manifest["entries"][f"runs/sizes-run/steps/{STEPS:06d}/commit"]
    files[MANIFEST] = json.dumps(manifest).encode()


def _another_readme(files: dict[str, bytes]) -> None:
    files["README.md"] += b"!"


def _no_manifest(files: dict[str, bytes]) -> None:
    del files[MANIFEST]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_flip_a_blob, "damaged: its .* bytes have digest"),
        (_drop_a_blob, "missing"),
        (_add_a_file, r"\.\./outside is not in its manifest"),
        (_rename_entries, "entry fleet/published/e is not one of run sizes-run"),
        (_cut_the_chain, "its entries end at step"),
        (_another_readme, "README.md is not the one of its manifest"),
        (_no_manifest, "has no manifest.json"),
    ],
)
def test_a_bundle_that_was_changed_is_refused_whole(
    bundle: Path, elsewhere: Blobs, change: Callable[[dict[str, bytes]], None], says: str
) -> None:
    rewrite(bundle, change)
    with pytest.raises(InputError, match=says):
        import_bundle(elsewhere, bundle)
    assert list(elsewhere.store.keys("")) == []


def test_a_file_that_is_no_bundle_is_refused(elsewhere: Blobs, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"no tar at all")
    with pytest.raises(InputError, match="cannot be read as a bundle"):
        import_bundle(elsewhere, tmp_path / "x.tar")


# Light bundles, and retired steps -------------------------------------------------------------------------------------------------
def test_a_light_bundle_has_answers_and_metrics_and_cannot_be_gone_on_with(
    run: TrainedRun, bundle: Path, elsewhere: Blobs, tmp_path: Path
) -> None:
    light = tmp_path / "light.tar"
    exported = export_run(run.chain.blobs, "sizes-run", light, light=True)
    assert exported.absent > 0
    kinds = {blob.kind for blob in Manifest.model_validate_json(members(light)[MANIFEST]).blobs.values()}
    assert not kinds & {"rollout", "base", "optimizer", "weights", "gate"}
    assert import_bundle(elsewhere, light).light
    tasks = TaskSource((run.chain.tasks_directory,))
    assert best_answer(elsewhere, "sizes-run", tasks) == best_answer(run.chain.blobs, "sizes-run", tasks)
    assert step_lines(elsewhere, "sizes-run", STEPS) == step_lines(run.chain.blobs, "sizes-run", STEPS)
    checked = check_run(elsewhere, "sizes-run")
    assert (checked.problems, checked.absent, checked.replayed) == ([], exported.absent, 0)
    from temporalio.exceptions import ApplicationError

    with pytest.raises(ApplicationError, match=r"step 3 of run sizes-run was retired \(light bundle\)") as refused:
        there(run, elsewhere).open()
    assert refused.value.type == Retired.__name__
    # The whole one brings the rest.
    import_bundle(elsewhere, bundle)
    assert check_run(elsewhere, "sizes-run").absent == 0
    assert there(run, elsewhere).open() == run.head


def test_what_was_retired_is_absent_from_a_bundle_and_comes_back_from_an_older_one(
    blobs: Blobs, elsewhere: Blobs, tmp_path: Path
) -> None:
    run = TrainedRun.make(blobs, tmp_path, 4)
    whole, thin = tmp_path / "whole.tar", tmp_path / "thin.tar"
    export_run(blobs, "sizes-run", whole)
    collect(blobs, Wish(None, 1, 0.0), 1e12, lambda _: False)
    exported = export_run(blobs, "sizes-run", thin)
    record = run.chain.store.retired(3)
    assert record is not None
    assert exported.absent == len(record.blobs) > 0
    import_bundle(elsewhere, thin)
    assert RunStore(elsewhere, "sizes-run").retired(3) == record
    import_bundle(blobs, whole)
    assert run.chain.store.retired(3) is None
    assert check_run(blobs, "sizes-run").absent == 0
