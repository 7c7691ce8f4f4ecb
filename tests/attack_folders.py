"""Folders of programs and what is expected of each, per backend. Used by ``tests/attacks.py``.

A manifest.json says what is expected; for a folder of somebody else, whose manifest knows no backends, stands what is known of all
programs of that name or kind.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PARTS = ("programs", "legit", "cpp")
"""Of a parent folder; its outputs.json is the matter of ``tests/attack_outputs.py``."""

SEVERAL = 16
"""Processes of legitimate programs, where the backend has them."""

_METADATA = "Landlock does not cover stat: existence and size of guessed paths stay visible (spec sandbox 5.1)"
_KNOWN = {"stat_secrets": {"landlock": _METADATA}}
_NO_PROCESSES = "one process only: no private /dev/shm, no total of several"
_NEEDS_PROCESSES = re.compile(r"multiprocessing|ProcessPool|subprocess|shared_memory|os\.fork|workers\s*=\s*(?!1\b)-?\d")
_ESCAPED_IF = {"socket": r"\d", "kill_parent": "0", "fork_bomb": r"\d{3}"}
"""By C++ program: what it prints if it could do what it tries."""


@dataclass(frozen=True)
class Entry:
    """One program."""

    name: str
    path: Path
    kind: Literal["hostile", "legit"]
    expect: list[str] | None = None
    """Statuses that count as contained; None: any."""
    known: dict[str, str] = field(default_factory=dict)
    """By backend: why it is known to escape. One that no longer escapes fails too, so that the manifest stays true."""
    refused: dict[str, str] = field(default_factory=dict)
    """By backend: why a legitimate program cannot work there; it must be refused cleanly."""
    perhaps_refused: bool = False
    """As `refused`, of a program that nothing is known about but its text: it may also work."""
    escaped_if: str | None = None
    """Pattern of an output that proves an escape, for programs that print."""

    @property
    def language(self) -> Literal["python", "cpp17"]:
        return "cpp17" if self.path.suffix == ".cpp" else "python"


def parts_of(folder: Path) -> list[Path]:
    """The folder itself, or its parts if it holds some."""
    found = [folder / part for part in PARTS if (folder / part).is_dir()]
    return found or [folder]


def entries_of(folder: Path) -> list[Entry]:
    """Every program of a folder. Without a manifest, C++ programs are hostile and Python programs legitimate."""
    manifest = folder / "manifest.json"
    if manifest.exists():
        return [_listed(folder, name, entry) for name, entry in json.loads(manifest.read_text()).items()]
    return [_unlisted(path) for path in sorted(folder.iterdir()) if path.suffix in (".py", ".cpp")]


def _listed(folder: Path, name: str, entry: dict[str, Any]) -> Entry:
    return Entry(
        name=name,
        path=folder / entry["file"],
        kind="legit" if entry.get("group") == "legit" else "hostile",
        expect=entry.get("expect"),
        known=entry.get("known", _KNOWN.get(name, {})),
        refused=entry.get("refused", {}),
        escaped_if=entry.get("escaped_if"),
    )


def _unlisted(path: Path) -> Entry:
    if path.suffix == ".cpp":
        return Entry(path.stem, path, "hostile", escaped_if=_ESCAPED_IF.get(path.stem))
    perhaps = _NEEDS_PROCESSES.search(path.read_text()) is not None
    return Entry(path.stem, path, "legit", refused={"landlock": _NO_PROCESSES} if perhaps else {}, perhaps_refused=perhaps)
