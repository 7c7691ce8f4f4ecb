"""Bundles: equal folders are equal bytes, and nothing in an archive is trusted."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from console.task_new import new_task
from tasks import bundles
from tasks.bundles import BundleCache, pack, unpack
from tasks.errors import TaskError
from tasks.registry import TaskSource, judge_digest, task_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return new_task("mine", tmp_path / "made").folder


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return archive.getnames()


def tar(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry, data in entries:
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def test_equal_folders_are_equal_bytes(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "mine"
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    assert pack(copy) == pack(folder)
    (copy / "instruction.md").write_text("something else")
    assert pack(copy) != pack(folder)


def test_what_is_no_part_of_a_task_stays_at_home(folder: Path) -> None:
    before = pack(folder)
    for name in (".git/config", ".env", "tests/__pycache__/judge.cpython-311.pyc", "seeds/x.pyc", "tests/.hidden/secret"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret")
    assert pack(folder) == before
    assert names(before) == sorted(names(before))
    assert {"mine/task.toml", "mine/tests/judge.py"} <= set(names(before))


def test_an_ignore_file_counts_below_its_own_folder(folder: Path) -> None:
    (folder / "notes").mkdir()
    for name in ("big.bin", "tests/big.bin", "tests/data.csv", "tests/keep.csv", "seeds/data.csv", "notes/a.txt"):
        (folder / name).write_text("x")
    (folder / ".harborignore").write_text("# comment\n/big.bin\nnotes/\n")
    (folder / "tests" / ".harborignore").write_text("*.csv\n!keep.csv\n")
    held = {name.removeprefix("mine/") for name in names(pack(folder))}
    assert {"tests/big.bin", "tests/keep.csv", "seeds/data.csv"} <= held
    assert not {"big.bin", "tests/data.csv", "notes/a.txt"} & held


def test_links_stay_within_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "again.md").symlink_to("instruction.md")
    with tarfile.open(fileobj=io.BytesIO(pack(folder))) as archive:
        assert archive.getmember("mine/again.md").isreg()
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (folder / "leak").symlink_to(secret)
    with pytest.raises(TaskError, match="outside the task's folder"):
        pack(folder)
    (folder / "leak").unlink()
    (folder / "seeds2").symlink_to(folder / "seeds")
    with pytest.raises(TaskError, match="link to a folder"):
        pack(folder)


def test_a_bundle_has_a_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "MAXIMUM_BYTES", 1000)
    with pytest.raises(TaskError, match=r"more than 1000 bytes.*\.harborignore"):
        pack(folder)
    monkeypatch.setattr(bundles, "MAXIMUM_FILES", 2)
    with pytest.raises(TaskError, match="at most 2"):
        pack(folder)


def test_a_fifo_is_no_file(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(TaskError, match="no regular file"):
        pack(folder)


def link(kind: bytes) -> Callable[[str], tuple[tarfile.TarInfo, bytes]]:
    def make(name: str) -> tuple[tarfile.TarInfo, bytes]:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, "/etc/passwd"
        return entry, b""

    return make


def file(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), b"x"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tar(file("mine/task.toml"), file("mine/../../evil")), "no regular file below"),
        (tar(file("/mine/task.toml")), "no regular file below"),
        (tar(file("mine/task.toml"), link(tarfile.SYMTYPE)("mine/x")), "no regular file below"),
        (tar(file("mine/task.toml"), link(tarfile.LNKTYPE)("mine/x")), "no regular file below"),
        (tar(file("mine/task.toml"), link(tarfile.CHRTYPE)("mine/x")), "no regular file below"),
        (tar(file("mine/task.toml"), file("mine/task.toml")), "twice"),
        (tar(file("other/task.toml")), "it holds the task 'other'"),
        (tar(file("mine/other.toml")), r"no mine/task\.toml"),
        (tar(), r"no mine/task\.toml"),
        (b"\x1f\x8b nonsense", "cannot be unpacked"),
        (tar(file("mine/task.toml"), file("mine/a"), file("mine/a/b")), "cannot be unpacked"),
    ],
)
def test_nothing_of_an_archive_is_trusted(tmp_path: Path, data: bytes, message: str) -> None:
    digest = hashlib.sha256(data).hexdigest()
    cache = BundleCache(tmp_path / "cache", lambda _: data)
    with pytest.raises(TaskError, match=message):
        cache.folder(digest, "mine")
    left = [path for path in tmp_path.rglob("*") if path != tmp_path / "cache"]
    assert left == []


@dataclass(frozen=True)
class Run:
    task: str
    bundle: str | None


def test_a_task_is_the_same_from_its_bundle(folder: Path, tmp_path: Path) -> None:
    data = pack(folder)
    digest = hashlib.sha256(data).hexdigest()
    fetched: list[str] = []

    def fetch(wanted: str) -> bytes:
        fetched.append(wanted)
        return data

    here = TaskSource([folder.parent]).load("mine")
    for _ in range(2):  # a second process finds what the first has unpacked
        there = TaskSource([], BundleCache(tmp_path / "cache", fetch)).of(Run("mine", digest))
        assert (task_digest(there), judge_digest(there)) == (task_digest(here), judge_digest(here))
        assert there.make_judge().grade(b"7") == here.make_judge().grade(b"7")
    assert fetched == [digest]
    assert pack(there.folder) == data


def test_a_bundle_of_another_digest_or_name_is_refused(folder: Path, tmp_path: Path) -> None:
    data = pack(folder)
    cache = BundleCache(tmp_path / "cache", lambda _: data)
    with pytest.raises(TaskError, match="came with digest"):
        cache.folder("0" * 64, "mine")
    digest = hashlib.sha256(data).hexdigest()
    cache.folder(digest, "mine")
    with pytest.raises(TaskError, match="holds no task 'yours'"):
        cache.folder(digest, "yours")
    with pytest.raises(TaskError, match="no place to unpack it"):
        TaskSource().of(Run("mine", digest))


def test_many_processes_may_unpack_at_once(folder: Path, tmp_path: Path) -> None:
    data = pack(folder)
    digest = hashlib.sha256(data).hexdigest()
    barrier, found = threading.Barrier(8), []

    def fetch(_: str) -> bytes:
        barrier.wait(20)
        return data

    def work() -> None:
        found.append(BundleCache(tmp_path / "cache", fetch).folder(digest, "mine"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [tmp_path / "cache" / digest / "mine"] * 8
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [digest]


def test_unpacking_keeps_what_may_be_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    unpack(pack(folder), "mine", tmp_path / "out")
    assert os.access(tmp_path / "out" / "mine" / "tests" / "test.sh", os.X_OK)
    assert not os.access(tmp_path / "out" / "mine" / "tests" / "judge.py", os.X_OK) or os.geteuid() == 0
    assert (tmp_path / "out" / "mine" / "tests" / "judge.py").stat().st_mode & 0o777 == 0o644
