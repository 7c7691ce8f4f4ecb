"""Make everything that a GPU machine without a network needs, as archives small enough to be carried one at a time.

    python -m scripts.gpu.prepare OUT                         engine, app and this tree
    python -m scripts.gpu.prepare OUT --packs app tree        only some
    python -m scripts.gpu.prepare OUT --model NAME=FOLDER     a model's folder, too, in pieces if it is large
    python OUT/unpack.py FOLDER                               there; then `. FOLDER/env.sh`

Packages come from the lock files by pip, for the machine that target.toml describes; none of their code is run here. FOLDER holds
engine/ (SGLang's site), app/ (the application's and the Megatron trainer's), tree/ (this repository), models/.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from scripts.gpu.archives import Manifest, cut_file, pack_folder
from scripts.gpu.archives import batches as batches_of

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(__file__).with_name("target.toml")
PACKS = ("engine", "app", "tree")
_STRIPPED_BYTES = 4_000_000
"""Native libraries above this size lose their symbols."""
_GLIBC = ("2_39", "2_38", "2_37", "2_36", "2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")


def wanted(requirements: Path, skip: list[str], python: str) -> list[str]:
    """Pinned packages of a lock file that hold for the target, without those to skip."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found = []
    for line in requirements.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text or text.startswith("-"):
            continue
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        if not any(fnmatch(requirement.name.lower(), pattern) for pattern in skip):
            found.append(f"{requirement.name}{requirement.specifier}")
    return found


def platforms(glibc: str) -> list[str]:
    """Wheel tags that the target takes."""
    newest = [int(part) for part in glibc.split(".")]
    fitting = [version for version in _GLIBC if [int(part) for part in version.split("_")] <= newest]
    return ["any", *(f"manylinux_{version}_x86_64" for version in fitting), "manylinux2014_x86_64", "manylinux1_x86_64"]


def download(packages: list[str], into: Path, python: str, glibc: str) -> None:
    """Fetch wheels of exactly these packages.

    Raises:
        SystemExit: one has no wheel for the target; pip's words stand above.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(into)]
    command += ["--python-version", python, "--implementation", "cp"]
    for platform in platforms(glibc):
        command += ["--platform", platform]
    for package in packages:
        if subprocess.run([*command, package], check=False).returncode:
            raise SystemExit(
                f"{package} cannot be fetched for Python {python} on x86-64; skip it in {TARGET.name} or choose another"
            )
        print("fetched", package, flush=True)


def unzip(wheels: Path, site: Path, drop: list[str]) -> None:
    """Wheels into a site-packages folder; scripts and binaries into its bin/."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as bundle:
            for member in bundle.namelist():
                if ".data/scripts/" in member:
                    script = site / "bin" / Path(member).name
                    script.parent.mkdir(parents=True, exist_ok=True)
                    script.write_bytes(bundle.read(member))
                    script.chmod(0o755)
                elif ".data/" in member:
                    _place_data(bundle, member, site)
                elif not member.startswith(tuple(drop)):
                    bundle.extract(member, site)


def _place_data(bundle: zipfile.ZipFile, member: str, site: Path) -> None:
    """`NAME.data/purelib/...` and `platlib/...` belong into the site; `data/...` and headers are for nobody here."""
    kind, _, path = member.partition(".data/")[2].partition("/")
    if kind in ("purelib", "platlib") and path and not path.endswith("/"):
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bundle.read(member))


def strip_libraries(site: Path) -> None:
    for library in site.rglob("*.so*"):
        if library.is_file() and library.stat().st_size > _STRIPPED_BYTES:
            # Best effort: a library that cannot be stripped is merely larger.
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=False, stderr=subprocess.DEVNULL)


def tree_files() -> Iterator[Path]:
    """What git tracks, and what is new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            yield ROOT / name


class Preparation:
    """Archives in one directory and their manifest."""

    def __init__(self, out: Path, limit_bytes: int) -> None:
        self._out, self._limit = out, limit_bytes
        self._manifest = Manifest()
        out.mkdir(parents=True, exist_ok=True)

    def add_pack(self, name: str, pack: dict[str, Any], python: str, glibc: str, wheels: Path | None) -> None:
        """A site folder from a lock file, or from a directory of wheels that are there already."""
        with tempfile.TemporaryDirectory() as scratch:
            fetched, site = Path(scratch, "wheels"), Path(scratch, "site")
            fetched.mkdir()
            site.mkdir()
            if wheels is None:
                download(wanted(ROOT / pack["requirements"], pack["skip"], python), fetched, python, glibc)
            unzip(wheels or fetched, site, pack["drop"])
            strip_libraries(site)
            self._manifest.archives += pack_folder(site, name, self._out, name, self._limit)

    def add_tree(self) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            for file in tree_files():
                target = Path(scratch) / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)
            self._manifest.archives += pack_folder(Path(scratch), "tree", self._out, "tree", self._limit)

    def add_folder(self, source: Path, prefix: str, name: str) -> None:
        """A model's files. Weights beyond the limit are cut as they are: they hardly compress."""
        large = [file for file in source.rglob("*") if file.is_file() and file.stat().st_size > self._limit]
        with tempfile.TemporaryDirectory() as scratch:
            rest = Path(scratch) / "rest"
            ignored = {str(file) for file in large}
            shutil.copytree(
                source, rest, symlinks=True, ignore=lambda folder, names: [n for n in names if str(Path(folder, n)) in ignored]
            )
            self._manifest.archives += pack_folder(rest, prefix, self._out, name, self._limit)
        for file in large:
            whole, pieces = cut_file(file, f"{prefix}/{file.relative_to(source).as_posix()}", self._out, self._limit)
            self._manifest.files.append(whole)
            self._manifest.pieces[whole.name] = pieces

    def finish(self) -> None:
        self._manifest.write(self._out)
        shutil.copy2(Path(__file__).with_name("unpack.py"), self._out / "unpack.py")
        entries = [*self._manifest.archives, *(piece for pieces in self._manifest.pieces.values() for piece in pieces)]
        for number, names in enumerate(batches_of(entries, self._limit), start=1):
            print(f"load {number}: {', '.join(names)}")
        print(f"{sum(entry.size for entry in entries) / 1e6:.1f} MB in {self._out}; there: python unpack.py FOLDER")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--packs", nargs="*", choices=PACKS, default=list(PACKS))
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--megabytes", type=int, default=58, help="largest archive")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--wheels", type=Path, help="take wheels from DIR/PACK instead of fetching them")
    options = parser.parse_args()
    target = tomllib.loads(options.target.read_text(encoding="utf-8"))
    preparation = Preparation(options.out, options.megabytes * 1_000_000)
    for name in options.packs:
        if name == "tree":
            preparation.add_tree()
        else:
            wheels = None if options.wheels is None else options.wheels / name
            preparation.add_pack(name, target["packs"][name], target["python"], target["glibc"], wheels)
    for model in options.model:
        name, _, folder = model.partition("=")
        preparation.add_folder(Path(folder), f"models/{name}", f"model-{name}")
    preparation.finish()


if __name__ == "__main__":
    main()
