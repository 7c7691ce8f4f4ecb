"""The engine worker's supervisor over an engine that starts slowly, fails, dies, hangs, loses adapters or outlives its worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.blobs import Blobs, LocalStore
from activities.fleet import read_notice
from activities.models import model_digest
from activities.open.identity_adapter import make_initial_policy
from activities.publish.publishing import publish
from activities.train.fake import FakeSearch, make_model
from tests.unreliable import FOLDER, Orders
from workers.engine import host as host_module
from workers.engine.host import EngineHost, keep_running
from workers.engine.launch import Launch
from workers.engine.orphans import Session
from workers.engine.process import launch_engine
from workers.settings import Settings
from workflows.contracts.messages import PublishRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(tmp_path / "orders")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(host_module, "LOST_SECONDS", 0.5)


def settings(tmp_path: Path, model: Path, orders: Orders, **fields: Any) -> Settings:
    chosen = {"home": tmp_path / "home", "engine_id": "box", "engine_model": str(model), "engine_hung_seconds": 3}
    return Settings.model_validate(chosen | orders.settings() | fields)


@asynccontextmanager
async def running(host: EngineHost) -> Any:
    stop = asyncio.Event()
    task = asyncio.create_task(keep_running(host, stop))
    try:
        yield host
    finally:
        stop.set()
        await task


async def until(condition: Callable[[], Any], what: str, seconds: float = 90) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)
    return found


def boot(host: EngineHost) -> str | None:
    return host.current.boot_id if host.current else None


@pytest.mark.usefixtures("quick")
async def test_failed_starts_are_repeated_and_a_slow_one_is_waited_for(
    tmp_path: Path, model: Path, orders: Orders, blobs: Blobs, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = settings(tmp_path, model, orders, engine_gpus=["3"])
    orders.give("fail", 1)
    orders.give("slow", 2)
    host = EngineHost(chosen, blobs)
    async with running(host):
        await until(lambda: boot(host), "the engine came up")
        starts = orders.starts()
        assert len(starts) == 2
        assert {start["gpus"] for start in starts} == {"3"}
        notice = await until(lambda: read_notice(blobs, "box"), "it is announced")
        assert notice.model_digest == model_digest(model)
        assert not notice.repeatable, "real SGLang decodes in batches"
    assert read_notice(blobs, "box") is None, "a stopped engine is not announced"
    assert all(Session(s["pid"], 0, "").living() == [] for s in starts)
    said = "".join(capfd.readouterr())
    assert "ended with code 1 while starting" in said
    assert "CUDA out of memory" in said, "the reason stands in the worker's own log"


@pytest.mark.usefixtures("quick")
async def test_an_engine_that_hangs_is_killed_and_started_again(tmp_path: Path, model: Path, orders: Orders, blobs: Blobs) -> None:
    host = EngineHost(settings(tmp_path, model, orders), blobs)
    async with running(host):
        first = await until(lambda: boot(host), "the engine came up")
        (start,) = orders.starts()
        os.kill(start["pid"], signal.SIGSTOP)
        await until(lambda: boot(host) not in (None, first), "another boot")
        assert len(orders.starts()) == 2


@pytest.mark.usefixtures("quick")
async def test_an_engine_without_a_good_answer_within_its_limit_is_given_up(
    tmp_path: Path, model: Path, orders: Orders, blobs: Blobs
) -> None:
    orders.give("slow", 60)
    host = EngineHost(settings(tmp_path, model, orders, engine_start_seconds=2), blobs)
    async with running(host):
        await until(lambda: len(orders.starts()) >= 2, "it was started again")
        assert boot(host) is None


@pytest.mark.usefixtures("quick")
async def test_a_restarted_engine_and_one_that_lost_an_adapter_get_it_back_before_they_are_announced_for_it(
    tmp_path: Path, model: Path, orders: Orders
) -> None:
    blobs = Blobs(LocalStore(tmp_path / "store"))
    search = FakeSearch.open(blobs, model, seed=5)
    policy = make_initial_policy(search.store, search.spec, model)
    request = PublishRequest(run=search.ref, engine="box", policy=policy, previous=None, initial=policy)
    host = EngineHost(settings(tmp_path, model, orders), blobs)

    def verified() -> str | None:
        """The boot that is announced as serving the policy with proof."""
        notice = read_notice(blobs, "box")
        return notice.boot_id if notice and policy.name in notice.verified else None

    async def listed() -> list[str]:
        assert host.current is not None
        async with httpx.AsyncClient(base_url=host.current.url, trust_env=False) as client:
            return [card["id"] for card in (await client.get("/v1/models")).json()["data"] if card["parent"]]

    async with running(host):
        await until(lambda: boot(host), "the engine came up")
        assert (await asyncio.to_thread(publish, blobs, host, request)).passed
        first = verified()
        assert first == boot(host)
        os.kill(orders.starts()[-1]["pid"], signal.SIGKILL)
        await until(lambda: verified() not in (None, first), "a new boot proved the adapter")
        assert await listed() == [policy.name]
        # Somebody takes the adapter away while the engine lives.
        assert host.current is not None
        second = verified()
        async with httpx.AsyncClient(base_url=host.current.url, trust_env=False) as client:
            await client.post("/unload_lora_adapter", json={"lora_name": policy.name})
        assert await listed() == []
        await until(lambda: verified() is None, "it is not announced any more", 20)
        await until(lambda: verified() == second, "it was proved again")
        assert await listed() == [policy.name]
        assert boot(host) == second, "for that the engine needs no restart"


WORKER = """
import asyncio, pathlib, sys
from activities.blobs import Blobs, LocalStore
from workers.engine.host import EngineHost, keep_running
from workers.settings import load_settings
host = EngineHost(load_settings(), Blobs(LocalStore(pathlib.Path(sys.argv[1]))))
asyncio.run(keep_running(host, asyncio.Event()))
"""


@pytest.fixture
def worker(tmp_path: Path, model: Path, orders: Orders) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts engine workers as processes of their own."""
    chosen = orders.settings()
    started: list[subprocess.Popen[bytes]] = []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TTTD_")}
    environment |= {
        "TTTD_HOME": str(tmp_path / "home"),
        "TTTD_ENGINE_ID": "box",
        "TTTD_ENGINE_MODEL": str(model),
        "TTTD_ENGINE_KIND": "sglang",
        "TTTD_ENGINE_ENVIRONMENT": str(chosen["engine_environment"]).replace("'", '"'),
    }

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WORKER, str(tmp_path / "store")]
        started.append(subprocess.Popen(command, env=environment, cwd=FOLDER.parent.parent))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


async def test_a_killed_workers_engine_dies_and_what_is_left_of_it_is_killed_before_another_starts(
    worker: Callable[[], subprocess.Popen[bytes]], orders: Orders, tmp_path: Path
) -> None:
    """The engine's own child asked for nothing and survives; it stands for a scheduler that hangs on its GPU."""
    orders.give("child", 1)
    first = worker()
    await until(lambda: orders.children(), "the engine started its child")
    (engine,), (child,) = (start["pid"] for start in orders.starts()), orders.children()
    first.kill()
    first.wait()
    await until(lambda: not alive(engine), "the engine died with its worker")
    assert alive(child)
    worker()
    await until(lambda: len(orders.starts()) == 2, "another engine")
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_stand_ins_refuse_what_sglang_does_not_know(orders: Orders) -> None:
    """Else a misspelt flag of ours would show on a GPU only."""
    environment = os.environ | orders.settings()["engine_environment"]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "/m", "--enable-loras"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=FOLDER.parent.parent)
    assert done.returncode == 2
    assert "--enable-loras" in done.stderr


NOISE = "[12:00:01] Received sigquit from a child process.\n[12:00:01] kill_process_tree called: parent_pid=7"
TOO_SMALL = "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.3."


@pytest.mark.parametrize(
    ("earlier", "written", "told"),
    [
        (
            "",
            f"Traceback:\n  raise ValueError(\n{TOO_SMALL}\n\n{NOISE}\n",
            f", the last error: {TOO_SMALL}, the last line: [12:00:01] kill",
        ),
        (f"{TOO_SMALL}\n", NOISE, ", the last line: [12:00:01] kill"),
        ("", f"torch.OutOfMemoryError: {'x' * 400}", f", the last line: torch.OutOfMemoryError: {'x' * 276}"),
        (f"{TOO_SMALL}\n", "", ""),
    ],
    ids=["cause before noise", "an engine before it", "the last line is the error", "silent"],
)
async def test_an_engine_that_ends_is_quoted_with_its_cause(tmp_path: Path, earlier: str, written: str, told: str) -> None:
    log = tmp_path / "engine.log"
    log.write_text(earlier)
    launch = Launch([sys.executable, "-c", f"import sys; sys.stderr.write({written!r}); sys.exit(3)"], "http://127.0.0.1:9")
    process = launch_engine(launch, log)
    with pytest.raises(RuntimeError) as raised:
        await process.ready()
    said = str(raised.value)
    assert said.startswith("the engine ended with code 3 while starting; its log is")
    assert said.partition(str(log))[2].startswith(told)
    assert bool(told) or said.endswith(str(log))
    assert "last error" not in said or "last error" in told
