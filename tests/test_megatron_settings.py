"""The deployment's settings choose the trainer's back-end."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from activities.train.megatron.options import MegatronOptions
from activities.train.torch_backend import TorchOptions
from workers.settings import Settings
from workers.train_options import trainer_options


def test_torch_on_a_cpu_is_the_default(tmp_path: Path) -> None:
    options = trainer_options(Settings(home=tmp_path))
    assert options == TorchOptions(threads=1, device="cpu", bfloat16=False, tokens_per_micro_batch=2048, recompute=False)


def test_a_gpu_brings_low_precision_and_large_micro_batches(tmp_path: Path) -> None:
    torch_options = trainer_options(Settings(home=tmp_path, train_device="cuda:1"))
    assert torch_options == TorchOptions(1, "cuda:1", bfloat16=True, tokens_per_micro_batch=16_384, recompute=True)
    megatron = trainer_options(Settings(home=tmp_path, train_device="cuda", trainer_kind="megatron", train_data_parallel=2))
    assert isinstance(megatron, MegatronOptions)
    assert megatron.low_precision
    assert megatron.tokens_per_micro_batch == 16_384
    assert megatron.folder == tmp_path.resolve() / "ranks"


def test_the_environment_reaches_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HOME": str(tmp_path),
        "TRAINER_KIND": "megatron",
        "TRAIN_TENSOR_PARALLEL": "2",
        "TRAIN_DATA_PARALLEL": "4",
        "TRAIN_RECOMPUTE": "full",
        "TRAIN_ATTENTION": "sdpa",
        "TRAIN_STALL_SECONDS": "77",
        "TRAIN_TOKENS_PER_MICRO_BATCH": "123",
    }.items():
        monkeypatch.setenv(f"TTTD_{name}", value)
    options = trainer_options(Settings())
    assert isinstance(options, MegatronOptions)
    assert options.processes == 8
    found = (options.recompute, options.attention, options.stall_seconds, options.tokens_per_micro_batch, options.device)
    assert found == ("full", "sdpa", 77.0, 123, "cpu")


def test_parallel_settings_without_megatron_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="TTTD_TRAINER_KIND=megatron"):
        trainer_options(Settings(home=tmp_path, train_tensor_parallel=2))


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="train_device"):
        Settings(home=tmp_path, train_device="gpu")
