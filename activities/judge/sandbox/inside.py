"""Runs inside the sandbox: closes it, then compiles and calls the program, and writes its answer.

Standard library only, and nothing of this project: the file must run in any interpreter that programs are judged with. It shares
one namespace with ``closing.py``, which is run first. Every layer stands before the program's first byte is compiled (spec sandbox
9). After that nothing here is trusted by the judge; the program may change all of it, and can still only send bytes.

On descriptor 3 it writes
    S + text           the sandbox could not be closed
    H + text           the task's helper failed
or one byte ``G`` when the program's turn comes, then one of
    J + JSON text      the return value
    R + text           why the return value is not one
    L + text           the return value would not fit
    M + text           out of memory
    X + bytes          whatever a binary program prints
Whatever comes before ``G`` is a failure of the sandbox or the task; whatever comes after it is the program's word.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing itself would cost every run some milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from activities.judge.sandbox.closing import SETUP_FAILED, Binary, close_sandbox, set_limits

RESULT = 3
OUT_OF_MEMORY = 77


class HelperFailed(Exception):
    """The task's helper raised; the message says what."""


def prepare(space: dict[str, Any], order: dict[str, Any]) -> None:
    """Put into a namespace what the program finds there: np if somebody says it, the constants, what the helper defines."""
    if order["constants"] or _mentions_np(order["source"] + order["helper"]):
        import numpy

        space["np"] = numpy
        for name, rows in order["constants"].items():
            space[name] = numpy.array(rows, dtype=numpy.float64)
    if order["helper"]:
        exec(compile(order["helper"], "helper.py", "exec", dont_inherit=True), space)


def populate(space: dict[str, Any], order: dict[str, Any]) -> None:
    """The whole module, for a process that imports it (``wall.py`` mounts the module that calls this)."""
    prepare(space, order)
    exec(compile(order["source"], "program.py", "exec", dont_inherit=True), space)


def make_module(order: dict[str, Any]) -> dict[str, Any]:
    """An empty module `program`, in which pickle finds what the program defines."""
    import types

    module = types.ModuleType("program")
    sys.modules["program"] = module
    if order["modules"]:
        sys.path.insert(0, order["modules"])
        # A process that the program starts must neither answer in its name nor hold its answer open.
        os.register_at_fork(after_in_child=lambda: os.close(RESULT))
    return module.__dict__


def run_helper(space: dict[str, Any], order: dict[str, Any]) -> None:
    """Before the program, whose code cannot have touched anything yet: a failure is the task's."""
    try:
        prepare(space, order)
    except BaseException as error:
        trace, line = error.__traceback__, 0
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "helper.py" else line
            trace = trace.tb_next
        raise HelperFailed(f"line {line}: {type(error).__name__}: {error}") from None


def run_program(space: dict[str, Any], order: dict[str, Any]) -> bytes:
    """Compile, call, and return the frame to send."""
    if not order["helper"]:
        prepare(space, order)
    exec(compile(order["source"], "program.py", "exec", dont_inherit=True), space)
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
    """Leave descriptors 0-3 as the program shall see them: its input or nothing, two logs, the result."""
    result, given = int(sys.argv[1]), int(sys.argv[2])
    source = given or os.open("/dev/null", os.O_RDONLY)
    os.dup2(source, 0)
    os.dup2(result, RESULT, inheritable=False)
    for descriptor in {source, result} - {0, RESULT}:
        os.close(descriptor)
    sys.argv[1:] = []


def report_exception(source: str) -> None:
    """Print the program's traceback without the frames of the sandbox and of the helper."""
    import linecache
    import traceback

    linecache.cache["program.py"] = (len(source), None, source.splitlines(True), "program.py")
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename in ("<string>", "inside.py"):
        trace = trace.tb_next
    report = traceback.TracebackException(kind, error, trace, compact=True)  # type: ignore[arg-type]  # called with one at hand
    parts = [report]
    for one in parts:  # grows while it is read
        one.stack[:] = [frame for frame in one.stack if frame.filename != "helper.py"]
        parts += [more for more in (one.__cause__, one.__context__) if more is not None]
    print("".join(report.format()), end="", file=sys.stderr)


def _exit_code(stop: SystemExit) -> int:
    """What the interpreter would exit with."""
    if stop.code is None or type(stop.code) is int:
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def become(binary: Binary) -> None:
    """Turn into a binary that reads our input and whose output is the result; never returns."""
    send(b"GX")
    os.dup2(RESULT, 1)
    try:
        binary.become()
    except OSError as error:
        os.write(2, str(error).encode())
    os._exit(SETUP_FAILED)


def close_and_prepare(order: dict[str, Any]) -> dict[str, Any]:
    """Everything up to the program's turn. Returns the program's namespace."""
    arrange_descriptors()
    try:
        binary = None
        if order["filter"]:
            binary = close_sandbox(order)
        else:
            set_limits(order["limits"])
        if binary:
            become(binary)
        space = make_module(order)
        if order["helper"]:
            run_helper(space, order)
        send(b"G")
    except (OSError, ValueError) as error:
        send(f"S{error}".encode("utf-8", "backslashreplace"))
    except HelperFailed as error:
        send(f"H{error}".encode("utf-8", "backslashreplace"))
    else:
        return space
    os._exit(SETUP_FAILED)


def main(order: dict[str, Any]) -> None:
    """Called by ``child.py``; never returns."""
    space = close_and_prepare(order)
    started = os.getpid()
    frame, code = b"", 0
    try:
        # Line by line, so that what a killed program printed is there to read.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # nobody has replaced it yet
        frame = run_program(space, order)
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
    if os.getpid() != started:
        os._exit(code & 0xFF)  # a child of the program that fell out of it: the answer is not its to give
    try:
        send(frame)
    except OSError:
        code = 1
    # No atexit, no __del__, no waiting for threads: the slot is free at once.
    os._exit(code & 0xFF)
