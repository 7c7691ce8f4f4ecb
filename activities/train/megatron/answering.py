"""What a rank does with each request. Knows the requests, not the processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from megatron.core import parallel_state

from activities.train.megatron.attention import choose_kernel
from activities.train.megatron.compute import RankTrainer
from activities.train.megatron.model import PackedModel
from activities.train.megatron.options import MegatronOptions
from activities.train.megatron.place import Place
from activities.train.megatron.weights import HuggingFaceWeights
from activities.train.megatron.wire import (
    Accumulate,
    Answer,
    Apply,
    Beat,
    Derivatives,
    Fingerprint,
    Floats,
    GetState,
    Gradients,
    Load,
    LogProbs,
    Open,
    Request,
    Restore,
    Scored,
    SquaredNorms,
    Trainable,
)


class Speaker(Protocol):
    """The pipe, as this module uses it."""

    def say(self, answer: Answer) -> None: ...

    def beat(self, doing: str) -> None: ...

    def hear(self) -> Any: ...


class Answering:
    """Holds the open model, and answers."""

    def __init__(self, place: Place, options: MegatronOptions, channel: Speaker) -> None:
        self._place = place
        self._options = options
        self._channel = channel
        self._trainer: RankTrainer | None = None
        self.attention, self._kernel = choose_kernel(options.attention, place.device, place.dtype)

    @property
    def stats(self) -> Mapping[str, float]:
        """Figures of the work last done."""
        return {} if self._trainer is None else self._trainer.stats

    def answer(self, request: Request) -> Any:
        """Do what is asked. See wire.py for what comes back."""
        if isinstance(request, Open):
            self._trainer = None  # the old model goes before the new one comes
            self._trainer = self._open(request)
            return None
        if self._trainer is None:
            raise RuntimeError(f"{type(request).__name__} before Open")
        trainer = self._trainer
        match request:
            case Load():
                trainer.load(request)
            case GetState():
                trainer.keep(request.number)
                return trainer.state()
            case Restore():
                trainer.restore(request.number)
            case LogProbs():
                for number, scored in trainer.log_probs(request.batches, request.adapter, request.in_float32):
                    self._report(number, scored)
            case Accumulate():
                trainer.accumulate(request.batches, request.longest, self._derivatives, self._channel.beat)
            case Gradients():
                return trainer.gradients()
            case SquaredNorms():
                return trainer.squared_norms()
            case Apply():
                trainer.apply(request.optimizer)
            case Trainable():
                return trainer.trainable()
            case Fingerprint():
                return trainer.fingerprint()
        return None

    def _open(self, request: Open) -> RankTrainer:
        """Build the model and read this rank's part of it.

        Raises:
            InputError: the files are not those of such a model.
            RuntimeError: this megatron-core built a model with other parameters than we fill.
        """
        model = PackedModel(
            request.shape,
            request.lora,
            request.output_head,
            self._place,
            self._kernel,
            self._options.logits_per_chunk,
        )
        unread = dict(model.base())
        ranks = (self._place.tensor_rank, self._place.tensor_ranks)
        with torch.no_grad(), HuggingFaceWeights(request.folder, request.shape, *ranks) as weights:
            for name, tensor in weights.tensors():
                if name not in unread or unread[name].shape != tensor.shape:
                    raise RuntimeError(f"this megatron-core has no parameter {name} of shape {tuple(tensor.shape)}")
                unread.pop(name).copy_(tensor)
                self._channel.beat(name)
        if unread:
            raise RuntimeError(f"this megatron-core has parameters that nothing fills: {', '.join(sorted(unread)[:3])}")
        return RankTrainer(
            model,
            request.lora,
            self._options,
            self._place,
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_data_parallel_group(),
        )

    def _report(self, number: int, scored: tuple[Floats, ...]) -> None:
        self._channel.say(Scored(number, scored) if self._place.speaks else Beat(f"micro-batch {number}"))

    def _derivatives(self, number: int, scored: tuple[Floats, ...]) -> Floats:
        """Report a micro-batch, and wait for the derivatives of the loss."""
        self._report(number, scored)
        answer = self._channel.hear()
        if not isinstance(answer, Derivatives) or answer.number != number:
            raise RuntimeError(f"expected the derivatives of micro-batch {number}, got {answer!r:.100}")
        return answer.values
