"""The Python environments that judged programs run in, apart from the worker's own: what a task asks for, and where it is built.

`environment/requirements.txt` of a task pins every package with `==`, dependencies included: the list is installed as it is and
nothing else, so that equal lists are equal environments. Tasks with equal lists share one. Knows no sandbox and no run.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tasks.errors import EnvironmentMissing, TaskError

PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
"""Version of the interpreter that runs this, and that every environment is made with."""
DEFAULT_DIRECTORY: Final = Path(sys.prefix) / "share" / "tttd" / "environments"

_PIN: Final = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?P<extras>\[[A-Za-z0-9,._ -]+\])?\s*==\s*(?P<version>[A-Za-z0-9.!+_-]+)"
    r"\s*(?:;(?P<marker>[^#]*?))?\s*(?P<hashes>(?:\s--hash=[a-z0-9]+:[0-9a-f]+)*)\s*"
)
_COMPLETE: Final = "complete"
"""File in an environment that is written last."""


@dataclass(frozen=True)
class Environment:
    """What the programs of a task may import."""

    pins: tuple[str, ...]
    """`name==version`, sorted, with names as package indices write them."""

    @property
    def science(self) -> str:
        """The part of a judge's identity: the same program may answer differently with other packages or another Python."""
        return "\n".join((f"python {PYTHON}", *self.pins))

    @property
    def digest(self) -> str:
        """sha256 over what would be installed on this platform."""
        return hashlib.sha256("\n".join((self.science, sysconfig.get_platform())).encode()).hexdigest()

    def place(self, directory: Path) -> Path:
        """Its folder below the directory of all environments."""
        return directory / self.digest[:16]

    def python(self, directory: Path) -> Path | None:
        """Its interpreter, or None if it is not built there."""
        place = self.place(directory)
        return place / "bin" / "python" if (place / _COMPLETE).is_file() else None


def parse(requirements: str, file: Path) -> Environment | None:
    """What a requirements.txt asks for; None if it asks for nothing.

    Raises:
        TaskError: a line is not pinned, or is pinned twice; names file and line.
    """
    pins: dict[str, str] = {}
    for number, line in _logical_lines(requirements):
        match = _PIN.fullmatch(line)
        if match is None:
            raise TaskError(
                f"{file}:{number}: {line!r} is not pinned; write name==version, dependencies too, since nothing else is installed"
            )
        name = re.sub(r"[-_.]+", "-", match["name"]).lower()
        marker = " ".join((match["marker"] or "").split())
        key = f"{name};{marker}"
        if key in pins:
            raise TaskError(f"{file}:{number}: {name} is pinned twice")
        hashes = "".join(f" {word}" for word in sorted(match["hashes"].split()))
        extras = (match["extras"] or "").replace(" ", "").lower()
        pins[key] = f"{name}{extras}=={match['version']}" + (f" ; {marker}" if marker else "") + hashes
    return Environment(tuple(sorted(pins.values()))) if pins else None


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Lines with their numbers, those that end with a backslash joined, comments and empty ones left out."""
    found, begun, begin = [], "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        begin = begin if begun else number
        begun = f"{begun} {line.removesuffix(chr(92)).strip()}".strip()
        if not line.endswith(chr(92)):
            if begun:
                found.append((begin, begun))
            begun = ""
    return [*found, (begin, begun)] if begun else found


def python_of(environment: Environment | None, directory: Path, build_command: str) -> Path | None:
    """The interpreter for a task's programs; None: the judge's own, since the task asks for no packages.

    Raises:
        EnvironmentMissing: it is not built on this host.
    """
    if environment is None:
        return None
    python = environment.python(directory)
    if python is None:
        raise EnvironmentMissing(
            f"the Python environment of the programs ({', '.join(environment.pins[:4])}{', ...' if environment.pins[4:] else ''}) "
            f"is not built on this host ({environment.place(directory)}): run `{build_command}`"
        )
    return python


def build(environment: Environment, directory: Path, pip_arguments: Sequence[str] = ()) -> Path:
    """Build an environment unless it is there; returns its interpreter. Safe to call from several processes at once.

    It is made where it will stay, since the scripts in it name their place; a marker that is written last says that it is whole.

    Raises:
        TaskError: an installation failed; ends with what pip said.
    """
    place = environment.place(directory)
    _make_public(directory)
    with (directory / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (python := environment.python(directory)) is not None:
            return python
        shutil.rmtree(place, ignore_errors=True)  # what a killed build left
        has_pip = importlib.util.find_spec("pip") is not None
        _run([sys.executable, "-m", "venv", *(["--without-pip"] if has_pip else []), str(place)], place)
        _install(environment, place, has_pip, pip_arguments)
        _write_public(place / _COMPLETE, environment.science)
    return place / "bin" / "python"


def _install(environment: Environment, place: Path, has_pip: bool, pip_arguments: Sequence[str]) -> None:
    """With this interpreter's pip where it has one: an environment without a pip of its own is smaller, and made sooner."""
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)] if has_pip else [str(python), "-m", "pip"]
    list_file = place / "requirements.txt"
    _write_public(list_file, "\n".join(environment.pins))
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--no-compile", "--no-input", "--disable-pip-version-check"]
    _run([*pip, "install", *options, *pip_arguments, "-r", str(list_file)], place)
    # Programs cannot write caches, so all is compiled now, but for the packages' own tests, which are half of it. A file that does
    # not compile (a template) is left as it is.
    compiled = [str(python), "-m", "compileall", "-q", "-j", "0", "-x", "/tests/", str(place / "lib")]
    subprocess.run(compiled, stdin=subprocess.DEVNULL, capture_output=True, umask=0o022, check=False)


def _make_public(directory: Path) -> None:
    """Make a directory, and those above it, that everyone may enter: whoever judges need not be whoever builds."""
    if directory.is_dir():
        return
    _make_public(directory.parent)
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)


def _write_public(file: Path, text: str) -> None:
    file.write_text(text + "\n", encoding="utf-8")
    file.chmod(0o644)


def _run(command: list[str], place: Path) -> None:
    """Readable by everyone, whatever the caller's umask: programs run under a user id of their own."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", umask=0o022)
    if done.returncode:
        shutil.rmtree(place, ignore_errors=True)
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-6:]
        raise TaskError(f"`{shlex.join(command)}` failed with exit code {done.returncode}:\n" + "\n".join(said))
