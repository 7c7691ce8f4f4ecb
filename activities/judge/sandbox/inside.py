"""Runs inside the sandbox: closes it, then compiles and calls the program, and writes its answer.

Standard library only, and nothing of this project: the file must run in any interpreter that programs are judged with. Order
matters: every layer stands before the program's first byte is compiled (spec sandbox 9). After that nothing here is trusted by
the judge; the program may change all of it, and can still only send bytes.

On descriptor 3 it writes one byte ``G`` once the sandbox is closed, then one of
    J + JSON text      the return value
    R + text           why the return value is not one
    L + text           the return value would not fit
    M + text           out of memory
Whatever comes before ``G`` is a failure of the sandbox; whatever comes after it is the program's word.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing itself would cost every run some milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

RESULT = 3
CHILD = sys.argv[0]
SETUP_FAILED = 120
OUT_OF_MEMORY = 77

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38
_SECCOMP_SET_MODE_FILTER, _SECCOMP_SPEC_ALLOW = 1, 4
_LANDLOCK_RULE_PATH_BENEATH = 1
_CAPABILITY_VERSION_3 = 0x20080522
_READ_SEARCH = 1 << 2
_SIGKILL = 9


class _Kernel:
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


def close_sandbox(order: dict[str, Any]) -> None:
    """Apply every layer to this process; raises OSError if one cannot be applied."""
    import resource

    kernel = _Kernel()
    # Paths are opened with the judge's rights: they may lie where the program's uid cannot go.
    fence = _ruleset(kernel, order["landlock"])
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    for name, soft, hard in order["limits"]:
        _lower(resource, getattr(resource, name), soft, hard)
    if order["uid"]:
        kernel.prctl("keep capabilities", _PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(order["uid"], order["uid"], order["uid"])
        os.setresuid(order["uid"], order["uid"], order["uid"])
    kernel.keep_capabilities(_READ_SEARCH if order["reads_as_root"] else 0)
    # After the uid, whose change clears it; a parent that died before this line is seen by the next.
    kernel.prctl("parent-death signal", _PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != order["parent"]:
        os._exit(SETUP_FAILED)
    kernel.prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
    rules = order["landlock"]
    kernel.call("landlock_restrict_self", rules["calls"]["restrict"], fence, rules["restrict_flags"])
    os.close(fence)
    # No core dumps through a pipe handler, which ignores RLIMIT_CORE, and no debugging by siblings of the same uid.
    kernel.prctl("dumpable", _PR_SET_DUMPABLE, 0)
    _load_filter(kernel, order["filter"])


def _lower(resource: Any, which: int, soft: int, hard: int) -> None:
    # Only root may raise a hard limit; the judge itself may already have less.
    most = resource.getrlimit(which)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(which, (soft, hard))


def _ruleset(kernel: _Kernel, rules: dict[str, Any]) -> int:
    import struct

    attributes = struct.pack("QQQ", rules["files"], rules["network"], rules["scopes"])
    size = 8 if rules["abi"] < 4 else 16 if rules["abi"] < 6 else 24
    fence = kernel.call("landlock_create_ruleset", rules["calls"]["create"], attributes, size, 0)
    for path, rights in (*rules["grants"], ("/proc/self", rules["own_process"])):
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, beneath)
        kernel.call(f"landlock_add_rule {path}", rules["calls"]["add"], fence, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
        os.close(beneath)
    return fence


def _load_filter(kernel: _Kernel, order: dict[str, Any]) -> None:
    import struct

    own, sentinel = struct.pack("I", os.getpid()), struct.pack("I", order["own_pid"])
    steps = (order["code"][at : at + 8] for at in range(0, len(order["code"]), 8))
    code = b"".join(step[:4] + own if step[4:] == sentinel else step for step in steps)
    buffer = kernel.ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(code) // 8, kernel.ctypes.addressof(buffer))
    # SPEC_ALLOW: before Linux 5.16 a filter otherwise slows down the program's own memory accesses.
    kernel.call("seccomp", order["seccomp"], _SECCOMP_SET_MODE_FILTER, _SECCOMP_SPEC_ALLOW, program)


def run_program(order: dict[str, Any]) -> bytes:
    """Compile, call, and return the frame to send."""
    import types

    module = types.ModuleType("program")
    space = module.__dict__
    source = order["source"]
    if order["constants"] or _mentions_np(source):
        import numpy

        space["np"] = numpy
        for name, rows in order["constants"].items():
            space[name] = numpy.array(rows, dtype=numpy.float64)
    sys.modules["program"] = module
    exec(compile(source, "program.py", "exec", dont_inherit=True), space)
    if order["entry"] not in space:
        raise NameError(f"the program defines no function {order['entry']}()")
    entry = space[order["entry"]]
    return encode(entry(**accepted(entry, order["arguments"])), order["result_bytes"])


def _mentions_np(source: str) -> bool:
    # A program that never says np need not wait 80 ms for it.
    import re

    return re.search(r"\bnp\b", source) is not None


def accepted(entry: Callable[..., object], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the entry's signature takes by name. (inspect would cost 10 ms.)"""
    while hasattr(entry, "__wrapped__"):
        entry = entry.__wrapped__
    code = getattr(entry, "__code__", None)
    if code is None:
        return {}
    if code.co_flags & 0x08:  # **kwargs
        return dict(arguments)
    named = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    return {name: value for name, value in arguments.items() if name in named}


class Refused(Exception):
    """The return value is not numbers in lists; the message says where."""


class TooLarge(Exception):
    """The return value would not fit into the result."""


MAXIMUM_NESTING = 4
MAXIMUM_INTEGER = 10**25
_FLOAT_BYTES = 3  # the shortest, such as 0.5
_SCALARS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def encode(value: object, maximum_bytes: int) -> bytes:
    """The frame for a return value: exact types only, float16 and float32 widened exactly, then JSON (spec tasks 1)."""
    try:
        plain = _Plain(maximum_bytes).of(value, 0)
        import json

        text = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()
    except Refused as refused:
        return b"R" + str(refused).encode("utf-8", "backslashreplace")
    except TooLarge as large:
        return b"L" + str(large).encode()
    except ValueError:
        return b"Rthe return value holds NaN or infinity; only finite numbers are taken"
    if len(text) > maximum_bytes:
        return b"L%d bytes, at most %d are taken" % (len(text), maximum_bytes)
    return b"J" + text


class _Plain:
    """Copies a value into lists, ints and floats, counting the least text it takes so that no copy outgrows the result."""

    def __init__(self, maximum_bytes: int) -> None:
        numpy = sys.modules.get("numpy")
        self.array = getattr(numpy, "ndarray", None)
        self.scalars = {getattr(numpy, name, None) for name in _SCALARS} - {None}
        self.most = maximum_bytes
        self.bytes = 0

    def of(self, value: Any, depth: int) -> object:
        kind = type(value)
        if kind is float:
            self._add(_FLOAT_BYTES)
            return value
        if kind is int:
            self._add(1)
            if not -MAXIMUM_INTEGER < value < MAXIMUM_INTEGER:
                raise Refused("the return value holds an integer of more than 25 digits")
            return value
        if kind is list or kind is tuple:
            return self._of_list(value, depth + 1)
        if kind is self.array:
            return self._of_array(value, depth)
        if kind in self.scalars:
            return self.of(value.item(), depth)
        raise Refused(f"the return value holds a {kind.__name__}; numbers, lists, tuples and numeric NumPy arrays are taken")

    def _of_list(self, items: Any, depth: int) -> object:
        self._go_deeper(depth)
        self._add(1 + len(items))
        if set(map(type, items)) == {float}:  # the usual case, and many times faster than one by one
            self._add(_FLOAT_BYTES * len(items))
            return items
        return [self.of(item, depth) for item in items]

    def _of_array(self, array: Any, depth: int) -> object:
        if array.dtype.kind not in "fiu" or array.dtype.itemsize > 8:
            raise Refused(f"the return value holds an array of {array.dtype}; real numbers of at most 64 bits are taken")
        self._go_deeper(depth + array.ndim)
        self._add(2 * array.size)
        return array.astype("f8").tolist() if array.dtype.kind == "f" else array.tolist()

    def _go_deeper(self, depth: int) -> None:
        if depth > MAXIMUM_NESTING:
            raise Refused(f"the return value is nested more than {MAXIMUM_NESTING} deep")

    def _add(self, least: int) -> None:
        self.bytes += least
        if self.bytes > self.most:
            raise TooLarge(f"more than the {self.most} bytes that are taken")


def send(frame: bytes) -> None:
    view = memoryview(frame)
    while view:
        view = view[os.write(RESULT, view) :]


def arrange_descriptors() -> None:
    """Leave descriptors 0-3 as the program shall see them: nothing to read, two logs, the result."""
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    result = int(sys.argv[1])
    os.dup2(result, RESULT, inheritable=False)
    for descriptor in {null, result} - {0, RESULT}:
        os.close(descriptor)
    sys.argv[1:] = []


def report_exception(source: str) -> None:
    """Print the program's traceback without the frames of this file."""
    import linecache
    import traceback

    linecache.cache["program.py"] = (len(source), None, source.splitlines(True), "program.py")
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename in ("inside.py", CHILD):
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def _exit_code(stop: SystemExit) -> int:
    """What the interpreter would exit with."""
    if stop.code is None or type(stop.code) is int:
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def main(order: dict[str, Any]) -> None:
    """Called by ``child.py``; never returns."""
    arrange_descriptors()
    try:
        close_sandbox(order)
        send(b"G")
    except OSError as error:
        send(f"S{error}".encode())
        os._exit(SETUP_FAILED)
    frame, code = b"", 0
    try:
        # Line by line, so that what a killed program printed is there to read.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # nobody has replaced it yet
        frame = run_program(order)
    except MemoryError:
        frame, code = b"Mout of memory", OUT_OF_MEMORY
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException:
        code = 1
        report_exception(order["source"])
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105  the program may have put anything there; contextlib costs an import
            stream.flush()
        except BaseException:
            pass
    try:
        send(frame)
    except OSError:
        code = 1
    # No atexit, no __del__, no waiting for threads: the slot is free at once.
    os._exit(code & 0xFF)
