"""The C++ compiler of this machine, taken apart: preprocessor and compiler, assembler, linker, each a command of its own.

The driver `g++` starts these three one after another. Asked what it would start (`-###`), it need not run at all: each tool then is
one process that starts no other, which the sandbox bounds and kills like any program. Only trusted text is compiled here: none.

Knows no sandbox.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

SOURCE: Final = "program.cpp"
BINARY: Final = "program"
"""File names in the working directory of the tools."""

FLAGS: Final = ("-O2", "-std=gnu++17", "-pthread")
_QUIET: Final = ("-fmax-errors=10", "-fdiagnostics-color=never")
_WHOLE_THREADS: Final = ("-Wl,--whole-archive", "-lpthread", "-Wl,--no-whole-archive")
"""Before glibc 2.34 a static program otherwise finds half of the thread library, and crashes in std::thread."""

_PLACES: Final = (Path("/usr/bin/g++"), Path("/usr/local/bin/g++"))
"""PATH is not asked: the tools, their headers and libraries must lie below /usr, which is all that they may read."""
_ENVIRONMENT: Final = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
_SECONDS: Final = 60

INSTALL_HINT: Final = "install the distribution's g++ with its static library (Debian, Ubuntu: apt-get install g++)"


class CompilerMissing(Exception):
    """There is no usable compiler; the message says what is missing and what to install."""


@dataclass(frozen=True)
class Step:
    """One tool, called in a directory that holds :data:`SOURCE` at first and :data:`BINARY` at last."""

    tool: Path
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Toolchain:
    version: str
    """First line of `g++ --version`."""
    steps: tuple[Step, ...]
    static: bool
    """The binary needs no library to run."""

    def digest(self, source: str) -> str:
        """sha256 over all that decides the binary."""
        commands = "\0".join(" ".join([str(step.tool), *step.arguments]) for step in self.steps)
        text = f"{self.version}\0{commands}\0{source}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def installed() -> Path | None:
    """The driver, if there is one; costs nothing."""
    return next((place for place in _PLACES if os.access(place, os.X_OK)), None)


@cache
def find_toolchain() -> Toolchain:
    """Ask the compiler how it works; a tenth of a second, once.

    Raises:
        CompilerMissing: there is none, or it is not taken apart; says what to do.
    """
    driver = installed()
    if driver is None:
        raise CompilerMissing(f"no C++ compiler: {' and '.join(map(str, _PLACES))} do not exist; {INSTALL_HINT}")
    static = all(_library(driver, name) for name in ("libstdc++.a", "libc.a"))
    linking = ("-static", *_WHOLE_THREADS) if static else ()
    try:
        steps = (
            _step(driver, [*FLAGS, *_QUIET, "-S", SOURCE, "-o", "program.s"]),
            _step(driver, ["-c", "program.s", "-o", "program.o"]),
            _step(driver, [*FLAGS, "-fno-use-linker-plugin", "program.o", *linking, "-o", BINARY]),
        )
        version = _ask(driver, ["--version"]).stdout.partition("\n")[0]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise CompilerMissing(f"the C++ compiler {driver} is not understood: {error}; {INSTALL_HINT}") from None
    return Toolchain(version, steps, static)


def _step(driver: Path, arguments: Sequence[str]) -> Step:
    """The one command that the driver would start."""
    told = _ask(driver, ["-###", *arguments]).stderr
    commands = [shlex.split(line) for line in told.splitlines() if line.startswith(" ")]
    if len(commands) != 1:
        raise ValueError(f"`g++ -### {' '.join(arguments)}` names {len(commands)} commands in place of one")
    name, *rest = commands[0]
    if Path(name).name == "collect2":  # a wrapper of the linker, for constructors of other systems and for -flto
        name = "ld"
    return Step(_tool(driver, name), tuple(rest))


def _tool(driver: Path, name: str) -> Path:
    """A tool's own file; the driver knows where a bare name is."""
    path = Path(name if "/" in name else _ask(driver, [f"-print-prog-name={name}"]).stdout.strip())
    tool = (path if path.is_absolute() else Path("/usr/bin") / path).resolve()
    if not os.access(tool, os.X_OK) or not tool.is_relative_to("/usr"):
        raise ValueError(f"its {name} is {tool}, which is no program below /usr")
    return tool


def _library(driver: Path, name: str) -> bool:
    found = _ask(driver, [f"-print-file-name={name}"]).stdout.strip()
    return found.startswith("/") and Path(found).is_file()


def _ask(driver: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(driver), *arguments], env=_ENVIRONMENT, cwd="/", capture_output=True, text=True, check=True, timeout=_SECONDS
    )
