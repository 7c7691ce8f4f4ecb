"""The experiment: one search undisturbed, the same search with the cable pulled while judges judge, and what must be alike.

Knows what a run stores and what `tttd status` prints; how the network is made and cut is network.py's.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from activities.run_store import RunStore
from tests.system import SHORT_TIMEOUTS, System, coordinates
from tests.two_hosts.network import A_ADDRESS, B_ADDRESS, LinkReport, Network, on_host_command, try_link
from tests.two_hosts.store import BUCKET, ENDPOINT, keys_of, open_as_people, running_store
from workers import temporal_server
from workflows.contracts import messages as m

STEPS = 2
CUT_STEP = 2
REQUEST = {
    "task": "circle_packing_26",
    "profile": "repeatable",
    "seed": 7,
    "timeouts": SHORT_TIMEOUTS,
    "search": {"steps": STEPS},
}
ROLLOUTS = 8
"""Of the profile's grid: 2 groups of 4."""
STORED_BEFORE = 2
"""Verdicts of the step that are stored when the cable is pulled."""
JUDGES = ("judge-1", "judge-2")
_OF_A = ("control", "sample", "train", "engine")


class Host(System):
    """tttd's processes of one host.

    Args:
        prefix: puts a command on the host.
        environment: beside the settings that every host has: Temporal and the store by A's address.
    """

    def __init__(self, home: Path, prefix: list[str], **environment: str) -> None:
        store = {"TTTD_STORE": f"s3://{BUCKET}", "TTTD_S3_ENDPOINT": ENDPOINT}
        super().__init__(home, **store, **environment)
        self._environment = {k: v for k, v in self._environment.items() if not k.startswith("AWS_")}
        self._prefix = prefix

    def start_temporal(self) -> None:
        """Bound to every address of the host, so that the other one reaches it."""
        temporal_server.write_client_config(self.settings)
        process = self._spawn("temporal", [*temporal_server.server_command(self.settings), "--ip", "0.0.0.0"])
        temporal_server.wait_until_serving(self.settings, process)

    def start_as(self, name: str, role: str, **environment: str) -> None:
        """A worker with its role's keys and no others."""
        self._spawn(name, [sys.executable, "-m", "console.main", "worker", role], **keys_of(role), **environment)

    def act_as(self, identity: str) -> None:
        """Whose keys the commands of this host use."""
        self._environment |= keys_of(identity)

    def _spawn(self, name: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        return super()._spawn(name, [*self._prefix, *command], **environment)


@dataclass
class Report:
    """What the experiment found."""

    cut_seconds: float
    link: LinkReport | None = None
    stored_before: int = 0
    """Verdicts of the step when the cable was pulled."""
    stored_while_cut: int = 0
    """Verdicts that came while it was out: none can."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    """`tttd status RUN --json` on host A while it was out, each with `seconds` since the cut."""
    text: str = ""
    """`tttd status RUN` as people see it, towards the end of the cut."""
    first_after_seconds: float | None = None
    """From plugging it in to the next verdict."""
    judged_after: int = 0
    """Verdicts that judges came to after the cut; those whose answer was lost on the way count twice."""
    seen_of_a: list[str] | None = None
    """What host B finds in host A's folder: nothing."""
    redone: list[str] = field(default_factory=list)
    """Stored verdicts that somebody judged again: none should be."""
    changed: list[str] = field(default_factory=list)
    """Stored verdicts that are others now: none can be."""
    verdicts: dict[str, int] = field(default_factory=dict)
    """Of the cut run, by step."""
    chain: str | None = None
    undisturbed_chain: str | None = None
    seconds: float = 0.0

    def problems(self) -> list[str]:
        """Why the experiment failed; empty when it did not."""
        found = []
        if self.link is None or self.link != LinkReport(before=True, silent=True, after=True):
            found.append(f"the cut is not like a pulled cable: {self.link}")
        if self.seen_of_a != []:
            found.append(f"host B sees host A's disk: {self.seen_of_a}")
        if not 0 < self.stored_before < ROLLOUTS:
            found.append(f"{self.stored_before} of {ROLLOUTS} verdicts were stored at the cut: not the middle of a step")
        if self.stored_while_cut:
            found.append(f"{self.stored_while_cut} verdicts came over a link that was cut")
        if self.chain is None or self.chain != self.undisturbed_chain:
            found.append(f"the chain is {self.chain}, undisturbed it is {self.undisturbed_chain}")
        if self.verdicts != {str(step): ROLLOUTS for step in range(1, STEPS + 1)}:
            found.append(f"verdicts by step are {self.verdicts}, not {ROLLOUTS} each")
        found += [f"{key} was judged again" for key in self.redone]
        found += [f"{key} changed" for key in self.changed]
        if not any(_says_what_is_awaited(status) for status in self.seen):
            found.append("`tttd status` did not say while the link was cut what the run waits for, since when, and what to do")
        return found

    def as_json(self) -> str:
        return json.dumps(asdict(self) | {"problems": self.problems()}, indent=2)


def _says_what_is_awaited(status: dict[str, Any]) -> bool:
    waits = [wait for wait in status["waits"] if wait["kind"] == "judge"]
    return any(w["since"] and w["attempts"] > 1 and w["failure"] and w["advice"] for w in waits)


class Trial:
    """One experiment, told as it goes on.

    Args:
        folder: of everything; host A and host B have one each in it.
        say: takes a sentence with the seconds since the beginning.
    """

    def __init__(self, network: Network, folder: Path, cut_seconds: float, say: Callable[[float, str], None]) -> None:
        self._network = network
        self._folder = folder
        self._began = time.monotonic()
        self._tell = say
        self._stored: dict[str, str] = {}
        """Verdicts of the step at the cut, by key: their digests."""
        self._events: dict[str, int] = {}
        """By judge: how many verdicts it had told of by then."""
        self.report = Report(cut_seconds)

    def say(self, text: str) -> None:
        self._tell(time.monotonic() - self._began, text)

    async def carry_out(self) -> Report:
        """All of it. What goes wrong with the search itself is in the report; what goes wrong with the experiment is raised."""
        self.say(f"host A is {A_ADDRESS}, host B is {B_ADDRESS}; a switch joins them, and they share no folder")
        self.report.link = try_link(self._network)
        self.say(f"pulling the cable is silent: {'yes' if self.report.link.silent else 'NO'}")
        with self._hosts() as (a, b):
            result = await a.run("undisturbed", REQUEST)
            self.report.undisturbed_chain = result.commit
            self.say(f"run undisturbed: {result.state} at step {result.step}, chain {_short(result.commit)}")
            result = await a.run("cut", REQUEST, lambda: self._disturb(a, b))
            self._examine(a, b, result)
        self.report.seconds = time.monotonic() - self._began
        return self.report

    @contextlib.contextmanager
    def _hosts(self) -> Iterator[tuple[Host, Host]]:
        a = Host(self._folder / "host-a" / "home", on_host_command())
        b = Host(
            self._folder / "host-b" / "home",
            self._network.on_b(hidden=self._folder / "host-a"),
            TEMPORAL_ADDRESS=f"{A_ADDRESS}:{a.settings.temporal_port}",
            TTTD_JUDGE_SLOTS="1",
        )
        a.act_as("console")
        with running_store(self._folder / "host-a" / "store"), contextlib.closing(_Stopping(a, b)):
            a.blobs = open_as_people()
            a.start_temporal()
            for role in _OF_A:
                a.start_as(role, role)
            self.say(f"host A: object store, Temporal, {', '.join(_OF_A)}")
            for i, name in enumerate(JUDGES):
                b.start_as(name, "judge", TTTD_JUDGE_UID_BASE=str(60_000 + 100 * i))
            look = [*self._network.on_b(hidden=self._folder / "host-a"), "ls", "-A", str(self._folder / "host-a")]
            self.report.seen_of_a = subprocess.run(look, check=True, capture_output=True, text=True, timeout=30).stdout.split()
            self.say(f"host B: {len(JUDGES)} judges, with the judge's keys of the store and no others")
            yield a, b

    def _disturb(self, a: Host, b: Host) -> None:
        a.wait_for("the middle of the step", lambda: self._verdicts(a) >= STORED_BEFORE, pause=0.05)
        self._network.cut()
        cut_at = time.monotonic()
        self._stored = a.entries("cut", CUT_STEP, "/verdict")
        self._events = {name: len(b.events(name, "rollout_judged")) for name in JUDGES}
        stored = self.report.stored_before = len(self._stored)
        self.say(f"run cut, step {CUT_STEP}: {stored} of {ROLLOUTS} verdicts are stored; THE LINK IS CUT")
        try:
            for share in (0.2, 0.5, 0.8):
                time.sleep(max(0.0, cut_at + share * self.report.cut_seconds - time.monotonic()))
                self._look(a, time.monotonic() - cut_at)
            self.report.text = a.tttd("status", "cut").stdout
            time.sleep(max(0.0, cut_at + self.report.cut_seconds - time.monotonic()))
            self.report.stored_while_cut = self._verdicts(a) - stored
        finally:
            self._network.mend()
        mended_at = time.monotonic()
        self.say(f"THE LINK IS BACK after {mended_at - cut_at:.0f} s; {self.report.stored_while_cut} verdicts came meanwhile")
        a.wait_for("a verdict after the cut", lambda: self._verdicts(a) > stored, pause=0.05)
        self.report.first_after_seconds = time.monotonic() - mended_at
        self.say(f"the next verdict came {self.report.first_after_seconds:.1f} s later")

    @staticmethod
    def _verdicts(a: Host) -> int:
        return len(a.entries("cut", CUT_STEP, "/verdict"))

    def _look(self, a: Host, seconds: float) -> None:
        asked = a.tttd("status", "cut", "--json")
        assert asked.returncode == 0, asked.stderr
        status = json.loads(asked.stdout)
        self.report.seen.append({"seconds": round(seconds, 1), "state": status["state"], "waits": status["waits"]})
        for wait in status["waits"]:
            what = f"{wait['waiting']} waiting, {wait['running']} running, attempt {wait['attempts']}"
            self.say(f"  tttd status: {wait['kind']}: {what}; {wait['failure'] or 'no failure yet'}")
            self.say(f"               {wait['advice'] or 'nothing to do yet'}")

    def _examine(self, a: Host, b: Host, result: m.RunResult) -> None:
        report = self.report
        report.chain = result.commit
        self.say(f"run cut: {result.state} at step {result.step}, chain {_short(result.commit)}")
        assert [commit.step for commit in a.chain("cut")] == list(range(STEPS + 1))
        assert RunStore(a.blobs, "cut").commit_digest(STEPS) == result.commit
        after = a.entries("cut", CUT_STEP, "/verdict")
        report.changed = [key for key, digest in self._stored.items() if after.get(key) != digest]
        events = [e for name in JUDGES for e in b.events(name, "rollout_judged")[self._events[name] :]]
        keys = [f"runs/cut/steps/{s:06d}/g{g:02d}/r{r:02d}/verdict" for s, g, r in coordinates(events, "cut")]
        report.redone = sorted(set(keys) & self._stored.keys())
        report.judged_after = len(keys)
        report.verdicts = {str(step): len(a.entries("cut", step, "/verdict")) for step in range(1, STEPS + 1)}
        self.say(f"of the {report.stored_before} stored verdicts {len(report.redone)} were made again")


class _Stopping:
    """Both hosts, to be closed as one."""

    def __init__(self, *hosts: Host) -> None:
        self._hosts = hosts

    def close(self) -> None:
        for host in self._hosts:
            host.stop()


def forget_surroundings() -> None:
    """This process is host A and nothing else: what the shell before it was told about Temporal, stores and keys is not for it."""
    for name in [name for name in os.environ if name.startswith(("TEMPORAL_", "TTTD_", "AWS_"))]:
        del os.environ[name]


def _short(digest: str) -> str:
    return digest[:12]
