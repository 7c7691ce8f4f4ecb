"""A run with training, without a model: tests/chain.py, with adapters and optimizer states stored as the trainer stores them.

Only the numbers in them are made up; documents, entries and commits are what the real rooms write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from activities.blobs import Blobs
from activities.records import BaseScores, GateEvidence, RunSpec, TrainRecord
from activities.train.backend import TrainerState
from activities.train.checkpoints import read_config, read_state, write_state
from activities.train.scoring import scores_key
from activities.train.training import next_policy
from tests.chain import Chain
from workflows.contracts.base import Coordinate, Head, Outcome, RunRef
from workflows.contracts.messages import CommitRequest

BESTS = (1.0, 2.0, 1.5, 1.6, 3.0, 2.0, 2.0)
"""Best score of each step's grid, from step 1 on: steps 1, 2 and 5 improve the run's best."""


@dataclass
class TrainedRun:
    """One run of several steps."""

    chain: Chain
    heads: list[Head] = field(default_factory=list)
    """By step, from the first commit on."""
    run: RunRef | None = None

    @classmethod
    def make(cls, blobs: Blobs, folder: Path, steps: int, **request: Any) -> TrainedRun:
        run = cls(Chain.fresh(blobs, folder, **request))
        run.open()
        for _ in range(steps):
            run.step()
        return run

    @property
    def head(self) -> Head:
        return self.heads[-1]

    def open(self) -> Head:
        """Open, or go on from the last commit."""
        self.run, opened = self.chain.open()
        self.heads.append(opened.head)
        return opened.head

    def step(self) -> Head:
        """Sample, judge, train and commit one step."""
        assert self.run is not None
        head, chain, store = self.head, self.chain, self.chain.store
        step = head.step + 1
        plan = chain.select(self.run, head).plan
        for at in chain.coordinates(plan, step):
            chain.write(plan, at, head.policy, score(at))
        batch = chain.assemble(self.run, step, plan, head.policy).batch
        record = self.train(step, batch)
        policy = next_policy(self.run.identity, head.policy, store.load(TrainRecord, record))
        request = CommitRequest(
            run=self.run, step=step, head=head, plan=plan, batch=batch, policy=policy, train_record=record, seconds={"train": 0.5}
        )
        self.heads.append(chain.commit(request).head)
        return self.head

    def train(self, step: int, batch: str) -> str:
        """A train record with an adapter, moments and evidence of their own; deterministic in base and batch."""
        assert self.run is not None
        head, store = self.head, self.chain.store
        before = read_state(store, head.policy.checkpoint)
        rng = np.random.default_rng([step, int(batch[:8], 16)])
        noise = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in sorted(before.adapter.items())}
        after = TrainerState(
            adapter={k: v + noise[k] for k, v in before.adapter.items()},
            exp_avg=noise,
            exp_avg_sq={k: v**2 for k, v in noise.items()},
            steps=before.steps + 1,
        )
        lora = store.load(RunSpec, self.run.spec).request.lora
        checkpoint, adapter = write_state(store, after, read_config(store, head.policy.checkpoint, lora))
        rollouts = tuple(
            sorted(
                e
                for key in store.blobs.store.keys(f"{store.root}/steps/{step:06d}/g00/")
                if key.endswith("/rollout")
                if (e := store.find(key))
            )
        )
        store.claim(
            scores_key(store, step, 0), BaseScores(step=step, group=0, rollouts=rollouts, log_probs=((-1.0,),) * len(rollouts))
        )
        values = ((-1.0 * step, -2.0),)
        gate = store.put(GateEvidence(sequences=((1, 2, step),), new=values, previous=values, initial=values))
        record = TrainRecord(
            step=step,
            base=head.policy.checkpoint,
            batch=batch,
            checkpoint=checkpoint,
            adapter=adapter,
            gate=gate,
            metrics={"kl_policy_base": 0.1},
        )
        return store.claim(store.step_key(step, "train"), record)[0]


def score(at: Coordinate) -> float | Outcome:
    """The last rollout of each group fails; the first of the first group is the step's best."""
    if at.rollout == 2:
        return Outcome.CRASHED
    return BESTS[(at.step - 1) % len(BESTS)] - 0.1 * at.group - 0.01 * at.rollout - 0.001 * (at.step // len(BESTS))
