"""Reading LoRA directories strictly, and the registry's names, counts and waiting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workers.engine.embedded.adapters import AdapterError, AdapterRegistry, read_adapter
from workers.engine.embedded.model import CausalModel, ModelError, load_model
from workers.engine.embedded.tiny import make_tiny_adapter, make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m") / "model", tokenizer=False)


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load_model(folder)


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    return make_tiny_adapter(tmp_path / "adapter", folder)


def edit_config(adapter: Path, **changes: object) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(adapter: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda a: (a / "adapter_config.json").unlink(), "adapter_config.json"),
        (lambda a: (a / "adapter_config.json").write_text("{"), "adapter_config.json"),
        (lambda a: (a / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
        (lambda a: (a / "adapter_model.safetensors").write_bytes(b"torn"), "not a whole safetensors file"),
        (lambda a: edit_tensors(a, lambda t: t.pop(FIRST)), "only one of lora_A and lora_B"),
        (lambda a: edit_tensors(a, lambda t: [t.pop(k) for k in list(t) if "q_proj" in k]), "2 of 14 target modules"),
        (lambda a: edit_tensors(a, lambda t: t.update({FIRST.replace("q_", "z_"): t[FIRST].clone()})), "no linear layer"),
        (lambda a: edit_tensors(a, lambda t: t.update({FIRST: t[FIRST][:2].clone()})), "is needed"),
        (lambda a: edit_tensors(a, lambda t: t[FIRST].fill_(float("nan"))), "NaN"),
        (lambda a: edit_tensors(a, lambda t: t.clear()), "no tensors"),
        (lambda a: edit_config(a, r=8), "is needed"),
        (lambda a: edit_config(a, use_dora=True), "use_dora"),
        (lambda a: edit_config(a, bias="all"), "bias"),
        (lambda a: edit_config(a, modules_to_save=["lm_head"]), "modules_to_save"),
        (lambda a: edit_config(a, init_lora_weights="pissa"), "init_lora_weights"),
        (lambda a: edit_config(a, peft_type="IA3"), "peft_type"),
    ],
)
def test_what_is_not_a_whole_lora_adapter_is_refused(
    spoil: Callable[[Path], object], reason: str, adapter: Path, model: CausalModel
) -> None:
    read_adapter("good", adapter, model.hooks.linears)
    spoil(adapter)
    with pytest.raises(AdapterError, match=reason):
        read_adapter("bad", adapter, model.hooks.linears)


def test_a_path_that_is_no_directory_is_refused_without_asking_a_hub(model: CausalModel) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read_adapter("x", Path("someone/some-adapter"), model.hooks.linears)


async def test_a_refused_directory_changes_nothing(adapter: Path, model: CausalModel) -> None:
    registry = AdapterRegistry(model.hooks.linears)
    await registry.load("one", str(adapter))
    (adapter / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(AdapterError):
        await registry.load("two", str(adapter))
    assert registry.paths() == {"one": str(adapter)}
    with pytest.raises(AdapterError, match="already loaded"):
        await registry.load("one", str(adapter))


async def test_unloading_waits_for_the_last_user(adapter: Path, model: CausalModel) -> None:
    registry = AdapterRegistry(model.hooks.linears)
    await registry.load("one", str(adapter))
    held = [registry.acquire("one"), registry.acquire("one")]
    unloading = asyncio.create_task(registry.unload("one"))
    await asyncio.sleep(0)
    assert not unloading.done()
    with pytest.raises(AdapterError, match="not loaded: one"):  # no new users meanwhile
        registry.acquire("one")
    registry.release(held[0])
    await asyncio.sleep(0)
    assert not unloading.done()
    registry.release(held[1])
    await asyncio.wait_for(unloading, 5)
    assert held[0] is not None
    assert held[0].modules  # still usable by whoever holds it
    with pytest.raises(AdapterError, match="none"):
        await registry.unload("one")


async def test_two_loads_of_one_name_at_once_give_one_adapter(adapter: Path, model: CausalModel) -> None:
    registry = AdapterRegistry(model.hooks.linears)
    results = await asyncio.gather(*(registry.load("one", str(adapter)) for _ in range(3)), return_exceptions=True)
    assert sorted(type(r).__name__ for r in results) == ["AdapterError", "AdapterError", "NoneType"]


def test_models_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="no-such-model"):
        load_model(tmp_path)
