"""What a replay reports: cases, each with its differences; and numbers as golden files write them. Knows no file format."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tests.golden.documented import WHERE_WE_DIFFER

RELATIVE = 1e-9
"""Of scores, priors and float64 advantages (spec algorithm 10)."""


class UnknownFormat(Exception):
    """A file that no replay recognises."""


@dataclass(frozen=True)
class Difference:
    """One place where we and the reference disagree."""

    where: str
    detail: str
    kind: str = ""
    """Key of the table of documented differences; empty for one that nobody has explained."""

    @property
    def documented(self) -> bool:
        return self.kind in WHERE_WE_DIFFER


@dataclass
class Case:
    """One golden case after its replay."""

    name: str
    checks: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Something was compared or explained, and nothing is unexplained."""
        return (self.checks > 0 or bool(self.differences)) and all(d.documented for d in self.differences)

    @property
    def kinds(self) -> set[str]:
        return {d.kind for d in self.differences}

    def differ(self, where: str, detail: str, kind: str = "") -> None:
        self.differences.append(Difference(where, detail, kind))

    def same(self, where: str, found: Any, expected: Any) -> bool:
        """Compare exactly."""
        self.checks += 1
        if found != expected:
            self.differ(where, f"found {found!r}, expected {expected!r}")
        return bool(found == expected)

    def near(self, where: str, found: float, expected: Any, *, relative: float = RELATIVE, absolute: float = 1e-15) -> bool:
        """Compare numbers within a relative tolerance, or an absolute one near zero."""
        self.checks += 1
        target = number(expected)
        close = found == target or math.isclose(found, target, rel_tol=relative, abs_tol=absolute)
        if not close:
            self.differ(where, f"found {found!r}, expected {target!r} within {relative:g} relative")
        return close


def number(value: Any) -> float:
    """A JSON number, or one of the words for what JSON cannot hold."""
    return float(value)


def summary_line(case: Case) -> list[str]:
    """One line for a case, and one for each reason or unexplained difference."""
    lines = [f"{'pass' if case.passed else 'FAIL'}  {case.name}: {case.checks} checks"]
    for kind in dict.fromkeys(d.kind for d in case.differences if d.documented):
        count = sum(d.kind == kind for d in case.differences)
        lines.append(f"        differs on purpose in {count} places ({kind}): {WHERE_WE_DIFFER[kind].reason}")
    lines += [f"        {d.where}: {d.detail}" for d in case.differences if not d.documented]
    if not case.checks and not case.differences:
        lines.append("        nothing was compared")
    return lines
