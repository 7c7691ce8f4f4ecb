"""docs/operate.md, word for word: its commands run in order against a real server and a real run, and print what the page prints.

A block of the language `console` holds commands after `$ ` and what they print; `...` stands for anything. A comment
`<!-- meanwhile: NAME -->` before a block has something happen that a page cannot do (:data:`MEANWHILE`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from activities.blobs import Blobs, LocalStore
from activities.records import StepCommit
from activities.run_store import RunStore
from console.stored import find_run
from workers.ports import free_port
from workers.temporal_server import find_temporal
from workflows import names

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "operate.md"
PATIENCE_SECONDS = 150.0

_BLOCK = re.compile(r"(?:<!-- meanwhile: (?P<meanwhile>[\w ]+) -->\n)?```console\n(?P<text>.*?)```", re.DOTALL)
_LOOKS_ONLY = re.compile(
    r"tttd (status|best|watch|storage list)\b|temporal workflow (list|count|describe|show|query|result|metadata)\b"
)
"""Commands that change nothing: they are repeated until they print what the page prints, as a reader would."""


@dataclass(frozen=True)
class Command:
    """A command of the page, and what it prints there."""

    line: str
    printed: tuple[str, ...]
    meanwhile: str | None


def commands(page: Path = PAGE) -> Iterator[Command]:
    for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        meanwhile = block["meanwhile"]
        pieces = re.split(r"^\$ ", block["text"], flags=re.MULTILINE)
        assert pieces[0].strip() == "", f"a console block begins with output: {pieces[0]!r}"
        for piece in pieces[1:]:
            command = re.match(r"(?:.*\\\n)*.*\n", piece)
            assert command is not None
            printed = piece[command.end() :].splitlines()
            yield Command(command[0].rstrip("\n"), tuple(line for line in printed if line.strip()), meanwhile)
            meanwhile = None


# What differs from one run of a command to the next, by the shape of what stands in its place on the page.
_SHAPES: tuple[tuple[str, str], ...] = (
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", ""),
    (r"[0-9a-f]{8}-v\d{4}-[0-9a-f]{12}", ""),
    (r"[0-9a-f]{64}", ""),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)?", ""),
    (r"\d+ (?:second|minute|hour)s? ago", r"(?:\d+ (?:second|minute|hour)s? ago|now)"),
    (r"127\.0\.0\.1:\d+", ""),
    (r"(?:\d+h)?\d+m\d\ds|\d+ s(?= )", r"(?:(?:\d+h)?\d+m\d\ds|\d+ s)"),
    (r"-?\d+\.\d+(?:e-?\d+)?…?", r"-?\d+(?:\.\d+)?(?:e-?\d+)?…?"),
    (r"(?:valid|new|improved|train|publish|sample\+judge|event ID|attempt) \d+", r"[\w+ ]+ \d+"),
    (r"\([1-9]\d* workers\)", ""),
    (r"identity \([0-9a-f]{8}, now [0-9a-f]{8}\)", ""),
)
_ANY_SHAPE = re.compile(r"\.\.\.|" + "|".join(f"({shape})" for shape, _ in _SHAPES))


def pattern_of(line: str) -> str:
    """A regular expression for a printed line: numbers that differ by their shape, `...` as anything, spaces as any spaces."""
    out, at = [], 0
    for found in _ANY_SHAPE.finditer(line):
        out.append(re.escape(line[at : found.start()]))
        index = found.lastindex
        out.append(".*" if index is None else f"(?:{_SHAPES[index - 1][1] or _SHAPES[index - 1][0]})")
        at = found.end()
    out.append(re.escape(line[at:]))
    return re.sub(r"(?:\\ )+", r"\\s+", "".join(out))


def prints(expected: tuple[str, ...], output: str) -> bool:
    """Whether a command printed what the page says. A line that is only `...` stands for any lines."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    pattern = "".join(r"(?:.*\n)*?" if line.strip() == "..." else pattern_of(" ".join(line.split())) + r"\n" for line in expected)
    return re.fullmatch(pattern, "".join(line + "\n" for line in lines)) is not None


@dataclass
class Reader:
    """Somebody with an installed tttd, the Temporal CLI and an empty folder."""

    folder: Path
    numbers: dict[str, str] = field(default_factory=dict)
    """Numbers that the page's commands printed alone: those of the page, and those of this reader."""

    def __post_init__(self) -> None:
        binaries = self.folder.parent / "bin"
        binaries.mkdir()
        for name, command in (("tttd", f'"{sys.executable}" -m console.main'), ("temporal", f'"{find_temporal()}"')):
            (binaries / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (binaries / name).chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TTTD_", "TEMPORAL_"))}
        port = free_port()
        self.environment = kept | {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TTTD_TEMPORAL_PORT": str(port),
            "TTTD_TEMPORAL_UI_PORT": str(free_port()),
            # Readers have the default port, which the Temporal CLI asks by itself.
            "TEMPORAL_ADDRESS": f"127.0.0.1:{port}",
        }

    def shell(self, line: str) -> str:
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=300,
            check=False,
        )
        return done.stdout

    def do(self, command: Command) -> str:
        """Run a command until it prints what the page prints, or once if it changes something."""
        line = re.sub(r"(?<=--event-id )\d+", lambda found: self.numbers.get(found[0], found[0]), command.line)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            output = self.shell(line)
            if prints(command.printed, output):
                break
            again = _LOOKS_ONLY.match(line) is not None and time.monotonic() < deadline
            wanted = "\n".join(command.printed)
            assert again, f"$ {line}\n--- the page prints\n{wanted}\n--- it printed\n{output}"
            time.sleep(0.5)
        if len(command.printed) == 1 and command.printed[0].strip().isdigit():
            self.numbers[command.printed[0].strip()] = output.strip()
        return output

    @property
    def blobs(self) -> Blobs:
        return Blobs(LocalStore(self.folder / ".tttd" / "store"))


def _archive_of(reader: Reader) -> Path:
    run = find_run(reader.blobs, "first")
    assert run is not None
    assert run.head is not None
    return reader.folder / ".tttd" / "store" / Blobs.key(run.head.archive)


def lose_a_blob(reader: Reader) -> None:
    path = _archive_of(reader)
    path.rename(path.with_suffix(".lost"))


def restore_the_blob(reader: Reader) -> None:
    path = _archive_of(reader)
    path.with_suffix(".lost").rename(path)


MEANWHILE: dict[str, Callable[[Reader], None]] = {
    "a blob is lost": lose_a_blob,
    "the blob is restored": restore_the_blob,
}


def stored(reader: Reader) -> dict[str, str]:
    """Every entry of the run with its content: what was done, and with what result."""
    store = reader.blobs.store
    return {key: store.get(key).decode() for key in store.keys("runs/first/")}


def work_done(reader: Reader) -> dict[str, int]:
    """How often workers did what costs something, by their logs."""
    logs = reader.folder / ".tttd" / "logs"
    told = {"sample": "rollout_sampled", "judge": "rollout_judged", "train": "step_trained"}
    return {role: (logs / f"{role}.log").read_text(encoding="utf-8").count(f'"{event}"') for role, event in told.items()}


def test_the_page_prints_what_its_commands_print(tmp_path: Path) -> None:
    (tmp_path / "clean").mkdir()
    reader = Reader(tmp_path / "clean")
    said: list[tuple[str, str]] = []
    before: tuple[dict[str, str], int] | None = None
    try:
        for command in commands():
            if command.meanwhile is not None:
                MEANWHILE[command.meanwhile](reader)
            if command.line.startswith("temporal workflow reset") and before is None:
                before = stored(reader), work_done(reader)["judge"]
                sampled = work_done(reader)["sample"]
            said.append((command.line, reader.do(command)))
            if command.line.startswith("tttd storage check"):
                assert before == (stored(reader), work_done(reader)["judge"]), "a reset changed what is stored, or judged again"
                assert sampled == work_done(reader)["sample"], "a reset sampled again"
    finally:
        reader.shell("tttd down")
    assert before is not None
    results = [output for line, output in said if line.startswith("temporal workflow result")]
    chains = [re.findall(r'"commit":"([0-9a-f]{64})"', output) for output in results]
    assert chains[0] == chains[1] == chains[2], "a reset changed the chain"
    store = RunStore(reader.blobs, "first")
    assert [store.load(StepCommit, store.commit_digest(step) or "").step for step in range(5)] == list(range(5))


def test_the_page_shows_every_command_that_a_run_has() -> None:
    lines = [command.line for command in commands()]
    for verb in ("start", "list", "count", "describe", "metadata", "show", "query", "result", "reset", "update execute"):
        assert any(line.startswith(f"temporal workflow {verb}") for line in lines), verb
    for update in (names.PAUSE, names.RESUME, names.RETRY, names.EXTEND):
        assert any(f"--name {update}" in line for line in lines), update
    for verb in ("status", "resume", "stop", "extend", "fork", "run", "storage check"):
        assert any(line.startswith(f"tttd {verb}") for line in lines), verb


@pytest.mark.parametrize(
    ("expected", "output", "same"),
    [
        (("step 1/3 · best 2.6 (+0.1) · valid 5/8",), "step 1/3 · best 2.71 (+0) · valid 4/8\n", True),
        (("step 1/3 · best 2.6",), "step 2/3 · best 2.6\n", False),
        (("state paused", "..."), "state paused\nmore\n\nand more\n", True),
        (("state paused",), "state paused\nmore\n", False),
        (("...", "state paused"), "run x\nstate   paused\n", True),
        (("on tttd-judge (0 workers)",), "on tttd-judge (1 workers)\n", False),
        (
            ("on tttd-judge (2 workers) · since 2026-11-30T02:41:28",),
            "on tttd-judge (1 workers) · since 2027-01-01T00:00:00\n",
            True,
        ),
        (("blob " + "a" * 64,), "blob " + "b" * 64 + "\n", True),
        (("blob " + "a" * 64,), "blob " + "b" * 63 + "\n", False),
    ],
)
def test_what_may_differ_is_times_digests_and_measured_numbers(expected: tuple[str, ...], output: str, same: bool) -> None:
    assert prints(expected, output) is same
