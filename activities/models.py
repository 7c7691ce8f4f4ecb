"""Where a model lies and what it is: its folder, its digest, the shapes that LoRA needs. Reads headers, never loads weights."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from activities.errors import InputError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""LoRA targets: every attention and MLP linear, each with its own A and B (design 5)."""

_TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files beside the weights that decide what a prompt's token ids are and where a response ends."""


def find_model(name: str, directories: tuple[Path, ...]) -> Path:
    """Folder of a model: a path, or a name below one of the directories (deployment setting, and the built-in proposers).

    Raises:
        InputError: no such folder, or it is not a Hugging Face causal LM folder; says where it looked.
    """
    candidates = [Path(name).expanduser(), *(directory / name for directory in directories)]
    for folder in candidates:
        if (folder / "config.json").is_file():
            if not list(folder.glob("*.safetensors")):
                raise InputError(f"model folder {folder} has a config.json but no *.safetensors; tttd reads safetensors only")
            return folder.resolve()
    places = ", ".join(str(directory) for directory in directories)
    raise InputError(
        f"model {name!r} is neither a Hugging Face folder nor below {places}; "
        "download it to a local folder first and name that folder, or set TTTD_MODEL_DIRS"
    )


_digests: dict[tuple[str, tuple[tuple[str, int, int], ...]], str] = {}


def model_digest(folder: Path) -> str:
    """sha256 over configuration, tokenizer, chat template and weights, by file content.

    Hashing 16 GB takes a while, so the result is kept for the process as long as names, sizes and times stay the same.
    """
    files = sorted([*(folder / name for name in _TEXTS if (folder / name).is_file()), *folder.glob("*.safetensors")])
    stats = tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)
    key = (str(folder), stats)
    if key not in _digests:
        h = hashlib.sha256()
        for file in files:
            with file.open("rb") as stream:
                h.update(f"{file.name}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
        _digests[key] = h.hexdigest()
    return _digests[key]


def linear_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """(out, in) of every projection that LoRA adapts, by module name without `.weight`, in layer order.

    Raises:
        InputError: no such projections: the architecture is not a dense Llama/Qwen one.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module.rpartition(".")[2] in PROJECTIONS and len(entry["shape"]) == 2:
                shapes[module] = (entry["shape"][0], entry["shape"][1])
    if not shapes:
        raise InputError(
            f"model {folder}: no {'/'.join(PROJECTIONS)} weights found; supported are dense Llama, Qwen2 and Qwen3 models"
        )
    return dict(sorted(shapes.items(), key=lambda item: _layer_order(item[0])))


def _layer_order(module: str) -> tuple[int, str]:
    numbers = [int(part) for part in module.split(".") if part.isdigit()]
    return (numbers[0] if numbers else -1, module)


def _header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: name -> dtype, shape, offsets."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= 100 << 20:
            raise InputError(f"{file}: not a safetensors file (header of {length} bytes); download the model again")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as error:
            raise InputError(f"{file}: its safetensors header cannot be read ({error}); download the model again") from None
    header.pop("__metadata__", None)
    return header
