"""Adapter directories on the engine's host: written whole or not at all, one per immutable adapter name."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from activities.blobs import Blobs, digest_of
from activities.errors import InputError
from activities.records import AdapterManifest
from workflows.contracts.base import Digest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def materialise(blobs: Blobs, adapter: Digest, directory: Path, name: str) -> Path:
    """Write an adapter as a PEFT directory `directory`/`name`, and return that.

    A directory that is there already is kept if its files have the right digests, and replaced if not, so that a torn copy from
    before a crash cannot be served.

    Raises:
        InputError: the name is not a plain folder name.
        CorruptBlob: the adapter's blobs are missing or damaged.
    """
    if not name or Path(name).name != name or name.startswith("."):
        raise InputError(f"adapter name {name!r} is not a plain folder name")
    manifest = AdapterManifest.model_validate_json(blobs.get(adapter))
    target = directory / name
    if _is_whole(target, manifest):
        return target
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{name}-{uuid.uuid4().hex}"
    temporary.mkdir()
    for file, digest in ((CONFIG, manifest.config), (WEIGHTS, manifest.weights)):
        (temporary / file).write_bytes(blobs.get(digest))
    shutil.rmtree(target, ignore_errors=True)
    try:
        temporary.rename(target)
    except OSError:  # another process placed it between the two lines above
        shutil.rmtree(temporary, ignore_errors=True)
        if not _is_whole(target, manifest):
            raise
    return target


def variant(original: Path, name: str, factor: float) -> Path:
    """A second directory beside `original` with the same weights under another name, alpha times `factor` in its configuration."""
    target = original.parent / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    config: dict[str, Any] = json.loads((original / CONFIG).read_text(encoding="utf-8"))
    config["lora_alpha"] *= factor
    (target / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    try:
        os.link(original / WEIGHTS, target / WEIGHTS)
    except OSError:  # a file system without hard links
        shutil.copyfile(original / WEIGHTS, target / WEIGHTS)
    return target


def remove(directory: Path, name: str) -> None:
    """Drop an unloaded adapter's directory; nothing happens if there is none."""
    shutil.rmtree(directory / name, ignore_errors=True)


def _is_whole(target: Path, manifest: AdapterManifest) -> bool:
    with contextlib.suppress(OSError):
        found = (digest_of((target / CONFIG).read_bytes()), digest_of((target / WEIGHTS).read_bytes()))
        return found == (manifest.config, manifest.weights)
    return False
