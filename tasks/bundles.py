"""A task folder as one deterministic archive, so that a task outside the repository reaches every host of a run by digest.

The archive is a plain tar: names sorted, times and owners zero, nothing but regular files below one folder that is named like the
task. Equal folders give equal bytes. Unpacking trusts nothing of it. Knows no store: bytes come from a function.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from tasks.errors import TaskError

MAXIMUM_BYTES: Final = 16 << 20
"""Of all files of a bundle together; more is data, which belongs elsewhere."""
MAXIMUM_FILES: Final = 2000
_IGNORE_FILE: Final = ".harborignore"
_NEVER: Final = ("__pycache__",)


def pack(folder: Path) -> bytes:
    """The bundle of a task folder.

    Left out: hidden files and folders (version control among them), Python's caches, and what a `.harborignore` names.

    Raises:
        TaskError: a link leaves the folder, something is neither file nor folder, a file cannot be read, or all are too large.
    """
    files = dict(_files(folder))
    if len(files) > MAXIMUM_FILES:
        raise TaskError(
            f"{folder}: {len(files)} files; a bundle holds at most {MAXIMUM_FILES}. Name what is no part of the task in "
            f"{folder / _IGNORE_FILE}"
        )
    total, buffer = 0, io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in sorted(files.items()):
            try:
                data, mode = path.read_bytes(), path.stat().st_mode
            except OSError as error:
                raise TaskError(f"{path} cannot be read: {error}") from None
            total += len(data)
            if total > MAXIMUM_BYTES:
                raise TaskError(
                    f"{folder}: more than {MAXIMUM_BYTES} bytes at {name}; name what is no part of the task "
                    f"in {folder / _IGNORE_FILE}"
                )
            entry = tarfile.TarInfo(f"{folder.resolve().name}/{name}")
            # A wheel's installation may have dropped the mode of scripts.
            runs = mode & 0o100 or name.endswith(".sh")
            entry.size, entry.mode = len(data), 0o755 if runs else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names relative to the folder, with `/`, of everything that belongs to the task."""
    root = folder.resolve()
    rules: list[_Rule] = []
    for here, directories, names in os.walk(root):
        place = PurePosixPath(Path(here).relative_to(root).as_posix())
        rules += _rules_of(Path(here), place)
        directories[:] = [d for d in directories if not _is_left_out(place / d, True, rules)]
        linked = [d for d in directories if (Path(here) / d).is_symlink()]
        if linked:
            raise TaskError(f"{Path(here) / linked[0]} is a link to a folder; a bundle holds files only, copy it")
        for name in names:
            if not _is_left_out(place / name, False, rules):
                path = Path(here) / name
                _check_file(path, root)
                yield (place / name).as_posix(), path


def _check_file(path: Path, root: Path) -> None:
    target = path.resolve()
    if not target.is_relative_to(root):
        raise TaskError(f"{path} is a link to {target}, outside the task's folder; copy the file")
    if not target.is_file():
        raise TaskError(f"{path} is no regular file; a bundle holds nothing else")


@dataclass(frozen=True)
class _Rule:
    """One line of an ignore file, as .gitignore has it: with a slash inside it is anchored, without one it matches at any depth."""

    base: PurePosixPath
    """Directory of the ignore file; the rule counts below it."""
    pattern: str
    takes_back: bool
    folders_only: bool

    def matches(self, path: PurePosixPath, is_folder: bool) -> bool:
        if not path.is_relative_to(self.base) or (self.folders_only and not is_folder):
            return False
        subject = path.relative_to(self.base).as_posix() if "/" in self.pattern else path.name
        return fnmatch.fnmatchcase(subject, self.pattern.lstrip("/"))


def _rules_of(directory: Path, place: PurePosixPath) -> list[_Rule]:
    file = directory / _IGNORE_FILE
    if not file.is_file():
        return []
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [
        _Rule(place, line.removeprefix("!").rstrip("/"), line.startswith("!"), line.endswith("/"))
        for line in lines
        if line and not line.startswith("#")
    ]


def _is_left_out(path: PurePosixPath, is_folder: bool, rules: list[_Rule]) -> bool:
    if path.name.startswith(".") or path.name in _NEVER or path.name.endswith(".pyc"):
        return True
    last = next((rule for rule in reversed(rules) if rule.matches(path, is_folder)), None)
    return last is not None and not last.takes_back


def unpack(data: bytes, name: str, target: Path) -> None:
    """Write a bundle's files below an empty directory: `target/name/task.toml` and so on.

    Raises:
        TaskError: it is no archive, is not of this task, or holds anything but regular files of that one folder.
    """
    total, seen = 0, set()
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for count, entry in enumerate(archive, 1):
                total += entry.size
                path = _checked_name(entry, name)
                if path in seen or count > MAXIMUM_FILES or total > MAXIMUM_BYTES:
                    raise TaskError(f"bundle of {name}: {entry.name[:80]!r} is there twice, or the bundle is too large")
                seen.add(path)
                content = archive.extractfile(entry)
                assert content is not None
                file = target / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content.read())
                file.chmod(0o755 if entry.mode & 0o100 else 0o644)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise TaskError(f"bundle of {name} cannot be unpacked: {error}") from None
    if not (target / name / "task.toml").is_file():
        raise TaskError(f"bundle of {name}: it holds no {name}/task.toml")


def _checked_name(entry: tarfile.TarInfo, name: str) -> PurePosixPath:
    path = PurePosixPath(entry.name)
    plain = entry.name.isprintable() and "\\" not in entry.name and entry.name == path.as_posix()
    if not entry.isreg() or not plain or path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
        raise TaskError(f"bundle of {name}: {entry.name[:80]!r} is no regular file below the task's folder")
    if path.parts[0] != name:
        raise TaskError(f"bundle of {name}: it holds the task {path.parts[0][:80]!r}")
    return path


class BundleCache:
    """Unpacked bundles below one directory, each made once and by digest.

    Args:
        directory: DIRECTORY/<digest>/<task>/task.toml; made when the first bundle comes.
        fetch: from a digest to the bundle's bytes; whatever it raises passes through.
    """

    def __init__(self, directory: Path, fetch: Callable[[str], bytes]) -> None:
        self._directory = directory
        self._fetch = fetch

    def folder(self, digest: str, name: str) -> Path:
        """The task's folder as the bundle has it.

        Raises:
            TaskError: the bytes have another digest, or are no bundle of this task.
        """
        place = self._directory.resolve() / digest
        if not place.is_dir():
            self._unpack(digest, name, place)
        folder = place / name
        if not (folder / "task.toml").is_file():
            raise TaskError(f"bundle {digest[:12]} in {place} holds no task {name!r}")
        return folder

    def _unpack(self, digest: str, name: str, place: Path) -> None:
        data = self._fetch(digest)
        if (found := hashlib.sha256(data).hexdigest()) != digest:
            raise TaskError(f"bundle {digest[:12]} of {name} came with digest {found[:12]}")
        place.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
        try:
            unpack(data, name, made)
            made.chmod(0o755)
            with contextlib.suppress(OSError):  # another process was first: a directory that is not empty is not replaced
                made.rename(place)
        finally:
            shutil.rmtree(made, ignore_errors=True)
