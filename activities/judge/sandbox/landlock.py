"""What a program may do with files, as Landlock rules, and whether this kernel has Landlock. Source: spec sandbox 9.

Nothing may be written but /dev/null, and nothing executed, unless a run is granted more. Knows no process: the child applies the
rules to itself.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

CREATE_RULESET: Final = 444
ADD_RULE: Final = 445
RESTRICT_SELF: Final = 446
"""System call numbers, the same on every architecture."""

_VERSION_FLAG: Final = 1

EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_TRUNCATE: Final = 1 << 14
_DEVICES: Final = 1 << 6 | 1 << 11 | 1 << 15
"""Making character and block devices, and ioctl on them."""

READ_TREE: Final = _READ_FILE | _READ_DIR
RUN_FILE: Final = _READ_FILE | EXECUTE
RUN_TREE: Final = READ_TREE | EXECUTE
OWN_TREE: Final = ((1 << 16) - 1) & ~_DEVICES & ~EXECUTE
"""Everything in a directory of the run's own, but for devices and execution."""

_FILES_BY_ABI: Final = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights on files that an ABI knows; from one to the next a bit was added."""

_NETWORK: Final = 0b11
_SCOPES: Final = 0b11
_NO_LOG: Final = 1
"""LANDLOCK_RESTRICT_SELF_LOG_SAME_EXEC_OFF: denials of hostile programs would flood the audit log."""

SYSTEM_TREES: Final = (
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/lib",
    "/lib64",
    "/usr/share/zoneinfo",
    "/sys/devices/system/cpu",
)
SYSTEM_FILES: Final = ("/etc/ld.so.cache", "/etc/localtime", "/proc/cpuinfo", "/proc/meminfo", "/dev/urandom", "/dev/zero")


@dataclass(frozen=True)
class Rules:
    """A ruleset in numbers, as the child passes them to the kernel."""

    abi: int
    files: int
    network: int
    scopes: int
    restrict_flags: int
    grants: tuple[tuple[str, int], ...]
    """(path, rights), existing paths only."""

    def granting(self, grants: Sequence[tuple[str, int]]) -> Rules:
        """These rules with other grants; rights that this ABI does not know are left out, since it cannot deny them either."""
        return replace(self, grants=tuple((path, rights & self.files) for path, rights in grants))

    def order(self) -> dict[str, Any]:
        """As the child is told."""
        return {
            "calls": {"create": CREATE_RULESET, "add": ADD_RULE, "restrict": RESTRICT_SELF},
            "abi": self.abi,
            "files": self.files,
            "network": self.network,
            "scopes": self.scopes,
            "restrict_flags": self.restrict_flags,
            "grants": [list(grant) for grant in self.grants],
        }


def landlock_abi() -> int:
    """Version of the kernel's Landlock; 0 if it has none or did not turn it on."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    version: int = libc.syscall(CREATE_RULESET, None, 0, _VERSION_FLAG)
    return max(0, version)


def make_rules(abi: int, readable: Sequence[str]) -> Rules:
    """Everything denied but reading system libraries and the given paths, from which programs import."""
    files = _FILES_BY_ABI[max(known for known in _FILES_BY_ABI if known <= abi)]
    grants = [(path, _reading(path)) for path in existing(readable)]
    grants.append(("/dev/null", _READ_FILE | _WRITE_FILE | _TRUNCATE))
    grants.append(("/proc/self", READ_TREE))
    rules = Rules(
        abi=abi,
        files=files,
        network=_NETWORK if abi >= 4 else 0,
        scopes=_SCOPES if abi >= 6 else 0,
        restrict_flags=_NO_LOG if abi >= 7 else 0,
        grants=(),
    )
    return rules.granting(grants)


def existing(readable: Sequence[str]) -> list[str]:
    """System libraries and the given paths, as far as this machine has them."""
    return [path for path in dict.fromkeys([*SYSTEM_TREES, *SYSTEM_FILES, *readable]) if os.path.exists(path)]


def unreachable(paths: list[str]) -> list[str]:
    """Those of the paths that a stranger's uid cannot reach, by permission bits alone."""
    return [path for path in paths if not _open_to_all(os.path.realpath(path))]


def _reading(path: str) -> int:
    return _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)


def _open_to_all(path: str) -> bool:
    mode = os.stat(path).st_mode
    wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
    return mode & wanted == wanted and all(os.stat(parent).st_mode & stat.S_IXOTH for parent in Path(path).parents)
