"""Compiled programs on disk: a bounded cache in a directory of this process's own. Knows neither compiler nor sandbox.

A directory whose process was killed is removed by the next process that makes one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from activities.judge.sandbox.cpp_toolchain import BINARY

MAXIMUM_BINARY_BYTES: Final = 64 << 20
MAXIMUM_CACHE_BYTES: Final = 256 << 20

_PREFIX: Final = "tttd-cpp-"
_LOCK: Final = "alive"
_CHUNK_BYTES: Final = 1 << 20


class NoBinary(Exception):
    """What a compiler left is not a file to run; the message says why."""


class Binaries:
    """Keeps binaries by digest until they are too many; one that is being run stays."""

    def __init__(self, maximum_bytes: int = MAXIMUM_CACHE_BYTES) -> None:
        self._maximum = maximum_bytes
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._used: dict[str, int] = {}
        self._root: Path | None = None
        self._alive = -1

    @contextmanager
    def lease(self, digest: str, make: Callable[[Path], None]) -> Iterator[Path]:
        """A binary that stays where it is meanwhile.

        Args:
            make: fills an empty directory with the file :data:`BINARY`, if the binary is not there; may raise anything.

        Raises:
            NoBinary: it left something else.
            OSError: no room, or no writable temporary directory.
        """
        with self._lock:
            self._used[digest] = self._used.get(digest, 0) + 1
            making = self._making.setdefault(digest, threading.Lock())
        try:
            with making:  # a program that many cases wait for is compiled once
                path = self._directory() / digest
                if not path.exists():
                    self._make(path, make)
            with self._lock:
                self._sizes[digest] = path.stat().st_size
                self._sizes.move_to_end(digest)
            yield path
        finally:
            self._give_back(digest)

    def close(self) -> None:
        """Remove everything."""
        with self._lock:
            root, self._root = self._root, None
            self._sizes.clear()
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
            os.close(self._alive)

    def _make(self, path: Path, make: Callable[[Path], None]) -> None:
        building = Path(tempfile.mkdtemp(prefix="build-", dir=path.parent))
        try:
            make(building)
            _take(building, path)
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def _give_back(self, digest: str) -> None:
        with self._lock:
            self._used[digest] -= 1
            if not self._used[digest]:
                del self._used[digest]
                del self._making[digest]
            idle = [known for known in self._sizes if known not in self._used]
            while idle and sum(self._sizes.values()) > self._maximum and self._root is not None:
                oldest = idle.pop(0)
                del self._sizes[oldest]
                (self._root / oldest).unlink(missing_ok=True)

    def _directory(self) -> Path:
        with self._lock:
            if self._root is None:
                _sweep(Path(tempfile.gettempdir()))
                self._root = Path(tempfile.mkdtemp(prefix=_PREFIX))
                # Runs have uids of their own: they may go through to the file that they are told, and see no list.
                self._root.chmod(0o711)
                self._alive = os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._alive, fcntl.LOCK_EX)
            return self._root


def _take(building: Path, path: Path) -> None:
    """Copy what hostile text was compiled to: a regular file, whatever its name is a link to."""
    directory = os.open(building, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.open(BINARY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        raise NoBinary(f"the linker left no file that can be run: {error.strerror}") from None
    finally:
        os.close(directory)
    try:
        about = os.fstat(found)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1 or about.st_size > MAXIMUM_BINARY_BYTES:
            raise NoBinary(f"the linker left no regular file of at most {MAXIMUM_BINARY_BYTES >> 20} MiB")
        temporary = path.with_name(f"{building.name}.new")
        with open(found, "rb", closefd=False) as source, open(temporary, "xb") as copy:
            shutil.copyfileobj(source, copy, _CHUNK_BYTES)
            os.fchmod(copy.fileno(), 0o555)
    finally:
        os.close(found)
    temporary.rename(path)


def _sweep(parent: Path) -> None:
    """Remove the directories of processes that were killed: nobody holds their lock."""
    for left in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if left.lstat().st_uid != os.getuid():
                continue
            lock = os.open(left / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
