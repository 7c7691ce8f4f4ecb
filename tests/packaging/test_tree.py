"""The tree itself: its size, the length of its files, and no trace of the machine it was written on."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 12 << 20
NORMAL_LINES, HARD_LINES = 400, 600
LONG_FILES = 3
"""Python files that may be longer than normal at one time; none may pass the hard limit."""
PACKAGES = ("workflows", "activities", "workers", "tasks", "console", "scripts", "tests")

MACHINE = re.compile(
    r"(?<![\w.$}\])/-])/(?:home/\w+|root\b|work/(?:main|shared)|Users/\w+|scratch|mnt/\w+)/?[\w.]*"
    r"|/tmp/(?:site|bash_jobs)"
    r"|https?://(?:[\w-]+\.)*(?:artifactory|nexus|devpi|mirror)[\w.-]*"
)
"""Absolute paths of a home, a checkout or a scratch disk, and hosts of package mirrors."""
ATTACKS = "tests/data/attacks/"
"""Hostile programs, which try to read such places."""


@cache
def files() -> tuple[Path, ...]:
    """Every file that is tracked or would be: what git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = (ROOT / name for name in listed.stdout.split("\0") if name)
    return tuple(sorted(path for path in found if path.is_file()))


def lines_of(path: Path) -> int:
    return len(path.read_bytes().splitlines())


def test_tree_is_small() -> None:
    sizes = {path: path.stat().st_size for path in files()}
    largest = sorted(((size, str(path.relative_to(ROOT))) for path, size in sizes.items()), reverse=True)[:5]
    assert sum(sizes.values()) < LIMIT_BYTES, largest


def test_python_files_keep_their_budget() -> None:
    lengths = {
        str(p.relative_to(ROOT)): lines_of(p) for p in files() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in PACKAGES
    }
    assert lengths
    assert {name: length for name, length in lengths.items() if length > HARD_LINES} == {}
    longer = {name: length for name, length in lengths.items() if length > NORMAL_LINES}
    assert len(longer) <= LONG_FILES, longer


def texts() -> list[tuple[Path, str]]:
    found = []
    for path in files():
        data = path.read_bytes()
        if b"\0" not in data[:4096]:
            found.append((path, data.decode("utf-8")))  # a text that is not UTF-8 fails here
    return found


def test_no_file_names_a_place_on_the_machine_it_was_written_on() -> None:
    here = str(ROOT) + "/"
    traces = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts()
        if path != Path(__file__).resolve() and not path.relative_to(ROOT).as_posix().startswith(ATTACKS)
        for match in [MACHINE.search(text) or re.search(re.escape(here), text)]
        if match
    ]
    assert traces == []


@pytest.mark.parametrize(
    ("text", "is_trace"),
    [
        ("/home/ann/tttd/x.py", True),
        ("open('/root/.cache/x')", True),
        ("cd /work/main", True),
        ("artifacts = ['/work/solution.py']", False),
        ("https://mirror.example.com/simple", True),
        ("volume /var/lib/tttd", False),
        ("runs/work/steps", False),
        ("$HOME/work/x", False),
        ("https://example.org/simple", False),
    ],
)
def test_what_counts_as_a_trace(text: str, is_trace: bool) -> None:
    assert bool(MACHINE.search(text)) == is_trace


def test_no_file_is_a_leftover() -> None:
    leftovers = [str(p.relative_to(ROOT)) for p in files() if re.search(r"(\.orig|\.rej|\.bak|\.swp|~|\.DS_Store)$", p.name)]
    assert leftovers == []


def test_python_modules_of_the_packages_say_what_they_are_for() -> None:
    packages = PACKAGES[:5]
    silent = [
        str(path.relative_to(ROOT))
        for path in files()
        if path.suffix == ".py"
        and (parts := path.relative_to(ROOT).parts)[0] in packages
        and not {"seeds", "solution", "tests"} & {*parts}
        if not path.read_text(encoding="utf-8").lstrip().startswith(('"""', 'r"""', "#!"))
    ]
    assert silent == []
