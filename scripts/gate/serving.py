"""What an engine answers when an adapter is served under a name, right or wrong, and what the gate says of it.

Every wrong one is a fault that has a name: the cause that an operator would find.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as read_safetensors
from safetensors.numpy import save as write_safetensors

from activities.engine_http import EngineClient
from activities.publish.gate import EngineScores, GateResult, compare
from activities.publish.placing import materialise, remove
from activities.publish.publishing import Publisher
from activities.records import AdapterManifest, RunStore
from scripts.gate.steps import Update

Scores = tuple[NDArray[np.float64], ...]


@dataclass
class Engine:
    """One engine over HTTP, and a directory that it can read."""

    client: EngineClient
    store: RunStore
    directory: Path
    loads: int = 0

    @contextmanager
    def serving(self, adapter: str) -> Iterator[str]:
        """An adapter loaded under a fresh name."""
        self.loads += 1
        name = f"trial-{self.loads:06d}"
        path = materialise(self.store.blobs, adapter, self.directory, name)
        self.client.load_adapter(name, str(path))
        try:
            yield name
        finally:
            self.client.unload_adapter(name)
            remove(self.directory, name)

    def score(self, adapter: str, sequences: tuple[tuple[int, ...], ...]) -> Scores:
        publisher = Publisher(self.store.blobs, "trial", self.client, lambda: "", self.directory, lambda: 0.0)
        with self.serving(adapter) as name:
            return publisher.score(sequences, name)


def scaled(store: RunStore, adapter: str, factor: float) -> str:
    """The adapter as an engine would serve it that takes another alpha: every B times the factor."""
    return _changed(store, adapter, lambda key, value: value * np.float32(factor) if ".lora_B." in key else value)


def without_mlp(store: RunStore, adapter: str) -> str:
    """The adapter as an engine would serve it that ignores gate, up and down projections."""
    return _changed(store, adapter, lambda key, value: np.zeros_like(value) if ".mlp." in key and ".lora_B." in key else value)


def _changed(store: RunStore, adapter: str, change: object) -> str:
    assert callable(change)
    manifest = store.load(AdapterManifest, adapter)
    tensors = read_safetensors(store.blobs.get(manifest.weights))
    weights = write_safetensors({k: np.ascontiguousarray(change(k, v)) for k, v in tensors.items()}, metadata={"format": "pt"})
    return store.put(AdapterManifest(config=manifest.config, weights=store.blobs.put(weights)))


def served(update: Update, sibling: Update, stranger: Update) -> dict[str, str]:
    """Adapter by what it is in place of version v+1.

    Args:
        sibling: a step from the same version on other rollouts of the same grid.
        stranger: a step of the same number in another run.
    """
    store, material = update.material.store, update.material
    cases = {
        "right": update.adapter,
        "base (none applied)": material.initial.adapter,
        "another run's v+1": stranger.adapter,
        "same v, other rollouts": sibling.adapter,
        "alpha doubled": scaled(store, update.adapter, 2.0),
        "alpha halved": scaled(store, update.adapter, 0.5),
        "MLP part ignored": without_mlp(store, update.adapter),
    }
    if material.policy.version > 0:
        cases["version v"] = material.policy.adapter
    return cases


def judge(engine: Engine, update: Update, sibling: Update, stranger: Update) -> dict[str, GateResult]:
    """The gate's answer for each adapter served in place of the right one. References are scored once: they are the same."""
    evidence, material = update.evidence, update.material
    first = material.policy.version == 0
    initial = engine.score(material.initial.adapter, evidence.sequences)
    previous = initial if first else engine.score(material.policy.adapter, evidence.sequences)
    out = {}
    for name, adapter in served(update, sibling, stranger).items():
        new = engine.score(adapter, evidence.sequences)
        out[name] = compare(evidence, EngineScores(new, previous, initial), first_version=first)
    return out
