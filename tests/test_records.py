"""Stored documents: one byte string per value, keys where they are looked for, and create-once entries."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from activities.blobs import Blobs, digest_of
from activities.errors import CorruptBlob, NewerDocument
from activities.records import ArchiveState, Checkpoint, Node, RolloutRecord, StepCommit, Verdict, canonical_json, policy_name
from activities.run_store import RunStore
from workflows.contracts.base import Coordinate, Outcome, PolicyRef
from workflows.names import group_workflow_id, step_workflow_id

AT = Coordinate(step=12, group=3, rollout=17)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


# Canonical JSON -----------------------------------------------------------------------------------------------------------------
@given(json_values)
def test_canonical_json_is_json_and_stable(value: object) -> None:
    data = canonical_json(value)
    assert json.loads(data) == value
    assert canonical_json(json.loads(data)) == data
    assert b"\n" not in data


@given(st.dictionaries(st.text(max_size=4), st.integers(), min_size=2, max_size=6), st.randoms())
def test_order_of_keys_does_not_matter(value: dict[str, int], random: object) -> None:
    items = list(value.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert canonical_json(dict(items)) == canonical_json(value)


def test_canonical_form_is_fixed() -> None:
    """A change of this form would change every digest of every stored run."""
    value = {"b": [1, 2.5, None, True], "a": "ü\u2028\n", "c": {"z": 1e-07, "y": 0.1}}
    assert canonical_json(value) == '{"a":"ü\u2028\\n","b":[1,2.5,null,true],"c":{"y":0.1,"z":1e-07}}'.encode()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": number})
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(Verdict(at=AT, outcome=Outcome.VALID, reason="", score=number))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_doubles_come_back_bit_for_bit(number: float) -> None:
    node = Node(id="a", step=0, value=number, score=number, code="", construction=None)
    again = Node.model_validate_json(canonical_json(node))
    assert math.copysign(1, again.value) == math.copysign(1, number)
    assert again == node
    assert canonical_json(again) == canonical_json(node)


def test_a_whole_number_is_the_same_double() -> None:
    one, two = (Node(id="a", step=0, value=v, score=None, code="", construction=None) for v in (1, 1.0))
    assert canonical_json(one) == canonical_json(two)
    assert b'"value":1.0' in canonical_json(one)


# Documents ----------------------------------------------------------------------------------------------------------------------
def test_documents_are_frozen_and_strict_about_fields() -> None:
    checkpoint = Checkpoint(step=0, adapter="a" * 64, optimizer=None)
    with pytest.raises(ValidationError, match="frozen"):
        checkpoint.step = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        Checkpoint.model_validate({"step": 0, "adapter": "a" * 64, "optimizer": None, "model": "b" * 64})
    with pytest.raises(ValidationError, match="pattern"):
        Checkpoint(step=0, adapter="not a digest", optimizer=None)


def test_commit_holds_no_times_hosts_or_attempts() -> None:
    names = set(StepCommit.model_fields)
    assert names == {
        "step", "previous", "identity", "rows", "archive", "policy", "previous_policy", "initial_policy", "origin"
    }  # fmt: skip


def test_policy_names_are_unique_to_identity_version_and_content() -> None:
    name = policy_name("a" * 64, 7, "b" * 64)
    assert name == "aaaaaaaa-v0007-bbbbbbbbbbbb"
    assert (
        len({name, policy_name("c" * 64, 7, "b" * 64), policy_name("a" * 64, 8, "b" * 64), policy_name("a" * 64, 7, "c" * 64)}) == 4
    )
    PolicyRef(version=7, name=name, checkpoint="a" * 64, adapter="b" * 64)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_outcomes_are_results_or_infrastructure(outcome: Outcome) -> None:
    assert outcome.is_result == (outcome.value not in ("judge_error", "engine_error"))


# The store of a run ---------------------------------------------------------------------------------------------------------------
@pytest.fixture
def store(blobs: Blobs) -> RunStore:
    return RunStore(blobs, "run-1")


def test_keys_are_where_the_documentation_says(store: RunStore) -> None:
    assert store.step_key(3, "plan") == "runs/run-1/steps/000003/plan"
    assert store.rollout_key(AT, "verdict") == "runs/run-1/steps/000012/g03/r17/verdict"
    assert step_workflow_id("run-1", 12) == "run/run-1/step/000012"
    assert group_workflow_id("run-1", 12, 3) == "run/run-1/step/000012/group/03"


def test_the_first_claim_wins_and_the_second_reads_it(store: RunStore) -> None:
    first, second = (Verdict(at=AT, outcome=outcome, reason="") for outcome in (Outcome.CRASHED, Outcome.INVALID))
    key = store.rollout_key(AT, "verdict")
    assert store.find(key) is None
    assert store.read(Verdict, key) is None
    digest, won = store.claim(key, first)
    assert won
    assert store.claim(key, second) == (digest, False)
    assert store.claim(key, first) == (digest, False)
    assert store.read(Verdict, key) == first
    assert store.load(Verdict, digest) == first


def test_of_many_claims_one_wins_and_all_agree(store: RunStore) -> None:
    verdicts = [Verdict(at=AT, outcome=Outcome.INVALID, reason=str(i)) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda v: store.claim("runs/run-1/x", v), verdicts))
    assert sum(won for _, won in results) == 1
    assert len({digest for digest, _ in results}) == 1
    winner = next(i for i, (_, won) in enumerate(results) if won)
    assert store.read(Verdict, "runs/run-1/x") == verdicts[winner]


def test_an_entry_whose_blob_is_gone_or_damaged_names_the_blob(store: RunStore) -> None:
    document = Verdict(at=AT, outcome=Outcome.INVALID, reason="")
    digest, _ = store.claim("runs/run-1/x", document)
    store.blobs.store.put(store.blobs.key(digest), b"{}")
    with pytest.raises(CorruptBlob, match=digest_of(b"{}")):
        store.read(Verdict, "runs/run-1/x")
    store.blobs.store.delete(store.blobs.key(digest))
    with pytest.raises(CorruptBlob, match=digest):
        store.read(Verdict, "runs/run-1/x")


def test_last_step_is_the_last_commit_of_this_run(store: RunStore) -> None:
    assert store.last_step() is None
    for key in (store.step_key(0, "commit"), store.step_key(9, "commit"), store.step_key(10, "commit"), store.step_key(11, "plan")):
        store.blobs.store.create(key, b"0" * 64)
    store.blobs.store.create(RunStore(store.blobs, "run-10").step_key(99, "commit"), b"0" * 64)
    assert store.last_step() == 10
    assert store.commit_digest(9) == "0" * 64
    assert store.commit_digest(8) is None


def test_archive_reads_back_as_it_was(store: RunStore) -> None:
    node = Node(id="a", step=1, value=1.0, score=None, code="x", construction=None, ancestors=("b",), ancestor_values=(0.1,))
    archive = ArchiveState(nodes=(node,), seeds=("b",), visits={"b": 2, "a": 1}, best_child={"b": 0.3}, total_visits=3)
    digest = store.put(archive)
    assert store.load(ArchiveState, digest) == archive
    assert store.put(store.load(ArchiveState, digest)) == digest


def test_a_record_of_many_tokens_reads_back(store: RunStore) -> None:
    record = RolloutRecord(
        at=AT,
        parent="seed-00",
        policy_version=0,
        policy_name="p",
        engine="e",
        boot_id="b",
        seed=1,
        prompt_tokens=tuple(range(100)),
        response_tokens=tuple(range(1000)),
        log_probs=tuple(-1 / (i + 3) for i in range(1000)),
        mask=(1,) * 1000,
        finish_reason="stop",
        text="é\u2028",
        program=None,
    )
    assert store.load(RolloutRecord, store.put(record)) == record


# Versions of tttd ---------------------------------------------------------------------------------------------------------------
def test_what_a_newer_version_wrote_is_named_and_worth_another_attempt(blobs: Blobs) -> None:
    """Workers are upgraded one after the other; the attempt is repeated until one that knows the field takes it."""
    digest = blobs.put(canonical_json({"step": 1, "adapter": "a" * 64, "optimizer": None, "momentum": 0.5}))
    with pytest.raises(
        NewerDocument, match=r"run r: Checkpoint [0-9a-f]{12} has fields .* know: momentum\. A newer tttd"
    ) as caught:
        RunStore(blobs, "r").load(Checkpoint, digest)
    assert caught.value.retryable


def test_what_no_version_wrote_is_not_called_newer(blobs: Blobs) -> None:
    digest = blobs.put(canonical_json({"step": "one", "adapter": "a" * 64, "optimizer": None, "momentum": 0.5}))
    with pytest.raises(ValidationError):
        RunStore(blobs, "r").load(Checkpoint, digest)
