"""A step once, whoever comes first: create-once records around the pure step, and the model that stays in memory between steps.

Temporal runs an activity at least once, so two trainers may work on one step at the same time. Both compute; the first record
written wins and the other returns it; what the loser stored are orphaned blobs. Knows nothing of Temporal itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from activities.blobs import Blobs
from activities.errors import InputError, TrainConflict
from activities.models import model_digest
from activities.records import BaseScores, RunSpec, TrainRecord, policy_name
from activities.run_store import RunStore
from activities.train.backend import TrainerBackend
from activities.train.scoring import score_group, scores_key
from activities.train.stepping import StepInputs, train_step
from workflows.contracts.base import Digest, PolicyRef
from workflows.contracts.messages import BaseScored, ScoreBaseRequest, Trained, TrainRequest
from workflows.contracts.request import LoraSettings

MakeBackend = Callable[[Path, LoraSettings], TrainerBackend]


@dataclass
class _Resident:
    """The one model in memory, and which checkpoint its adapter and moments are."""

    folder: Path
    model: Digest
    lora: LoraSettings
    backend: TrainerBackend
    checkpoint: Digest | None = None
    """None while a step is under way or after one that failed: the state in memory is then nobody's."""


class Trainer:
    """Trains steps of any run, one at a time.

    Args:
        model_locator: folder of a model by the name that a run request gives it.
        make_backend: builds the back-end for a folder and adapter shape.
    """

    def __init__(
        self,
        blobs: Blobs,
        model_locator: Callable[[str], Path],
        make_backend: MakeBackend,
        clock: Callable[[], float],
    ) -> None:
        self._blobs = blobs
        self._locate = model_locator
        self._make_backend = make_backend
        self._clock = clock
        self._resident: _Resident | None = None
        self._lock = threading.Lock()

    def train(self, request: TrainRequest, progress: Callable[[str], None] = lambda _: None) -> Trained:
        """Return the step's record, making it first if there is none.

        Raises:
            TrainConflict: the step was trained already, from another checkpoint or batch.
            InputError: the model found here is not the one that the run was opened with.
            TrainCheckFailed, IncompleteGrid, CorruptBlob: see `train_step`.
        """
        store = RunStore(self._blobs, request.run.run_id)
        key = store.step_key(request.step, "train")
        if (found := store.find(key)) is not None:
            return _answer(store, request, found)
        with self._lock:
            progress("model")
            spec = store.spec(request.run)
            resident = self._model(spec)
            inputs = StepInputs(request.step, request.batch, request.policy)
            held = resident.checkpoint == request.policy.checkpoint
            resident.checkpoint = None
            record = train_step(store, spec, inputs, resident.backend, resident=held, clock=self._clock, progress=progress)
            winner, _ = store.claim(key, record)
            answer = _answer(store, request, winner)
            if answer.policy.checkpoint == record.checkpoint:
                resident.checkpoint = record.checkpoint
            return answer

    def score_base(self, request: ScoreBaseRequest, progress: Callable[[str], None] = lambda _: None) -> BaseScored:
        """Return the group's scores under the frozen base, making them first if there are none.

        Raises:
            InputError: see `score_group` and `train`.
        """
        store = RunStore(self._blobs, request.run.run_id)
        key = scores_key(store, request.step, request.group)
        digest = store.find(key)
        if digest is None:
            with self._lock:
                progress("model")
                backend = self._model(store.spec(request.run)).backend
                progress("base")
                digest, _ = store.claim(key, score_group(store, request, backend))
        scores = store.load(BaseScores, digest)
        return BaseScored(record=digest, tokens=sum(map(len, scores.log_probs)))

    def close(self) -> None:
        """Give back the model and whatever its back-end holds outside this process."""
        held, self._resident = self._resident, None
        if held is not None:
            held.backend.close()

    def _model(self, spec: RunSpec) -> _Resident:
        folder, lora = self._locate(spec.request.model), spec.request.lora
        digest = model_digest(folder)
        if digest != spec.model_digest:
            raise InputError(
                f"model {spec.request.model!r} in {folder} has digest {digest[:12]}, run {spec.run_id} was opened with "
                f"{spec.model_digest[:12]}; restore that model, or start a new run with this one"
            )
        held = self._resident
        if held is None or (held.folder, held.model, held.lora) != (folder, digest, lora):
            self.close()  # free the old model before the new one is read
            held = self._resident = _Resident(folder, digest, lora, self._make_backend(folder, lora))
        return held


def _answer(store: RunStore, request: TrainRequest, digest: Digest) -> Trained:
    record = store.load(TrainRecord, digest)
    if (record.step, record.base, record.batch) != (request.step, request.policy.checkpoint, request.batch):
        raise TrainConflict(
            f"run {store.run_id} step {request.step} was trained from checkpoint {record.base[:12]} and batch {record.batch[:12]}, "
            f"asked for are checkpoint {request.policy.checkpoint[:12]} and batch {request.batch[:12]}. Two histories share this "
            "run id: stop one of them, or fork the run under another name."
        )
    return Trained(
        record=digest,
        policy=next_policy(request.run.identity, request.policy, record),
        kl=record.metrics.get("kl_policy_base"),
        grad_norm=record.metrics.get("grad_norm"),
        notes=record.notes,
    )


def next_policy(identity: Digest, policy: PolicyRef, record: TrainRecord) -> PolicyRef:
    """The version that a step made."""
    version = policy.version + 1
    return PolicyRef(
        version=version,
        name=policy_name(identity, version, record.adapter),
        checkpoint=record.checkpoint,
        adapter=record.adapter,
        gate=record.gate,
    )
