"""Real single optimizer steps, many from few stored grids: each on a random part of one step's grid. Knows no engine.

A part of a grid is a grid: its rollouts are on-policy and judged, so a step on it is one that a smaller run could have taken.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from activities.records import Batch, BatchRow, GateEvidence, RunSpec, RunStore, StepCommit, TrainRecord
from activities.train.backend import TrainerBackend
from activities.train.stepping import StepInputs, train_step
from workflows.contracts.base import PolicyRef


@dataclass(frozen=True)
class Material:
    """What one committed step of a run leaves to train on."""

    store: RunStore
    spec: RunSpec
    step: int
    policy: PolicyRef
    """Version v, which sampled the grid."""
    initial: PolicyRef
    rows: tuple[BatchRow, ...]


@dataclass(frozen=True)
class Update:
    """One step on a part of a grid."""

    material: Material
    adapter: str
    """Digest of the AdapterManifest of version v+1."""
    evidence: GateEvidence
    rollouts: int


def read_material(store: RunStore) -> list[Material]:
    """Every trained step of a run, oldest first.

    Raises:
        SystemExit: the run has none.
    """
    last = store.last_step() or 0
    found = []
    for step in range(1, last + 1):
        before, record = store.commit_digest(step - 1), store.read(TrainRecord, store.step_key(step, "train"))
        if before is None or record is None:
            continue
        commit = store.load(StepCommit, before)
        spec = store.read(RunSpec, f"{store.root}/open")
        assert spec is not None, "a run with commits has been opened"
        rows = store.load(Batch, record.batch).rows
        found.append(Material(store, spec, step, commit.policy, commit.initial_policy, rows))
    if not found:
        raise SystemExit(f"run {store.run_id} has no trained step; run it with train=on first")
    return found


def split(material: Material, rng: random.Random) -> tuple[list[BatchRow], list[BatchRow]]:
    """Two halves of a grid without a common rollout: half of every group's rollouts each."""
    halves: tuple[list[BatchRow], list[BatchRow]] = ([], [])
    groups = sorted({row.at.group for row in material.rows})
    for group in groups:
        rows = [row for row in material.rows if row.at.group == group]
        rng.shuffle(rows)
        half = len(rows) // 2
        halves[0].extend(rows[:half])
        halves[1].extend(rows[half : 2 * half])
    return halves


def take_step(backend: TrainerBackend, material: Material, rows: Sequence[BatchRow]) -> Update:
    """Train once from version v on these rows, by the train room's own function."""
    store = material.store
    ordered = tuple(sorted(rows, key=lambda row: (row.at.group, row.at.rollout)))
    batch = store.put(
        Batch(step=material.step, policy_version=material.policy.version, plan=material.rows[0].rollout, rows=ordered)
    )
    inputs = StepInputs(material.step, batch, material.policy)
    record = train_step(store, material.spec, inputs, backend, resident=False, clock=time.monotonic)
    return Update(material, record.adapter, store.load(GateEvidence, record.gate), len(ordered))
