"""Running a program that nobody trusts. Source: spec sandbox 9.

Boundary: knows programs, limits and outcomes; knows no task, no store and no Temporal. ``types.py`` holds the words; a backend
is a class that implements :class:`Sandbox`; :func:`open_sandbox` chooses one and proves it.
"""

from activities.judge.sandbox.opening import AUTO, examine, open_sandbox
from activities.judge.sandbox.types import (
    Isolation,
    Limits,
    Outcome,
    Program,
    Sandbox,
    SandboxSettings,
    SandboxUnavailable,
    Status,
)

__all__ = [
    "AUTO",
    "Isolation",
    "Limits",
    "Outcome",
    "Program",
    "Sandbox",
    "SandboxSettings",
    "SandboxUnavailable",
    "Status",
    "examine",
    "open_sandbox",
]
