"""A binary that a child becomes in place of running a Python program: a compiled program, or the compiler that makes one.

Knows no language. Whoever compiles gives a backend an :class:`Execution` (``LocalSandbox.run_blocking(..., execution=...)``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Execution:
    """What to become once the sandbox is closed. ``Program.stdin`` is its input; what it prints is the outcome's result, raw.

    It is one process with threads that starts nothing, and reads nothing but its own file and what lies below `trees`: a tool on
    hostile text, such as a compiler, gets the system's files, and a `directory` that it may write.
    """

    path: Path
    """Absolute, a regular file. A static binary, unless `trees` hold its loader and libraries."""
    arguments: tuple[str, ...] = ()
    """After the path itself."""
    environment: Mapping[str, str] = field(default_factory=dict)
    trees: tuple[Path, ...] = ()
    """Directories whose files it may read. Its loader lies there too, so Landlock lets them be executed; the filter does not."""
    directory: Path | None = None
    """The one directory that it may write, and its working directory; the backend hands it over to the run's own uid. Files in it
    may have at most ``Limits.scratch_bytes``."""
