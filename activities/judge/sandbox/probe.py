"""The self-test's hostile program: tries everything that a program must not be able to do, and reports what was refused.

Runs inside the sandbox as a judged program, so it is sent as source and imports nothing of this project. Every answer is 1 if the
attempt was refused; what cannot be tried on this machine counts as refused. :data:`CHECKS` names the answers for the self-test.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CHECKS = (
    "read a file",
    "list a directory",
    "write a file",
    "truncate a file",
    "change a file's mode",
    "create a file",
    "see that a file exists",
    "connect over TCP",
    "connect to an abstract unix socket",
    "open a vsock",
    "signal the judge",
    "signal the judge through F_SETOWN",
    "read the judge's environment",
    "trace the judge",
    "read the judge's limits",
    "find secrets in its environment",
    "inherit descriptors",
    "fork",
    "execute a program",
    "use io_uring",
    "use bpf",
    "use keyctl",
    "use userfaultfd",
    "use perf events",
    "gain privileges by execution",
    "run without a filter",
    "take more memory than allowed",
    "set its own limits",
    "be root",
    "start threads without end",
    "make a namespace",
)


def refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, MemoryError, RuntimeError, ValueError):
        return True
    return False


class Attempts:
    """Attempts that take more than one expression."""

    def __init__(self, calls: dict[str, int | None]) -> None:
        import ctypes

        self.calls = calls
        self.ctypes = ctypes
        self.long = ctypes.c_long
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.syscall.restype = ctypes.c_long

    def call(self, name: str, *arguments: int) -> None:
        number = self.calls.get(name)
        if number is None or self.libc.syscall(number, *(self.long(a) for a in arguments)) < 0:
            raise OSError(name)

    def prctl(self, option: int) -> int:
        answer: int = self.libc.prctl(option, *(self.long(0) for _ in range(4)))
        return answer

    def open(self, path: str, flags: int) -> None:
        os.close(os.open(path, flags))

    def connect(self, family: int, address: tuple[str, int] | str) -> None:
        import socket

        with socket.socket(family) as s:
            s.settimeout(2)
            s.connect(address)

    def fork(self) -> None:
        if os.fork() == 0:
            os._exit(0)
        os.wait()

    def set_owner(self, judge: int) -> None:
        import fcntl

        fcntl.fcntl(0, fcntl.F_SETOWN, judge)

    def make_user_namespace(self) -> None:
        import time

        for _ in range(100):
            self.ctypes.set_errno(0)
            try:
                return self.call("unshare", 0x10000000)
            except OSError:
                if self.ctypes.get_errno() != 22:  # EINVAL: a thread of ours that was joined is still ending
                    raise
                time.sleep(0.01)
        raise OSError("unshare")

    def start_threads(self, count: int) -> None:
        import threading
        import time

        threading.stack_size(64 << 10)  # so that the number is what stops them, not their stacks
        started = []
        try:
            for _ in range(count):
                thread = threading.Thread(target=time.sleep, args=(0.1,), daemon=True)
                thread.start()
                started.append(thread)
        finally:
            for thread in started:
                thread.join()


def on_files(attempts: Attempts, canary: str, walled: bool) -> list[bool]:
    folder = os.path.dirname(canary)
    return [
        refused(lambda: attempts.open(canary, os.O_RDONLY)),
        refused(lambda: os.listdir(folder)),
        refused(lambda: attempts.open(canary, os.O_WRONLY)),
        refused(lambda: os.truncate(canary, 0)) and refused(lambda: attempts.open(canary, os.O_RDONLY | os.O_TRUNC)),
        refused(lambda: os.chmod(canary, 0o777)),
        refused(lambda: attempts.open(folder + "/new", os.O_WRONLY | os.O_CREAT)),
        not walled or refused(lambda: os.stat(canary)),
    ]


def on_network(attempts: Attempts, port: int, name: str) -> list[bool]:
    import socket

    return [
        refused(lambda: attempts.connect(socket.AF_INET, ("127.0.0.1", port))),
        refused(lambda: attempts.connect(socket.AF_UNIX, "\0" + name)),
        refused(lambda: socket.socket(40, socket.SOCK_STREAM).close()),
    ]


def on_the_judge(attempts: Attempts, judge: int) -> list[bool]:
    import resource

    return [
        refused(lambda: os.kill(judge, 0)),
        refused(lambda: attempts.set_owner(judge)),
        refused(lambda: attempts.open(f"/proc/{judge}/environ", os.O_RDONLY)),
        refused(lambda: attempts.call("ptrace", 16902, judge, 0, 0)),
        refused(lambda: resource.prlimit(judge, resource.RLIMIT_NOFILE)),
        "CANARY" not in str(os.environ),
        all(refused(lambda f=f: os.fstat(f)) for f in range(4, 256)),  # type: ignore[misc]
    ]


def on_the_kernel(attempts: Attempts, several: bool) -> list[bool]:
    if several:
        attempts.fork()  # where processes are allowed, they must work
    return [
        several or refused(attempts.fork),
        several or refused(lambda: os.execv("/bin/true", ["/bin/true"])),
        refused(lambda: attempts.call("io_uring_setup", 4, 0)),
        refused(lambda: attempts.call("bpf", 0, 0, 0)),
        refused(lambda: attempts.call("keyctl", 0, -3, 0)),
        refused(lambda: attempts.call("userfaultfd", 1)),
        refused(lambda: attempts.call("perf_event_open", 0, 0, -1, -1, 0)),
        attempts.prctl(39) == 1,  # PR_GET_NO_NEW_PRIVS
        attempts.prctl(21) != 0,  # PR_GET_SECCOMP: 2, or refused by the filter itself
    ]


def on_limits(attempts: Attempts, memory_bytes: int, threads: int) -> list[bool]:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        refused(lambda: bytearray(memory_bytes)),
        refused(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)),
        os.getuid() != 0 and os.geteuid() != 0,
        refused(lambda: attempts.start_threads(threads)),
        # Last and alone: only a single thread can make a user namespace, and in it may lose the right to read its libraries.
        refused(attempts.make_user_namespace),
    ]


def run(
    canary: str,
    port: int,
    name: str,
    judge: int,
    memory_bytes: int,
    threads: int,
    calls: dict[str, int | None],
    walled: bool,
    several: bool,
) -> list[int]:
    import json  # noqa: F401  what carries the answers out must be loaded before the last attempt

    attempts = Attempts(calls)
    answers = [
        *on_files(attempts, canary, walled),
        *on_network(attempts, port, name),
        *on_the_judge(attempts, judge),
        *on_the_kernel(attempts, several),
        *on_limits(attempts, memory_bytes, threads),
    ]
    return [int(answer) for answer in answers]
