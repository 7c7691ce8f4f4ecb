"""Judges on one host, everything else on another, and the cable between them pulled for a minute in the middle of a step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "tests.two_hosts"]
CUT_SECONDS = 60


@pytest.fixture(scope="module")
def link() -> str:
    """What the network alone says; where networks cannot be made, every test here is skipped with the reason."""
    asked = subprocess.run([*COMMAND, "--link-only"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if asked.returncode == 2:
        pytest.skip(asked.stderr.strip())
    assert asked.returncode == 0, asked.stdout + asked.stderr
    return asked.stdout


@pytest.fixture(scope="module")
def found(link: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one whole experiment, as `python -m tests.two_hosts` writes it."""
    folder = tmp_path_factory.mktemp("two-hosts")
    options = ["--cut-seconds", str(CUT_SECONDS), "--folder", str(folder), "--report", str(folder / "report.json")]
    ended = subprocess.run([*COMMAND, *options], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert (folder / "report.json").is_file(), ended.stdout + ended.stderr
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert ended.returncode == (1 if report["problems"] else 0), ended.stdout + ended.stderr
    assert not report["problems"], ended.stdout
    return report


def test_a_pulled_cable_is_silent_and_connections_outlive_it(link: str) -> None:
    assert link == "LinkReport(before=True, silent=True, after=True)\n"


def test_a_cut_of_a_minute_in_the_middle_of_a_step_changes_nothing(found: dict[str, Any]) -> None:
    assert 0 < found["stored_before"] < 8
    assert found["stored_while_cut"] == 0
    assert found["chain"] == found["undisturbed_chain"]
    assert len(found["chain"]) == 64
    assert found["seen_of_a"] == []


def test_every_verdict_stands_once_and_none_that_was_stored_is_made_again(found: dict[str, Any]) -> None:
    assert found["verdicts"] == {"1": 8, "2": 8}
    assert (found["redone"], found["changed"]) == ([], [])
    in_flight = 2  # A verdict that a judge sent into the cut cable arrives afterwards, when the attempt that made it is gone.
    assert found["judged_after"] >= 8 - found["stored_before"] - in_flight


def test_status_says_while_the_link_is_cut_what_the_run_waits_for(found: dict[str, Any]) -> None:
    late = found["seen"][-1]
    assert late["seconds"] > 40
    (wait,) = late["waits"]
    assert (late["state"], wait["kind"], wait["role"], wait["queue"]) == ("running", "judge", "judge", "tttd-judge")
    assert wait["waiting"] + wait["running"] == 8 - found["stored_before"]
    assert wait["attempts"] >= 2
    assert wait["failure"] == "Timeout: no answer from the worker in time"
    assert "no judge worker has asked tttd-judge for work since 20" in wait["advice"]
    text = found["text"]
    assert f"judged {found['stored_before']}/8" in text
    assert "waits     judge: " in text
    assert f"since {wait['since'][:19]}" in text
    assert "Timeout: no answer from the worker in time" in text
    assert "`tttd worker judge`" in text


def network_of(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return None


def processes() -> list[int]:
    return [int(process.name) for process in Path("/proc").glob("[0-9]*")]


def below(pid: int) -> set[int]:
    """A process and everything that it has started."""
    parents = {}
    for process in processes():
        with contextlib.suppress(OSError):
            parents[process] = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def test_kill_9_of_the_experiment_leaves_neither_process_nor_network(link: str, tmp_path: Path) -> None:
    with subprocess.Popen([*COMMAND, "--folder", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("host B: 2 judges" in line for line in process.stdout)
        started = below(process.pid)
        made = {network_of(pid) for pid in started} - {None, network_of(os.getpid())}
        process.send_signal(signal.SIGKILL)
    assert len(made) >= 3, "two hosts and a switch"
    assert len(started) >= 11, "a store, a server, six workers, and who holds the networks"
    deadline = time.monotonic() + 60
    while left := [pid for pid in processes() if network_of(pid) in made]:
        assert time.monotonic() < deadline, f"processes {left} and their networks are left"
        time.sleep(0.2)
