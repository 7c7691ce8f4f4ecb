"""The judge of a problem that costs nothing to judge: the number after the program's last `return`. Nothing is run."""

from __future__ import annotations

import math
import threading
from fractions import Fraction
from typing import Any

from tasks.judging import Grade


class ReadsTheText:
    """A `ServiceJudge`: it gets the program's text itself, so that the worker enters no sandbox."""

    service = "none"

    def at(self, url: str | None) -> ReadsTheText:
        return self

    def submit(self, source: str, stop: threading.Event | None = None) -> Grade:
        return _grade(source.rpartition("return ")[2].strip())

    def verify(self, construction: Any) -> Grade:
        return _grade(str(construction))


def _grade(text: str) -> Grade:
    try:
        number = float(text)
    except ValueError:
        return Grade(valid=False, reason=f"no number after the last return: {text[:40]!r}")
    if not math.isfinite(number) or number < 0:
        return Grade(valid=False, reason=f"{number} is no score; finite numbers from 0 on are")
    return Grade(valid=True, reason="", exact=Fraction(number), score=number, construction=number)
