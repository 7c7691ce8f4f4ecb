"""The `train` activity."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from temporalio import activity

from activities.blobs import Blobs
from activities.context import beating, log, translate_errors
from activities.train.backend import TrainerBackend
from activities.train.megatron.backend import MegatronBackend
from activities.train.megatron.options import MegatronOptions
from activities.train.torch_backend import TorchBackend, TorchOptions
from activities.train.training import Trainer
from workflows import names
from workflows.contracts.messages import BaseScored, ScoreBaseRequest, Trained, TrainRequest
from workflows.contracts.request import LoraSettings


class TrainActivities:
    """Holds the base model in memory between steps, so one process trains one model.

    Args:
        model_locator: folder of a model by its name in the request.
        options: of the back-end; their type chooses it.
    """

    def __init__(
        self, blobs: Blobs, model_locator: Callable[[str], Path], options: TorchOptions | MegatronOptions | None = None
    ) -> None:
        chosen = options or TorchOptions()
        if isinstance(chosen, MegatronOptions):
            chosen.check()

        def make_backend(folder: Path, lora: LoraSettings) -> TrainerBackend:
            if isinstance(chosen, MegatronOptions):
                return MegatronBackend(folder, lora, chosen)
            return TorchBackend(folder, lora, chosen)

        self._trainer = Trainer(blobs, model_locator, make_backend, time.monotonic)

    def close(self) -> None:
        """End the trainer's processes, if it has any."""
        self._trainer.close()

    @activity.defn(name=names.SCORE_BASE, no_thread_cancel_exception=True)
    @translate_errors
    def score_base(self, request: ScoreBaseRequest) -> BaseScored:
        with _beating_phase() as progress:
            scored = self._trainer.score_base(request, progress)
        log.info("group_scored", run=request.run.run_id, step=request.step, group=request.group, tokens=scored.tokens)
        return scored

    # A cancelled thread must not be interrupted inside a write: the step is finished, and its result is first or orphaned.
    @activity.defn(name=names.TRAIN, no_thread_cancel_exception=True)
    @translate_errors
    def train(self, request: TrainRequest) -> Trained:
        with _beating_phase() as progress:
            trained = self._trainer.train(request, progress)
        log.info("step_trained", policy=trained.policy.name, kl=trained.kl, grad_norm=trained.grad_norm, notes=list(trained.notes))
        return trained


@contextmanager
def _beating_phase() -> Iterator[Callable[[str], None]]:
    """Heartbeats that tell the phase last reported."""
    phase = "start"

    def progress(now: str) -> None:
        nonlocal phase
        phase = now

    with beating(lambda: phase):
        yield progress
