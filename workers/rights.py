"""What each role may do in the object store: the least it needs, in one table that the workers themselves obey.

Every worker's store is wrapped in :class:`RestrictedStore`, so that the table cannot drift from the code: a role that strays fails
in the first test that runs it. The same table is written out as access policies for the store (``scripts/access_policies.py``),
which hold even against a worker that was taken over. Knows keys, not what lies under them.

Patterns are those of S3 policies: `*` stands for anything, slashes included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from activities.blobs import Entry, ObjectStore
from activities.errors import InputError

PROBE: Final = "fleet/probe-*"
"""What a store writes twice at the first create, to learn whether it honours conditions; below this module's sight."""


class NotAllowed(InputError):
    """A role reached for a key that is not its own."""


@dataclass(frozen=True)
class Rights:
    """Key patterns of one role, by what it does with them."""

    read: tuple[str, ...]
    create: tuple[str, ...]
    """Written once, never over something."""
    replace: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    list: tuple[str, ...] = ()
    """Of prefixes whose keys are asked for."""


_BLOBS: Final = "blobs/*"

RIGHTS: Final[Mapping[str, Rights]] = MappingProxyType(
    {
        # Opens runs, selects, assembles and commits: all of a run's documents pass through it.
        "control": Rights(
            read=(_BLOBS, "runs/*", "fleet/engines/*"),
            create=(_BLOBS, "runs/*"),
            replace=(_BLOBS,),  # heals a damaged blob; readers check digests, so nothing else can come of it
            list=("runs/*", "fleet/engines/*"),
        ),
        "sample": Rights(
            read=(_BLOBS, "runs/*/rollout", "fleet/engines/*"),
            create=(_BLOBS, "runs/*/rollout"),
            list=("fleet/engines/*",),
        ),
        # Runs programs of strangers: creates verdicts, and can neither replace nor remove anything.
        "judge": Rights(read=(_BLOBS, "runs/*/verdict"), create=(_BLOBS, "runs/*/verdict")),
        "train": Rights(
            read=(_BLOBS, "runs/*/train", "runs/*/base"),
            create=(_BLOBS, "runs/*/train", "runs/*/base"),
            replace=(_BLOBS,),
        ),
        "engine": Rights(
            read=(_BLOBS, "fleet/engines/*", "fleet/published/*"),
            create=(_BLOBS,),
            replace=("fleet/engines/*", "fleet/published/*"),
            delete=("fleet/engines/*",),
        ),
    }
)


class RestrictedStore(ObjectStore):
    """A store as one role may use it.

    Raises:
        NotAllowed: from every method, for a key that the role's rights do not cover; names role, key and what would be allowed.
    """

    def __init__(self, store: ObjectStore, role: str) -> None:
        self._store = store
        self._role = role
        self._rights = RIGHTS[role]

    def get(self, key: str) -> bytes:
        self._check("read", self._rights.read, key)
        return self._store.get(key)

    def create(self, key: str, data: bytes) -> bool:
        self._check("create", self._rights.create, key)
        return self._store.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._check("replace", self._rights.replace, key)
        self._store.put(key, data)

    def exists(self, key: str) -> bool:
        self._check("read", self._rights.read, key)
        return self._store.exists(key)

    def keys(self, prefix: str) -> Iterator[str]:
        self._check("list", self._rights.list, prefix)
        return self._store.keys(prefix)

    def entries(self, prefix: str) -> Iterator[Entry]:
        self._check("list", self._rights.list, prefix)
        return self._store.entries(prefix)

    def refresh(self, key: str, data: bytes) -> None:
        # Writes nothing that is not there: whoever may create an entry may keep it from growing old.
        self._check("create", self._rights.create, key)
        self._store.refresh(key, data)

    def folders(self, prefix: str) -> list[str]:
        self._check("list", self._rights.list, prefix)
        return self._store.folders(prefix)

    def delete(self, key: str) -> None:
        self._check("delete", self._rights.delete, key)
        self._store.delete(key)

    @property
    def url(self) -> str:
        return self._store.url

    def _check(self, verb: str, patterns: tuple[str, ...], key: str) -> None:
        if not any(fnmatchcase(key, pattern) for pattern in patterns):
            raise NotAllowed(
                f"role {self._role} may not {verb} {key!r} in {self.url}; it may {verb} {', '.join(patterns) or 'nothing'}. "
                "Rights stand in workers/rights.py; the store's access policies are made from them (docs/operate.md)"
            )
