"""A store whose new entries lie apart, so that the gigabytes of many trial steps can be thrown away. Reads see both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from activities.blobs import Entry, LocalStore, MissingKey, ObjectStore


class ScratchStore(ObjectStore):
    """What is below stays as it is; what is written goes to `folder`, and `clear` empties that."""

    def __init__(self, below: LocalStore, folder: Path) -> None:
        self._below, self._folder = below, folder
        self._above = LocalStore(folder)

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._above = LocalStore(self._folder)

    def get(self, key: str) -> bytes:
        try:
            return self._above.get(key)
        except MissingKey:
            return self._below.get(key)

    def create(self, key: str, data: bytes) -> bool:
        return not self._below.exists(key) and self._above.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._above.put(key, data)

    def exists(self, key: str) -> bool:
        return self._above.exists(key) or self._below.exists(key)

    def keys(self, prefix: str) -> Iterator[str]:
        yield from sorted({*self._above.keys(prefix), *self._below.keys(prefix)})

    def entries(self, prefix: str) -> Iterator[Entry]:
        found = {entry.key: entry for store in (self._below, self._above) for entry in store.entries(prefix)}
        yield from (found[key] for key in sorted(found))

    def folders(self, prefix: str) -> list[str]:
        return sorted({*self._above.folders(prefix), *self._below.folders(prefix)})

    def refresh(self, key: str, data: bytes) -> None:
        if self._above.exists(key):
            self._above.refresh(key, data)

    def delete(self, key: str) -> None:
        self._above.delete(key)

    @property
    def url(self) -> str:
        return self._below.url
