"""Every published construction certifies to the digits of the table, and the independent checker agrees with its certificate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checker import check
from tests.constructions import FOLDER, Published, certificate_of, difference, main, read_files, read_table

TABLE = read_table(FOLDER)
FILES = read_files(FOLDER)

NOT_PUBLISHED_AS_DATA = {
    *("ac1_simpletes_972.json", "ac2_thetaevolve_8B_wo_RL_100.json", "cp26_simpletes.json", "cp26_thetaevolve_8B_w_RL_65.json"),
    *("cp32_reef_qwen3_8b.json", "erdos_simpletes_4096.json"),
}
"""Rows of the table without a file."""


def size_of(content: dict[str, Any]) -> int:
    return len(content.get("values") or content.get("circles") or content["circles_int"])


def test_the_table_lists_every_file() -> None:
    assert TABLE.keys() - FILES.keys() == NOT_PUBLISHED_AS_DATA
    assert FILES.keys() <= TABLE.keys()
    assert len(FILES) == 42


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if size_of(content) > 10_000 else ()) for name, content in FILES.items()]
)
def test_certified_to_every_printed_digit(name: str) -> None:
    certificate = certificate_of(FILES[name])
    assert difference(TABLE[name], certificate) == ""
    check(json.loads(certificate.model_dump_json()))


def test_a_value_that_differs_in_its_last_digit_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "cp26_certified_rational.json"
    certificate = certificate_of(FILES[name])
    assert "the table says" in difference(Published(26, TABLE[name].value[:-1] + "6"), certificate)
    assert "size 26" in difference(Published(27, TABLE[name].value), certificate)
    (tmp_path / name).write_text(json.dumps(FILES[name]))
    table = f"| file | n | claim | certified |\n| {name} | 26 | raw 2.6 | {TABLE[name].value} | here |\n"
    (tmp_path / "README.md").write_text(table)
    assert main([str(tmp_path), "--write-certificates", str(tmp_path / "out")]) == 0
    (tmp_path / "README.md").write_text(table.replace("1865", "1866"))
    assert main([str(tmp_path)]) == 1
    assert "1 of 1 as published" in capsys.readouterr().out
    checker = [sys.executable, "-I", str(Path(__file__).parent / "checker.py"), str(tmp_path / "out" / name)]
    checked = subprocess.run(checker, capture_output=True, text=True, cwd=tmp_path)
    assert (checked.returncode, checked.stdout) == (0, f"{tmp_path / 'out' / name}: holds\n")
