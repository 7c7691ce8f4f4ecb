"""Real single optimizer steps, many from few stored grids: a chain of them from one version, each on other rollouts of its grid.

A part of a grid is a grid: its rollouts are on-policy and judged, so a step on it is one that a smaller run could have taken. The
further steps of a chain train rollouts that are a few steps old, at most. Knows no engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from activities.records import Batch, BatchRow, GateEvidence, RunSpec, StepCommit, Verdict
from activities.run_store import RunStore
from activities.train.backend import TrainerBackend
from activities.train.checkpoints import read_state
from activities.train.evidence import choose_sequences, collect
from activities.train.grid import load_grid
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
    number: int
    """Of the chain's steps, from 0."""
    previous: PolicyRef
    """What the step started from: the material's version, or the step of the chain before."""
    after: PolicyRef
    batch: str
    """Digest of the Batch that was trained."""
    policy: PolicyRef
    """What the batch is of: the material's version by name, `previous` by content."""
    rollouts: int

    @property
    def is_first(self) -> bool:
        """The step started from B = 0."""
        return self.previous.adapter == self.material.initial.adapter


def read_material(store: RunStore, learning_rate: float | None = None, *, draw_rewards: bool = False) -> list[Material]:
    """Every step of a run that has a batch, oldest first.

    Args:
        learning_rate: of the steps to be taken; None: the run's own.
        draw_rewards: in the judge's stead, uniform in [0, 1): a model that is a shape with random weights earns none, and a step
            without rewards moves nothing.

    Raises:
        SystemExit: the run has none.
    """
    spec = store.read(RunSpec, f"{store.root}/open")
    if spec is not None and learning_rate is not None:
        optimizer = spec.request.optimizer.model_copy(update={"learning_rate": learning_rate})
        spec = spec.model_copy(update={"request": spec.request.model_copy(update={"optimizer": optimizer})})
    found = []
    for step in range(1, (store.last_step() or 0) + 1):
        before, batch = store.commit_digest(step - 1), store.read(Batch, store.step_key(step, "batch"))
        if spec is None or before is None or batch is None:
            continue
        commit = store.load(StepCommit, before)
        rows = _rewarded(store, batch.rows) if draw_rewards else batch.rows
        found.append(Material(store, spec, step, commit.policy, commit.initial_policy, rows))
    if not found:
        raise SystemExit(f"run {store.run_id} has no step with a batch; let it finish one first")
    return found


def _rewarded(store: RunStore, rows: Sequence[BatchRow]) -> tuple[BatchRow, ...]:
    rng = random.Random(f"rewards {store.run_id}")
    found = []
    for row in rows:
        reward = rng.random()
        verdict = store.load(Verdict, row.verdict).model_copy(update={"reward": reward})
        found.append(row.model_copy(update={"reward": reward, "verdict": store.put(verdict)}))
    return tuple(found)


def parts(material: Material, count: int, rng: random.Random) -> list[list[BatchRow]]:
    """A grid cut into parts without a common rollout, each with as many rollouts of every group."""
    out: list[list[BatchRow]] = [[] for _ in range(count)]
    for group in sorted({row.at.group for row in material.rows}):
        rows = [row for row in material.rows if row.at.group == group]
        rng.shuffle(rows)
        size = len(rows) // count
        for i, part in enumerate(out):
            part.extend(rows[i * size : (i + 1) * size])
    return out


def chain(
    backend: TrainerBackend, material: Material, steps: int, count: int, rng: random.Random
) -> Iterator[tuple[Update, Update]]:
    """Steps one after the other, each with a sibling: a step from the same version on other rollouts.

    Args:
        steps: length of the chain; 2 · steps parts of the grid are used.
        count: parts that the grid is cut into, at least 2 · steps.
    """
    cut = parts(material, count, rng)
    before = material.policy
    for number in range(steps):
        update = take_step(backend, material, before, number, cut[2 * number])
        yield update, take_step(backend, material, before, number, cut[2 * number + 1])
        before = update.after


def take_step(backend: TrainerBackend, material: Material, before: PolicyRef, number: int, rows: Sequence[BatchRow]) -> Update:
    """Train once on these rows, by the train room's own function."""
    store = material.store
    ordered = tuple(sorted(rows, key=lambda row: (row.at.group, row.at.rollout)))
    batch = store.put(
        Batch(step=material.step, policy_version=material.policy.version, plan=material.rows[0].rollout, rows=ordered)
    )
    # The name and number of the version that sampled the grid, with the weights that the chain has come to.
    policy = material.policy.model_copy(update={"checkpoint": before.checkpoint, "adapter": before.adapter})
    inputs = StepInputs(material.step, batch, policy)
    record = train_step(store, material.spec, inputs, backend, resident=False, clock=time.monotonic)
    after = material.policy.model_copy(update={"checkpoint": record.checkpoint, "adapter": record.adapter, "gate": record.gate})
    return Update(material, number, before, after, batch, policy, len(ordered))


def evidence_sets(backend: TrainerBackend, update: Update, count: int) -> list[GateEvidence]:
    """The update's evidence, several times from sequences that none has in common, each as the train room collects it."""
    store = update.material.store
    grid = load_grid(store, update.batch, update.material.step, update.policy)
    sequences = choose_sequences(grid, limit=sum(len(r.tokens) for r in grid.rollouts))
    before, after = read_state(store, update.previous.checkpoint), read_state(store, update.after.checkpoint)
    return [collect(backend, before, after, sequences[i::count]).document() for i in range(count)]
