"""What a rank answers: log-probs, gradients and Adam on its part of one model. Knows no pipes, no launcher and no object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from activities.train.adam import Moments, adam_step
from activities.train.frozen import fingerprint
from activities.train.megatron.memory import RecomputePlan, choose, layer_bytes
from activities.train.megatron.model import PackedModel
from activities.train.megatron.options import MegatronOptions
from activities.train.megatron.place import Place
from activities.train.megatron.wire import Array, Floats, Load, Packed
from activities.train.precision import float32_arithmetic
from workflows.contracts.request import LoraSettings, OptimizerSettings

_LOGIT_COPIES = 5
"""Arrays of one chunk's logits in float32 to leave room for: logits, softmax, gradient, two of half the size, one spare."""
_MEMORY_MARGIN = 0.9
"""Of free memory: the estimate of activations leaves out small things, and the allocator fragments."""


class RankTrainer:
    """One rank's part of a model, its adapter and Adam's moments.

    Args:
        tensor_group, data_group: process groups over which memory is agreed and gradients are summed.
    """

    def __init__(
        self,
        model: PackedModel,
        lora: LoraSettings,
        options: MegatronOptions,
        place: Place,
        tensor_group: Any,
        data_group: Any,
    ) -> None:
        self._model = model
        self._lora = lora
        self._options = options
        self._place = place
        self._tensor_group = tensor_group
        self._data_group = data_group
        self._adapter = model.adapter()
        self._moments: Moments = {}
        self._steps = 0
        self._gradients: dict[str, torch.Tensor] = {}
        self._kept: dict[int, tuple[dict[str, torch.Tensor], Moments, int]] = {}
        self.stats: dict[str, float] = {}
        self._margin = _MEMORY_MARGIN

    # State ----------------------------------------------------------------------------------------------------------------
    def load(self, state: Load) -> None:
        """Replace adapter and moments, and drop gradients."""
        with torch.no_grad():
            for key, parameter in self._adapter.items():
                parameter.copy_(torch.from_numpy(state.adapter[key]))
                parameter.grad = None
        self._moments = {key: (self._tensor(m), self._tensor(state.exp_avg_sq[key])) for key, m in sorted(state.exp_avg.items())}
        self._steps = state.steps
        self._gradients = {}

    def state(self) -> Load:
        return Load(
            adapter={key: _array(p) for key, p in self._adapter.items()},
            exp_avg={key: _array(m) for key, (m, _) in self._moments.items()},
            exp_avg_sq={key: _array(v) for key, (_, v) in self._moments.items()},
            steps=self._steps,
        )

    def keep(self, number: int) -> None:
        """Copy the state, to be restored under this number; the last two are kept."""
        adapter = {key: p.detach().clone() for key, p in self._adapter.items()}
        moments = {key: (m.clone(), v.clone()) for key, (m, v) in self._moments.items()}
        self._kept = dict([*self._kept.items(), (number, (adapter, moments, self._steps))][-2:])

    def restore(self, number: int) -> None:
        """As `load` of the state that was kept.

        Raises:
            KeyError: it is not kept any more.
        """
        adapter, moments, self._steps = self._kept[number]
        with torch.no_grad():
            for key, parameter in self._adapter.items():
                parameter.copy_(adapter[key])
                parameter.grad = None
        self._moments = {key: (m.clone(), v.clone()) for key, (m, v) in moments.items()}  # Adam writes into them
        self._gradients = {}

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.tensor(array, dtype=torch.float32, device=self._place.device)

    # Log-probs and gradients ----------------------------------------------------------------------------------------------
    def log_probs(self, batches: Sequence[Packed], adapter: bool, in_float32: bool) -> Iterator[tuple[int, tuple[Floats, ...]]]:
        """(number of the micro-batch, log-probs of each of its sequences), without gradients."""
        self._model.switch.on = adapter
        self._reset_peak()
        precision: AbstractContextManager[None] = float32_arithmetic(self._model) if in_float32 else nullcontext()
        try:
            with precision, torch.no_grad():
                for batch in batches:
                    yield batch.number, self._split(batch, self._forward(batch, RecomputePlan()))
        finally:
            self._model.switch.on = True
        self._note_peak()

    def accumulate(
        self,
        batches: Sequence[Packed],
        longest: int,
        derivatives_of: Callable[[int, tuple[Floats, ...]], Floats],
        beat: Callable[[str], None],
    ) -> None:
        """Forward and backward over each micro-batch; then the gradients of all copies of the model are summed.

        Args:
            longest: tokens of the largest micro-batch of any rank; what is recomputed is chosen by it.
            derivatives_of: (number, log-probs of each sequence) -> derivatives of the loss, joined.
        """
        self._reset_peak()
        plan, again = self._plan(longest), 0
        found: dict[str, torch.Tensor] = {}
        for batch in batches:
            plan, failures = self._backward(batch, plan, derivatives_of)
            again += failures
            for key, parameter in self._adapter.items():
                if parameter.grad is not None:
                    found[key] = found[key].add_(parameter.grad) if key in found else parameter.grad
                    parameter.grad = None
            beat(f"micro-batch {batch.number}")
        self._note_peak()
        self.stats |= {"layers_recomputed": float(plan.full), "mlps_recomputed": float(plan.mlp), "out_of_memory": float(again)}
        self._collect(found)

    def _backward(
        self, batch: Packed, plan: RecomputePlan, derivatives_of: Callable[[int, tuple[Floats, ...]], Floats]
    ) -> tuple[RecomputePlan, int]:
        """Leave one micro-batch's gradients in the parameters. Memory that turns out too small is met by recomputing more.

        Returns:
            What was recomputed in the end, and how often memory was too small.
        """
        derivatives: Floats | None = None
        scored: torch.Tensor | None = None
        failures = 0
        while True:
            try:
                scored = self._forward(batch, plan)
                if derivatives is None:  # asked for once, whatever happens
                    derivatives = derivatives_of(batch.number, self._split(batch, scored))
                scored.backward(torch.tensor(derivatives, dtype=scored.dtype, device=scored.device))  # type: ignore[no-untyped-call]
                return plan, failures
            except torch.OutOfMemoryError as error:
                plan = self._recompute_more(batch, plan, error)
                failures += 1
            # Outside of the handler, whose exception holds the failed pass's activations, as its log-probs do.
            scored = None
            for parameter in self._adapter.values():
                parameter.grad = None
            if self._place.device.type == "cuda":
                torch.cuda.empty_cache()

    def _recompute_more(self, batch: Packed, plan: RecomputePlan, error: torch.OutOfMemoryError) -> RecomputePlan:
        """The next plan that needs less memory; later calls count on less from the start.

        Raises:
            OutOfMemoryError: there is none, or it is not this rank's to choose. Says what to change.
        """
        layers = self._model.shape.layers
        # Ranks that share a copy of the model must recompute alike, and one of them alone knows of its failure.
        if self._options.recompute != "auto" or self._options.tensor_parallel > 1 or plan.full == layers:
            raise torch.OutOfMemoryError(
                f"{sum(len(t) for t in batch.tokens)} tokens at once do not fit with {plan.full} of {layers} layers and {plan.mlp} "
                "MLPs recomputed. Lower TTTD_TRAIN_TOKENS_PER_MICRO_BATCH, give a shared GPU's engine less "
                f"(TTTD_ENGINE_MEMORY_FRACTION), or set TTTD_TRAIN_RECOMPUTE=full. {error}"
            ) from error
        self._margin *= _MEMORY_MARGIN
        return RecomputePlan(mlp=layers) if plan.full + plan.mlp < layers else RecomputePlan(full=layers)

    def _forward(self, batch: Packed, plan: RecomputePlan) -> torch.Tensor:
        sequences = [torch.from_numpy(tokens).to(self._place.device) for tokens in batch.tokens]
        return self._model.log_probs(sequences, batch.firsts, plan)

    def _split(self, batch: Packed, joined: torch.Tensor) -> tuple[Floats, ...]:
        values = joined.detach().double().cpu().numpy()
        ends = np.cumsum([len(tokens) - first for tokens, first in zip(batch.tokens, batch.firsts, strict=True)])
        return tuple(np.split(values, ends[:-1]))

    def _collect(self, found: dict[str, torch.Tensor]) -> None:
        """Add this call's gradients, summed over the copies of the model, to those of earlier calls."""
        found = {key: found[key] if key in found else torch.zeros_like(p) for key, p in self._adapter.items()}
        if self._options.data_parallel > 1:
            # One message: on a GPU each is a kernel launch on every rank.
            flat = torch.cat([g.reshape(-1) for g in found.values()])
            dist.all_reduce(flat, dist.ReduceOp.SUM, self._data_group)
            parts = torch.split(flat, [g.numel() for g in found.values()])
            found = {key: part.view_as(g) for (key, g), part in zip(found.items(), parts, strict=True)}
        earlier = self._gradients
        self._gradients = {key: earlier[key] + g if key in earlier else g for key, g in found.items()}

    def _plan(self, tokens: int) -> RecomputePlan:
        """What to recompute; the same on every rank of a copy, whose backward passes must meet in the same order."""
        free = self._free_bytes()
        if free is not None and self._options.tensor_parallel > 1:
            least = torch.tensor(free, dtype=torch.int64, device=self._place.device)
            dist.all_reduce(least, dist.ReduceOp.MIN, self._tensor_group)
            free = int(least)
        itemsize = torch.empty(0, dtype=self._place.dtype).element_size()
        one = layer_bytes(self._model.shape, self._lora.rank, self._options.tensor_parallel, itemsize)
        return choose(one, self._model.shape.layers, tokens, free, self._options.recompute)

    def _free_bytes(self) -> int | None:
        logits = _LOGIT_COPIES * 4 * self._options.logits_per_chunk
        if self._options.memory_bytes is not None:
            return self._options.memory_bytes - logits
        if self._place.device.type != "cuda":
            return None
        unused, _ = torch.cuda.mem_get_info(self._place.device)
        cached = torch.cuda.memory_reserved(self._place.device) - torch.cuda.memory_allocated(self._place.device)
        return int(self._margin * (unused + cached)) - logits

    def _reset_peak(self) -> None:
        if self._place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._place.device)

    def _note_peak(self) -> None:
        if self._place.device.type == "cuda":
            self.stats["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self._place.device))

    # Optimizer and what must hold -----------------------------------------------------------------------------------------
    def gradients(self) -> dict[str, Array]:
        return {key: _array(g) for key, g in self._gradients.items()}

    def squared_norms(self) -> dict[str, float]:
        return {key: float(g.double().pow(2).sum()) for key, g in self._gradients.items()}

    def apply(self, optimizer: OptimizerSettings) -> None:
        for key, parameter in self._adapter.items():
            parameter.grad = self._gradients.get(key)
        self._moments = adam_step(self._adapter, self._moments, self._steps, optimizer)
        self._steps += 1
        self._gradients = {}

    def trainable(self) -> frozenset[str]:
        """PEFT keys of the adapter's parameters that get gradients, and Megatron's names of any others."""
        ours: Mapping[str, torch.nn.Parameter] = self._adapter
        others = {name for name, p in self._model.base() if p.requires_grad}
        return frozenset({key for key, p in ours.items() if p.requires_grad} | others)

    def fingerprint(self) -> str:
        return fingerprint(self._model.base())


def _array(tensor: torch.Tensor) -> Array:
    return np.array(tensor.detach().float().cpu().numpy(), dtype=np.float32, copy=True)
