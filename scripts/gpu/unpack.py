"""Unpack what `scripts.gpu.prepare` made, on the machine that it was made for. Needs Python's standard library alone.

    python unpack.py FOLDER [FROM]      FROM: where the archives are, by default beside this file

Checks every digest, unpacks the archives that are there into FOLDER, joins files that came in pieces once all of them are there,
and writes FOLDER/env.sh. Run it again as more archives come; what is done stays done.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

ENV = """# The environment of everything here: `. {folder}/env.sh`
export PYTHONPATH="{folder}/tree:{folder}/app${{PYTHONPATH:+:$PYTHONPATH}}"
export PATH="{folder}/app/bin:$PATH"
export HF_HUB_OFFLINE=1
export TTTD_ENGINE_KIND=sglang
export TTTD_ENGINE_ENVIRONMENT='{{"PYTHONPATH": "{folder}/engine"}}'
export TTTD_MODEL_DIRS='["{folder}/models"]'
"""


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    source = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parent
    manifest: dict[str, Any] = json.loads((source / "manifest.json").read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / ".unpacked.json"
    done: list[str] = json.loads(state.read_text(encoding="utf-8")) if state.exists() else []
    missing = []
    for entry in manifest["archives"]:
        archive = source / entry["name"]
        if entry["sha256"] in done:
            continue
        if not archive.exists():
            missing.append(entry["name"])
            continue
        check(archive, entry["sha256"])
        with tarfile.open(archive, "r:xz") as tar:
            tar.extractall(folder, filter="tar")
        done.append(entry["sha256"])
        state.write_text(json.dumps(done), encoding="utf-8")
        print("unpacked", entry["name"], flush=True)
    for entry in manifest["files"]:
        pieces = manifest["pieces"][entry["name"]]
        absent = [piece["name"] for piece in pieces if not (source / piece["name"]).exists()]
        target = folder / entry["name"]
        if target.exists() and target.stat().st_size == entry["size"]:
            continue
        if absent:
            missing += absent
            continue
        join([source / piece["name"] for piece in pieces], target, entry["sha256"])
        print("joined", entry["name"], flush=True)
    (folder / "env.sh").write_text(ENV.format(folder=folder), encoding="utf-8")
    if missing:
        print("still missing:", ", ".join(missing))
    return 1 if missing else 0


def join(pieces: list[Path], target: Path, sha256: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    with partial.open("wb") as out:
        for piece in pieces:
            out.write(piece.read_bytes())
    check(partial, sha256)
    partial.replace(target)


def check(file: Path, sha256: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise SystemExit(f"{file} is damaged: sha256 {found}, {sha256} was made; carry it again")


if __name__ == "__main__":
    sys.exit(main())
