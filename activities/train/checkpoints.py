"""Adapter and optimizer state as blobs: a PEFT directory that engines and PEFT itself can load, and Adam's moments beside it.

Keys and shapes are PEFT's own, float32. The same state gives the same bytes. Reads and writes arrays; knows no model and no torch.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as read_safetensors
from safetensors.numpy import save as write_safetensors

from activities.errors import CorruptBlob, InputError
from activities.models import PROJECTIONS
from activities.records import AdapterManifest, Checkpoint
from activities.run_store import RunStore
from activities.train.backend import Tensors, TrainerState
from workflows.contracts.base import Digest
from workflows.contracts.request import LoraSettings

_METADATA = {"format": "pt"}
"""What PEFT and transformers expect in the header, although no torch is needed to write the file."""
_FIRST, _SECOND, _STEP = "exp_avg/", "exp_avg_sq/", "step"


def read_config(store: RunStore, digest: Digest, lora: LoraSettings) -> Digest:
    """Blob of a checkpoint's adapter_config.json, which every later version carries on unchanged.

    Raises:
        InputError: the adapter was made with another rank, alpha or target set than the run asks for.
    """
    adapter = store.load(AdapterManifest, store.load(Checkpoint, digest).adapter)
    config: dict[str, Any] = json.loads(store.blobs.get(adapter.config))
    found = {
        "r": config.get("r"),
        "lora_alpha": config.get("lora_alpha"),
        "target_modules": sorted(config.get("target_modules") or []),
        "bias": config.get("bias", "none"),
        "use_dora": bool(config.get("use_dora", False)),
        "use_rslora": bool(config.get("use_rslora", False)),
    }
    wanted = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(PROJECTIONS),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
    }
    if different := [f"{key} {found[key]!r} instead of {wanted[key]!r}" for key in found if found[key] != wanted[key]]:
        raise InputError(f"checkpoint {digest} was made for another adapter: {'; '.join(different)}")
    return adapter.config


def read_state(store: RunStore, digest: Digest) -> TrainerState:
    """The state that a checkpoint manifest names.

    Raises:
        CorruptBlob: a file is missing or damaged.
    """
    manifest = store.load(Checkpoint, digest)
    adapter = store.load(AdapterManifest, manifest.adapter)
    tensors = read_tensors(store, adapter.weights)
    if manifest.optimizer is None:
        return TrainerState(adapter=tensors, steps=manifest.step)
    moments = read_tensors(store, manifest.optimizer)
    taken = int(moments.pop(_STEP)[0]) if _STEP in moments else -1
    if taken != manifest.step:
        raise CorruptBlob(f"checkpoint {digest}: {manifest.step} optimizer steps, but its Adam state has taken {taken}")
    return TrainerState(
        adapter=tensors,
        exp_avg={k.removeprefix(_FIRST): v for k, v in moments.items() if k.startswith(_FIRST)},
        exp_avg_sq={k.removeprefix(_SECOND): v for k, v in moments.items() if k.startswith(_SECOND)},
        steps=taken,
    )


def write_state(store: RunStore, state: TrainerState, config: Digest) -> tuple[Digest, Digest]:
    """Store a state. Returns (digest of the Checkpoint, digest of the AdapterManifest)."""
    adapter = store.put(
        AdapterManifest(
            config=config,
            weights=store.blobs.put(write_safetensors(dict(state.adapter), metadata=_METADATA)),
        )
    )
    moments: dict[str, NDArray[np.float32]] = {
        **{_FIRST + key: value for key, value in state.exp_avg.items()},
        **{_SECOND + key: value for key, value in state.exp_avg_sq.items()},
        _STEP: np.array([state.steps], dtype=np.float32),
    }
    optimizer = store.blobs.put(write_safetensors(moments, metadata=_METADATA)) if state.exp_avg else None
    return store.put(Checkpoint(step=state.steps, adapter=adapter, optimizer=optimizer)), adapter


def read_tensors(store: RunStore, digest: Digest) -> dict[str, NDArray[np.float32]]:
    """The float32 arrays of a safetensors blob."""
    try:
        tensors: dict[str, NDArray[Any]] = read_safetensors(store.blobs.get(digest))
    except ValueError as error:  # safetensors' own errors derive from it
        raise CorruptBlob(f"blob {digest} is no safetensors file: {error}") from None
    if odd := sorted(k for k, v in tensors.items() if v.dtype != np.float32):
        raise CorruptBlob(f"blob {digest}: tensors are not float32: {', '.join(odd[:3])}")
    return tensors


def b_norm(adapter: Tensors) -> float:
    """Frobenius norm over every lora_B: 0 exactly for an adapter that changes nothing."""
    return float(sum(float(np.square(v, dtype=np.float64).sum()) for k, v in adapter.items() if ".lora_B." in k) ** 0.5)
