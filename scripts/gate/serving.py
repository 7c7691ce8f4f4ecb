"""What an engine answers under right and wrong adapters, and what the gate says of it.

Every fault has a name, the cause that an operator would find: the engine reads adapters wrongly (`loader`), it was given other
files (`files`), or it serves something else under the name (`name`).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file as read_safetensors
from safetensors.numpy import save_file as write_safetensors

from activities.engine_http import EngineClient
from activities.publish.gate import EngineScores, GateResult, NameResult, Names, compare, compare_names, served_share
from activities.publish.placing import WEIGHTS, materialise, variant
from activities.publish.scoring import Scorer
from activities.records import GateEvidence
from activities.run_store import RunStore
from scripts.gate.steps import Update

Scores = tuple[NDArray[np.float64], ...]


@dataclass(frozen=True)
class Served:
    """An adapter as an engine gets it."""

    adapter: str
    """Digest of an AdapterManifest."""
    factor: float = 1.0
    """Times the alpha of its configuration."""
    without_mlp: bool = False
    """As an engine would serve it that ignores gate, up and down projections."""


@dataclass
class Engine:
    """One engine over HTTP, and a directory that it can read."""

    client: EngineClient
    store: RunStore
    directory: Path
    loads: int = 0
    _scorer: Scorer = field(init=False)

    def __post_init__(self) -> None:
        self._scorer = Scorer(self.client)

    def score(self, served: Served, evidence: Sequence[GateEvidence]) -> list[Scores]:
        """Log-probs of each evidence with the adapter loaded under a fresh name."""
        self.loads += 1
        folder = variant(self._files(served), f"trial-{self.loads:06d}", served.factor)
        self.client.load_adapter(folder.name, str(folder))
        try:
            return [self._scorer.score(e.sequences, folder.name) for e in evidence]
        finally:
            self.client.unload_adapter(folder.name)
            shutil.rmtree(folder)

    def forget(self) -> None:
        """Remove every adapter's files."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _files(self, served: Served) -> Path:
        original = self.directory / served.adapter
        if not original.is_dir():
            materialise(self.store.blobs, served.adapter, self.directory, served.adapter)
        if not served.without_mlp:
            return original
        changed = self.directory / f"{served.adapter}-without-mlp"
        if not changed.is_dir():
            variant(original, changed.name, 1.0)
            (changed / WEIGHTS).unlink()
            tensors = read_safetensors(original / WEIGHTS)
            kept = {k: np.zeros_like(v) if ".mlp." in k and ".lora_B." in k else v for k, v in tensors.items()}
            write_safetensors(kept, changed / WEIGHTS, metadata={"format": "pt"})
        return changed


@dataclass(frozen=True)
class Decision:
    """The gate's, on one case."""

    weights: GateResult
    name: NameResult | None
    """Asked only where adapters are amplified, as in a publication."""
    served_share: float | None

    @property
    def passed(self) -> bool:
        return self.weights.passed and (self.name is None or not self.name.cause)


@dataclass
class Answers:
    """The engine's answers to evidence of one update, all with one amplification. What a publication asks twice is asked twice."""

    engine: Engine
    update: Update
    evidence: list[GateEvidence]
    factor: float

    def _score(self, adapter: str, factor: float = 1.0, without_mlp: bool = False) -> list[Scores]:
        return self.engine.score(Served(adapter, factor, without_mlp), self.evidence)

    def decide(self, sibling: Update, stranger: Update) -> dict[str, list[Decision]]:
        """Every case, decided once for each evidence."""
        update, k = self.update, self.factor
        new, old, base = update.after.adapter, update.previous.adapter, update.material.initial.adapter
        others = {"another run's": stranger.after.adapter, "a sibling's": sibling.after.adapter, "no": base}
        if not update.is_first:
            others["version v's"] = old
        initial = self._score(base)
        served = {"right": new, **others}
        plain = {what: self._score(adapter) for what, adapter in served.items()}
        before = initial if update.is_first else self._score(old)
        old_again = self._score(base if update.is_first else old)

        def pair(factor: float, without_mlp: bool = False) -> tuple[list[Scores], list[Scores]]:
            reference = initial if update.is_first else self._score(old, factor, without_mlp)
            return self._score(new, factor, without_mlp), reference

        right, reference = pair(k) if k != 1 else (plain["right"], before)
        loader = {"alpha doubled": pair(2 * k), "alpha halved": pair(k / 2), "MLP part ignored": pair(k, without_mlp=True)}
        files = {what: self._score(adapter, k) if k != 1 else plain[what] for what, adapter in others.items()}
        fresh = self._score(new) if k != 1 else plain["right"]
        again = {what: self._score(adapter) for what, adapter in served.items()} if k != 1 else plain

        def decisions(served: list[Scores], reference: list[Scores], name: str, fresh: list[Scores]) -> list[Decision]:
            named = [Names(*rows) for rows in zip(plain[name], fresh, before, initial, again[name], old_again, strict=True)]
            rows = zip(self.evidence, served, reference, initial, named, strict=True)
            return [_decide(*row, first=update.is_first) for row in rows]

        out = {"right": decisions(right, reference, "right", fresh)}
        out |= {f"loader: {what}": decisions(*scores, "right", fresh) for what, scores in loader.items()}
        out |= {f"files: {what} adapter": decisions(files[what], reference, what, plain[what]) for what in others}
        if k != 1:
            out |= {f"name: {what} adapter": decisions(right, reference, what, fresh) for what in others}
        return out


def _decide(evidence: GateEvidence, new: Scores, old: Scores, initial: Scores, names: Names, *, first: bool) -> Decision:
    weights = compare(evidence, EngineScores(new, old, initial), first_version=first)
    share = served_share(evidence, names.named, names.previous)
    return Decision(weights, compare_names(evidence, names, first_version=first) if evidence.amplification != 1 else None, share)
