"""What can be wrong with a task. Knows no task; every message says which file, and what is allowed."""

from __future__ import annotations

import traceback
from pathlib import Path


class TaskError(Exception):
    """A task folder is missing or malformed; the message says which file and what is allowed."""


class EnvironmentMissing(TaskError):
    """The task's programs need a Python environment that is not built on this host; the message says how to build it."""


class JudgeFault(Exception):
    """A task's judge failed on an answer instead of grading it: a mistake of the judge, never a reward. Names file and line."""


def place_of(error: BaseException, folder: Path) -> str:
    """`tests/judge.py:12` for the innermost line in the folder where an error came from, else the innermost line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)]
    if isinstance(error, SyntaxError) and error.filename:
        path, line = Path(error.filename), error.lineno
    elif frames:
        path, line = Path((own or frames)[-1].filename), (own or frames)[-1].lineno
    else:
        return "an unknown place"
    return f"{path.relative_to(folder) if path.is_relative_to(folder) else path}:{line}"
