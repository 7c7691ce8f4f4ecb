"""Policy version 0: a PEFT adapter that changes nothing (B = 0), made from the headers of the model's weight files, without torch.

Step 0 serves an adapter too, so that every request of a run names one and a base answer can never pass for a policy's
(design 4; the bug class behind several peers' "from scratch" runs).
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import safetensors.numpy

from activities.models import PROJECTIONS, linear_shapes
from activities.records import AdapterManifest, Checkpoint, RunSpec, canonical_json, policy_name
from activities.run_store import RunStore
from workflows.contracts.base import PolicyRef


def make_initial_policy(store: RunStore, spec: RunSpec, model: Path) -> PolicyRef:
    """Store version 0 and return its reference. Deterministic in (model, rank, alpha, seed)."""
    lora = spec.request.lora
    config = adapter_config(lora.rank, lora.alpha, spec.model_digest)
    weights = safetensors.numpy.save(identity_weights(linear_shapes(model), lora.rank, spec.request.seed))
    adapter = store.put(AdapterManifest(config=store.blobs.put(canonical_json(config)), weights=store.blobs.put(weights)))
    checkpoint = store.put(Checkpoint(step=0, adapter=adapter, optimizer=None))
    return PolicyRef(version=0, name=policy_name(spec.identity, 0, adapter), checkpoint=checkpoint, adapter=adapter)


def adapter_config(rank: int, alpha: int, model: str) -> dict[str, object]:
    """adapter_config.json as PEFT reads it; the base model is named by digest, since a path means nothing elsewhere."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": f"sha256:{model}",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(PROJECTIONS),
        "inference_mode": True,
    }


def identity_weights(shapes: dict[str, tuple[int, int]], rank: int, seed: int) -> dict[str, np.ndarray]:
    """LoRA A (rank, in), uniform as PEFT draws it (Kaiming with a = √5, bound 1/√in); B (out, rank) zero; float32."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for module, (rows, columns) in shapes.items():
        bound = 1 / math.sqrt(columns)
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = rng.uniform(-bound, bound, (rank, columns)).astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = np.zeros((rows, rank), np.float32)
    return tensors
