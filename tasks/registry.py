"""Finds a task's folder and reads it. A task is data: adding one never changes a file here.

Source: the house of ARCHITECTURE.md; Harbor schema 1.4 with our fields under ``[metadata.discovery]``.
"""

from __future__ import annotations

import hashlib
import importlib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.judging import TaskJudge

BUILT_IN = Path(__file__).parent
REQUIREMENTS = "environment/requirements.txt"


class TaskError(Exception):
    """A task folder is missing or malformed; the message says which file and what is allowed."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TaskLimits(_Data):
    """What one program of this task may use, unless the run request says otherwise."""

    wall_seconds: float = Field(gt=0)
    """Told to the program; it is killed a little later."""
    cores: int = Field(default=1, ge=1)
    processes: int = Field(default=1, ge=1, le=256)
    """Above 1 the task needs a sandbox that can bound several processes (`bwrap`)."""
    memory_bytes: int = Field(default=4 << 30, ge=64 << 20)
    result_bytes: int = Field(default=16 << 20, ge=1)


class Start(_Data):
    """One state that may open the archive."""

    program: str | None = None
    """File in the task's folder; None: no program yet."""
    construction: str | None = None
    """A construction that the judge certifies when the run opens: a JSON file of the folder, or `file.py:function`, called as
    `function(rng, index)` with a `random.Random` seeded from the run's seed and the root's number. Beside a program, the state
    has the construction's value and the program's code."""
    value: float = 0.0
    """Value of a start with neither (higher is better); anything else is judged when the run opens."""
    description: str = ""


class Task(_Data):
    """``[metadata.discovery]`` of a task folder, with its texts read in."""

    name: str
    folder: Path
    instruction: str
    judge: str
    """``module:Class`` of a judge (:mod:`tasks.judging`), or ``file.py:name`` in the task's folder: such a class, or a function
    from a returned value to a score."""
    judge_parameters: dict[str, Any] = {}
    language: Literal["python", "cpp17"] = "python"
    entry: str
    """The function that a program must define (C++: `main`)."""
    helper: str | None = None
    """A Python file of the folder that runs in the program's namespace before it, so that it can score itself. Only a copy: the
    judge never reads what it computes."""
    baseline: str | None = None
    """A program file of the folder: the simple solver that any claim is measured against (`tttd baseline`, `tttd polish`)."""
    direction: Literal["maximize", "minimize"]
    score_name: str
    best_known: float | None = None
    """For plots and reports only; never in a reward."""
    construction_name: str = "parent_construction"
    """Global under which a child program gets its parent's construction, if the run offers it."""
    default_start: str
    limits: TaskLimits
    starts: dict[str, Start]

    @property
    def sign(self) -> int:
        """value = sign x score, so that a higher value is always better."""
        return 1 if self.direction == "maximize" else -1

    def start_name(self, start: str) -> str:
        """The start that a request means.

        Raises:
            TaskError: the task has no such start; names those it has.
        """
        key = self.default_start if start == "default" else start
        if key not in self.starts:
            raise TaskError(f"task {self.name} has no start {key!r}; it has: default, {', '.join(sorted(self.starts))}")
        return key

    def start_program(self, start: str) -> str:
        """Source of a seed program, or "" for a start without one."""
        file = self.starts[self.start_name(start)].program
        return "" if file is None else self._text(file, f"program of start {start!r}")

    @property
    def helper_source(self) -> str:
        """Source of the self-scoring helper, or ""."""
        return "" if self.helper is None else self._text(self.helper, "helper")

    @property
    def baseline_source(self) -> str | None:
        """Source of the baseline program, if the task has one."""
        return None if self.baseline is None else self._text(self.baseline, "baseline")

    @property
    def requirements(self) -> str:
        """Pinned packages that programs may import (`environment/requirements.txt`), or "": the judge's own interpreter is used."""
        return self._text(REQUIREMENTS, "requirements") if (self.folder / REQUIREMENTS).is_file() else ""

    def _text(self, file: str, what: str) -> str:
        try:
            return (self.folder / file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TaskError(f"task {self.name}: {what} {file} cannot be read: {error}") from None

    def make_judge(self) -> TaskJudge:
        """The task's judge with its parameters.

        Raises:
            TaskError: no such module or class, or it does not take these parameters.
        """
        try:
            judge: TaskJudge = getattr(judge_module(self), self.judge.partition(":")[2])(**self.judge_parameters)
        except (AttributeError, TypeError, ValueError) as error:
            raise TaskError(f"task {self.name}: judge {self.judge} with {self.judge_parameters!r}: {error}") from None
        return judge


def task_folders(directories: Sequence[Path] = ()) -> Iterator[Path]:
    """Every task folder: the user's directories first, then the built-in ones."""
    for parent in (*directories, BUILT_IN):
        if parent.is_dir():
            yield from sorted(p.parent for p in parent.glob("*/task.toml") if not p.parent.name.startswith("_"))


def load_task(name: str, directories: Sequence[Path] = ()) -> Task:
    """Read a task by name.

    Raises:
        TaskError: no folder of that name, or its task.toml does not fit; lists what exists or what is wrong.
    """
    folders = {f.name: f for f in reversed(list(task_folders(directories)))}
    if name not in folders:
        raise TaskError(f"no task {name!r}; there are: {', '.join(sorted(folders)) or 'none'}")
    return read_task(folders[name])


def read_task(folder: Path) -> Task:
    """Read one task folder.

    Raises:
        TaskError: a file is missing or is no text, the section is, or a field does not fit; names the file.
    """
    file = folder / "task.toml"
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
        metadata = data.get("metadata")
        discovery = metadata.get("discovery") if isinstance(metadata, dict) else None
        if not isinstance(discovery, dict):
            raise TaskError(f"{file}: no [metadata.discovery] section; compare tasks/circle_packing_26/task.toml")
        if own := discovery.keys() & {"name", "folder", "instruction"}:
            raise TaskError(f"{file}: {', '.join(sorted(own))} is taken from the folder; leave it out of [metadata.discovery]")
        task = Task(name=folder.name, folder=folder, instruction=instruction, **discovery)
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}, got {item['input']!r:.80}" for item in error.errors())
        raise TaskError(f"{file}: [metadata.discovery] {'; '.join(wrong)}") from None
    except (OSError, ValueError) as error:  # no such file, no UTF-8, or no TOML
        raise TaskError(f"{file}: {error}") from None
    task.start_name("default")
    return task


class TaskSource:
    """Where a process finds its tasks; reads each folder once."""

    def __init__(self, directories: Sequence[Path] = ()) -> None:
        self._directories = tuple(directories)
        self._tasks: dict[str, Task] = {}

    def load(self, name: str) -> Task:
        """Read a task by name; see :func:`load_task`."""
        if name not in self._tasks:
            self._tasks[name] = load_task(name, self._directories)
        return self._tasks[name]


def task_digest(task: Task) -> str:
    """sha256 over everything of the folder that can change what a run finds: statement, settings, seed programs.

    The judge's code has its own digest (:func:`judge_digest`).
    """
    starts = {f"start {name}": task.start_program(name) for name in task.starts}
    texts = {name: (task.folder / name).read_text(encoding="utf-8") for name in ("task.toml", "instruction.md")} | starts
    lines = (f"{name}\0{hashlib.sha256(text.encode()).hexdigest()}\n" for name, text in sorted(texts.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def judge_module(task: Task) -> ModuleType:
    """The module of the task's judge.

    Raises:
        TaskError: it cannot be imported; says why.
    """
    module, colon, name = task.judge.partition(":")
    if not (module and colon and name):
        raise TaskError(f"task {task.name}: judge {task.judge!r} must be written module:Class")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TaskError(f"task {task.name}: judge module {module} cannot be imported: {error}") from None


def judge_digest(task: Task) -> str:
    """sha256 over the judge's module and its parameters: two verdicts compare only under one digest."""
    module = judge_module(task)
    if module.__file__ is None:
        raise TaskError(f"task {task.name}: judge module {task.judge} has no file")
    source = Path(module.__file__).read_bytes()
    shared = (BUILT_IN / "judging.py").read_bytes() + (BUILT_IN / "judges" / "wire.py").read_bytes()
    return hashlib.sha256(b"\0".join([source, shared, repr(sorted(task.judge_parameters.items())).encode()])).hexdigest()
