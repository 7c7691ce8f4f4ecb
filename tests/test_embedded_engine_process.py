"""The engine as a process: start, real sockets, clients that vanish, SIGTERM under load, death with its parent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import workers.engine.embedded
from workers.engine.embedded.tiny import make_tiny_adapter, make_tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(str(workers.engine.embedded.__file__)).parents[3]
START_SECONDS = 120


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    log: Path

    def event(self, name: str) -> dict[str, object]:
        """Wait for a log line."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for line in self.log.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    if (entry := json.loads(line)).get("event") == name:
                        return dict(entry)
            if self.process.poll() is not None:
                raise AssertionError(f"engine ended with {self.process.returncode}: {self.log.read_text()}")
            time.sleep(0.05)
        raise AssertionError(f"no {name} within {START_SECONDS} s: {self.log.read_text()}")

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.event('listening')['port']}", timeout=60, trust_env=False)


def command(model: Path, *options: str, port: int = 0) -> list[str]:
    return [sys.executable, "-m", "workers.engine.embedded", "--model-path", str(model), "--port", str(port), *options]


@contextlib.contextmanager
def running(model: Path, log: Path, *options: str) -> Iterator[Running]:
    with log.open("wb") as stream:
        process = subprocess.Popen(command(model, *options), cwd=ROOT, stderr=stream, stdout=stream)
    try:
        yield Running(process, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("p") / "model", context_tokens=100_000)


def body(new: int, seed: int = 0) -> dict[str, object]:
    return {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": new, "ignore_eos": True, "sampling_seed": seed}}


def wait_until_running(client: httpx.Client, rows: int) -> None:
    deadline = time.monotonic() + 60
    while client.get("/server_info").json()["internal_states"][0]["running"] != rows:
        assert time.monotonic() < deadline, f"never {rows} rows running"
        time.sleep(0.02)


def test_a_life_of_requests_ended_by_sigterm(model: Path, tmp_path: Path) -> None:
    adapter = make_tiny_adapter(tmp_path / "adapter", model)
    with running(model, tmp_path / "log") as engine, engine.client() as client, ThreadPoolExecutor(40) as pool:
        assert client.get("/health").status_code == 200
        client.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": str(adapter)}).raise_for_status()
        answers = list(pool.map(lambda i: client.post("/generate", json=body(10 + i, i) | {"lora_path": "a"}), range(32)))
        assert [len(a.json()["output_ids"]) for a in answers] == [10 + i for i in range(32)]

        # A client that goes away takes its row with it.
        with pytest.raises(httpx.ReadTimeout):
            client.post("/generate", json=body(50_000), timeout=0.5)
        wait_until_running(client, 0)

        endless = [pool.submit(client.post, "/generate", json=body(50_000, i)) for i in range(3)]
        wait_until_running(client, 3)
        begun = time.monotonic()
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(30) == 0
        assert time.monotonic() - begun < 10  # 2 s is the promise; a busy test machine gets more
        for future in endless:
            assert future.result().status_code == 503


def test_unusable_options_end_with_status_2(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "log") as engine:
        port = int(str(engine.event("listening")["port"]))
        taken = subprocess.run(command(model, port=port), cwd=ROOT, capture_output=True, timeout=START_SECONDS, check=False)
        assert (taken.returncode, b"cannot_listen" in taken.stderr) == (2, True)
    missing = subprocess.run(command(tmp_path / "none"), cwd=ROOT, capture_output=True, timeout=START_SECONDS, check=False)
    assert (missing.returncode, b"config.json" in missing.stderr) == (2, True)


def test_the_engine_dies_with_its_parent(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen({command(model, '--die-with-parent')!r}, stderr=open({str(log)!r}, 'wb'))\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        Running(parent, log).event("listening")
        os.kill(child, 0)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 30
        while alive(child):
            assert time.monotonic() < deadline, "the engine outlived its parent"
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()


def alive(pid: int) -> bool:
    """False also for a zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
