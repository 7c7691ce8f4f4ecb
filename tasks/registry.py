"""Finds a task's folder and reads it. A task is data: adding one never changes a file here.

Source: the house of ARCHITECTURE.md; Harbor schema 1.4 with our fields under ``[metadata.discovery]``.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.bundles import BundleCache
from tasks.environments import Environment, parse, python_of
from tasks.errors import TaskError as TaskError
from tasks.function_judge import FunctionJudge
from tasks.judge_loading import JudgeReference, judge_sources, load_judge
from tasks.judging import TaskJudge

BUILT_IN = Path(__file__).parent
REQUIREMENTS = "environment/requirements.txt"


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
    offer_construction: bool = False
    """Whether a run offers it unless the request says otherwise (`search.offer_construction`)."""
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
    def environment(self) -> Environment | None:
        """The packages that programs may import (`environment/requirements.txt`); None: what the judge's own interpreter has.

        Raises:
            TaskError: a line is not pinned; names it.
        """
        file = self.folder / REQUIREMENTS
        return parse(self._text(REQUIREMENTS, "requirements"), file) if file.is_file() else None

    def program_python(self, environments: Path) -> Path | None:
        """The interpreter that runs this task's programs; None: the sandbox's own.

        Raises:
            EnvironmentMissing: the task's environment is not built below `environments`; says which command builds it.
        """
        where = "" if self.is_built_in else f" --task-dir {self.folder.parent}"
        return python_of(self.environment, environments, f"tttd task build {self.name}{where}")

    @property
    def is_built_in(self) -> bool:
        """Every host of this version has it; any other task travels as a bundle."""
        return self.folder.resolve().parent == BUILT_IN.resolve()

    @property
    def judge_reference(self) -> JudgeReference:
        return JudgeReference(self.name, self.folder, self.judge)

    def _text(self, file: str, what: str) -> str:
        try:
            return (self.folder / file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TaskError(f"task {self.name}: {what} {file} cannot be read: {error}") from None

    def make_judge(self) -> TaskJudge:
        """The task's judge with its parameters; a function is made a judge (:mod:`tasks.function_judge`).

        Raises:
            TaskError: no such module, class or function, or it does not take these parameters.
        """
        found = load_judge(self.judge_reference)
        self._check_parameters(found)
        try:
            if isinstance(found, type):
                judge: TaskJudge = found(**self.judge_parameters)
                return judge
        except Exception as error:
            raise TaskError(f"task {self.name}: judge {self.judge} with {self.judge_parameters!r}: {error}") from error
        function = functools.partial(found, **self.judge_parameters)
        return FunctionJudge(function, self.direction, self.folder, self.limits.result_bytes)

    def check_judge(self) -> None:
        """Whether the judge can be loaded and takes its parameters, without making one.

        Raises:
            TaskError: it does not; says why.
        """
        self._check_parameters(load_judge(self.judge_reference))

    def _check_parameters(self, found: Callable[..., Any]) -> None:
        result = () if isinstance(found, type) else ("result",)
        try:
            inspect.signature(found).bind(*result, **self.judge_parameters)
        except (TypeError, ValueError) as error:
            raise TaskError(f"task {self.name}: judge {self.judge} with {self.judge_parameters!r}: {error}") from None


def task_folders(directories: Sequence[Path] = ()) -> Iterator[Path]:
    """Every task folder: the user's directories first, then the built-in ones. A directory may be a task folder itself."""
    for parent in (*(directory.resolve() for directory in directories), BUILT_IN):
        if (parent / "task.toml").is_file():
            yield parent
        elif parent.is_dir():
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


class BundledTask(Protocol):
    """What names the task of a run: its RunSpec."""

    @property
    def task(self) -> str: ...

    @property
    def bundle(self) -> str | None: ...


class TaskSource:
    """Where a process finds its tasks.

    Args:
        directories: the user's, with task folders.
        bundles: where the tasks of runs come from that lie on another host; None: this process takes no bundles.
    """

    def __init__(self, directories: Sequence[Path] = (), bundles: BundleCache | None = None) -> None:
        self._directories = tuple(directories)
        self._bundles = bundles
        self._tasks: dict[tuple[str, str | None], Task] = {}

    def load(self, name: str) -> Task:
        """Read a task by name, as its folder is now; see :func:`load_task`."""
        return load_task(name, self._directories)

    def of(self, run: BundledTask) -> Task:
        """The task of a run, the same on every host: from its bundle if it has one, else the built-in one. Read once.

        Raises:
            TaskError: the bundle is not what the run says, or there is no such task.
        """
        key = (run.task, run.bundle)
        if key not in self._tasks:
            self._tasks[key] = self.load(run.task) if run.bundle is None else read_task(self._unpacked(run.task, run.bundle))
        return self._tasks[key]

    def _unpacked(self, name: str, bundle: str) -> Path:
        if self._bundles is None:
            raise TaskError(f"task {name} comes as bundle {bundle[:12]}, and this process was given no place to unpack it")
        return self._bundles.folder(bundle, name)


def task_digest(task: Task) -> str:
    """sha256 over everything of the folder that can change what a run finds: statement, settings, starts, helper.

    The judge's code and the programs' environment have their own digest (:func:`judge_digest`).
    """
    files = {"task.toml", "instruction.md", *filter(None, [task.helper])}
    for start in task.starts.values():
        files |= {file for file in (start.program, (start.construction or "").partition(":")[0]) if file}
    texts = {file: task._text(file, "file") for file in files}
    return _digest_of_parts({name: text.encode() for name, text in texts.items()})


def judge_digest(task: Task) -> str:
    """sha256 over all that decides a score: two verdicts compare only under one digest.

    That is the judge's source files (:func:`tasks.judge_loading.judge_sources`) and parameters, and what programs run with.

    Raises:
        TaskError: a source file is missing or malformed, or the environment's list is.
    """
    parts = judge_sources(task.judge_reference)
    parts["parameters"] = repr(sorted(task.judge_parameters.items())).encode()
    if task.language == "python":
        environment = task.environment
        parts["environment"] = b"" if environment is None else environment.science.encode()
    return _digest_of_parts(parts)


def _digest_of_parts(parts: dict[str, bytes]) -> str:
    lines = (f"{name}\0{hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(parts.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
