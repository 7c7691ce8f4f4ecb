"""Object stores: one suite for a directory and for S3, then what each alone can get wrong. S3 is moto's server behind a lock."""

from __future__ import annotations

import hashlib
import io
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from activities.blobs import Blobs, LocalStore, MissingKey, ObjectStore, S3Store, digest_of, open_store
from activities.errors import CorruptBlob, InputError, TransientError

ROOT = Path(__file__).resolve().parent.parent
Environ = dict[str, Any]
Application = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]


class S3Server:
    """moto behind a switch: `fault` sees every request first and may answer in its place."""

    def __init__(self) -> None:
        self._moto: Application = DomainDispatcherApplication(create_backend_app)
        self.fault: Callable[[Environ, Callable[..., Any], Application], Iterable[bytes] | None] | None = None
        # One request at a time: moto's check of If-None-Match is not atomic, and an atomic one is what a real S3 promises.
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        stream = environ["wsgi.input"]
        environ["wsgi.input"] = io.BytesIO(stream.read() if environ.get("wsgi.input_terminated") else stream.read(length))
        with self._lock:
            answer = self.fault(environ, start_response, self._moto) if self.fault else None
            return list(self._moto(environ, start_response)) if answer is None else answer

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[S3Server, Callable[[], S3Store]]]:
    """The server and a maker of stores on one fresh bucket."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    config = Config(retries={"mode": "standard", "max_attempts": 3}, max_pool_connections=20)
    client = boto3.client("s3", endpoint_url=s3_server.url, config=config)
    bucket = f"bucket-{random.Random().randrange(1 << 60):x}"
    client.create_bucket(Bucket=bucket)
    yield s3_server, lambda: S3Store(client, bucket, "some/prefix")
    s3_server.fault = None


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "directory":
        return LocalStore(tmp_path / "store")
    made: ObjectStore = request.getfixturevalue("s3")[1]()
    return made


# Both kinds -------------------------------------------------------------------------------------------------------------------
def test_create_writes_once(store: ObjectStore) -> None:
    assert store.create("runs/a/open", b"first")
    assert not store.create("runs/a/open", b"second")
    assert store.get("runs/a/open") == b"first"
    assert store.exists("runs/a/open")


def test_create_has_one_winner_among_threads(store: ObjectStore) -> None:
    barrier = threading.Barrier(16)

    def attempt(i: int) -> bool:
        barrier.wait()
        return store.create("runs/a/contested", b"writer %d" % i)

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(attempt, range(16)))
    assert results.count(True) == 1
    assert store.get("runs/a/contested") == b"writer %d" % results.index(True)


def test_put_replaces(store: ObjectStore) -> None:
    store.put("fleet/engines/e1", b"one")
    store.put("fleet/engines/e1", b"two")
    assert store.get("fleet/engines/e1") == b"two"


def test_missing_entries_are_named(store: ObjectStore) -> None:
    store.create("runs/a/steps/1", b"")
    for key in ("nothing", "runs/a/steps", "runs/a/steps/1/below"):
        with pytest.raises(MissingKey, match=key):
            store.get(key)
        assert not store.exists(key)
        store.delete(key)  # nothing happens
    assert store.get("runs/a/steps/1") == b""


def test_delete_removes_one_entry(store: ObjectStore) -> None:
    store.put("a/b", b"1")
    store.put("a/bc", b"2")
    store.delete("a/b")
    assert list(store.keys("")) == ["a/bc"]


def test_keys_are_in_order_and_below_the_prefix(store: ObjectStore) -> None:
    names = ["r/10", "r/2", "r/b/c", "r/b", "r/b.x", "r/B", "r-/x", "r/é", "q/1"]
    names.remove("r/b")  # a directory cannot hold both `r/b` and `r/b/c`, and no run's keys do
    for name in names:
        store.create(name, b"x")
    assert list(store.keys("")) == sorted(names)
    assert list(store.keys("r/")) == sorted(n for n in names if n.startswith("r/"))
    assert list(store.keys("r/b")) == ["r/b.x", "r/b/c"]
    assert list(store.keys("r/1")) == ["r/10"]
    assert list(store.keys("none/such/")) == []


def test_folders_are_those_directly_below_the_prefix(store: ObjectStore) -> None:
    for name in ("r/b/c", "r/a/x/y", "r/a/z", "r/file", "ra/b"):
        store.create(name, b"x")
    assert store.folders("r/") == ["a", "b"]
    assert store.folders("r/a/") == ["x"]
    assert store.folders("none/such/") == []


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../escape", "a/../../escape", "a/../b", "a//b", "a/", "./a", "a/.tmp-1", "a\0b", "a\nb"]
)
def test_keys_that_leave_the_store_are_refused(store: ObjectStore, key: str) -> None:
    actions: list[Callable[[], object]] = [
        lambda: store.get(key),
        lambda: store.create(key, b""),
        lambda: store.put(key, b""),
        lambda: store.exists(key),
        lambda: store.delete(key),
    ]
    for action in actions:
        with pytest.raises(InputError, match="leaves the store"):
            action()
    assert list(store.keys("")) == []


def test_blobs_are_addressed_by_content(store: ObjectStore) -> None:
    blobs = Blobs(store)
    digest = blobs.put(b"content")
    assert digest == hashlib.sha256(b"content").hexdigest() == blobs.put(b"content")
    assert blobs.get(digest) == b"content"
    assert list(store.keys("blobs/")) == [f"blobs/{digest[:2]}/{digest}"]


def test_missing_blob_names_key_and_store(store: ObjectStore) -> None:
    digest = digest_of(b"never stored")
    with pytest.raises(CorruptBlob) as caught:
        Blobs(store).get(digest)
    assert f"blobs/{digest[:2]}/{digest}" in str(caught.value)
    assert store.url in str(caught.value)


@pytest.mark.parametrize("damage", [b"", b"conten", b"content\0", b"Content"])
def test_damaged_blob_is_named_and_healed_by_the_next_put(store: ObjectStore, damage: bytes) -> None:
    blobs = Blobs(store)
    digest = blobs.put(b"content")
    store.put(blobs.key(digest), damage)
    with pytest.raises(CorruptBlob) as caught:
        blobs.get(digest)
    assert digest_of(damage) in str(caught.value)
    assert blobs.key(digest) in str(caught.value)
    assert blobs.put(b"content") == digest
    assert blobs.get(digest) == b"content"


def test_blobs_from_many_threads(store: ObjectStore) -> None:
    blobs = Blobs(store)
    contents = [b"content %d" % (i % 4) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        digests = list(pool.map(blobs.put, contents))
    assert [blobs.get(d) for d in digests] == contents
    assert len(list(store.keys("blobs/"))) == 4


# A directory ------------------------------------------------------------------------------------------------------------------
WRITER = """
import hashlib, sys
from pathlib import Path
from activities.blobs import LocalStore
store = LocalStore(Path(sys.argv[1]))
block = bytes(range(256)) * (1 << 14)  # 4 MiB: long enough on its way that a kill often hits the middle
for i in range(10 ** 9):
    body = b"%d" % i + block
    data = hashlib.sha256(body).hexdigest().encode() + body
    store.create(f"e/{sys.argv[2]}-{i % 3}", data)
    store.put("e/rewritten", data)
    if i == 0:
        print("writing", flush=True)
"""


@pytest.mark.slow
def test_killed_writers_leave_no_torn_entry(tmp_path: Path) -> None:
    rng = random.Random(0)
    store = LocalStore(tmp_path)
    for attempt in range(20):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(attempt)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
            threading.Event().wait(rng.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        keys = list(store.keys("e/"))
        assert "e/rewritten" in keys
        for key in keys:
            data = store.get(key)
            assert data[:64].decode() == hashlib.sha256(data[64:]).hexdigest(), key
            if key != "e/rewritten":
                store.delete(key)
    assert store.create("e/after", b"the directory is still usable")


def test_unfinished_write_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("activities.blobs.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        LocalStore(tmp_path).put("a", b"data")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_symbolic_link_out_of_the_store_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    store = LocalStore(tmp_path / "store")
    (tmp_path / "store" / "link").symlink_to(outside)
    with pytest.raises(InputError, match="leaves the store"):
        store.put("link/file", b"")
    assert not list(outside.iterdir())


def test_new_directories_are_synced_into_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(LocalStore, "_sync_directory", staticmethod(synced.append))
    LocalStore(tmp_path).create("a/b/c", b"")
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)


# S3 ---------------------------------------------------------------------------------------------------------------------------
S3 = tuple[S3Server, Callable[[], S3Store]]


def answer(start_response: Callable[..., Any], status: str, code: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "application/xml")])
    return [f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()]


def is_conditional_put(environ: Environ) -> bool:
    return environ["REQUEST_METHOD"] == "PUT" and environ.get("HTTP_IF_NONE_MATCH") == "*"


def test_s3_that_ignores_the_condition_is_refused(s3: S3) -> None:
    server, make = s3

    def forget(environ: Environ, start_response: Callable[..., Any], moto: Application) -> Iterable[bytes] | None:
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return None

    server.fault = forget
    store = make()
    with pytest.raises(InputError, match="ignores If-None-Match"):
        store.create("runs/a/open", b"")
    assert list(store.keys("")) == []  # nothing written, the probe cleaned up


def test_s3_that_does_not_know_the_condition_is_refused(s3: S3) -> None:
    server, make = s3
    server.fault = lambda environ, start, moto: (
        answer(start, "501 Not Implemented", "NotImplemented") if is_conditional_put(environ) else None
    )
    with pytest.raises(InputError, match="refuses If-None-Match"):
        make().create("runs/a/open", b"")


@pytest.mark.parametrize("conflicts", [2, 1000])
def test_concurrent_conditional_writes_are_repeated(s3: S3, monkeypatch: pytest.MonkeyPatch, conflicts: int) -> None:
    monkeypatch.setattr("activities.blobs._CONFLICT_PAUSES", (0.0, 0.0, 0.0))
    server, make = s3
    store = make()
    store.create("runs/a/first", b"")
    left = [conflicts]

    def conflict(environ: Environ, start_response: Callable[..., Any], moto: Application) -> Iterable[bytes] | None:
        if is_conditional_put(environ) and left[0]:
            left[0] -= 1
            return answer(start_response, "409 Conflict", "ConditionalRequestConflict")
        return None

    server.fault = conflict
    if conflicts == 2:
        assert store.create("runs/a/second", b"mine")
        assert store.get("runs/a/second") == b"mine"
    else:
        with pytest.raises(TransientError, match="runs/a/second"):
            store.create("runs/a/second", b"mine")


def test_lost_answers_neither_fail_the_probe_nor_duplicate(s3: S3) -> None:
    """The client repeats a write whose answer was lost, and is then told that the entry exists: it does, with its own bytes."""
    server, make = s3
    lost: set[str] = set()

    def lose(environ: Environ, start_response: Callable[..., Any], moto: Application) -> Iterable[bytes] | None:
        key = environ["PATH_INFO"]
        if is_conditional_put(environ) and key not in lost:
            lost.add(key)
            list(moto(environ, lambda *_: None))
            return answer(start_response, "500 Internal Server Error", "InternalError")
        return None

    server.fault = lose
    store = make()
    blobs = Blobs(store)
    digest = blobs.put(b"content")
    assert not store.create("runs/a/open", b"mine")
    assert store.get("runs/a/open") == b"mine"
    assert blobs.get(digest) == b"content"


def test_missing_bucket_is_named(s3: S3) -> None:
    _, make = s3
    store = make()
    store._bucket = "no-such-bucket"
    for action in (lambda: store.get("a"), lambda: store.create("a", b"")):
        with pytest.raises(InputError, match="no-such-bucket"):
            action()


# Addresses --------------------------------------------------------------------------------------------------------------------
def test_open_store_returns_to_where_url_points(tmp_path: Path, s3: S3) -> None:
    local = LocalStore(tmp_path / "with space & ü")
    local.put("a", b"here")
    assert open_store(local.url).get("a") == b"here"
    assert open_store(str(tmp_path / "with space & ü")).get("a") == b"here"
    server, make = s3
    remote = make()
    remote.put("a", b"there")
    assert open_store(remote.url, endpoint=server.url).get("a") == b"there"


@pytest.mark.parametrize("url", ["", "s3://", "s3:/bucket", "http://x/y", "file://relative/path", "file:relative"])
def test_addresses_that_mean_nothing_are_refused(url: str) -> None:
    with pytest.raises(InputError, match="use a path"):
        open_store(url)
