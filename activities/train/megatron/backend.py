"""The train worker's side of the Megatron back-end: a TrainerBackend over rank processes. Imports neither megatron nor torch.

State is split over ranks and joined here, in numpy, so it goes in and out bit for bit. The base model stays in the ranks' memory
between steps. If ranks are lost, the call fails with TrainerLost and the next `load` starts new ones.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from activities.errors import CorruptBlob, TrainCheckFailed, TrainerLost
from activities.train.backend import Floats, GradientOf, ScoredSequence, Tensors, TrainerBackend, TrainerState
from activities.train.megatron.options import MegatronOptions
from activities.train.megatron.packing import pack
from activities.train.megatron.processes import RankGroup, start_ranks
from activities.train.megatron.shape import check_layout, read_shape
from activities.train.megatron.sharding import adapter_shapes, join, shard, split_axis
from activities.train.megatron.wire import (
    Accumulate,
    Answer,
    Apply,
    Array,
    Derivatives,
    Fingerprint,
    GetState,
    Gradients,
    Load,
    LogProbs,
    Open,
    Packed,
    Request,
    Restore,
    Scored,
    SquaredNorms,
    Trainable,
)
from workflows.contracts.request import LoraSettings, OptimizerSettings


class MegatronBackend(TrainerBackend):
    """See :class:`TrainerBackend`. Before the first `load` there is no adapter, only the base.

    Args:
        folder: a Hugging Face folder of a dense Llama, Qwen2 or Qwen3 model.
        options: by default those of `group`.
        group: ranks that are there already and stay the caller's to end; None: ranks of its own, as `options` say.

    Raises:
        InputError: model or options are not supported; names what.
        TrainerLost: the ranks did not come up.
    """

    def __init__(
        self, folder: Path, lora: LoraSettings, options: MegatronOptions | None = None, group: RankGroup | None = None
    ) -> None:
        self._options = options or (group.options if group is not None else MegatronOptions())
        shape = read_shape(folder)
        check_layout(shape, self._options.tensor_parallel)
        self._shapes = adapter_shapes(shape, lora, self._options.output_head)
        self._open = Open(folder, shape, lora, self._options.output_head)
        self._group: RankGroup | None = None
        self._given = group
        self._loaded = False
        self._numbers = itertools.count()
        self._kept: dict[int, TrainerState] = {}
        self._ranks()

    # Ranks ----------------------------------------------------------------------------------------------------------------
    def _ranks(self) -> RankGroup:
        """The rank processes with the model open, started if there are none."""
        if self._group is None or not self._group.alive:
            self.close()
            group = self._given if self._given is not None and self._given.alive else start_ranks(self._options)
            try:
                group.ask([self._open] * self._options.processes, patience_seconds=self._options.start_seconds)
            except BaseException:
                group.kill()
                raise
            self._group = group
            self._loaded = False
            self._kept = {}
        return self._group

    def _held(self) -> RankGroup:
        """The rank processes that hold the state that was loaded: new ones would not.

        Raises:
            TrainerLost: there are none.
        """
        if self._group is None or not self._group.alive or not self._loaded:
            raise TrainerLost(
                "the trainer's ranks hold no adapter: it was never loaded, or they ended since; the step is tried again"
            )
        return self._group

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [] if self._group is None else self._group.pids

    @property
    def stats(self) -> Mapping[str, float]:
        """Figures of the last request: peak memory of the largest rank in bytes, layers recomputed."""
        return {} if self._group is None else self._group.stats

    @property
    def attention(self) -> str:
        """The attention kernel that the ranks have chosen."""
        return "" if self._group is None else self._group.attention

    def close(self) -> None:
        if self._group is not None and self._group is not self._given:
            self._group.stop()
        self._group = None

    # State ----------------------------------------------------------------------------------------------------------------
    def load(self, state: TrainerState) -> None:
        group = self._ranks()
        if (number := next((n for n, kept in self._kept.items() if kept is state), None)) is not None:
            group.ask([Restore(number)] * self._options.processes)
            return
        self._check(state.adapter, "adapter")
        if state.exp_avg or state.exp_avg_sq:
            self._check(state.exp_avg, "Adam's first moments")
            self._check(state.exp_avg_sq, "Adam's second moments")
        parts = [
            Load(self._part(state.adapter, t), self._part(state.exp_avg, t), self._part(state.exp_avg_sq, t), state.steps)
            for t in range(self._options.tensor_parallel)
        ]
        group.ask(parts * self._options.data_parallel)
        self._loaded = True

    def state(self) -> TrainerState:
        number = next(self._numbers)
        answers: list[Load] = self._ask_all(GetState(number))
        state = TrainerState(
            adapter=self._whole([a.adapter for a in answers], "adapter"),
            exp_avg=self._whole([a.exp_avg for a in answers], "Adam's first moments"),
            exp_avg_sq=self._whole([a.exp_avg_sq for a in answers], "Adam's second moments"),
            steps=answers[0].steps,
        )
        # The ranks keep what they have just told, and need not be sent it again. It is the same as long as nobody writes to it.
        for array in (*state.adapter.values(), *state.exp_avg.values(), *state.exp_avg_sq.values()):
            array.flags.writeable = False
        self._kept = dict([*self._kept.items(), (number, state)][-2:])
        return state

    def gradients(self) -> Tensors:
        """The accumulated gradient, whole; empty if there is none."""
        return self._whole(self._ask_all(Gradients()), "gradient")

    def _ask_all(self, request: Request, *, of_state: bool = True) -> list[Any]:
        group = self._held() if of_state else self._ranks()
        return group.ask([request] * self._options.processes)

    def _part(self, tensors: Tensors, tensor_rank: int) -> dict[str, Array]:
        return {key: shard(key, array, tensor_rank, self._options.tensor_parallel) for key, array in tensors.items()}

    def _whole(self, parts: Sequence[Mapping[str, Array]], what: str) -> dict[str, Array]:
        """Join the parts of the first copy of the model, and see that whoever holds the same has the same bits.

        Raises:
            TrainCheckFailed: copies differ.
        """
        ranks = self._options.tensor_parallel
        whole: dict[str, Array] = {}
        for key in parts[0]:
            owners = range(len(parts)) if split_axis(key) is None else range(0, len(parts), ranks)
            for first in range(ranks if split_axis(key) is not None else 1):
                same = [parts[owner + first][key] for owner in owners]
                if any(not np.array_equal(same[0].view(np.int32), other.view(np.int32)) for other in same[1:]):
                    raise TrainCheckFailed(
                        f"{what} {key} differs between trainer ranks that must hold the same; restart the train worker"
                    )
            whole[key] = join(key, [part[key] for part in parts[:ranks]])
        return whole

    def _check(self, tensors: Tensors, what: str) -> None:
        found = {key: tuple(t.shape) for key, t in tensors.items()}
        expected: dict[str, tuple[int, ...]] = dict(self._shapes)
        if wrong := sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k)):
            shown = ", ".join(f"{k}: {found.get(k, 'missing')} instead of {expected.get(k, 'nothing')}" for k in wrong[:3])
            raise CorruptBlob(f"{what} of the checkpoint does not fit this model and LoRA rank in {len(wrong)} tensors: {shown}")

    # Log-probs and gradients ----------------------------------------------------------------------------------------------
    def log_probs(self, sequences: Sequence[ScoredSequence], *, adapter: bool, in_float32: bool = False) -> list[Floats]:
        found: dict[int, tuple[Floats, ...]] = {}

        def hear(_: int, message: Answer) -> None:
            if isinstance(message, Scored):
                found[message.number] = message.log_probs

        batches = self._batches(sequences)
        group = self._held() if adapter else self._ranks()
        group.ask([LogProbs(self._of_rank(batches, rank), adapter, in_float32) for rank in self._all_ranks], hear)
        return [values for number in sorted(found) for values in found[number]]

    def accumulate(self, sequences: Sequence[ScoredSequence], gradient_of: GradientOf) -> list[Floats]:
        group = self._held()
        batches = self._batches(sequences)
        found: dict[int, tuple[Floats, ...]] = {}
        out: list[Floats] = []
        due = iter(sorted(batch.number for batch in batches))
        next_number = next(due, None)

        def hear(_: int, message: Answer) -> None:
            """Derivatives are asked for in the order of the sequences, whichever rank is first."""
            nonlocal next_number
            if not isinstance(message, Scored):
                return
            found[message.number] = message.log_probs
            while next_number is not None and next_number in found:
                gradients = [gradient_of(len(out) + i, values) for i, values in enumerate(found[next_number])]
                out.extend(found[next_number])
                for rank in self._owners(next_number):
                    group.tell(rank, Derivatives(next_number, np.concatenate(gradients)))
                next_number = next(due, None)

        longest = max((sum(len(t) for t in batch.tokens) for batch in batches), default=0)
        group.ask([Accumulate(self._of_rank(batches, rank), longest) for rank in self._all_ranks], hear)
        return out

    @property
    def _all_ranks(self) -> range:
        return range(self._options.processes)

    def _batches(self, sequences: Sequence[ScoredSequence]) -> list[Packed]:
        """Micro-batches that are not empty."""
        budget, ways = self._options.tokens_per_micro_batch, self._options.data_parallel
        runs = pack([len(s.tokens) for s in sequences], budget, ways)
        return [
            Packed(
                number,
                tokens=tuple(np.array(sequences[i].tokens, dtype=np.int64) for i in run),
                firsts=tuple(sequences[i].first for i in run),
            )
            for number, run in enumerate(runs)
            if run
        ]

    def _of_rank(self, batches: Iterable[Packed], rank: int) -> tuple[Packed, ...]:
        return tuple(batch for batch in batches if rank in self._owners(batch.number))

    def _owners(self, number: int) -> range:
        """Ranks of the copy of the model that works on a micro-batch."""
        first = (number % self._options.data_parallel) * self._options.tensor_parallel
        return range(first, first + self._options.tensor_parallel)

    # Optimizer and what must hold -----------------------------------------------------------------------------------------
    def gradient_norm(self) -> float:
        norms: list[dict[str, float]] = self._ask_all(SquaredNorms())
        ranks = self._options.tensor_parallel
        return float(
            sum(sum(part[key] for part in norms[: ranks if split_axis(key) is not None else 1]) for key in sorted(norms[0])) ** 0.5
        )

    def apply(self, optimizer: OptimizerSettings) -> None:
        self._ask_all(Apply(optimizer))

    def trainable_names(self) -> frozenset[str]:
        return frozenset().union(*self._ask_all(Trainable(), of_state=False))

    def adapter_names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def base_fingerprint(self) -> str:
        return hashlib.sha256("\n".join(self._ask_all(Fingerprint(), of_state=False)).encode()).hexdigest()
