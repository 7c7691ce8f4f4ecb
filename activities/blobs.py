"""The object store: content-addressed blobs and create-once records, on a local directory or on S3.

Two kinds of keys live in it:
    blobs/ab/<sha256>        immutable bytes, addressed by their digest, checked on every read
    runs/..., fleet/...      named entries: created once (`claim`), or rewritten in place where a document is a mere notice (`put`)

Knows nothing of runs, steps or models. Methods are synchronous and thread-safe; async callers use a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from activities.errors import CorruptBlob, InputError, TransientError

if TYPE_CHECKING:  # the type stubs are a development dependency
    from botocore.exceptions import ClientError
    from mypy_boto3_s3 import S3Client


T = TypeVar("T")
R = TypeVar("R")


def digest_of(data: bytes) -> str:
    """Lower-case hex sha256."""
    return hashlib.sha256(data).hexdigest()


class MissingKey(KeyError):
    """No entry of that name."""


_TEMPORARY = ".tmp-"
"""Beginning of the names of unfinished files in a LocalStore; no key holds such a name."""


_CONFLICT_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds between attempts while another conditional write of the same key is in flight on S3."""


_REFRESH_SECONDS = 3600.0
"""Age beyond which S3 is asked to write an entry again: far below any grace that garbage collection gives."""


def check_key(key: str) -> str:
    """Return a key that means the same in every store: names joined by single slashes, none of them `.` or `..`.

    Raises:
        InputError: it would leave a directory, or be one thing on a disk and another on S3.
    """
    names = key.split("/")
    if not key.isprintable() or any(name in ("", ".", "..") or name.startswith(_TEMPORARY) for name in names):
        raise InputError(f"key {key!r} leaves the store or is none: use names joined by single slashes, without '.' and '..'")
    return key


@dataclass(frozen=True)
class Entry:
    """One entry as a listing has it."""

    key: str
    size: int
    """Bytes."""
    modified: float
    """Unix seconds of the last write, or of the last :meth:`ObjectStore.refresh`."""


class ObjectStore(ABC):
    """Named bytes. The one promise that everything rests on: of many `create`s of one key exactly one returns True.

    Every method raises InputError for a key that :func:`check_key` refuses.
    """

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Read an entry.

        Raises:
            MissingKey: there is none.
        """

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Write an entry if there is none yet; False if there was one. Durable when it returns."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write or replace an entry. For notices (registrations), never for results."""

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    @abstractmethod
    def keys(self, prefix: str) -> Iterator[str]:
        """Every key that starts with the prefix, in order."""

    @abstractmethod
    def entries(self, prefix: str) -> Iterator[Entry]:
        """Like :meth:`keys`, with size and age."""

    @abstractmethod
    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below a prefix that ends with "/", in order."""

    @abstractmethod
    def refresh(self, key: str, data: bytes) -> None:
        """Make an entry young again: somebody means to use it, and what is old and unused may be collected.

        Args:
            data: what it holds, for a store in which only writing does that.
        """

    def remove_unfinished(self, before: float) -> tuple[int, int]:
        """Remove what writers that were killed left behind. Returns (pieces, bytes).

        Args:
            before: Unix seconds; what is younger may still be written.
        """
        return 0, 0

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an entry; nothing happens if there is none."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it is, without credentials."""


class LocalStore(ObjectStore):
    """A directory. A crash leaves at most a stray temporary file, never a torn entry."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._root.mkdir(parents=True, exist_ok=True)

    def _path(self, key: str) -> Path:
        path = (self._root / check_key(key)).resolve()
        if not path.is_relative_to(self._root):  # a symbolic link inside the store
            raise InputError(f"key {key!r} leaves the store {self._root}")
        return path

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise MissingKey(key) from None

    def create(self, key: str, data: bytes) -> bool:
        # link() is atomic and refuses to replace; O_EXCL plus write would let a kill leave a torn winner.
        path = self._path(key)
        temporary = self._write_temporary(path, data)
        try:
            os.link(temporary, path)
            created = True
        except FileExistsError:
            created = False
        finally:
            temporary.unlink()
        # The loser goes on from the winner's entry too, and the winner may not have come as far as this line.
        self._sync_directory(path.parent)
        return created

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        self._write_temporary(path, data).replace(path)
        self._sync_directory(path.parent)

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def keys(self, prefix: str) -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        base = self._path(folder) if folder else self._root
        found = (p.relative_to(self._root).as_posix() for p in base.rglob("*") if not p.name.startswith(_TEMPORARY) and p.is_file())
        yield from sorted(key for key in found if key.startswith(prefix))

    def entries(self, prefix: str) -> Iterator[Entry]:
        for key in self.keys(prefix):
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                found = self._path(key).stat()
                yield Entry(key, found.st_size, found.st_mtime)

    def refresh(self, key: str, data: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._path(key))

    def remove_unfinished(self, before: float) -> tuple[int, int]:
        pieces = size = 0
        for path in self._root.rglob(f"{_TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError):  # its writer finished
                found = path.stat()
                if path.is_file() and found.st_mtime < before:
                    path.unlink()
                    pieces, size = pieces + 1, size + found.st_size
        return pieces, size

    def folders(self, prefix: str) -> list[str]:
        base = self._path(prefix.rstrip("/"))
        return sorted(entry.name for entry in base.iterdir() if entry.is_dir()) if base.is_dir() else []

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._path(key).unlink()

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def _write_temporary(self, path: Path, data: bytes) -> Path:
        self._make_directory(path.parent)
        temporary = path.parent / f"{_TEMPORARY}{os.getpid()}-{threading.get_ident()}-{uuid.uuid4().hex}"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:  # a full disk must not fill up further with what could not be finished
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _make_directory(self, directory: Path) -> None:
        """Make a directory durably: an entry survives a power cut only if every directory above it does."""
        if directory.is_dir():
            return
        self._make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        self._sync_directory(directory.parent)

    @staticmethod
    def _sync_directory(directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class S3Store(ObjectStore):
    """A bucket and prefix on any S3 that honours conditional writes (``If-None-Match: *``); checked once, on the first create."""

    def __init__(self, client: S3Client, bucket: str, prefix: str = "") -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix.strip("/")
        self._probed = False
        self._probe_lock = threading.Lock()

    def _key(self, key: str) -> str:
        return self._listed(check_key(key))

    def _listed(self, prefix: str) -> str:
        return f"{self._prefix}/{prefix}" if self._prefix else prefix

    def get(self, key: str) -> bytes:
        from botocore.exceptions import ClientError

        try:
            data: bytes = self._client.get_object(Bucket=self._bucket, Key=self._key(key))["Body"].read()
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("NoSuchKey", "404"):
                raise MissingKey(key) from None
            raise self._explained(error) from error
        return data

    def create(self, key: str, data: bytes) -> bool:
        self._key(key)  # a bad key is the caller's mistake, whatever the probe would say
        self._probe()
        return self._create(key, data)

    def _create(self, key: str, data: bytes) -> bool:
        from botocore.exceptions import ClientError

        for pause in (*_CONFLICT_PAUSES, None):
            try:
                self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data, IfNoneMatch="*")
            except ClientError as error:
                status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
                if status == 412:
                    return False
                if status != 409:
                    raise self._explained(error) from error
                if pause is not None:  # a concurrent conditional write is in flight: its outcome is not known yet
                    time.sleep(pause)
            else:
                return True
        raise TransientError(f"{self.url}/{key}: concurrent conditional writes for {sum(_CONFLICT_PAUSES):g} s, try again")

    def _explained(self, error: ClientError) -> Exception:
        """What only a person can mend, in words; anything else as it came."""
        code = error.response.get("Error", {}).get("Code", "")
        if code == "NoSuchBucket":
            return InputError(
                f"{self.url}: there is no bucket {self._bucket!r}; create it, or correct the deployment's store address"
            )
        if code == "NotImplemented":
            return InputError(f"{self.url} refuses If-None-Match on PUT; tttd needs an S3 with conditional writes")
        return error

    def _probe(self) -> None:
        """Old S3 look-alikes ignore the condition and overwrite: that would break exactly-once silently, so refuse them.

        Judged by what is stored in the end: an answer lost on the way makes the client repeat its own write, which is then refused.
        """
        with self._probe_lock:
            if self._probed:
                return
            key = f"fleet/probe-{uuid.uuid4().hex}"
            self._create(key, b"first")
            overwritten = self._create(key, b"second") or self.get(key) != b"first"
            self.delete(key)
            if overwritten:
                raise InputError(f"{self.url} ignores If-None-Match on PUT; tttd needs an S3 with conditional writes")
            self._probed = True

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data)

    def exists(self, key: str) -> bool:
        from botocore.exceptions import ClientError

        try:
            self._client.head_object(Bucket=self._bucket, Key=self._key(key))
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
                return False
            raise
        return True

    def keys(self, prefix: str) -> Iterator[str]:
        yield from (entry.key for entry in self.entries(prefix))

    def entries(self, prefix: str) -> Iterator[Entry]:
        cut = len(self._prefix) + 1 if self._prefix else 0
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._listed(prefix)):
            for item in page.get("Contents", []):
                yield Entry(item["Key"][cut:], item["Size"], item["LastModified"].timestamp())

    def refresh(self, key: str, data: bytes) -> None:
        from botocore.exceptions import ClientError

        try:
            written = self._client.head_object(Bucket=self._bucket, Key=self._key(key))["LastModified"].timestamp()
            if time.time() - written > _REFRESH_SECONDS:
                self.put(key, data)
        except ClientError as error:
            # Some roles may only create. What they store again is small and soon named by an entry.
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") not in (403, 404):
                raise

    def folders(self, prefix: str) -> list[str]:
        start = self._key(prefix.rstrip("/")) + "/"
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start, Delimiter="/")
        return sorted(p["Prefix"].removeprefix(start).rstrip("/") for page in pages for p in page.get("CommonPrefixes", []))

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._key(key))

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}" + (f"/{self._prefix}" if self._prefix else "")


def open_store(url: str, *, endpoint: str | None = None) -> ObjectStore:
    """Open ``s3://bucket/prefix`` (credentials as boto3 finds them), ``file:///path`` or a plain path.

    Raises:
        InputError: another scheme, an S3 address without a bucket, or a file address with a host or a relative path.
    """
    parts = urlsplit(url)
    if parts.scheme == "s3" and parts.netloc:
        import boto3
        from botocore.config import Config

        client = boto3.client("s3", endpoint_url=endpoint, config=Config(retries={"mode": "standard", "max_attempts": 5}))
        return S3Store(client, parts.netloc, parts.path)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return LocalStore(Path(unquote(parts.path)))
    if parts.scheme == "" and url:
        return LocalStore(Path(url))
    raise InputError(f"store {url!r}: use a path, file:///path or s3://bucket/prefix")


READERS = 8
"""Reads of one caller at a time. boto3 keeps ten connections for all threads of a process."""


def read_together(read: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """What `read` gives for each item, in their order, several at once: on S3 every document is a round trip, and a step has
    thousands. The first error in that order is raised."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="reader") as pool:
        return list(pool.map(read, items))


class Blobs:
    """Content-addressed bytes in an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    @staticmethod
    def key(digest: str) -> str:
        return f"blobs/{digest[:2]}/{digest}"

    def put(self, data: bytes) -> str:
        """Store bytes; returns their digest. Storing the same bytes twice stores them once."""
        digest = digest_of(data)
        with contextlib.suppress(MissingKey):
            if digest_of(self.store.get(self.key(digest))) == digest:
                self.store.refresh(self.key(digest), data)
                return digest
            self.store.put(self.key(digest), data)  # heal a damaged copy
            return digest
        self.store.create(self.key(digest), data)
        return digest

    def get(self, digest: str) -> bytes:
        """Read bytes and check them.

        Raises:
            CorruptBlob: absent, or the bytes do not have this digest; names key and store.
        """
        try:
            data = self.store.get(self.key(digest))
        except MissingKey:
            raise CorruptBlob(f"blob {digest} is missing from {self.store.url}; restore {self.key(digest)} from a backup") from None
        if (found := digest_of(data)) != digest:
            raise CorruptBlob(
                f"blob {self.key(digest)} in {self.store.url} is damaged: its bytes have digest {found}; restore it from a backup"
            )
        return data
