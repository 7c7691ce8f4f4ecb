"""One request on a directory and on a real S3: one chain. And what people do with a store works on S3 as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from activities.blobs import Blobs, S3Store
from activities.records import AdapterManifest, StepCommit
from activities.run_store import RunStore
from console.storage.checking import check_run
from tests.system import SHORT_TIMEOUTS, System
from tests.test_deploy_store import Store, secret, store  # noqa: F401  a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUEST = {"task": "circle_packing_26", "profile": "repeatable", "seed": 3, "timeouts": SHORT_TIMEOUTS, "search": {"steps": 2}}


def s3_system(home: Path, endpoint: str, **environment: str) -> System:
    """A system whose roles share one identity of the store, which may do everything."""
    return System(
        home,
        TTTD_STORE="s3://tttd/equal",
        TTTD_S3_ENDPOINT=endpoint,
        AWS_DEFAULT_REGION="us-east-1",
        AWS_ACCESS_KEY_ID="console-key",
        AWS_SECRET_ACCESS_KEY=secret("console"),
        **environment,
    )


async def run_in(system: System) -> str:
    """The hash of the whole chain."""
    try:
        system.start_all()
        return (await system.run("equal", REQUEST)).commit
    finally:
        system.stop()


async def test_a_directory_and_s3_give_the_same_chain(store: Store, tmp_path: Path) -> None:  # noqa: F811
    local = System(tmp_path / "local")
    remote = s3_system(tmp_path / "remote", store.endpoint)
    assert await run_in(local) == await run_in(remote)
    blobs = Blobs(S3Store(store.client("console"), "tttd", "equal"))
    ours, theirs = RunStore(local.blobs, "equal"), RunStore(blobs, "equal")
    assert [ours.commit_digest(step) for step in range(3)] == [theirs.commit_digest(step) for step in range(3)]
    checked = check_run(blobs, "equal")
    assert (checked.problems, checked.replayed) == ([], checked.steps - 1), "all but the roots, which need the task at hand"
    _look_after(remote, blobs, tmp_path)


def _look_after(remote: System, blobs: Blobs, folder: Path) -> None:
    """Damage, collection and export, by the commands, on S3."""
    bundle = folder / "equal.tar"
    assert remote.tttd("export", "equal", "--out", str(bundle)).returncode == 0
    commit = RunStore(blobs, "equal").read(StepCommit, "runs/equal/steps/000002/commit")
    assert commit is not None
    weights = RunStore(blobs, "equal").load(AdapterManifest, commit.policy.adapter).weights
    blobs.store.put(Blobs.key(weights), b"damaged")
    found = remote.tttd("storage", "check", "equal", "--json")
    assert found.returncode == 1
    assert json.loads(found.stdout)[0]["problems"][0]["where"] == f"blob {weights}"
    assert remote.tttd("storage", "check", "equal", "--from", str(bundle)).returncode == 0
    orphan = blobs.put(b"of a zombie")
    young = remote.tttd("storage", "gc", "--all", "--json")
    assert (young.returncode, json.loads(young.stdout)["orphans"]) == (0, 0), young.stderr
    old = remote.tttd("storage", "gc", "--all", "--grace-hours", "0", "--json")
    assert old.returncode == 0, old.stderr
    assert json.loads(old.stdout)["orphans"] >= 1
    assert not blobs.store.exists(Blobs.key(orphan))
    assert remote.tttd("storage", "check", "equal").returncode == 0
    assert remote.tttd("verify", "equal").returncode == 0
