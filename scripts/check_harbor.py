"""Loads and lints every task folder with the real Harbor: the built-in ones, the template, and an exported copy of each.

Run by `make harbor`, in an environment of its own: Harbor needs Python 3.12 and brings packages that tttd does not. No rule may
find anything, those that are off by default included, but one: `unpinned-image` is only reported. An image's digest is a fact about
a registry, which whoever builds the image looks up; none is made up here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

from harbor.lint import LintRule, lint_task  # type: ignore[import-not-found]
from harbor.models.task.task import Task  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parent.parent
ONLY_REPORTED = {LintRule.UNPINNED_IMAGE}


def main() -> int:
    """Returns 0 if every folder loads and no rule that counts finds anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tttd", default=str(ROOT / ".venv" / "bin" / "tttd"), help="the command that exports")
    options = parser.parse_args()
    print(f"harbor {importlib.metadata.version('harbor')}")
    folders = sorted(file.parent for file in (ROOT / "tasks").glob("*/task.toml"))
    with tempfile.TemporaryDirectory() as made:
        exported = [export(folder, Path(made), options.tttd) for folder in folders]
        results = [check(folder) for folder in (*folders, *exported)]
    return 0 if all(results) else 1


def export(folder: Path, directory: Path, tttd: str) -> Path:
    """`tttd task export-harbor`, by folder."""
    command = [tttd, "task", "export-harbor", str(folder), "--dir", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def check(folder: Path) -> bool:
    """Load one folder and lint it; prints a line, and one for each finding."""
    task = Task(folder)
    findings = lint_task(folder, selected_rules=set(LintRule))
    wrong = [finding for finding in findings if finding.rule not in ONLY_REPORTED]
    kind = "folder" if folder.is_relative_to(ROOT) else "exported"
    print(f"{'FAILED' if wrong else 'ok    '} {kind:<8} {task.name}: {len(findings)} findings, {len(wrong)} that count")
    for finding in findings:
        print(f"         {Path(finding.path).relative_to(folder)}:{finding.line or 1} [{finding.rule.value}] {finding.message}")
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
