"""Write the store's access policies, one for each role, from the table that the workers obey (workers/rights.py).

    python -m scripts.access_policies --bucket tttd --prefix prod --output my-policies
    python -m scripts.access_policies --bucket tttd --output deploy/policies --seaweedfs deploy/seaweedfs/identities.json.in

The files are policies as AWS IAM reads them. Stated in them:
    list     ListBucket on the whole bucket, for every role: without it a store answers 403 instead of 404 for a key that does not
             exist, and a worker could not tell a rollout that nobody has made from one that it may not see. It shows names only.
    create   PutObject only with `If-None-Match`, so that nothing can be overwritten
    replace  PutObject without condition

SeaweedFS 4.48 knows no `s3:if-none-match` in a policy, and refuses where it stands. Its identities therefore have PutObject without
the condition: what a role may create there, it could also overwrite; readers find that by the digest, or by the hash chain.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workers.rights import PROBE, RIGHTS, Rights

Statement = dict[str, Any]


def policy(rights: Rights, bucket: str, prefix: str = "", *, conditions: bool = True) -> dict[str, Any]:
    """The policy document of one role.

    Args:
        prefix: of the store's address within the bucket (`s3://bucket/prefix`), without slashes at its ends.
        conditions: False for a store that does not know the condition key.
    """

    def objects(patterns: Iterable[str]) -> list[str]:
        return [f"arn:aws:s3:::{bucket}/{f'{prefix}/' if prefix else ''}{pattern}" for pattern in sorted(set(patterns))]

    create_only = set(rights.create) - set(rights.replace)
    once = {"Condition": {"Null": {"s3:if-none-match": "false"}}} if conditions else {}
    statements = [
        _allow("List", "s3:ListBucket", [f"arn:aws:s3:::{bucket}"]),
        _allow("Read", "s3:GetObject", objects((*rights.read, PROBE))),
        _allow("Create", "s3:PutObject", objects((*create_only, PROBE))) | once,
        _allow("Delete", "s3:DeleteObject", objects((*rights.delete, PROBE))),
    ]
    if rights.replace:
        statements.append(_allow("Replace", "s3:PutObject", objects(rights.replace)))
    return {"Version": "2012-10-17", "Statement": statements}


def _allow(sid: str, action: str, resources: list[str]) -> Statement:
    return {"Sid": sid, "Effect": "Allow", "Action": action, "Resource": resources}


def identities(bucket: str, prefix: str = "") -> dict[str, Any]:
    """SeaweedFS' identities, one for each role and one for people; keys are placeholders: `@JUDGE_KEY@`, `@JUDGE_SECRET@`."""

    def identity(name: str, **rights: Any) -> dict[str, Any]:
        key = {"accessKey": f"@{name.upper()}_KEY@", "secretKey": f"@{name.upper()}_SECRET@"}
        return {"name": name, "credentials": [key], **rights}

    everything = [f"{action}:{bucket}" for action in ("Admin", "Read", "Write", "List")]
    return {
        "identities": [identity("console", actions=everything), *(identity(role, policyNames=[role]) for role in RIGHTS)],
        "policies": [
            {"name": role, "content": json.dumps(policy(rights, bucket, prefix, conditions=False))}
            for role, rights in RIGHTS.items()
        ],
    }


def as_text(document: dict[str, Any]) -> str:
    """A document as its file holds it."""
    return json.dumps(document, indent=2) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the store's access policies, one for each role.")
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--prefix", default="", help="of the store's address: s3://BUCKET/PREFIX")
    parser.add_argument("--output", type=Path, required=True, help="folder for ROLE.json")
    parser.add_argument("--seaweedfs", type=Path, help="file for SeaweedFS' identities, with placeholders for keys")
    options = parser.parse_args()
    prefix = options.prefix.strip("/")
    options.output.mkdir(parents=True, exist_ok=True)
    for role, rights in RIGHTS.items():
        (options.output / f"{role}.json").write_text(as_text(policy(rights, options.bucket, prefix)), encoding="utf-8")
    if options.seaweedfs:
        options.seaweedfs.parent.mkdir(parents=True, exist_ok=True)
        options.seaweedfs.write_text(as_text(identities(options.bucket, prefix)), encoding="utf-8")


if __name__ == "__main__":
    main()
