"""The cache of compiled programs: bounded, shared by threads, and taking nothing but a plain file from a linker."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from activities.judge.sandbox.cpp_binaries import Binaries, NoBinary
from activities.judge.sandbox.cpp_toolchain import BINARY


def write(data: bytes) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / BINARY).write_bytes(data)

    return make


def test_binaries_are_bounded_and_the_oldest_goes_first() -> None:
    cache = Binaries(maximum_bytes=250)
    try:
        paths = []
        for digest in ("a", "b", "a", "c"):
            with cache.lease(digest, write(b"x" * 100)) as path:
                paths.append(path)
                assert path.read_bytes() == b"x" * 100
                assert path.stat().st_mode & 0o777 == 0o555
        a, b, _, c = paths
        assert (a.exists(), b.exists(), c.exists()) == (True, False, True)
        with cache.lease("a", write(b"other")) as path:
            assert path.read_bytes() == b"x" * 100
    finally:
        cache.close()
    assert not a.parent.exists()


def test_a_binary_in_use_stays() -> None:
    cache = Binaries(maximum_bytes=10)
    try:
        with cache.lease("a", write(b"x" * 100)) as held, cache.lease("b", write(b"y" * 100)):
            pass
        assert not held.exists()  # given back, and there are too many
        with cache.lease("a", write(b"x" * 100)) as held:
            with cache.lease("b", write(b"y" * 100)) as other:
                pass
            assert held.exists()
            assert not other.exists()
    finally:
        cache.close()


def link(directory: Path) -> None:
    (directory / BINARY).symlink_to("/etc/passwd")


def hard_link(directory: Path) -> None:
    (directory / "original").write_bytes(b"x")
    os.link(directory / "original", directory / BINARY)


LEFT: dict[str, Callable[[Path], None]] = {
    "nothing": lambda directory: None,
    "a link": link,
    "a second name": hard_link,
    "a directory": lambda directory: (directory / BINARY).mkdir(),
    "a pipe": lambda directory: os.mkfifo(directory / BINARY),
    "too much": lambda directory: os.truncate(os.open(directory / BINARY, os.O_CREAT | os.O_WRONLY), 1 << 30),
}


@pytest.mark.parametrize("name", LEFT)
def test_only_a_plain_file_is_taken_from_the_linker(name: str) -> None:
    cache = Binaries()
    try:
        with pytest.raises(NoBinary), cache.lease("digest", LEFT[name]):
            pass
        with cache.lease("digest", write(b"fine")) as path:
            assert path.read_bytes() == b"fine"
            assert sorted(p.name for p in path.parent.iterdir()) == ["alive", "digest"]
    finally:
        cache.close()


def test_many_threads_get_the_same_binary() -> None:
    cache, made = Binaries(maximum_bytes=1 << 20), []

    def make(directory: Path) -> None:
        made.append(threading.get_ident())
        write(b"z" * 1000)(directory)

    def use(k: int) -> int:
        with cache.lease(f"d{k % 2}", make) as path:
            return len(path.read_bytes())

    try:
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(use, range(64))) == {1000}
        assert len(made) == 2
    finally:
        cache.close()


@pytest.mark.slow
def test_the_directory_of_a_killed_process_is_removed_by_the_next() -> None:
    script = (
        "import os, signal\n"
        "from activities.judge.sandbox.cpp_binaries import Binaries\n"
        "with Binaries().lease('d', lambda directory: (directory / 'program').write_bytes(b'x')) as path:\n"
        "    print(path.parent, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    left = Path(done.stdout.strip())
    assert left.is_dir()
    cache = Binaries()
    try:
        with cache.lease("e", write(b"y")) as path:
            assert not left.exists()
            other = Binaries()
            with other.lease("f", write(b"z")):
                assert path.exists()  # its process lives
            other.close()
    finally:
        cache.close()
