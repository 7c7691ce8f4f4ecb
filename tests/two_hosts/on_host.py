"""Runs one command on one of the hosts, and ends it with whoever started it: ``on_host.py [options] PARENT_PID COMMAND...``

A file of its own that needs nothing but Python, since it becomes the command: after `exec` nothing of it is left.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys

_CLONE_NEWNS = 0x0002_0000
CLONE_NEWNET = 0x4000_0000
_MS_PRIVATE_REC = (1 << 18) | (1 << 14)
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def new_network() -> None:
    """Give this process a network of its own, in which there is nothing yet. Call it before there are threads.

    Raises:
        OSError: the kernel does not permit it.
    """
    _checked(_libc.unshare(CLONE_NEWNET), "unshare(CLONE_NEWNET)")


def join_network(pid: int) -> None:
    """Move this process into another one's network.

    Raises:
        OSError: there is no such process, or the kernel does not permit it.
    """
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        _checked(_libc.setns(descriptor, CLONE_NEWNET), f"setns(network of {pid})")
    finally:
        os.close(descriptor)


def hide(directory: str) -> None:
    """Show this process and its children an empty folder in a directory's place: two hosts share no disk.

    Raises:
        OSError: the kernel does not permit it.
    """
    _checked(_libc.unshare(_CLONE_NEWNS), "unshare(CLONE_NEWNS)")
    _checked(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_PRIVATE_REC), None), "mount(private)")
    _checked(_libc.mount(b"none", directory.encode(), b"tmpfs", ctypes.c_ulong(0), b"size=64k"), f"mount(tmpfs on {directory})")


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent does: a network lives as long as somebody is in it."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it was gone before the kernel was asked
        sys.exit("on_host: the parent has ended")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-network", action="store_true", help="in a network of its own")
    parser.add_argument("--network-of", type=int, metavar="PID", help="in the network of this process")
    parser.add_argument("--hide", metavar="DIR", help="see an empty folder in its place")
    parser.add_argument("parent", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    end_with(asked.parent)
    if asked.new_network:
        new_network()
    if asked.network_of is not None:
        join_network(asked.network_of)
    if asked.hide is not None:
        hide(asked.hide)
    os.execvp(asked.command[0], asked.command)


if __name__ == "__main__":
    main()
