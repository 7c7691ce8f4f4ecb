"""From the words of a task.toml to a judge: `module:Name` of an installed module, or `tests/judge.py:Name` in the task's folder.

Knows no task; gets its folder and what is written there. A file of a folder is loaded by path under a module name that no other
folder shares, so that two tasks may both have a `tests/judge.py`. The files beside it are its siblings: `from .other import x`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tasks.errors import TaskError, place_of
from tasks.imports import ROOT, reached

_HARBOR_FILES = frozenset({"Dockerfile", "test.sh"})
"""Beside a judge, but no part of it."""

_SHARED = (ROOT / "tasks" / "judging.py", ROOT / "tasks" / "judges" / "wire.py", ROOT / "tasks" / "function_judge.py")
"""What every answer passes through, whether or not the judge imports it."""

_loading = threading.Lock()


@dataclass(frozen=True)
class JudgeReference:
    """Where a judge is."""

    task: str
    folder: Path
    text: str
    """As the task.toml has it."""

    @property
    def target(self) -> str:
        return self.text.partition(":")[0]

    @property
    def name(self) -> str:
        return self.text.partition(":")[2]

    @property
    def file(self) -> Path | None:
        """The judge's file, if it lies in the task's folder; None for an installed module."""
        return self.folder / self.target if self.target.endswith(".py") else None

    def fail(self, why: str) -> TaskError:
        return TaskError(f"task {self.task}: judge {self.text}: {why}")


def load_judge(reference: JudgeReference) -> Callable[..., Any]:
    """The class or function that a task names.

    Raises:
        TaskError: there is none, or its module cannot be imported; says why, with file and line where it is the judge's own.
    """
    if not (reference.target and reference.name):
        raise reference.fail("write module:Class, or file.py:name with a file of the task's folder")
    module = _module(reference)
    found = getattr(module, reference.name, None)
    if not callable(found):
        names = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise reference.fail(f"{reference.target} defines no {reference.name}; it has {', '.join(names) or 'nothing to call'}")
    return found  # type: ignore[no-any-return]


def judge_sources(reference: JudgeReference) -> dict[str, bytes]:
    """Everything that decides a score, by name: the judge's file, what lies beside it in the folder, and the modules of `tasks`
    that either imports. Installed packages are not among them: pin what a judge imports from elsewhere.

    Raises:
        TaskError: a file is missing or is no Python; names file and line.
    """
    file = reference.file
    own = {_module_file(reference)} if file is None else _beside(reference, file)
    python = {path for path in own if path.suffix == ".py"}
    around = reached({*python, *_SHARED}) - {path.resolve() for path in own}
    sources = {f"judge/{_relative(path, reference)}": path for path in own}
    sources |= {path.relative_to(ROOT).as_posix(): path for path in around}
    return {name: path.read_bytes() for name, path in sources.items()}


def _beside(reference: JudgeReference, file: Path) -> set[Path]:
    if not file.is_file():
        raise reference.fail(f"there is no file {file}")
    if file.parent.resolve() == reference.folder.resolve():
        return set(file.parent.glob("*.py"))  # beside task.toml lie the statement, the starts and more that are no part of it
    within = (p for p in file.parent.rglob("*") if p.is_file() and p.suffix != ".pyc")
    hidden = (p for p in within if not any(part.startswith((".", "__pycache__")) for part in p.relative_to(file.parent).parts))
    return {path for path in hidden if path.relative_to(file.parent).as_posix() not in _HARBOR_FILES}


def _relative(path: Path, reference: JudgeReference) -> str:
    return path.relative_to(reference.folder).as_posix() if path.is_relative_to(reference.folder) else path.name


def _module_file(reference: JudgeReference) -> Path:
    try:
        spec = importlib.util.find_spec(reference.target)
    except (ImportError, ValueError) as error:
        raise reference.fail(f"module {reference.target} cannot be imported: {error}") from None
    if spec is None or spec.origin is None:
        raise reference.fail(f"module {reference.target} cannot be imported: there is none of that name")
    return Path(spec.origin)


def _module(reference: JudgeReference) -> ModuleType:
    try:
        return importlib.import_module(reference.target) if reference.file is None else _by_path(reference, reference.file)
    except TaskError:
        raise
    except Exception as error:
        raise reference.fail(f"cannot be imported: {_import_problem(reference, error)}") from error


def _import_problem(reference: JudgeReference, error: Exception) -> str:
    where = place_of(error, reference.folder)
    hint = ""
    if isinstance(error, ModuleNotFoundError) and reference.file is not None and error.name:
        sibling = reference.file.with_name(f"{error.name}.py")
        hint = f"; for the file beside it write `from . import {error.name}`" if sibling.is_file() else ""
    return f"{where}: {type(error).__name__}: {error}{hint}"


def _by_path(reference: JudgeReference, file: Path) -> ModuleType:
    """Load a file as a module of a package that stands for its directory, once per process and path."""
    if not file.is_file():
        raise reference.fail(f"there is no file {file}")
    directory = file.parent.resolve()
    package = f"tttd_judge_{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}"
    name = f"{package}.{file.stem}"
    with _loading:
        if name in sys.modules:
            return sys.modules[name]
        if package not in sys.modules:
            around = ModuleType(package)
            around.__path__ = [str(directory)]
            sys.modules[package] = around
        spec = importlib.util.spec_from_file_location(name, file.resolve())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:  # a half-made module must not be found by the next attempt
            del sys.modules[name]
            raise
    return module
