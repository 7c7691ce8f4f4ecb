"""Certifies a folder of constructions, and compares with the values that its README has.

    python -m tests.constructions DIR [--write-certificates OUT] [--only NAME ...]

The folder holds JSON files (``tasks/candidates.py`` says in which forms) and a README.md with a table of the columns file, n,
claim, certified value. All printed digits count, rounded against the construction. Every certificate is also given to the
independent checker. Exits 1 if anything differs. The repository's own folder holds its files in one compressed pack.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import sys
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from tasks.candidates import read_candidate
from tasks.certificate import Certificate, certify, directed_digits
from tasks.registry import load_task
from tests.checker import Wrong, check

FOLDER = Path(__file__).parent / "data" / "constructions"
PACK = "constructions.json.xz"

_ROW = re.compile(r"^\| (?P<file>[\w.-]+\.json) \| (?P<n>\d+) \|.*?\| (?P<value>\d+\.\d+) \|", re.MULTILINE)


@dataclass(frozen=True)
class Published:
    """One row of a README's table."""

    n: int
    value: str
    """Certified value, to all digits that are printed."""


def read_table(folder: Path) -> dict[str, Published]:
    """Rows by file name."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    return {row["file"]: Published(int(row["n"]), row["value"]) for row in _ROW.finditer(text)}


def read_files(folder: Path) -> dict[str, Any]:
    """Contents by file name, from the folder's own files or its pack."""
    pack = folder / PACK
    if pack.is_file():
        packed: dict[str, Any] = json.loads(lzma.decompress(pack.read_bytes()))
        return packed
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def certificate_of(content: Any) -> Certificate:
    """The certificate of a file's content, under the task that it names."""
    candidate = read_candidate(json.dumps(content).encode())
    task = load_task(candidate.task or "")
    answer = certify(task, task.make_judge(), candidate)
    if not isinstance(answer, Certificate):
        raise ValueError(answer.reason)
    return answer


def difference(published: Published, certificate: Certificate) -> str:
    """In which way a certificate is not what the table says; "" if it is."""
    decimals = len(published.value.partition(".")[2])
    found = directed_digits(Fraction(certificate.exact), certificate.rounding, decimals)
    size = len(next(iter(certificate.construction[key] for key in ("circles", "heights") if key in certificate.construction)))
    if size != published.n:
        return f"it has size {size}, the table says {published.n}"
    return "" if found == published.value else f"certified {found}, the table says {published.value}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.constructions", description="Certify a folder of constructions.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write-certificates", type=Path, metavar="OUT")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    asked = parser.parse_args(arguments)
    table, files = read_table(asked.folder), read_files(asked.folder)
    names = [name for name in table if not asked.only or name in asked.only]
    bad = [name for name in names if name in files and not _reported(name, table[name], files[name], asked.write_certificates)]
    missing = [name for name in names if name not in files]
    unlisted = sorted(files.keys() - table.keys()) if not asked.only else []
    for word, list_ in (("not in the folder", missing), ("not in the table", unlisted)):
        if list_:
            print(f"{word}: {', '.join(list_)}")
    done = len(names) - len(missing)
    print(f"{done - len(bad)} of {done} as published")
    return 1 if bad or not done else 0


def _reported(name: str, published: Published, content: Any, out: Path | None) -> bool:
    began = time.process_time()
    try:
        certificate = certificate_of(content)
        spent = time.process_time() - began
        wrong = difference(published, certificate)
        check(json.loads(certificate.model_dump_json()))
    except (Wrong, ValueError) as error:
        print(f"{name}: {error}")
        return False
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(certificate.model_dump_json(indent=1) + "\n", encoding="utf-8")
    note = f" ({certificate.repair})" if certificate.repair else ""
    print(f"{name}: {wrong or 'ok'} {published.value} {spent:.2f} s{note}", flush=True)
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
