"""SeaweedFS as the S3 of a test: one process, an identity for each worker, quick to come back after a kill. Knows no run."""

from __future__ import annotations

import contextlib
import copy
import json
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from mypy_boto3_s3 import S3Client

from scripts.access_policies import identities
from tests.seaweed import GRPC, find_weed, free_pairs

BUCKET = "tttd"
REGION = "us-east-1"
_READY_SECONDS = 60.0


def secret(worker: str) -> str:
    return f"{worker}-secret-of-a-test"


class SeaweedFS:
    """Where it lies, how it is started, and how it is asked. Starting and killing are the caller's.

    Args:
        folder: for its data; a restart finds there what it had.
        workers: whose identities it knows: roles, and further processes of a role as `train-2`.
    """

    def __init__(self, folder: Path, workers: Sequence[str]) -> None:
        self._folder = folder
        (folder / "data").mkdir(parents=True)
        self._ports = free_pairs(("master", "volume", "filer", "s3"))
        (folder / "identities.json").write_text(json.dumps(_identities(workers)), encoding="utf-8")

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._ports["s3"]

    def command(self) -> list[str]:
        """One master, and so no election to wait for: after a kill the default would cost 15 to 25 s, this costs 3."""
        return [
            find_weed(),
            "-logtostderr=true",
            "server",
            f"-dir={self._folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-filer",
            "-s3",
            *(f"-{name}.port={port}" for name, port in self._ports.items()),
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=0",
            "-master.electionTimeout=1s",
            f"-s3.config={self._folder / 'identities.json'}",
        ]

    def client(self, *, attempts: int = 10) -> S3Client:
        """A client with all rights on the bucket, straight to the store."""
        host, port = self.address
        return boto3.client(
            "s3",
            endpoint_url=f"http://{host}:{port}",
            aws_access_key_id="console-key",
            aws_secret_access_key=secret("console"),
            region_name=REGION,
            config=Config(retries={"mode": "standard", "total_max_attempts": attempts}),
        )

    def wait_until_ready(self) -> None:
        """Wait until it writes; make the bucket if there is none.

        Raises:
            RuntimeError: not within 60 s.
        """
        client, (host, port) = self.client(attempts=1), self.address
        deadline, last = time.monotonic() + _READY_SECONDS, ""
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://{host}:{port}/healthz", timeout=2):
                    pass
                with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
                    client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="harness/ready", Body=b"ready")
            except (OSError, BotoCoreError, ClientError) as error:
                last = str(error)
                time.sleep(0.1)
            else:
                return
        raise RuntimeError(f"the object store did not write within {_READY_SECONDS:.0f} s: {last}")

    def clean(self) -> None:
        """Remove the Unix sockets that it leaves in /tmp when it is killed."""
        for port in self._ports.values():
            for number in (port, port + GRPC):
                for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    left.unlink(missing_ok=True)


def _identities(workers: Sequence[str]) -> dict[str, Any]:
    """The deployment's own identities and rights, filled in, and one more for each further process of a role."""
    document = identities(BUCKET)
    by_role = {identity["name"]: identity for identity in document["identities"]}
    filled = []
    for name in ("console", *workers):
        identity = copy.deepcopy(by_role[name.partition("-")[0]])
        identity |= {"name": name, "credentials": [{"accessKey": f"{name}-key", "secretKey": secret(name)}]}
        filled.append(identity)
    return document | {"identities": filled}
