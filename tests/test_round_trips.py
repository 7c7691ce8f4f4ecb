"""How the rooms read what a step stored: a grid is thousands of documents, and on S3 each is a round trip.

Only how reads overlap is told here, and how many there are; what they find is the business of each room's own tests.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from activities.blobs import READERS, Blobs, LocalStore, read_together
from tests.chain import Chain, spread
from workflows.contracts.messages import CommitRequest


class Overlapping(LocalStore):
    """A directory whose reads take a moment; knows how many were under way at once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def get(self, key: str) -> bytes:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            time.sleep(0.02)
            return super().get(key)
        finally:
            with self._lock:
                self._now -= 1


def test_results_stand_in_the_order_of_the_items_whoever_was_first() -> None:
    def read(number: int) -> int:
        time.sleep(0.02 * (5 - number))
        return 10 * number

    assert read_together(read, range(5)) == [0, 10, 20, 30, 40]
    assert read_together(read, []) == []


def test_the_first_error_in_that_order_is_raised() -> None:
    def read(number: int) -> int:
        if number == 1:
            time.sleep(0.05)
        if number:
            raise ValueError(f"number {number}")
        return number

    with pytest.raises(ValueError, match="number 1"):
        read_together(read, range(6))


def test_barrier_and_commit_read_a_grid_together(tmp_path: Path) -> None:
    store = Overlapping(tmp_path / "store")
    chain = Chain.fresh(Blobs(store), tmp_path, search={"groups": 2, "rollouts": 8, "steps": 1})
    run, opened = chain.open()
    plan = chain.select(run, opened.head).plan
    for at in chain.coordinates(plan, 1):
        chain.write(plan, at, opened.head.policy, spread(at))
    store.most = 0
    batch = chain.assemble(run, 1, plan, opened.head.policy).batch
    assert 4 <= store.most <= READERS
    store.most = 0
    committed = chain.commit(
        CommitRequest(run=run, step=1, head=opened.head, plan=plan, batch=batch, policy=opened.head.policy, seconds={})
    )
    assert 4 <= store.most <= READERS
    assert committed.head.step == 1
