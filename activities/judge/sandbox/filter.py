"""Compiles the list of allowed system calls to a BPF program, once per process. Source: spec sandbox 5.2.

The list is data (``syscalls.toml``). libseccomp is needed here only: a program gets bytes and loads them with one system call.
"""

from __future__ import annotations

import errno
import os
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

LIST: Final = Path(__file__).with_name("syscalls.toml")

Placeholder = Literal["own_pid", "exec_path", "exec_arguments", "exec_variables"]

PLACEHOLDERS: Final[dict[Placeholder, tuple[int, int]]] = {
    "own_pid": (0x7ABCDEF1, 0x7ABCDEF2),
    "exec_path": (0x7ABCDEF3, 0x7ABCDEF4),
    "exec_arguments": (0x7ABCDEF5, 0x7ABCDEF6),
    "exec_variables": (0x7ABCDEF7, 0x7ABCDEF8),
}
"""(low, high) half of what stands in the compiled filter for a value that only the child knows; it replaces them before loading."""

Extra = Literal["write", "processes", "talk", "become"]
"""What a run may be allowed beyond the base list; see ``syscalls.toml``."""


class FilterUnavailable(Exception):
    """libseccomp is missing or refuses the list."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Condition(_Data):
    """(argument AND mask) == equals."""

    argument: Annotated[int, Field(ge=0, le=5)]
    mask: Annotated[int, Field(gt=0, lt=1 << 64)]
    equals: int | Placeholder


class ArgumentRule(_Data):
    """Calls that pass if all conditions of one alternative hold."""

    calls: list[str]
    why: str
    alternatives: list[list[Condition]]


class Absent(_Data):
    names: list[str]


class Addition(_Data):
    """An extra: its calls, and rules in place of the base ones."""

    allow: list[str]
    arguments: list[ArgumentRule] = []

    @property
    def names(self) -> set[str]:
        return {*self.allow, *(name for rule in self.arguments for name in rule.calls)}


class SyscallList(_Data):
    """``syscalls.toml``."""

    allow: dict[str, list[str]]
    absent: Absent
    arguments: list[ArgumentRule]
    extra: dict[Extra, Addition] = {}

    def with_extras(self, extras: Collection[Extra]) -> SyscallList:
        """The list of a run that is allowed more."""
        added = [self.extra[name] for name in sorted(extras)]
        replaced = {name for addition in added for name in addition.names}
        kept = [rule.model_copy(update={"calls": [c for c in rule.calls if c not in replaced]}) for rule in self.arguments]
        return SyscallList(
            allow={**self.allow, "extra": [name for addition in added for name in addition.allow]},
            absent=self.absent,
            arguments=[*kept, *(rule for addition in added for rule in addition.arguments)],
        )


def read_list(file: Path = LIST) -> SyscallList:
    return SyscallList.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))


def compile_filter(rules: SyscallList) -> bytes:
    """The BPF program for this machine's architecture, with placeholders still in it.

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
    value = condition.equals
    if isinstance(value, str):
        low, high = PLACEHOLDERS[value]
        value = (high << 32 | low) & condition.mask
    return seccomp.Arg(condition.argument, seccomp.MASKED_EQ, condition.mask, value)
