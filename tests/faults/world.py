"""The whole system with everything that can be killed in it: workers, Temporal server and object store, each a process.

Workers reach the store through the proxy, and each process signs with a key of its own, so that the proxy knows who asks. What the
harness itself reads goes to the store directly. Knows how to take a part down and bring it back; not when.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from activities.blobs import Blobs, S3Store
from tests.faults.proxy import Proxy
from tests.faults.seaweed import BUCKET, REGION, SeaweedFS, secret
from tests.system import ROLES, SHORT_TIMEOUTS, System

TEMPORAL, STORE = "temporal", "store"
PARTS = (*ROLES, TEMPORAL, STORE)
"""Everything that is killed."""
SPARE_ROLES = ("train", "judge")
"""Roles of which a second process is started while the first is frozen."""
GROUPS, ROLLOUTS = 2, 3
"""The smallest grid that trains: adaptive advantages need three rollouts a group."""


def spare_of(role: str) -> str:
    return f"{role}-2"


def request_of(steps: int) -> dict[str, Any]:
    """One request for all runs of a table: equal but for the number of steps, which is not in the identity."""
    search = {"groups": GROUPS, "rollouts": ROLLOUTS, "steps": steps}
    return {"task": "circle_packing_26", "profile": "repeatable", "seed": 7, "timeouts": SHORT_TIMEOUTS, "search": search}


class World(System):
    """A system on S3 whose every part can go down and come back.

    Args:
        folder: a fresh one; everything lies below it.
    """

    def __init__(self, folder: Path) -> None:
        self._weed = SeaweedFS(folder / "objects", (*ROLES, *map(spare_of, SPARE_ROLES)))
        self.proxy = Proxy(self._weed.address)
        super().__init__(
            folder / "home",
            TTTD_STORE=f"s3://{BUCKET}",
            TTTD_S3_ENDPOINT=self.proxy.url,
            AWS_DEFAULT_REGION=REGION,
            AWS_EC2_METADATA_DISABLED="true",
            OMP_NUM_THREADS="1",
        )
        self.blobs = Blobs(S3Store(self._weed.client(), BUCKET))
        self._starts: dict[str, int] = {}
        self._frozen: set[str] = set()

    # Up and down ----------------------------------------------------------------------------------------------------------
    def start_all(self) -> None:
        self.bring_up(STORE)
        self.bring_up(TEMPORAL)
        self.start(*ROLES)

    def start(self, *names: str) -> None:
        """Start workers by name: `train`, or `train-2` for a second one."""
        for name in names:
            role, _, number = name.partition("-")
            extra = {"AWS_ACCESS_KEY_ID": f"{name}-key", "AWS_SECRET_ACCESS_KEY": secret(name)}
            if role == "judge" and number:  # sandboxes of two judges need user ids of their own
                extra["TTTD_JUDGE_UID_BASE"] = str(60_000 + 1000 * int(number))
            self._starts[name] = self._count_starts(name)
            self._spawn(name, [sys.executable, "-m", "console.main", "worker", role], **extra)

    def bring_up(self, part: str) -> None:
        """Start a part and wait until it is up."""
        if part == STORE:
            self._spawn(STORE, self._weed.command())
            self._weed.wait_until_ready()
        elif part == TEMPORAL:
            self.start_temporal()
        else:
            self.start(part)
            self.wait_until_up(part)

    def wait_until_up(self, worker: str) -> None:
        self.wait_for(f"the start of {worker}", lambda: self._count_starts(worker) > self._starts[worker], seconds=60)

    def is_there(self, part: str) -> bool:
        return part in self._processes

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        super().kill(name, number)
        self._frozen.discard(name)

    def freeze(self, worker: str) -> None:
        """SIGSTOP: it holds its connections and answers nothing."""
        os.kill(self.pid(worker), signal.SIGSTOP)
        self._frozen.add(worker)

    def thaw(self, worker: str) -> None:
        os.kill(self.pid(worker), signal.SIGCONT)
        self._frozen.discard(worker)

    def heal(self) -> None:
        """Whatever went on before: nothing held, nothing frozen, every part there once."""
        self.proxy.release_all()
        for name in list(self._frozen):
            self.kill(name)
        for role in SPARE_ROLES:
            if self.is_there(spare_of(role)):
                self.kill(spare_of(role))
        for part in (STORE, TEMPORAL, *ROLES):
            if self.is_there(part) and self._processes[part].poll() is not None:
                self.kill(part)
            if not self.is_there(part):
                self.bring_up(part)

    def forget(self) -> None:
        """Drop blobs and what engines were told to serve: runs of one request store the same bytes, and each is to do it anew."""
        store = self.blobs.store
        for key in [*store.keys("blobs/"), *store.keys("fleet/published/")]:
            store.delete(key)

    def stop(self) -> None:
        super().stop()
        self.proxy.close()
        self._weed.clean()

    # What it shows --------------------------------------------------------------------------------------------------------
    def runs_a_program(self, judge: str) -> bool:
        """Whether a judge's process has a child: a program in its sandbox."""
        parent = str(self.pid(judge))
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError):  # a process that has just ended
                # The name stands in brackets and may hold anything; the fields are counted from its end.
                state, its_parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
                if its_parent == parent and state not in "ZX":
                    return True
        return False

    def workers_of(self, role: str) -> list[str]:
        """Names of the processes of a role that ever ran, by their logs."""
        return [name for name in (role, spare_of(role)) if (self.settings.logs / f"{name}.log").is_file()]

    def _count_starts(self, worker: str) -> int:
        log = self.settings.logs / f"{worker}.log"
        return log.read_text(encoding="utf-8").count('"event": "worker_started"') if log.is_file() else 0
