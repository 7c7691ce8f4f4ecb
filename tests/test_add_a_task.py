"""docs/add-a-task.md, followed to the letter in a clean folder: its files are written, its commands run, and a search goes on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from activities.blobs import Blobs, LocalStore
from activities.records import StepCommit
from console.stored import find_run
from workers.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = ROOT / "docs" / "add-a-task.md"

_BLOCK = re.compile(r"(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """A file to write, or a command to run."""

    file: str | None
    text: str


def parts() -> Iterator[Part]:
    """What the page tells a reader to do, in order. Blocks of no language are only shown."""
    for block in _BLOCK.finditer(TUTORIAL.read_text(encoding="utf-8")):
        if block["file"]:
            yield Part(block["file"], block["text"])
        elif block["language"] == "sh":
            yield from (Part(None, line) for line in block["text"].splitlines() if line.strip())


class Reader:
    """Somebody with an installed tttd and an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = folder.parent / "bin" / "tttd"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m console.main "$@"\n')
        command.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TTTD_", "TEMPORAL_"))}
        self.environment = kept | {
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TTTD_TEMPORAL_PORT": str(free_port()),
            "TTTD_TEMPORAL_UI_PORT": str(free_port()),
            "TTTD_ENGINE_ID": "tutorial",
        }
        self.said: dict[str, str] = {}

    def do(self, part: Part) -> None:
        if part.file is not None:
            file = self.folder / part.file
            assert file.parent.is_dir(), f"the page writes {part.file} into a folder that it did not make"
            file.write_text(part.text, encoding="utf-8")
            return
        done = self.shell(part.text)
        assert done.returncode == 0, f"$ {part.text}\n{done.stdout}\n{done.stderr}"
        self.said[part.text] = done.stdout

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_leads_to_a_search_with_a_certified_best(tmp_path: Path) -> None:
    (tmp_path / "clean").mkdir()
    reader = Reader(tmp_path / "clean")
    try:
        for part in parts():
            reader.do(part)
    finally:
        reader.shell("tttd down")
    (checked,) = (said for command, said in reader.said.items() if command.startswith("tttd task check"))
    assert "FAILED" not in checked
    assert "attack all_in_one_place.py" in checked
    assert checked.endswith("is ready\n")
    run = find_run(Blobs(LocalStore(tmp_path / "clean" / ".tttd" / "store")), "first")
    assert run is not None
    assert isinstance(run.head, StepCommit)
    assert run.step == 2
    assert run.head.policy.version == 2
    best = json.loads(reader.shell("tttd best first --json").stdout)
    assert best["score"] > 1.7914213562373097, "the search found nothing better than the program it began with"
    assert best["exact"]
    verdict = reader.said["tttd judge my_circles best.py --task-dir ."]
    assert verdict.startswith("valid")
    assert f"{best['score']:.17g}" in verdict
    assert (tmp_path / "clean" / "for-harbor" / "my_circles" / "tests" / "tttd" / "activities" / "judge" / "harbor.py").is_file()


def test_the_page_names_files_and_commands_that_exist() -> None:
    found = list(parts())
    commands = [part.text for part in found if part.file is None]
    assert commands[0] == "tttd task new my_circles"
    assert any(command.startswith("tttd run my_circles --task-dir .") for command in commands)
    assert {part.file for part in found} >= {"my_circles/tests/judge.py", "my_circles/attacks/all_in_one_place.py"}
    named = set(re.findall(r"`((?:tasks|tests|docs)/[\w./-]+)`", TUTORIAL.read_text(encoding="utf-8")))
    here = {name for name in named if name not in {"tests/judge.py", "tests/test.sh"}}
    assert [name for name in sorted(here) if not (ROOT / name).exists()] == []
