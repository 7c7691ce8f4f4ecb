"""The constructions that open an archive: read from a file of the task's folder, or made by a function of it, one a root.

What comes out is what a program of the task would return, and the judge certifies it like any other answer. Knows no run and no
store. Source: spec tasks 3e, 6e and 7e, where searches begin from constructions without a program of their own.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from typing import Any

from tasks.errors import TaskError
from tasks.judging import Grade, TaskJudge
from tasks.registry import Start, Task


def verdicts_needed(start: Start, roots: int) -> int:
    """How many verdicts a start takes before its roots have values: none, one that all share, or one for each root."""
    if start.construction is None:
        return 0 if start.program is None else 1
    return roots if _is_made(start.construction) else 1


def root_answer(task: Task, name: str, run_seed: int, root: int) -> Any:
    """The construction of one root, as plain JSON data. The same (run seed, root) gives the same one everywhere.

    Raises:
        TaskError: the file cannot be read or run; names it.
    """
    construction = task.starts[name].construction
    if construction is None:
        raise TaskError(f"task {task.name}: start {name!r} has no construction")
    if not _is_made(construction):
        return _read(task, name, construction)
    make = _function(task, name, construction)
    try:
        answer = make(random.Random(f"{run_seed}/{root}"), root)
        json.dumps(answer, allow_nan=False)
    except Exception as error:
        raise TaskError(
            f"task {task.name}: start {name!r}: {construction}(rng, {root}) raised {type(error).__name__}: {error}; "
            "it must return numbers in lists, as a program does"
        ) from error
    return answer


def grade_answer(judge: TaskJudge, answer: Any) -> Grade:
    """Certify an answer that no program just returned.

    Args:
        answer: numbers in lists are what a program returns, and are repaired as such; an object is a stored construction.
    """
    if isinstance(answer, dict) or not hasattr(judge, "grade"):  # a judge of programs that print grades no returned values
        return judge.verify(answer)
    return judge.grade(json.dumps(answer).encode())


def _is_made(construction: str) -> bool:
    return ":" in construction


def _read(task: Task, name: str, file: str) -> Any:
    try:
        return json.loads((task.folder / file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"task {task.name}: construction {file} of start {name!r} cannot be read: {error}") from None


def _function(task: Task, name: str, construction: str) -> Callable[[random.Random, int], Any]:
    file, _, function = construction.partition(":")
    spec = importlib.util.spec_from_file_location(f"tttd_start_{task.name}", task.folder / file)
    if spec is None or spec.loader is None:
        raise TaskError(f"task {task.name}: start {name!r}: {file} is no Python file; write file.py:function, or a JSON file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made: Callable[[random.Random, int], Any] = getattr(module, function)
    except Exception as error:
        raise TaskError(f"task {task.name}: start {name!r}: {construction}: {type(error).__name__}: {error}") from error
    return made
