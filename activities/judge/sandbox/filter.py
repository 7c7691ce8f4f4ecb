"""Compiles the list of allowed system calls to a BPF program, once per process. Source: spec sandbox 5.2.

The list is data (``syscalls.toml``). libseccomp is needed here only: a program gets bytes and loads them with one system call.
"""

from __future__ import annotations

import errno
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

LIST: Final = Path(__file__).with_name("syscalls.toml")

OWN_PID: Final = 0x7ABCDEF1
"""Stands for the program's process id in the compiled filter; the child replaces it by its own before loading."""

INSTRUCTION_BYTES: Final = 8


class FilterUnavailable(Exception):
    """libseccomp is missing or refuses the list."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Condition(_Data):
    """(argument AND mask) == equals."""

    argument: Annotated[int, Field(ge=0, le=5)]
    mask: Annotated[int, Field(gt=0, lt=1 << 64)]
    equals: int | Literal["own_pid"]


class ArgumentRule(_Data):
    """Calls that pass if all conditions of one alternative hold."""

    calls: list[str]
    why: str
    alternatives: list[list[Condition]]


class Absent(_Data):
    names: list[str]


class SyscallList(_Data):
    """``syscalls.toml``."""

    allow: dict[str, list[str]]
    absent: Absent
    arguments: list[ArgumentRule]


def read_list(file: Path = LIST) -> SyscallList:
    return SyscallList.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))


def compile_filter(rules: SyscallList) -> bytes:
    """The BPF program for this machine's architecture, with OWN_PID still in it.

    Raises:
        FilterUnavailable: no libseccomp, or it refuses a rule; says which.
    """
    seccomp = _library()
    try:
        program = seccomp.SyscallFilter(defaction=seccomp.ERRNO(errno.EPERM))
        # int 0x80 and x32 calls have other numbers: without this they would pass by theirs.
        program.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.KILL_PROCESS)
        _add_rules(seccomp, program, rules)
        with open(os.memfd_create("filter"), "w+b") as file:  # libseccomp writes to a descriptor only
            program.export_bpf(file)
            file.seek(0)
            return file.read()
    except OSError as error:
        raise FilterUnavailable(f"libseccomp refuses {LIST.name}: {error}") from None


def number_of(name: str) -> int | None:
    """This architecture's number of a system call, or None if it has none."""
    seccomp = _library()
    number: int = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
    return number if number >= 0 else None


def _library() -> Any:
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise FilterUnavailable(f"pyseccomp cannot load libseccomp: {error}") from None
    return pyseccomp


def _add_rules(seccomp: Any, program: Any, rules: SyscallList) -> None:
    for name in (name for group in rules.allow.values() for name in group):
        if number_of(name) is not None:
            program.add_rule(seccomp.ALLOW, name)
    for name in rules.absent.names:
        if number_of(name) is not None:
            program.add_rule(seccomp.ERRNO(errno.ENOSYS), name)
    for rule in rules.arguments:
        for name in rule.calls:
            if number_of(name) is not None:
                for alternative in rule.alternatives:
                    program.add_rule(seccomp.ALLOW, name, *(_condition(seccomp, c) for c in alternative))


def _condition(seccomp: Any, condition: Condition) -> Any:
    value = OWN_PID if condition.equals == "own_pid" else condition.equals
    return seccomp.Arg(condition.argument, seccomp.MASKED_EQ, condition.mask, value)
