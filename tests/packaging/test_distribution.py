"""What is shipped: package names and files of the wheel, rivals for those names, lock files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = {"workflows", "activities", "workers", "tasks", "console"}
RIVALS = {"workflows", "llama-index-workflows", "activities", "workers", "tasks", "console"}
"""Distributions that install a top-level package of one of our names."""
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that hatchling builds from a copy of the sources, by its own command line and without isolation."""
    pytest.importorskip("hatchling", reason="the build back-end comes with `make setup`")
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    for folder in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (file,) = target.glob("*.whl")
    return zipfile.ZipFile(file)


def test_wheel_holds_exactly_our_packages(wheel: zipfile.ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist()}
    information = {name for name in top if name.endswith(".dist-info")}
    assert len(information) == 1
    assert top - information == PACKAGES


def test_wheel_holds_what_a_run_reads(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {
        "tasks/circle_packing_26/task.toml",
        "tasks/circle_packing_26/instruction.md",
        "tasks/circle_packing_26/seeds/grid.py",
        "tasks/judges/circle_packing.py",
        "workflows/contracts/request.py",
    } <= names
    proposer = {f"tasks/proposers/packing/{file.name}" for file in (ROOT / "tasks" / "proposers" / "packing").iterdir()}
    assert proposer <= names
    assert "tasks/proposers/packing/model.safetensors" in proposer
    sources = {f.relative_to(ROOT).as_posix() for package in PACKAGES for f in (ROOT / package).rglob("*.py")}
    assert sources <= names


def test_wheel_holds_no_test_and_no_cache(wheel: zipfile.ZipFile) -> None:
    assert not [name for name in wheel.namelist() if "__pycache__" in name or name.startswith(("tests/", "scripts/", "deploy/"))]


def test_console_script_is_the_one_promised() -> None:
    assert PROJECT["scripts"] == {"tttd": "console.main:main"}


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_package_is_regular(package: str) -> None:
    """A regular package wins over a namespace portion of the same name elsewhere on the path."""
    assert (ROOT / package / "__init__.py").is_file()


def test_no_installed_distribution_owns_our_names() -> None:
    owners = packages_distributions()
    strangers = {name: owners[name] for name in PACKAGES if set(owners.get(name, [])) - {PROJECT["name"]}}
    assert not strangers


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_of(file: Path) -> set[tuple[str, str]]:
    """(name, version) of every line; a name stands twice where Python 3.11 and 3.12 get different versions."""
    pins = re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==([^\s;\\]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {(normalised(name), version) for name, version in pins}


def names_of(file: Path) -> set[str]:
    return {name for name, _ in pins_of(file)}


@pytest.mark.parametrize("file", LOCKS, ids=[file.name for file in LOCKS])
def test_lock_file_pins_everything_exactly_and_names_no_rival(file: Path) -> None:
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    requirements = [line for line in lines if line and not line.startswith(("#", "-", "--hash"))]
    assert requirements
    assert [line for line in requirements if "==" not in line] == []
    assert len(pins_of(file)) == len(requirements)
    assert not RIVALS & names_of(file)
    unmarked = [name for line in requirements if ";" not in line for name in [normalised(line.partition("==")[0])]]
    assert len(unmarked) == len(set(unmarked))


@pytest.mark.parametrize("file", LOCKS, ids=[file.name for file in LOCKS])
def test_lock_file_names_no_place(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"https?://|file:|--index-url|--find-links|/(home|root|tmp|work)/", text)


@pytest.mark.parametrize(
    ("name", "requirements"), [("app", PROJECT["dependencies"]), ("dev", PROJECT["optional-dependencies"]["dev"])]
)
def test_lock_files_hold_what_the_project_asks_for(name: str, requirements: list[str]) -> None:
    pinned = names_of(ROOT / "requirements" / f"{name}.txt")
    asked = {normalised(re.split(r"[\[<>=~! ]", requirement, maxsplit=1)[0]) for requirement in requirements}
    assert asked <= pinned


def test_development_lock_agrees_with_the_application_lock() -> None:
    app, dev = (pins_of(ROOT / "requirements" / f"{name}.txt") for name in ("app", "dev"))
    assert app <= dev
