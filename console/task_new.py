"""Makes task folders: a new one from the template, and one that Harbor can run by itself. Knows no terminal."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

from tasks.bundles import pack, unpack
from tasks.errors import TaskError
from tasks.imports import ROOT
from tasks.judge_loading import judge_sources
from tasks.registry import Task, read_task

TEMPLATE: Final = ROOT / "tasks" / "_template"
_PLACEHOLDER: Final = "new-task"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")

VENDORED: Final = ("workflows", "activities/*", "activities/judge", "tasks/*", "tasks/judges")
"""What judging one program needs of us; `x/*` without the folders below."""

JUDGE_PACKAGES: Final = (
    "annotated-types",
    "cffi",
    "msgspec",
    "numpy",
    "pycparser",
    "pydantic",
    "pydantic-core",
    "pyseccomp",
    "typing-extensions",
    "typing-inspection",
)
"""What the vendored part imports from elsewhere."""


def new_task(name: str, directory: Path) -> Task:
    """A copy of the template as DIRECTORY/NAME: a small problem that works at once, for its author to change.

    Raises:
        TaskError: the name is none for a task, or the folder exists.
    """
    if not _NAME.fullmatch(name):
        raise TaskError(f"task name {name!r}: use letters, digits, - and _, beginning with a letter or digit")
    folder = directory / name
    if folder.exists():
        raise TaskError(f"{folder} exists; choose another name or --dir")
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for file in (file for file in folder.rglob("*") if file.is_file()):
        text = file.read_text(encoding="utf-8")
        file.chmod(0o755 if file.suffix == ".sh" else 0o644)  # a wheel's installation drops it
        file.write_text(text.replace(f"local/{_PLACEHOLDER}", f"local/{_slug(name)}").replace(_PLACEHOLDER, name), encoding="utf-8")
    return read_task(folder.resolve())


def _slug(name: str) -> str:
    """A task's name as Harbor writes names."""
    return name.lower().replace("_", "-")


def export_for_harbor(task: Task, directory: Path) -> Path:
    """A copy of a task as DIRECTORY/NAME that Harbor can build and verify by itself: tests/ gets the task and the judge's code.

    Raises:
        TaskError: the folder exists, or the task cannot be bundled.
    """
    target = directory / task.folder.name
    if target.exists():
        raise TaskError(f"{target} exists; choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".export-") as made:
        bundle, folder = pack(task.folder), Path(made) / task.folder.name
        unpack(bundle, task.folder.name, Path(made))
        (folder / "tests" / "task").mkdir(parents=True)
        unpack(bundle, task.folder.name, folder / "tests" / "task")
        _vendor(task, folder / "tests" / "tttd")
        folder.rename(target)
    return target


def _vendor(task: Task, target: Path) -> None:
    for pattern in VENDORED:
        for path in sorted((ROOT / pattern.removesuffix("/*")).glob("*" if pattern.endswith("/*") else "**/*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                _copy(path, target)
    for name in judge_sources(task.judge_reference):
        if (path := ROOT / name).is_file():
            _copy(path, target)
    pins = (f"{package}=={importlib.metadata.version(package)}" for package in JUDGE_PACKAGES)
    (target / "requirements.txt").write_text("\n".join(pins) + "\n", encoding="utf-8")


def _copy(path: Path, target: Path) -> None:
    copy = target / path.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, copy)
