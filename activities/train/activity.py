"""The `train` activity."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from temporalio import activity

from activities.blobs import Blobs
from activities.context import beating, log, translate_errors
from activities.train.backend import TrainerBackend
from activities.train.torch_backend import TorchBackend, TorchOptions
from activities.train.training import Trainer
from workflows import names
from workflows.contracts.messages import Trained, TrainRequest
from workflows.contracts.request import LoraSettings


class TrainActivities:
    """Holds the base model in memory between steps, so one process trains one model.

    Args:
        model_locator: folder of a model by its name in the request.
        threads: CPU threads of torch; equal bits are promised for equal numbers only.
        options: for a GPU; replaces `threads`.
    """

    def __init__(
        self, blobs: Blobs, model_locator: Callable[[str], Path], threads: int = 1, options: TorchOptions | None = None
    ) -> None:
        chosen = options or TorchOptions(threads=threads)

        def make_backend(folder: Path, lora: LoraSettings) -> TrainerBackend:
            return TorchBackend(folder, lora, chosen)

        self._trainer = Trainer(blobs, model_locator, make_backend, time.monotonic)

    # A cancelled thread must not be interrupted inside a write: the step is finished, and its result is first or orphaned.
    @activity.defn(name=names.TRAIN, no_thread_cancel_exception=True)
    @translate_errors
    def train(self, request: TrainRequest) -> Trained:
        phase = "start"

        def progress(now: str) -> None:
            nonlocal phase
            phase = now

        with beating(lambda: phase):
            trained = self._trainer.train(request, progress)
        log.info("step_trained", policy=trained.policy.name, kl=trained.kl, grad_norm=trained.grad_norm, notes=list(trained.notes))
        return trained
