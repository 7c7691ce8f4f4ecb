"""docs/operate.md, "When a run waits": each row is brought about in a real system, and `tttd status` prints what the row says."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest

from activities.blobs import Blobs, S3Store
from tests.system import SHORT_TIMEOUTS, System
from tests.test_operate_commands import PAGE, pattern_of
from workers.ports import free_port
from workflows import names

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN = "waiting"
REQUEST = {"task": "circle_packing_26", "profile": "repeatable", "seed": 7, "timeouts": SHORT_TIMEOUTS, "search": {"steps": 2}}
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
PATIENCE_SECONDS = 90.0


def rows() -> dict[str, list[str]]:
    """The table: who is missing -> lines that `tttd status` prints then."""
    section = PAGE.read_text(encoding="utf-8").partition("## When a run waits\n")[2].partition("\n## ")[0]
    found = {}
    for line in section.splitlines():
        cells = line.strip("|").split(" | ")
        if line.startswith("| ") and "``" in line:
            found[cells[0].strip()] = [re.sub(r"^`` ?(.*?) ?``$", r"\1", part.strip()) for part in cells[1].split("<br>")]
    return found


class Waiting:
    """One run in a system from which parts are taken away."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.left = rows()

    def shows(self, row: str) -> None:
        """Wait until `tttd status` prints every line of a row."""
        expected = [re.sub(r"\bRUN\b", RUN, line) for line in self.left.pop(row)]
        patterns = [re.compile(pattern_of(" ".join(line.split()))) for line in expected]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            printed = self.system.tttd("status", RUN).stdout
            lines = [" ".join(line.split()) for line in printed.splitlines()]
            missing = [line for line, p in zip(expected, patterns, strict=True) if not any(map(p.fullmatch, lines))]
            if not missing:
                return
            assert time.monotonic() < deadline, f"{row}: not printed: {missing}\nprinted:\n{printed}"

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        self.system.wait_for(what, condition, pause=0.1)


@pytest.fixture
def s3() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """An object store that can be taken away: moto's server."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
                    break
                assert time.monotonic() < deadline, "moto's server does not answer"
                time.sleep(0.2)
            yield url, process
        finally:
            process.kill()


def test_status_says_for_every_row_what_the_page_says(s3: tuple[str, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    url, store = s3
    client = boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        region_name=KEYS["AWS_DEFAULT_REGION"],
    )
    client.create_bucket(Bucket="tttd")
    system = System(tmp_path / "home", TTTD_STORE="s3://tttd", TTTD_S3_ENDPOINT=url, **KEYS)
    system.blobs = Blobs(S3Store(client, "tttd"))
    try:
        system.start_temporal()
        take_away(Waiting(system), store)
    finally:
        system.stop()


def take_away(waiting: Waiting, store: subprocess.Popen[bytes]) -> None:
    """One part after the other, in the order in which a run needs them; each is given before the next is taken."""
    system = waiting.system
    # Not `run/NAME`: a run that somebody started under its bare name is found, too.
    start = ["--type", names.DISCOVERY_RUN, "--task-queue", names.CONTROL_QUEUE, "--workflow-id", RUN]
    assert system.temporal("workflow", "start", *start, "--input", json.dumps(REQUEST)).returncode == 0
    waiting.shows("no control worker yet")
    system.start("control")
    waiting.shows("no judge")
    system.start("judge")
    waiting.shows("no engine")
    system.start("engine")
    waiting.shows("no sampler")
    system.kill("engine")
    system.start("sample")
    waiting.shows("the engine went away")
    system.start("engine")
    waiting.until("every verdict", lambda: len(system.entries(RUN, 1, "/verdict")) == 8)
    waiting.shows("no trainer")
    system.kill("control")
    waiting.shows("the control worker went away")
    system.start("control", "train")
    assert system.tttd("pause", RUN).returncode == 0
    waiting.shows("somebody paused it")
    system.kill("temporal")
    waiting.shows("Temporal")
    system.start_temporal()
    waiting.until("the run to go on", lambda: system.tttd("resume", RUN).returncode == 0)
    waiting.until("the middle of a step", lambda: len(system.entries(RUN, 2, "/rollout")) >= 1)
    store.kill()
    store.wait(30)
    waiting.shows("the object store")
    assert not waiting.left, "rows of the page that nobody brought about"


def test_the_table_has_every_part_that_can_be_missing() -> None:
    assert set(rows()) == {
        "no control worker yet",
        "no judge",
        "no engine",
        "no sampler",
        "the engine went away",
        "no trainer",
        "the control worker went away",
        "somebody paused it",
        "the object store",
        "Temporal",
    }
