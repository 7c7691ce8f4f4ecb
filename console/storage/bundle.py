"""The file that `tttd export` writes: one run as a plain tar, and that tar read as an object store.

    README.md                 what this is, and how to read it without tttd
    blobs/ab/<sha256>         every document (JSON) and file that the run reaches, named by its digest
    manifest.json             the run's entries, every blob with size and kind, and what was left out

The same run gives the same bytes: members are sorted and carry neither times nor owners. Knows no terminal.
"""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from activities.blobs import Blobs, Entry, MissingKey, ObjectStore, digest_of
from activities.errors import InputError
from activities.records import canonical_json
from workflows.contracts.base import Digest, RunId

FORMAT: Final = "tttd run bundle"
VERSION: Final = 1
MANIFEST, README = "manifest.json", "README.md"
LARGEST_MANIFEST_BYTES: Final = 1 << 30

README_TEXT = """\
# A run of tttd

One search with everything that it stored, in a plain tar.

- `manifest.json` names the run, its identity and its last commit. `entries` are the run's named records
  (`runs/RUN/steps/000003/commit`, ...), each with the sha256 of the document that it holds. `blobs` lists every file below `blobs/`
  with its size and kind, `absent` what was left out on purpose.
- `blobs/ab/DIGEST` is a file whose sha256 is DIGEST. Documents are JSON; `weights` and `optimizer` are safetensors, and an
  `adapter` document names the two files of a PEFT directory (adapter_config.json, adapter_model.safetensors).
- The chain: each `commit` document names its predecessor's digest, so the last commit's digest stands for all steps before it.
  `exact` in its rows is the certified value as a fraction, `construction` the digest of the certified answer.
- Programs' outputs and engines' names are as the run stored them.

`tttd import FILE` checks all of it and puts it into a store. Then `tttd best`, `verify`, `metrics`, `storage check`, `extend` and
`fork` work on it.
"""


class BundledBlob(BaseModel):
    """A file below `blobs/`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int
    kind: str


class AbsentBlob(BaseModel):
    """A blob that the run names and the bundle does not have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    reason: str


class Manifest(BaseModel):
    """What is in a bundle."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    format: Literal["tttd run bundle"] = FORMAT
    version: Literal[1] = VERSION
    run: RunId
    task: str
    identity: Digest
    step: int
    """Last committed step."""
    commit: Digest
    """Hash of the chain up to `step`."""
    fork_of: str | None
    """RUN@STEP, for a fork."""
    light: bool
    """Without rollouts, optimizer states, adapters and gate evidence: for answers, certificates and metrics, not to go on."""
    entries: dict[str, Digest]
    blobs: dict[Digest, BundledBlob]
    absent: dict[Digest, AbsentBlob]
    readme: Digest
    """sha256 of README.md."""


def member_name(digest: str) -> str:
    """A blob's path in the tar: its key in a store."""
    return Blobs.key(digest)


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file that says nothing of when and where it was written."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o644, 0
    tar.addfile(info, io.BytesIO(data))


def manifest_bytes(manifest: Manifest) -> bytes:
    """A manifest as its file holds it."""
    return canonical_json(manifest) + b"\n"


class BundleStore(ObjectStore):
    """A bundle as a store that can only be read.

    Raises:
        InputError: the file is no bundle, or holds other files than its manifest says.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reading = threading.Lock()
        try:
            self._tar = tarfile.open(path, "r:")  # noqa: SIM115  closed by close()
            self._members = {member.name: member for member in self._tar.getmembers()}
        except (OSError, tarfile.TarError) as error:
            raise InputError(f"{path} cannot be read as a bundle (a plain tar of `tttd export`): {error}") from None
        self.manifest = self._read_manifest()
        self._check_members()

    def close(self) -> None:
        self._tar.close()

    def _read_manifest(self) -> Manifest:
        member = self._members.get(MANIFEST)
        if member is None or not member.isfile() or member.size > LARGEST_MANIFEST_BYTES:
            raise InputError(f"{self._path} has no {MANIFEST}: it is no bundle of `tttd export`, or it was cut off")
        try:
            return Manifest.model_validate_json(self._data(member))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError(f"{self._path}: {MANIFEST} is not one of version {VERSION}: {where}: {first['msg']}") from None

    def _check_members(self) -> None:
        expected = {MANIFEST, README, *(member_name(digest) for digest in self.manifest.blobs)}
        if odd := sorted(self._members.keys() ^ expected):
            raise InputError(f"{self._path}: {odd[0]} is {'not in its manifest' if odd[0] in self._members else 'missing'}")
        if digest_of(self._data(self._members[README])) != self.manifest.readme:
            raise InputError(f"{self._path}: {README} is not the one of its manifest")
        root = f"runs/{self.manifest.run}/"
        if foreign := next((key for key in self.manifest.entries if not key.startswith(root)), None):
            raise InputError(f"{self._path}: entry {foreign} is not one of run {self.manifest.run}")

    def _data(self, member: tarfile.TarInfo) -> bytes:
        with self._reading:  # all members share one file and its position
            file = self._tar.extractfile(member) if member.isfile() else None
            if file is None:
                raise InputError(f"{self._path}: {member.name} is no plain file")
            return file.read()

    def get(self, key: str) -> bytes:
        if key in self.manifest.entries:
            return self.manifest.entries[key].encode()
        member = self._members.get(key) if key.startswith("blobs/") else None
        if member is None:
            raise MissingKey(key)
        return self._data(member)

    def exists(self, key: str) -> bool:
        return key in self.manifest.entries or (key.startswith("blobs/") and key in self._members)

    def keys(self, prefix: str) -> Iterator[str]:
        yield from sorted(key for key in (*self.manifest.entries, *self._members) if key.startswith(prefix) and "/" in key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        for key in self.keys(prefix):
            yield Entry(key, len(self.get(key)), 0.0)

    def folders(self, prefix: str) -> list[str]:
        below = (key.removeprefix(prefix) for key in self.keys(prefix))
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def create(self, key: str, data: bytes) -> bool:
        raise InputError(f"{self.url} can only be read")

    def put(self, key: str, data: bytes) -> None:
        raise InputError(f"{self.url} can only be read")

    def refresh(self, key: str, data: bytes) -> None:
        raise InputError(f"{self.url} can only be read")

    def delete(self, key: str) -> None:
        raise InputError(f"{self.url} can only be read")

    @property
    def url(self) -> str:
        return self._path.resolve().as_uri()
