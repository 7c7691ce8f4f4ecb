"""What each role may do in the object store: the table, the policies made from it, and that stores obey."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from activities.blobs import Blobs, LocalStore, MissingKey
from activities.errors import InputError
from scripts.access_policies import as_text, identities, policy
from workers.rights import RIGHTS, NotAllowed, RestrictedStore
from workers.roles import _ROLES

DEPLOY = Path(__file__).parent.parent / "deploy"
COORDINATE = "runs/a-run/steps/000003/g05/r17"
KEYS = {
    "blob": "blobs/ab/" + "ab" * 32,
    "spec": "runs/a-run/open",
    "plan": "runs/a-run/steps/000003/plan",
    "rollout": f"{COORDINATE}/rollout",
    "verdict": f"{COORDINATE}/verdict",
    "base": "runs/a-run/steps/000003/g05/base",
    "batch": "runs/a-run/steps/000003/batch",
    "train": "runs/a-run/steps/000003/train",
    "commit": "runs/a-run/steps/000003/commit",
    "notice": "fleet/engines/an-engine",
    "published": "fleet/published/an-engine",
}
CREATES = {
    "control": {"blob", "spec", "plan", "rollout", "verdict", "base", "batch", "train", "commit"},
    "sample": {"blob", "rollout"},
    "judge": {"blob", "verdict"},
    "train": {"blob", "train", "base"},
    "engine": {"blob"},
}


def allowed(role: str, verb: str) -> set[str]:
    patterns = getattr(RIGHTS[role], verb)
    return {name for name, key in KEYS.items() if any(fnmatchcase(key, pattern) for pattern in patterns)}


def test_every_role_has_rights() -> None:
    assert RIGHTS.keys() == _ROLES.keys() == CREATES.keys()


@pytest.mark.parametrize("role", RIGHTS)
def test_roles_create_what_is_theirs(role: str) -> None:
    assert allowed(role, "create") == CREATES[role]


def test_nothing_of_a_run_can_be_replaced_or_deleted_by_a_worker() -> None:
    for role in RIGHTS:
        assert allowed(role, "replace") <= {"blob", "notice", "published"}, role
        assert allowed(role, "delete") <= {"notice"}, role


def test_judges_read_blobs_and_verdicts_and_overwrite_nothing() -> None:
    assert allowed("judge", "read") == {"blob", "verdict"}
    assert allowed("judge", "replace") == allowed("judge", "delete") == allowed("judge", "list") == set()


def test_only_engines_write_notices() -> None:
    assert [role for role in RIGHTS if "notice" in allowed(role, "replace")] == ["engine"]


def test_a_restricted_store_lets_through_what_is_allowed_and_names_what_is_not(tmp_path: Path) -> None:
    store = RestrictedStore(LocalStore(tmp_path), "judge")
    assert store.create(KEYS["verdict"], b"first")
    assert not store.create(KEYS["verdict"], b"second")
    assert store.get(KEYS["verdict"]) == b"first"
    assert not store.exists(KEYS["blob"])
    with pytest.raises(MissingKey):
        store.get(KEYS["blob"])
    for attempt in (
        lambda: store.put(KEYS["verdict"], b"x"),
        lambda: store.create(KEYS["rollout"], b"x"),
        lambda: store.get(KEYS["commit"]),
        lambda: store.exists(KEYS["rollout"]),
        lambda: store.delete(KEYS["verdict"]),
        lambda: store.keys("runs/"),
        lambda: store.folders("runs/"),
    ):
        with pytest.raises(NotAllowed, match=r"role judge may not \w+ 'runs/.*workers/rights\.py"):
            attempt()
    assert issubclass(NotAllowed, InputError), "another attempt would be refused as well"


def test_a_judge_cannot_heal_a_damaged_blob_but_control_can(tmp_path: Path) -> None:
    plain = Blobs(LocalStore(tmp_path))
    digest = plain.put(b"content")
    plain.store.put(plain.key(digest), b"damaged")
    with pytest.raises(NotAllowed, match="may not replace"):
        Blobs(RestrictedStore(LocalStore(tmp_path), "judge")).put(b"content")
    Blobs(RestrictedStore(LocalStore(tmp_path), "control")).put(b"content")
    assert plain.get(digest) == b"content"


@pytest.mark.parametrize("role", RIGHTS)
def test_the_policies_in_the_repository_are_those_of_the_table(role: str) -> None:
    remedy = "write them anew: `make deploy-files`"
    assert (DEPLOY / "policies" / f"{role}.json").read_text() == as_text(policy(RIGHTS[role], "tttd")), remedy
    assert (DEPLOY / "seaweedfs" / "identities.json.in").read_text() == as_text(identities("tttd")), remedy


def test_a_policy_says_create_only_where_the_table_does() -> None:
    for role, rights in RIGHTS.items():
        statements = {s["Sid"]: s for s in policy(rights, "bucket", "some/prefix")["Statement"]}
        assert statements["Create"]["Condition"] == {"Null": {"s3:if-none-match": "false"}}
        unconditional = statements.get("Replace", {"Resource": []})["Resource"]
        expected = {f"arn:aws:s3:::bucket/some/prefix/{pattern}" for pattern in rights.replace}
        assert set(unconditional) == expected, role
        assert all(r.startswith("arn:aws:s3:::bucket/some/prefix/") for r in statements["Read"]["Resource"])


def test_no_key_stands_in_the_repository() -> None:
    found = json.loads((DEPLOY / "seaweedfs" / "identities.json.in").read_text())
    keys = [value for identity in found["identities"] for key in identity["credentials"] for value in key.values()]
    assert len(keys) == 2 * (len(RIGHTS) + 1)
    assert all(key.startswith("@") and key.endswith("@") for key in keys)
