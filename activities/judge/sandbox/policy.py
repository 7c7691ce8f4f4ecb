"""What every run of a sandbox has in common, and from it the plan of one run: what the child is told and what it is given.

Knows no process; ``process.py`` starts a plan, ``closing.py`` obeys the order in it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from activities.judge.sandbox import landlock
from activities.judge.sandbox.execution import Execution
from activities.judge.sandbox.filter import PLACEHOLDERS, Extra
from activities.judge.sandbox.interpreter import Interpreter
from activities.judge.sandbox.types import Isolation, Limits, Program
from activities.judge.sandbox.wall import (
    LEAST_SCRATCH_BYTES,
    LEAST_SHARED_BYTES,
    MODULES,
    OWN_DIRECTORIES,
    TOOLS,
    View,
    Wall,
)

SHARED_UID_SPARE_TASKS: Final = 64
"""Tasks that an ordinary user's own processes may gain during a run, where they count against the program's limit."""

MAXIMUM_PROCESSES: Final = 64
MAXIMUM_SCRATCH_BYTES: Final = 16 << 30
_HELPER_PROCESSES: Final = 4
"""A forkserver and a resource tracker are not what a program means by its processes."""

_OF_A_MODULE: Final = ("code", "source", "helper", "constants")

EXTRAS: Final[tuple[frozenset[Extra], ...]] = (
    frozenset(),
    frozenset({"write"}),
    frozenset({"write", "processes", "talk"}),
    frozenset({"become"}),
)
"""Every combination that a plan can ask for."""


@dataclass(frozen=True)
class Plan:
    """One run, ready to be started."""

    command: tuple[str, ...]
    """The interpreter and its flags."""
    environment: Mapping[str, str]
    order: Mapping[str, Any]
    """Plain data, since it crosses as marshal."""
    stdin: bytes
    wall: Wall | None
    view: View
    processes: int


@dataclass(frozen=True)
class Policy:
    """Everything about a run that does not change between runs of one interpreter."""

    interpreter: Interpreter
    rules: landlock.Rules | None
    """None: this kernel has no Landlock; only with a wall."""
    filters: Mapping[frozenset[Extra], bytes]
    seccomp_number: int
    uid_base: int | None
    """None: programs keep the judge's uid."""
    reads_as_root: bool
    pin: bool
    cores: tuple[int, ...]
    """Cores that this process may use."""
    wall: Wall | None = None
    tasks_per_namespace: bool = False
    """RLIMIT_NPROC counts the tasks of the run's own user namespace only (Linux 5.14)."""

    def digest(self) -> str:
        parts = [*(self.filters[extras] for extras in EXTRAS), *self.interpreter.codes, repr((self.rules, self.wall)).encode()]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def isolation(self) -> Isolation:
        return Isolation(
            backend="bwrap" if self.wall else "landlock",
            landlock_abi=self.rules.abi if self.rules else 0,
            uids="own" if self.uid_base is None else f"{self.uid_base}+slot",
            policy_hash=self.digest()[:16],
            reads_as_root=self.reads_as_root,
            processes=MAXIMUM_PROCESSES if self.wall else 1,
            scratch_bytes=MAXIMUM_SCRATCH_BYTES if self.wall else 0,
        )

    def refusal(self, limits: Limits, execution: Execution | None) -> str | None:
        """Why these limits cannot be kept here; None if they can."""
        if limits.processes > MAXIMUM_PROCESSES:
            return f"{limits.processes} processes are asked for; at most {MAXIMUM_PROCESSES} are run"
        if self.wall is None and execution is None and (limits.processes > 1 or limits.scratch_bytes):
            asked = f"{limits.processes} processes and {limits.scratch_bytes} bytes of scratch space"
            return f"{asked} are asked for; the backend landlock has one process and none, install bubblewrap (`tttd doctor`)"
        return None

    def plan(self, program: Program, limits: Limits, slot: int, execution: Execution | None = None) -> Plan:
        """Decide everything about one run."""
        several = execution is None and limits.processes > 1
        order = self._order(program, limits, slot, execution)
        environment = variables(limits.cores)
        view = View()
        if execution is not None:
            trees = tuple(str(tree) for tree in execution.trees)
            directory = None if execution.directory is None else str(execution.directory)
            # The file itself may lie in none of the trees.
            view = View(trees=(*trees, str(execution.path)), writable=directory)
        elif several or limits.scratch_bytes:
            scratch, shared = own_bytes(limits)
            modules = {name: order[name] for name in _OF_A_MODULE} if several else None
            view = View(scratch, shared, TOOLS if several else (), modules=modules)
            environment |= {"HOME": "/tmp", "TMPDIR": "/tmp"}
        return Plan(
            command=(str(self.interpreter.python),),
            environment=environment,
            order=order,
            stdin=program.stdin,
            wall=self.wall,
            view=view,
            processes=limits.processes if several else 1,
        )

    def _order(self, program: Program, limits: Limits, slot: int, execution: Execution | None) -> dict[str, Any]:
        several = execution is None and limits.processes > 1
        directory = execution.directory if execution else "/tmp" if several or limits.scratch_bytes else None
        uid = 0 if self.uid_base is None else self.uid_base + slot
        rules = self._rules(limits, execution)
        return {
            "code": list(self.interpreter.codes),
            "source": program.source,
            "helper": program.helper,
            "entry": program.entry,
            "arguments": dict(program.arguments),
            "constants": dict(program.constants),
            "modules": MODULES if several else "",
            "result_bytes": limits.result_bytes,
            "limits": self._rlimits(limits, execution),
            "cores": self._cores(limits, slot),
            "directory": None if directory is None else str(directory),
            "uid": uid,
            "reads_as_root": self.reads_as_root,
            "parent": 1 if self.wall else os.getpid(),
            "dumpable": 1 if several else 0,
            "landlock": rules.order() if rules else None,
            "execute": None if execution is None else _execute(execution),
            "filter": {
                "code": self.filters[extras_of(limits, execution)],
                "placeholders": {name: list(halves) for name, halves in PLACEHOLDERS.items()},
                "seccomp": self.seccomp_number,
            },
        }

    def _rules(self, limits: Limits, execution: Execution | None) -> landlock.Rules | None:
        if self.rules is None:
            return None
        if execution is None:
            several = limits.processes > 1
            grants = list(self.rules.grants)
            if several:
                grants = [(path, rights | (landlock.EXECUTE if _runnable(path) else 0)) for path, rights in grants]
                grants += [(MODULES, landlock.READ_TREE), *((tree, landlock.RUN_TREE) for tree in TOOLS if os.path.isdir(tree))]
            if several or limits.scratch_bytes:
                grants += [(path, landlock.OWN_TREE) for path in OWN_DIRECTORIES]
            return self.rules.granting(grants)
        grants = [grant for grant in self.rules.grants if grant[0] in ("/dev/null", "/proc/self")]
        grants += [(str(execution.path), landlock.RUN_FILE), *((str(tree), landlock.RUN_TREE) for tree in execution.trees)]
        if execution.directory is not None:
            grants.append((str(execution.directory), landlock.OWN_TREE))
        return self.rules.granting(grants)

    def _rlimits(self, limits: Limits, execution: Execution | None) -> list[list[Any]]:
        cpu = limits.cpu_limit_seconds
        largest = max(own_bytes(limits)) if execution is None else limits.scratch_bytes if execution.directory else 0
        return [
            ["RLIMIT_CPU", cpu, cpu + 1],
            *(
                [name, value, value]
                for name, value in (
                    ("RLIMIT_AS", limits.address_space_bytes),
                    ("RLIMIT_NPROC", self._tasks(limits, execution)),
                    ("RLIMIT_NOFILE", limits.open_files),
                    ("RLIMIT_FSIZE", largest),
                    ("RLIMIT_CORE", 0),
                    ("RLIMIT_MEMLOCK", 0),
                    ("RLIMIT_MSGQUEUE", 0),
                )
            ),
        ]

    def _tasks(self, limits: Limits, execution: Execution | None) -> int:
        tasks = limits.threads
        if execution is None and limits.processes > 1:
            tasks += limits.processes + _HELPER_PROCESSES
        if self.tasks_per_namespace:
            tasks += 1  # bubblewrap's own process in it
        elif self.uid_base is None:
            tasks += tasks_of(os.getuid()) + SHARED_UID_SPARE_TASKS
        return tasks

    def _cores(self, limits: Limits, slot: int) -> list[int]:
        if not self.pin:
            return []
        first = slot * limits.cores
        return [self.cores[(first + k) % len(self.cores)] for k in range(min(limits.cores, len(self.cores)))]


def extras_of(limits: Limits, execution: Execution | None) -> frozenset[Extra]:
    """What the filter of a run allows beyond the base list."""
    if execution is not None:
        return frozenset({"become"})
    if limits.processes > 1:
        return frozenset({"write", "processes", "talk"})
    return frozenset({"write"}) if limits.scratch_bytes else frozenset()


def own_bytes(limits: Limits) -> tuple[int, int]:
    """Sizes of a run's own /tmp and /dev/shm."""
    if limits.processes > 1:
        return max(limits.scratch_bytes, LEAST_SCRATCH_BYTES), max(limits.scratch_bytes, LEAST_SHARED_BYTES)
    return limits.scratch_bytes, limits.scratch_bytes


def _runnable(path: str) -> bool:
    """A program of several processes starts its own interpreter again, by way of the system's loader."""
    return not path.startswith(("/dev/", "/proc/", "/sys/", "/etc/"))


def _execute(execution: Execution) -> dict[str, Any]:
    return {
        "path": str(execution.path),
        "arguments": list(execution.arguments),
        "environment": dict(execution.environment),
    }


def variables(cores: int) -> dict[str, str]:
    """All that a program finds in its environment."""
    threads = ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "BLIS", "VECLIB", "NUMBA")
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        "SETUPTOOLS_USE_DISTUTILS": "stdlib",  # an installed setuptools would otherwise cost every start some milliseconds
        **{f"{name}_NUM_THREADS": str(cores) for name in threads},
    }


def tasks_of(uid: int) -> int:
    """Threads that a user has now, as RLIMIT_NPROC counts them."""
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
            except OSError:
                continue  # it ended meanwhile
    return count
