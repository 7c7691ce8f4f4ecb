"""The harness's own judgement: a fault that left a trace is found, and the table has every part at every point."""

from __future__ import annotations

import itertools

import pytest

from activities.blobs import Blobs
from activities.records import canonical_json
from tests.faults.cases import CASES, Action, Case, Point, Watch, by_run
from tests.faults.chaos import ENTRIES_PER_STEP, most_kills
from tests.faults.checks import created_twice, done_again
from tests.faults.matrix import Result, table
from tests.faults.proxy import Answered, Request, Side
from tests.faults.world import PARTS

KEY = "steps/000001/g00/r01/rollout"


def put(status: int | None, *, create: bool = True, run: str = "r") -> Answered:
    return Answered(Request("sample", "PUT", f"runs/{run}/{KEY}", 64, create), status, 0.0)


def get(status: int) -> Answered:
    return Answered(Request("sample", "GET", f"runs/r/{KEY}", 0, False), status, 0.0)


def test_the_table_has_every_part_at_every_point_and_zombies_of_two() -> None:
    killed = [(case.part, case.point) for case in CASES if case.action is Action.KILL]
    assert sorted(killed) == sorted(itertools.product(PARTS, Point))
    frozen = [(case.part, case.point) for case in CASES if case.action is Action.FREEZE]
    assert sorted(frozen) == sorted(itertools.product(("train", "judge"), Point))
    assert len({case.name for case in CASES}) == len(CASES)
    assert all([case.step for case in cases] == [1, 2, 3] for cases in by_run(CASES).values())
    assert all(case.effect for case in CASES if case.action is Action.FREEZE)


@pytest.mark.parametrize(
    ("answered", "says"),
    [
        ([put(200)], []),
        ([put(200), put(412), put(412)], []),
        ([put(None)], []),
        ([put(200), put(None)], []),
        ([put(200), put(200, run="other")], []),
        ([put(200), put(200)], [f"{KEY} was created 2 times"]),
        ([put(412)], [f"{KEY} was created by nobody that the proxy saw"]),
        ([], [f"{KEY} was created by nobody that the proxy saw"]),
        ([put(200, create=False)], [f"{KEY} was written by sample without a condition"]),
    ],
)
def test_what_was_created_more_or_less_than_once_is_named(answered: list[Answered], says: list[str]) -> None:
    assert created_twice("r", [KEY], answered) == says


@pytest.mark.parametrize(
    ("answered", "made", "says"),
    [
        ([get(404), put(200)], 1, []),
        ([get(404), get(404), put(200), get(200)], 2, []),
        ([get(404), put(200), get(200)], 2, [f"runs/r/{KEY} was made 2 times, and looked for in vain 1 times"]),
        ([put(200)], 1, [f"runs/r/{KEY} was made 1 times, and looked for in vain 0 times"]),
    ],
)
def test_work_that_a_stored_result_should_have_spared_is_named(answered: list[Answered], made: int, says: list[str]) -> None:
    assert done_again("r", "rollout", [(1, 0, 1)] * made, answered) == says


def ask(key: str, *, who: str = "train", method: str = "GET", size: int = 0) -> Request:
    return Request(who, method, key, size, False)


def test_a_watch_finds_keys_below_its_step_and_blobs_by_who_names_them(blobs: Blobs) -> None:
    root = "runs/r/steps/000002/"
    entry = Watch("train", "GET", "g*/r*/rollout", Side.BEFORE).matcher(blobs, root)
    assert entry(ask(f"{root}g01/r02/rollout"))
    assert not entry(ask("runs/r/steps/000001/g01/r02/rollout"))
    assert entry(ask(f"{root}g01/r02/rollout", who="train-2")), "a second process of the role"
    assert not entry(ask(f"{root}g01/r02/rollout", who="sample"))
    assert not entry(ask(f"{root}g01/r02/rollout", method="PUT"))

    document = Watch("train", "GET", "@batch", Side.BEFORE).matcher(blobs, root)
    field = Watch("train", "GET", "@batch.adapter", Side.BEFORE).matcher(blobs, root)
    adapter = blobs.put(b"adapter")
    digest = blobs.put(canonical_json({"adapter": adapter}))
    assert not document(ask(Blobs.key(digest))), "nothing names it yet"
    blobs.store.create(f"{root}batch", digest.encode())
    assert document(ask(Blobs.key(digest)))
    assert not document(ask(Blobs.key(adapter)))
    assert field(ask(Blobs.key(adapter)))
    assert not field(ask(Blobs.key(digest)))

    large = Watch("train", "PUT", "blobs/*", Side.DURING, least=10, since="plan").matcher(blobs, root)
    assert not large(ask("blobs/aa/x", method="PUT", size=11)), "the plan is not stored yet"
    blobs.store.create(f"{root}plan", b"x")
    assert large(ask("blobs/aa/x", method="PUT", size=11))
    assert not large(ask("blobs/aa/x", method="PUT", size=9))


def test_the_table_tells_what_failed_and_why() -> None:
    case: Case = CASES[0]
    text = table([Result(case, 9.0, 3.0), Result(CASES[1], 8.0, 2.0, ["the chain ends elsewhere"])])
    assert " ".join(text.splitlines()[2].split()) == "control early kill -9 parents selected, plan not stored 9.0 +3.0 OK"
    assert "FAILED" in text.splitlines()[3]
    assert "kill-control-middle: the chain ends elsewhere" in text
    assert text.endswith("2 cases: 1 OK, 1 failed")


def test_a_run_has_room_for_the_kills_that_are_promised() -> None:
    assert ENTRIES_PER_STEP == 19
    assert most_kills(6) >= 30
