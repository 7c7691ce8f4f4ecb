"""LoRA adapters: reading a PEFT directory strictly, applying it as a low-rank sum, and keeping count of who uses which.

An adapter is only added to the output of linear layers while its own rows are computed: base weights are never touched, switching
costs one assignment, and a directory that cannot be read changes nothing. What PEFT would load with a warning (missing tensors,
other ranks) is refused here, because a silently half-loaded adapter would be trained on.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file
from torch import nn

_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base weights as they are; the others (pissa, olora, ...) need altered ones."""

_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
"""Settings of PEFT under which LoRA is no longer a low-rank sum on linear layers alone."""


class AdapterError(ValueError):
    """An adapter cannot be loaded, found or unloaded; the message says why."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """One module's share: output += (x Aᵀ) Bᵀ, with the scale folded into B."""

    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """[out, rank]"""


@dataclass(slots=True, eq=False)
class Adapter:
    """A loaded adapter. It stays usable for those who hold it, also after it was unloaded."""

    name: str
    path: str
    modules: Mapping[str, LowRank]
    users: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class LowRankHooks:
    """Adds the active adapter to every linear layer of a model. Used by the compute thread only."""

    def __init__(self, model: nn.Module) -> None:
        self.linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        self._active: Mapping[str, LowRank] = {}
        for name, module in self.linears.items():
            module.register_forward_hook(self._hook(name))

    def activate(self, adapter: Adapter | None) -> None:
        """Compute with this adapter from now on; None: with the base model."""
        self._active = {} if adapter is None else adapter.modules

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            low_rank = self._active.get(name)
            if low_rank is None:
                return None
            inner = nn.functional.linear(inputs[0].to(low_rank.a.dtype), low_rank.a)
            if output.dtype != inner.dtype:  # half-precision base: sum in the adapter's float32, as PEFT does
                return (output + nn.functional.linear(inner, low_rank.b)).to(output.dtype)
            output.view(-1, output.shape[-1]).addmm_(inner.view(-1, inner.shape[-1]), low_rank.b.t())
            return None

        return add


def read_adapter(name: str, folder: Path, linears: Mapping[str, nn.Linear]) -> Adapter:
    """Read a PEFT LoRA directory (adapter_config.json, adapter_model.safetensors) for a model with these linear layers.

    Raises:
        AdapterError: it is not there, not LoRA, needs altered base weights, lacks a tensor, has one too many, or a shape or a
            number is wrong.
    """
    config = _read_config(folder)
    tensors = _read_tensors(folder)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if _is_copy_of_base(key, tensor, linears):
            continue
        match = _TENSOR_NAME.fullmatch(key)
        if match is None or match["module"] not in linears:
            raise AdapterError(f"{folder}: tensor {key} belongs to no linear layer of this model")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    _refuse_missing(folder, config, sides, linears)
    modules = {module: _low_rank(folder, module, pair, config, linears[module]) for module, pair in sides.items()}
    return Adapter(name=name, path=str(folder), modules=modules)


def _read_config(folder: Path) -> Any:
    # Checked first: for a path that is no directory PEFT would ask the Hugging Face hub.
    if not (folder / "adapter_config.json").is_file():
        raise AdapterError(f"{folder} holds no adapter_config.json; name a directory written by PEFT's save_pretrained")
    try:
        config = LoraConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise AdapterError(f"{folder}/adapter_config.json: {error}") from None
    if not isinstance(config, LoraConfig):
        raise AdapterError(f"{folder}: peft_type is {config.peft_type!s}; only LoRA adapters are served")
    unsupported = {key: bool(getattr(config, key, None)) for key in _UNSUPPORTED}
    unsupported["bias"] = config.bias != "none"
    unsupported["init_lora_weights"] = config.init_lora_weights not in _PLAIN_INITS
    bad = [f"{key}={getattr(config, key)!r}" for key, is_bad in unsupported.items() if is_bad]
    if bad:
        raise AdapterError(f"{folder}: plain LoRA on linear layers is served, not {', '.join(bad)}")
    return config


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise AdapterError(f"{folder} holds no adapter_model.safetensors (pickled weights are not read)")
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except Exception as error:  # safetensors raises a type of its own, without a public base
        raise AdapterError(f"{file} is not a whole safetensors file: {error}") from None
    if not tensors:
        raise AdapterError(f"{file} holds no tensors")
    return tensors


def _is_copy_of_base(key: str, tensor: torch.Tensor, linears: Mapping[str, nn.Linear]) -> bool:
    """PEFT stores the head's own weights beside an adapter of the head; unchanged ones say nothing new."""
    module = key.removeprefix("base_model.model.").removesuffix(".base_layer.weight")
    if not key.endswith(".base_layer.weight") or module not in linears:
        return False
    weight = linears[module].weight
    return torch.equal(tensor.to(weight.device, weight.dtype), weight)


def _refuse_missing(folder: Path, config: Any, sides: Mapping[str, Any], linears: Mapping[str, Any]) -> None:
    halves = [module for module, pair in sides.items() if len(pair) != 2]
    if halves:
        raise AdapterError(f"{folder}: {halves[0]} has only one of lora_A and lora_B ({len(halves)} such modules)")
    if config.target_modules == "all-linear" or not config.target_modules:
        return
    wanted = [module for module in linears if check_target_module_exists(config, module)]
    missing = [module for module in wanted if module not in sides]
    if missing:
        raise AdapterError(f"{folder}: {len(missing)} of {len(wanted)} target modules have no tensors, the first is {missing[0]}")


def _low_rank(folder: Path, module: str, pair: Mapping[str, torch.Tensor], config: Any, linear: nn.Linear) -> LowRank:
    a, b = pair["A"], pair["B"]
    rank = _pattern(config.rank_pattern, module, config.r)
    wanted = ((rank, linear.in_features), (linear.out_features, rank))
    if (tuple(a.shape), tuple(b.shape)) != wanted:
        raise AdapterError(f"{folder}: {module} has A, B of {tuple(a.shape)}, {tuple(b.shape)}; {wanted} is needed")
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise AdapterError(f"{folder}: {module} holds NaN or infinity")
    alpha = _pattern(config.alpha_pattern, module, config.lora_alpha)
    scale = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    # float32 whatever the base is: PEFT keeps half-precision adapters so, too.
    device = linear.weight.device
    return LowRank(a=a.float().contiguous().to(device), b=(b.float() * scale).contiguous().to(device))


def _pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Value of the first pattern that matches the module's name or its tail, by PEFT's rule."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


class AdapterRegistry:
    """Names that requests may use. Lives on the event loop: every method runs there, so it needs no locks."""

    def __init__(self, linears: Mapping[str, nn.Linear]) -> None:
        self._linears = linears
        self._adapters: dict[str, Adapter] = {}
        self._loading: set[str] = set()

    def paths(self) -> dict[str, str]:
        """Name -> directory of everything loaded, in order of loading."""
        return {name: adapter.path for name, adapter in self._adapters.items()}

    async def load(self, name: str, path: str) -> None:
        """Read a directory and serve it under a new name.

        Raises:
            AdapterError: the name is taken (names are never reused for other content), or the directory is refused.
        """
        if name in self._adapters or name in self._loading:
            raise AdapterError(f"LoRA adapter {name!r} is already loaded; unload it first, or use another name")
        self._loading.add(name)
        try:
            self._adapters[name] = await asyncio.to_thread(read_adapter, name, Path(path), self._linears)
        finally:
            self._loading.discard(name)

    async def unload(self, name: str) -> None:
        """Refuse new requests at once, and return when the last running one has finished.

        Raises:
            AdapterError: no such adapter.
        """
        adapter = self._get(name)
        del self._adapters[name]
        while adapter.users:
            adapter.idle.clear()
            await adapter.idle.wait()

    def acquire(self, name: str | None) -> Adapter | None:
        """The adapter of a request, counted as used until :meth:`release`; None stands for the base model.

        Raises:
            AdapterError: no such adapter.
        """
        if name is None:
            return None
        adapter = self._get(name)
        adapter.users += 1
        return adapter

    def release(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            adapter.users -= 1
            if adapter.users == 0:
                adapter.idle.set()

    def _get(self, name: str) -> Adapter:
        if name not in self._adapters:
            loaded = ", ".join(self._adapters) or "none"
            raise AdapterError(f"The following requested LoRA adapters are not loaded: {name}. Loaded adapters: {loaded}.")
        return self._adapters[name]
