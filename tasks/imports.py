"""Which source files a Python file reaches: read from its import statements, without running anything.

Knows no task. Only modules of the packages asked for are followed; everything else is an installed package of some version.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tasks.errors import TaskError

ROOT = Path(__file__).resolve().parent.parent
"""Where the five packages lie: a checkout, or site-packages."""


def reached(files: Iterable[Path], packages: Sequence[str] = ("tasks",), root: Path = ROOT) -> frozenset[Path]:
    """The files themselves, and every module of `packages` that they import, directly or through others.

    Raises:
        TaskError: a file cannot be read, or is no Python; names file and line.
    """
    found: set[Path] = set()
    waiting = [file.resolve() for file in files]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        waiting += [path for name in imported_names(file, root) for path in _files_of(name, packages, root)]
    return frozenset(found)


def imported_names(file: Path, root: Path = ROOT) -> tuple[str, ...]:
    """Absolute names of what a file imports, wherever in it; for `from a import b` both `a` and `a.b`, since b may be a module."""
    try:
        source = file.read_bytes()
        return _names(file, source, root)
    except SyntaxError as error:
        raise TaskError(f"{file}:{error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise TaskError(f"{file} cannot be read: {error}") from None


@functools.lru_cache(1024)
def _names(file: Path, source: bytes, root: Path) -> tuple[str, ...]:
    """Parsing takes most of a judge digest's time, and every verdict compares one."""
    return tuple(dict.fromkeys(_found_names(ast.parse(source, filename=str(file)), file, root)))


def _found_names(tree: ast.AST, file: Path, root: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (base := _base(node, file, root)):
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _base(node: ast.ImportFrom, file: Path, root: Path) -> str:
    if node.level == 0:
        return node.module or ""
    if not file.is_relative_to(root):
        return ""  # relative to a task's own folder, all of whose files count anyway
    package = file.relative_to(root).parent.parts
    kept = package[: len(package) - (node.level - 1)]
    return ".".join((*kept, *((node.module,) if node.module else ())))


def _files_of(name: str, packages: Sequence[str], root: Path) -> Iterator[Path]:
    """A module's file and those of the packages around it."""
    parts = name.split(".")
    if parts[0] not in packages:
        return
    for length in range(1, len(parts) + 1):
        path = root.joinpath(*parts[:length])
        for candidate in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if candidate.is_file():
                yield candidate
