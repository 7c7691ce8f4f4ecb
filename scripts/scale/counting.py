"""An object store that counts what is asked of it. Knows no key's meaning beyond the three sorts of keys that a store has."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from activities.blobs import Entry, ObjectStore


@dataclass
class Count:
    """Of one method on one sort of key."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Inside the store, added up over threads."""


def sort_of(key: str) -> str:
    """`blob`, `entry` (of a run) or `fleet` (notices)."""
    return {"blobs": "blob", "runs": "entry"}.get(key.partition("/")[0], "fleet")


class CountingStore(ObjectStore):
    """Passes everything on.

    Args:
        delay_seconds: waited before each request, as an object store behind a network would have it.
    """

    def __init__(self, store: ObjectStore, delay_seconds: float = 0.0) -> None:
        self._store = store
        self._delay = delay_seconds
        self._lock = threading.Lock()
        self._counts: dict[str, Count] = {}

    def counts(self) -> dict[str, Count]:
        """By method and sort of key (`get blob`), as they are now."""
        with self._lock:
            return {name: Count(c.calls, c.bytes, c.seconds) for name, c in self._counts.items()}

    @contextmanager
    def _counted(self, method: str, key: str, size: int = 0) -> Iterator[list[int]]:
        sizes, began = [size], time.perf_counter()
        try:
            if self._delay:
                time.sleep(self._delay)
            yield sizes
        finally:
            seconds = time.perf_counter() - began
            with self._lock:
                count = self._counts.setdefault(f"{method} {sort_of(key)}", Count())
                count.calls += 1
                count.bytes += sum(sizes)
                count.seconds += seconds

    def get(self, key: str) -> bytes:
        with self._counted("get", key) as sizes:
            data = self._store.get(key)
            sizes.append(len(data))
            return data

    def create(self, key: str, data: bytes) -> bool:
        with self._counted("create", key, len(data)):
            return self._store.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        with self._counted("put", key, len(data)):
            self._store.put(key, data)

    def exists(self, key: str) -> bool:
        with self._counted("exists", key):
            return self._store.exists(key)

    def keys(self, prefix: str) -> Iterator[str]:
        with self._counted("list", prefix):
            return iter(list(self._store.keys(prefix)))

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self._counted("list", prefix):
            return iter(list(self._store.entries(prefix)))

    def folders(self, prefix: str) -> list[str]:
        with self._counted("list", prefix):
            return self._store.folders(prefix)

    def refresh(self, key: str, data: bytes) -> None:
        with self._counted("refresh", key):
            self._store.refresh(key, data)

    def delete(self, key: str) -> None:
        with self._counted("delete", key):
            self._store.delete(key)

    @property
    def url(self) -> str:
        return self._store.url
