"""Folders and files in archives of bounded size, each with its digest in one manifest. Knows no packages.

Every archive unpacks into the same folder, so each can be carried alone, in any order. A file that is too large even for an archive
of its own is cut into pieces that `unpack.py` joins again.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

MANIFEST = "manifest.json"
_GUESS = 0.5
"""Compressed size of a file that is not written yet, relative to its own; native libraries reach 0.35 to 0.45."""
_LARGE_BYTES = 20 << 20
_MARGIN_BYTES = 6 << 20
"""What the compressor still holds back while the size so far is read."""


@dataclass(frozen=True)
class Entry:
    """One file among the archives."""

    name: str
    sha256: str
    size: int


@dataclass
class Manifest:
    """What `unpack.py` needs."""

    archives: list[Entry] = field(default_factory=list)
    """To be unpacked into the folder."""
    files: list[Entry] = field(default_factory=list)
    """Whole files, by their path in the folder, that come in pieces NAME.000, NAME.001, ..."""
    pieces: dict[str, list[Entry]] = field(default_factory=dict)

    def write(self, out: Path) -> None:
        (out / MANIFEST).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


class _Counted:
    """A file that counts what is written to it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.written = 0

    def write(self, data: bytes) -> int:
        self.written += len(data)
        return self._stream.write(data)


def pack_folder(source: Path, prefix: str, out: Path, name: str, limit_bytes: int) -> list[Entry]:
    """Write a folder's files as NAME-01.tar.xz, NAME-02.tar.xz, ... which unpack to PREFIX/...

    Raises:
        SystemExit: an archive became larger than the limit all the same; names it.
    """
    files = [file for file in source.rglob("*") if file.is_file() or file.is_symlink()]
    # Large ones first, where the guess of their size costs room; small ones fill what is left.
    waiting = sorted(files, key=lambda file: (file.lstat().st_size < _LARGE_BYTES, file.as_posix()))
    entries: list[Entry] = []
    while waiting:
        target = out / f"{name}-{len(entries) + 1:02d}.tar.xz"
        with _archive(target) as (tar, counter):
            room = True
            while waiting and room:
                file = waiting.pop(0)
                tar.add(file, arcname=f"{prefix}/{file.relative_to(source).as_posix()}", recursive=False)
                following = waiting[0].lstat().st_size if waiting else 0
                room = counter.written + _MARGIN_BYTES + _GUESS * following <= limit_bytes
        size = target.stat().st_size
        if size > limit_bytes:
            raise SystemExit(
                f"{target} has {size} bytes, {limit_bytes} are allowed: leave its largest file out (target.toml: drop)"
            )
        entries.append(Entry(target.name, sha256(target), size))
    return entries


@contextmanager
def _archive(target: Path) -> Iterator[tuple[tarfile.TarFile, _Counted]]:
    with target.open("wb") as raw:
        counter = _Counted(raw)
        with lzma.LZMAFile(counter, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:  # type: ignore[arg-type]
            yield tar, counter


def cut_file(file: Path, path: str, out: Path, limit_bytes: int) -> tuple[Entry, list[Entry]]:
    """Cut a large file into pieces beside the archives.

    Args:
        path: where it belongs in the folder.
    """
    pieces: list[Entry] = []
    with file.open("rb") as stream:
        while data := stream.read(limit_bytes):
            piece = out / f"{path.replace('/', '__')}.{len(pieces):03d}"
            piece.write_bytes(data)
            pieces.append(Entry(piece.name, hashlib.sha256(data).hexdigest(), len(data)))
    return Entry(path, sha256(file), file.stat().st_size), pieces


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def batches(entries: Iterable[Entry], limit_bytes: int) -> list[list[str]]:
    """Names grouped so that each group can be carried at once, in order."""
    groups: list[list[str]] = []
    room = 0
    for entry in entries:
        if not groups or entry.size > room:
            groups.append([])
            room = limit_bytes
        groups[-1].append(entry.name)
        room -= entry.size
    return groups
