"""Closes the sandbox around the calling process: every layer, in the order that matters (spec sandbox 9).

Runs inside the sandbox, in one namespace with ``inside.py``, which comes after it. Standard library only, and nothing of this
project: it must run in any interpreter that programs are judged with.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing itself would cost every run some milliseconds
if TYPE_CHECKING:
    from typing import Any

SETUP_FAILED = 120

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38
_SECCOMP_SET_MODE_FILTER, _SECCOMP_SPEC_ALLOW = 1, 4
_LANDLOCK_RULE_PATH_BENEATH = 1
_CAPABILITY_VERSION_3 = 0x20080522
_READ_SEARCH = 1 << 2
_SIGKILL = 9
_HALF = (1 << 32) - 1


class Kernel:
    """System calls that Python has no functions for; each raises OSError with its name."""

    def __init__(self) -> None:
        import ctypes

        self.ctypes = ctypes
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.syscall.restype = ctypes.c_long

    def call(self, name: str, number: int, *arguments: object) -> int:
        return self._checked(name, self.libc.syscall(number, *arguments))

    def prctl(self, name: str, option: int, value: int) -> None:
        zero = self.ctypes.c_ulong(0)
        self._checked(name, self.libc.prctl(option, self.ctypes.c_ulong(value), zero, zero, zero))

    def keep_capabilities(self, mask: int) -> None:
        header = (self.ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        # Two words each of effective, permitted and inheritable; ambient ones go with inheritable.
        data = (self.ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)
        self._checked("capset", self.libc.capset(header, data))

    def _checked(self, name: str, result: int) -> int:
        if result < 0:
            number = self.ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")
        return result


class Binary:
    """A program file to become. Its arguments are laid out before the filter is loaded, which allows execve with these addresses
    only: after the call they are gone, and nobody knows them, so that the allowance holds once."""

    def __init__(self, kernel: Kernel, order: dict[str, Any]) -> None:
        ctypes = kernel.ctypes
        self.kernel = kernel
        self.path = ctypes.create_string_buffer(os.fsencode(order["path"]))
        arguments = [order["path"], *order["arguments"]]
        variables = [f"{name}={value}" for name, value in order["environment"].items()]
        self.arguments = (ctypes.c_char_p * (len(arguments) + 1))(*map(os.fsencode, arguments), None)
        self.variables = (ctypes.c_char_p * (len(variables) + 1))(*map(os.fsencode, variables), None)

    def addresses(self) -> dict[str, int]:
        address = self.kernel.ctypes.addressof
        return {
            "exec_path": address(self.path),
            "exec_arguments": address(self.arguments),
            "exec_variables": address(self.variables),
        }

    def become(self) -> None:
        """Returns only by raising OSError."""
        self.kernel._checked("execve", self.kernel.libc.execve(self.path, self.arguments, self.variables))


def close_sandbox(order: dict[str, Any]) -> Binary | None:
    """Apply every layer to this process; raises OSError if one cannot be applied. Returns the file to become, if one is ordered."""
    kernel = Kernel()
    # Paths are opened with the judge's rights: they may lie where the program's uid cannot go.
    fence = _ruleset(kernel, order["landlock"]) if order["landlock"] else None
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    set_limits(order["limits"])
    _change_user(kernel, order)
    if order["directory"]:
        os.chdir(order["directory"])  # the program's own
    # After the uid, whose change clears it; a parent that died before this line is seen by the next.
    kernel.prctl("parent-death signal", _PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != order["parent"]:
        os._exit(SETUP_FAILED)
    kernel.prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
    if fence is not None:
        rules = order["landlock"]
        kernel.call("landlock_restrict_self", rules["calls"]["restrict"], fence, rules["restrict_flags"])
        os.close(fence)
    # 0: no core dumps through a pipe handler, which ignores RLIMIT_CORE, and no debugging by siblings of the same uid.
    # 1 where the judge must read the memory of several processes.
    kernel.prctl("dumpable", _PR_SET_DUMPABLE, order["dumpable"])
    binary = Binary(kernel, order["execute"]) if order["execute"] else None
    _load_filter(kernel, order["filter"], binary.addresses() if binary else {})
    return binary


def set_limits(limits: list[list[Any]]) -> None:
    """[name, soft, hard] each; never above what this process has."""
    import resource

    for name, soft, hard in limits:
        which = getattr(resource, name)
        most = resource.getrlimit(which)[1]
        # Only root may raise a hard limit; the judge itself may already have less.
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(which, (soft, hard))


def _change_user(kernel: Kernel, order: dict[str, Any]) -> None:
    if order["uid"]:
        kernel.prctl("keep capabilities", _PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(order["uid"], order["uid"], order["uid"])
        os.setresuid(order["uid"], order["uid"], order["uid"])
    kernel.keep_capabilities(_READ_SEARCH if order["reads_as_root"] else 0)


def _ruleset(kernel: Kernel, rules: dict[str, Any]) -> int:
    import struct

    attributes = struct.pack("QQQ", rules["files"], rules["network"], rules["scopes"])
    size = 8 if rules["abi"] < 4 else 16 if rules["abi"] < 6 else 24
    fence = kernel.call("landlock_create_ruleset", rules["calls"]["create"], attributes, size, 0)
    for path, rights in rules["grants"]:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, beneath)
        kernel.call(f"landlock_add_rule {path}", rules["calls"]["add"], fence, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
        os.close(beneath)
    return fence


def _load_filter(kernel: Kernel, order: dict[str, Any], addresses: dict[str, int]) -> None:
    import struct

    # The compiled filter holds a placeholder where only this process knows the value.
    values = {"own_pid": os.getpid(), **addresses}
    patches = {}
    for name, (low, high) in order["placeholders"].items():
        value = values.get(name, 0)
        patches[struct.pack("I", low)] = struct.pack("I", value & _HALF)
        patches[struct.pack("I", high)] = struct.pack("I", value >> 32)
    steps = (order["code"][at : at + 8] for at in range(0, len(order["code"]), 8))
    code = b"".join(step[:4] + patches.get(step[4:], step[4:]) for step in steps)
    buffer = kernel.ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(code) // 8, kernel.ctypes.addressof(buffer))
    # SPEC_ALLOW: before Linux 5.16 a filter otherwise slows down the program's own memory accesses.
    kernel.call("seccomp", order["seccomp"], _SECCOMP_SET_MODE_FILTER, _SECCOMP_SPEC_ALLOW, program)
