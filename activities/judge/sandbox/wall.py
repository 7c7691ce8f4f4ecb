"""The outer wall of the backend `bwrap`: bubblewrap's namespaces and mounts around the hardened child. Source: spec sandbox 9.

Everything here is arguments for one command; the child inside is the same as without a wall. Its root is a tmpfs that holds
nothing but what is listed, and that is read-only when the child starts.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

FILES_LIMIT: Final = 10_000
"""Files that a run may have in its own directories at once; an empty one still takes kernel memory."""

OWN_DIRECTORIES: Final = ("/tmp", "/dev/shm")
LEAST_SCRATCH_BYTES: Final = 16 << 20
"""With several processes: sockets of multiprocessing and the like need a directory."""
LEAST_SHARED_BYTES: Final = 64 << 20

MODULES: Final = "/program"
"""Where processes of a program find its module."""

TOOLS: Final = ("/usr/bin", "/bin")
"""What a program of several processes may also start."""

_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom")
_PLACES: Final = ("/usr/bin/bwrap", "/bin/bwrap", "/usr/local/bin/bwrap")
"""The distribution's own first: Ubuntu's AppArmor profile names that path only. PATH is not asked."""

_MODULE = '''"""Makes this process's copy of the program."""
import marshal
with open("/program/order", "rb") as file:
    order = marshal.load(file)
inside = {"__name__": "inside", "__file__": "inside.py"}
for code in order["code"]:
    exec(marshal.loads(code), inside)
inside["populate"](globals(), order)
'''


def find_bwrap() -> Path | None:
    """bubblewrap, if it is installed."""
    return next((Path(place) for place in _PLACES if os.access(place, os.X_OK)), None)


@dataclass(frozen=True)
class View:
    """What one run finds besides the interpreter and the system's libraries."""

    scratch_bytes: int = 0
    shared_bytes: int = 0
    trees: tuple[str, ...] = ()
    writable: str | None = None
    modules: Mapping[str, Any] | None = None
    """The order, for processes that import the program; None: there are none."""


@dataclass(frozen=True)
class Wall:
    """How bubblewrap is called here."""

    bwrap: Path
    as_root: bool
    """Root keeps its user namespace and drops to the slot's uid inside; anybody else gets a user namespace."""
    fresh_proc: bool = True
    """False: an empty /proc, where the kernel refuses a new one (a container that masks parts of its own)."""
    reads_as_root: bool = False
    mounts: tuple[str, ...] = field(default=(), repr=False)
    """Arguments for the interpreter and the system's libraries."""

    def arguments(self, view: View, status: int, open_file: Callable[[bytes], int]) -> list[str]:
        """All of bubblewrap's options; `open_file` makes a descriptor that holds some bytes."""
        own = self._own(view, open_file)
        # --remount-ro comes last: up to then mount points are made in the root.
        # Private directories come first: a private /tmp must not hide an interpreter that lies below the host's.
        return [*self._namespaces(status), *_private(view), *self.mounts, *self._proc(), *own, "--chdir", "/", "--remount-ro", "/"]

    def _namespaces(self, status: int) -> list[str]:
        # No --disable-userns, which gVisor does not know: the seccomp filter denies new namespaces.
        options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--die-with-parent", "--hostname", "sandbox", "--json-status-fd", str(status)]
        if not self.as_root:
            return ["--unshare-user", *options]
        kept = ["CAP_SETUID", "CAP_SETGID", *(["CAP_DAC_READ_SEARCH"] if self.reads_as_root else [])]
        return [*options, "--cap-drop", "ALL", *(word for name in kept for word in ("--cap-add", name))]

    def _proc(self) -> list[str]:
        return ["--proc", "/proc"] if self.fresh_proc else ["--dir", "/proc"]

    def _own(self, view: View, open_file: Callable[[bytes], int]) -> list[str]:
        options = mounts_of(view.trees, self.mounts)
        if view.writable:
            options += [word for path in reversed(Path(view.writable).parents[:-1]) for word in ("--dir", str(path))]
            options += ["--bind", view.writable, view.writable]
        if view.modules is not None:
            options += ["--dir", MODULES]
            for name, data in (("order", marshal.dumps(dict(view.modules), 4)), ("program.py", _MODULE.encode())):
                options += ["--perms", "0444", "--file", str(open_file(data)), f"{MODULES}/{name}"]
        return options


def _private(view: View) -> list[str]:
    sizes = {"/tmp": view.scratch_bytes, "/dev/shm": view.shared_bytes}
    return [word for path, size in sizes.items() if size for word in ("--perms", "1777", "--size", str(size), "--tmpfs", path)]


def mounts_of(paths: Sequence[str], already: Sequence[str] = ()) -> list[str]:
    """Read-only binds of paths, and the links on the way to them, each once; nothing for what lies below a bind already there."""
    links: dict[str, str] = {}
    reals = dict.fromkeys(_resolve(path, links) for path in paths if not path.startswith(("/proc/", *_DEVICES)))
    bound = {already[k + 1] for k, word in enumerate(already) if word == "--ro-bind"}
    linked = {already[k + 2] for k, word in enumerate(already) if word == "--symlink"}
    trees = [path for path in reals if path not in bound and not _below(path, {*reals, *bound} - {path})]
    # Made by name: bubblewrap makes the directories above a mount point for its own uid alone.
    above = {str(parent) for path in (*trees, *links) for parent in Path(path).parents if str(parent) != "/"}
    options = [word for path in sorted(above) if not _below(path, {*trees, *bound}) for word in ("--dir", path)]
    options += [word for path in trees for word in ("--ro-bind", path, path)]
    for link, target in links.items():
        if link not in linked and not _below(link, {*trees, *bound}):
            options += ["--symlink", target, link]
    if not already:
        options += ["--dir", "/dev"]
        options += [word for device in _DEVICES for word in ("--dev-bind", device, device)]
    return options


def _below(path: str, trees: set[str]) -> bool:
    return any(str(parent) in trees for parent in Path(path).parents)


def _resolve(path: str, links: dict[str, str]) -> str:
    """The real path; remembers every link on the way."""
    current = "/"
    for part in path.strip("/").split("/"):
        step = os.path.join(current, part)
        if os.path.islink(step):
            links[step] = target = os.readlink(step)
            current = _resolve(os.path.normpath(os.path.join(current, target)), links)
        else:
            current = step
    return current
