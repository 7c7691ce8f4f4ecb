"""A trainer's back-end without a model: log-probs from a formula, a step that moves one weight. Knows no reward and no store.

Adapter and moments have the real shapes, so that checkpoints have the real size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from activities.train.backend import Floats, GradientOf, ScoredSequence, TrainerBackend, TrainerState
from scripts.scale.arithmetic import STEP, log_probs, strength_key, strength_of
from workflows.contracts.request import LoraSettings, OptimizerSettings

work_seconds = 0.0
"""Spent inside the back-end of this process, without what it calls."""


class NoOpBackend(TrainerBackend):
    """See :class:`TrainerBackend`; takes the arguments of the torch back-end and looks at none."""

    def __init__(self, folder: Path, lora: LoraSettings, options: object = None) -> None:
        self._adapter: dict[str, NDArray[np.float32]] = {}
        self._moments: dict[str, NDArray[np.float32]] = {}
        self._steps = 0
        self._squares = 0.0

    def load(self, state: TrainerState) -> None:
        with _working():
            self._adapter = {key: value.copy() for key, value in state.adapter.items()}
            self._moments = {key: np.zeros_like(value) for key, value in state.adapter.items()} if state.steps else {}
            self._steps = state.steps
            self._squares = 0.0

    def state(self) -> TrainerState:
        with _working():
            return TrainerState(
                adapter={key: value.copy() for key, value in self._adapter.items()},
                exp_avg=dict(self._moments),
                exp_avg_sq=dict(self._moments),
                steps=self._steps,
            )

    def log_probs(self, sequences: Sequence[ScoredSequence], *, adapter: bool, in_float32: bool = False) -> list[Floats]:
        with _working():
            strength = strength_of(self._adapter) if adapter and self._adapter else 0.0
            return [log_probs(s.tokens, s.first, strength) for s in sequences]

    def accumulate(self, sequences: Sequence[ScoredSequence], gradient_of: GradientOf) -> list[Floats]:
        found = self.log_probs(sequences, adapter=True)
        for i, values in enumerate(found):
            self._squares += float(np.square(gradient_of(i, values)).sum())
        return found

    def gradient_norm(self) -> float:
        return math.sqrt(self._squares)

    def apply(self, optimizer: OptimizerSettings) -> None:
        with _working():
            self._adapter[strength_key(self._adapter)].flat[0] += np.float32(STEP)
            self._moments = {key: np.zeros_like(value) for key, value in self._adapter.items()}
            self._steps += 1
            self._squares = 0.0

    def trainable_names(self) -> frozenset[str]:
        return frozenset(self._adapter)

    def adapter_names(self) -> frozenset[str]:
        return frozenset(self._adapter)

    def base_fingerprint(self) -> str:
        return "no base"


@contextmanager
def _working() -> Iterator[None]:
    global work_seconds
    began = time.perf_counter()
    try:
        yield
    finally:
        work_seconds += time.perf_counter() - began
