"""Host A's object store: SeaweedFS as the compose file starts it, with an identity for each role, on the host's own address.

Only its S3 port answers to others. The host's network is its own, so the usual ports are free.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import boto3
from botocore.config import Config

from activities.blobs import Blobs, S3Store
from tests.seaweed import find_weed, wait_until_healthy
from tests.system import ROLES
from tests.two_hosts.network import A_ADDRESS, on_host_command

BUCKET = "tttd"
ENDPOINT = f"http://{A_ADDRESS}:8333"
_DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "seaweedfs"


def keys_of(identity: str) -> dict[str, str]:
    """Environment variables with the keys of a role, or of `console`, which is people."""
    return {
        "AWS_ACCESS_KEY_ID": f"{identity}-key",
        "AWS_SECRET_ACCESS_KEY": f"{identity}-secret-of-two-hosts",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def open_as_people() -> Blobs:
    """The store as `tttd status` sees it."""
    keys = keys_of("console")
    client = boto3.client(
        "s3",
        endpoint_url=ENDPOINT,
        aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        region_name=keys["AWS_DEFAULT_REGION"],
        config=Config(retries={"max_attempts": 2}),
    )
    return Blobs(S3Store(client, BUCKET))


@contextlib.contextmanager
def running_store(folder: Path) -> Iterator[None]:
    """The store with its bucket, while the body runs; in this process's network."""
    (folder / "data").mkdir(parents=True)
    weed = find_weed()
    environment = {
        **os.environ,
        **{f"TTTD_{i.upper()}_KEY": keys_of(i)["AWS_ACCESS_KEY_ID"] for i in ("console", *ROLES)},
        **{f"TTTD_{i.upper()}_SECRET": keys_of(i)["AWS_SECRET_ACCESS_KEY"] for i in ("console", *ROLES)},
        "PATH": f"{Path(weed).parent}:{os.environ['PATH']}",
        "TTTD_IDENTITIES": str(_DEPLOY / "identities.json.in"),
        "TTTD_S3_CONFIG": str(folder / "identities.json"),
        "TTTD_BUCKET": BUCKET,
        "TTTD_MASTER": "127.0.0.1:9333",
    }
    server = [weed, "-logtostderr=true", "server", f"-dir={folder / 'data'}", "-filer", "-s3", "-s3.port.iceberg=0"]
    server += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.ip.bind=0.0.0.0", "-master.volumeSizeLimitMB=64", "-volume.max=0"]
    command = [*on_host_command(), "sh", str(_DEPLOY / "start.sh"), *server]
    with (
        (folder / "weed.log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            wait_until_healthy(ENDPOINT, process, folder / "weed.log")
            create = ["sh", str(_DEPLOY / "create-bucket.sh")]
            subprocess.run(create, env=environment, check=True, capture_output=True, timeout=120)
            yield
        finally:
            process.kill()
