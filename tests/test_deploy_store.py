"""The compose file's object store for real: SeaweedFS with an identity for each role, and a run in which each has its own keys."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from mypy_boto3_s3 import S3Client

from activities.blobs import Blobs, S3Store
from activities.records import StepCommit
from activities.run_store import RunStore
from tests.seaweed import find_weed, free_pairs, wait_until_healthy
from tests.system import ROLES, SHORT_TIMEOUTS, System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEPLOY = Path(__file__).parent.parent / "deploy"
IDENTITIES = ("console", *ROLES)


def secret(identity: str) -> str:
    return f"{identity}-secret-of-a-test"


@dataclass
class Store:
    """The object store as compose starts it."""

    endpoint: str

    def client(self, identity: str) -> S3Client:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=f"{identity}-key",
            aws_secret_access_key=secret(identity),
            region_name="us-east-1",
            config=Config(retries={"max_attempts": 2}),
        )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """`start.sh` and `create-bucket.sh` of the compose file, on ports of this test's own."""
    folder = tmp_path_factory.mktemp("store")
    (folder / "data").mkdir()
    ports = free_pairs(("master", "volume", "filer", "s3"))
    keys = {f"TTTD_{i.upper()}_KEY": f"{i}-key" for i in IDENTITIES} | {f"TTTD_{i.upper()}_SECRET": secret(i) for i in IDENTITIES}
    environment = {
        **os.environ,
        **keys,
        "PATH": f"{Path(find_weed()).parent}:{os.environ['PATH']}",
        "TTTD_IDENTITIES": str(DEPLOY / "seaweedfs" / "identities.json.in"),
        "TTTD_S3_CONFIG": str(folder / "identities.json"),
        "TTTD_BUCKET": "tttd",
        "TTTD_MASTER": f"127.0.0.1:{ports['master']}",
    }
    command = [
        "weed",
        "-logtostderr=true",
        "server",
        f"-dir={folder / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-filer",
        "-s3",
    ]
    command += [f"-master.port={ports['master']}", f"-volume.port={ports['volume']}", f"-filer.port={ports['filer']}"]
    command += [f"-s3.port={ports['s3']}", "-s3.port.iceberg=0", "-master.volumeSizeLimitMB=64", "-volume.max=0"]
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(
            ["sh", str(DEPLOY / "seaweedfs" / "start.sh"), *command], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        endpoint = f"http://127.0.0.1:{ports['s3']}"
        wait_until_healthy(endpoint, process, folder / "weed.log")
        for _ in range(2):  # at every `up`
            created = subprocess.run(
                ["sh", str(DEPLOY / "seaweedfs" / "create-bucket.sh")], env=environment, capture_output=True, text=True, timeout=120
            )
            assert created.returncode == 0, created.stderr
            assert created.stdout == "bucket tttd is ready\n"
        yield Store(endpoint)
    finally:
        process.kill()
        process.wait()


def status(error: ClientError) -> int:
    return error.response["ResponseMetadata"]["HTTPStatusCode"]


async def test_a_run_in_which_every_role_has_its_own_keys_only(store: Store, tmp_path: Path) -> None:
    system = System(tmp_path / "home", TTTD_STORE="s3://tttd", TTTD_S3_ENDPOINT=store.endpoint, AWS_DEFAULT_REGION="us-east-1")
    try:
        system.start_temporal()
        for role in ROLES:
            system._environment |= {"AWS_ACCESS_KEY_ID": f"{role}-key", "AWS_SECRET_ACCESS_KEY": secret(role)}
            system.start(role)
        request = {
            "task": "circle_packing_26",
            "profile": "repeatable",
            "seed": 5,
            "timeouts": SHORT_TIMEOUTS,
            "search": {"steps": 1},
        }
        result = await system.run("rights", request)
    finally:
        system.stop()
    assert (result.state, result.step) == ("completed", 1)
    stored = RunStore(Blobs(S3Store(store.client("console"), "tttd")), "rights")
    commit = stored.read(StepCommit, stored.step_key(1, "commit"))
    assert commit is not None
    assert len(commit.rows) == 8
    assert not list((tmp_path / "home" / "store").iterdir()), "nothing went to a local store"
    logs = "".join(path.read_text() for path in system.settings.logs.iterdir())
    assert "NotAllowed" not in logs
    assert "AccessDenied" not in logs
    assert not [role for role in ROLES if secret(role) in logs]


@pytest.mark.parametrize(
    ("identity", "key"),
    [
        ("judge", "runs/r/steps/000001/g00/r00/rollout"),
        ("judge", "runs/r/steps/000001/commit"),
        ("judge", "fleet/engines/impostor"),
        ("sample", "runs/r/steps/000001/g00/r00/verdict"),
        ("sample", "fleet/engines/impostor"),
        ("train", "runs/r/steps/000001/commit"),
        ("engine", "runs/r/steps/000001/train"),
    ],
)
def test_the_store_itself_refuses_what_a_role_has_no_right_to(store: Store, identity: str, key: str) -> None:
    client = store.client(identity)
    with pytest.raises(ClientError) as written:
        client.put_object(Bucket="tttd", Key=key, Body=b"x", IfNoneMatch="*")
    assert status(written.value) == 403


def test_a_judge_may_create_a_verdict_once_and_delete_nothing(store: Store) -> None:
    client, key = store.client("judge"), "runs/r/steps/000001/g00/r01/verdict"
    client.put_object(Bucket="tttd", Key=key, Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError) as again:
        client.put_object(Bucket="tttd", Key=key, Body=b"second", IfNoneMatch="*")
    assert status(again.value) == 412
    with pytest.raises(ClientError) as deleted:
        client.delete_object(Bucket="tttd", Key=key)
    assert status(deleted.value) == 403
    with pytest.raises(ClientError) as missing:
        client.get_object(Bucket="tttd", Key=key.replace("r01", "r02"))
    assert status(missing.value) == 404, "a key that does not exist must not look like one that is forbidden"


def test_a_stranger_is_refused(store: Store) -> None:
    with pytest.raises(ClientError) as refused:
        store.client("stranger").list_objects_v2(Bucket="tttd")
    assert status(refused.value) == 403
