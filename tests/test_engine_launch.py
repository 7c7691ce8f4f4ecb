"""How engines are started: command lines, environments, several of them on one host, and what a killed worker left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from console.plan.hardware import GPUS
from console.plan.planning import Assumptions, default_machine, make_plan
from console.plan.shapes import KNOWN
from workers.engine.launch import engine_launch, engine_variables
from workers.engine.orphans import Session, end_orphans
from workers.services import worker_services
from workers.settings import Settings
from workflows.contracts.request import parse_request


def settings(**fields: object) -> Settings:
    return Settings.model_validate(
        {"engine_id": "box", "engine_kind": "sglang", "engine_python": "/opt/sglang/bin/python"} | fields
    )


def flags(command: list[str]) -> dict[str, list[str]]:
    """Flag -> what follows it."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in command:
        if word.startswith("--"):
            name = word
            assert name not in found or name in ("--attention-backend",), f"{name} twice"
            found[name] = []
        elif name:
            found[name].append(word)
    return found


def test_sglang_is_started_with_what_the_settings_say() -> None:
    chosen = settings(
        engine_gpus=["0,1"],
        engine_memory_fraction=0.7,
        engine_context_tokens=32_768,
        engine_concurrency=512,
        engine_lora_rank=16,
        engine_lora_slots=2,
        engine_args=["--attention-backend", "triton"],
        engine_environment={"PYTHONPATH": "/opt/pack", "NCCL_NVLS_ENABLE": "0"},
        engine_start_seconds=300,
    )
    launch = engine_launch(chosen, Path("/models/coder"), 30_001)
    assert launch.command[:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    found = flags(launch.command)
    assert found["--model-path"] == ["/models/coder"]
    assert (found["--host"], found["--port"]) == (["127.0.0.1"], ["30001"])
    assert launch.url == "http://127.0.0.1:30001"
    assert (found["--tp-size"], found["--mem-fraction-static"]) == (["2"], ["0.7"])
    assert (found["--context-length"], found["--max-running-requests"]) == (["32768"], ["512"])
    assert found["--enable-lora"] == []
    assert found["--max-lora-rank"] == ["16"]
    assert set(found["--lora-target-modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert found["--max-loras-per-batch"] == ["2"]
    assert int(found["--max-loaded-loras"][0]) >= 12, "four runs with three versions each must fit, or SGLang evicts silently"
    assert launch.command[-2:] == ["--attention-backend", "triton"], "the deployment's own flags come last"
    assert launch.environment == {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTHONPATH": "/opt/pack",
        "NCCL_NVLS_ENABLE": "0",
    }
    assert launch.start_seconds == 300


def test_what_is_left_out_is_left_to_sglang() -> None:
    launch = engine_launch(settings(), Path("/models/coder"), 1)
    found = flags(launch.command)
    assert "--context-length" not in found
    assert "--max-running-requests" not in found
    assert found["--tp-size"] == ["1"]
    assert "CUDA_VISIBLE_DEVICES" not in launch.environment
    assert "--disable-radix-cache" not in found, "siblings share their prompt"


def test_the_embedded_engine_takes_extra_flags_too() -> None:
    launch = engine_launch(settings(engine_kind="embedded", engine_args=["--max-batch", "8"]), Path("/m"), 5)
    assert launch.command[:3] == [sys.executable, "-m", "workers.engine.embedded"]
    assert launch.command[-2:] == ["--max-batch", "8"]


def test_each_engine_of_a_host_has_its_own_id_port_and_gpus() -> None:
    chosen = settings(engines=3, engine_gpus=["0", "1", "2,3"], engine_port=30_000)
    services = worker_services(chosen, ("control", "engine", "train"))
    assert [service.name for service in services] == ["control", "engine", "engine-2", "engine-3", "train"]
    engines = [dict(service.environment) for service in services if service.name.startswith("engine")]
    assert [e["TTTD_ENGINE_ID"] for e in engines] == ["box", "box-2", "box-3"]
    assert [e["TTTD_ENGINE_PORT"] for e in engines] == ["30000", "30001", "30002"]
    assert [e["TTTD_ENGINE_GPUS"] for e in engines] == ['["0"]', '["1"]', '["2,3"]']
    assert {e["TTTD_ENGINES"] for e in engines} == {"1"}
    assert not services[0].environment


def test_the_engines_environment_is_what_its_worker_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, second) = engine_variables(settings(engines=2, engine_gpus=["0", "1"]))
    for name, value in second.items():
        monkeypatch.setenv(name, value)
    assert Settings().engine_id == "box-2"
    assert Settings().engine_gpus == ("1",)
    assert Settings().engine_port == 0


def test_engines_and_gpus_must_match() -> None:
    with pytest.raises(RuntimeError, match=r"GPUs for 1 engines, and engines=2.*TTTD_ENGINE_GPUS"):
        worker_services(settings(engines=2, engine_gpus=["0"]), ("engine",))


PRESETS = {1: ("coder", "paper"), 2: ("paper",), 8: ("paper",)}
"""GPUs -> profiles that run there."""


@pytest.mark.parametrize("gpus", PRESETS)
def test_presets_are_settings_that_use_every_gpu_once_and_fit(gpus: int) -> None:
    file = Path(__file__).parent.parent / "deploy" / f"gpu-{gpus}.toml"
    chosen = Settings.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    assert len(engine_variables(chosen)) == chosen.engines
    sampling = [int(gpu) for group in chosen.engine_gpus for gpu in group.split(",")]
    first = int(chosen.train_device.partition(":")[2])
    training = list(range(first, first + chosen.train_tensor_parallel * chosen.train_data_parallel))
    assert sorted({*sampling, *training}) == list(range(gpus))
    assert gpus == 1 or not {*sampling} & {*training}
    for profile in PRESETS[gpus]:
        request = parse_request({"task": "any", "profile": profile})
        shape = KNOWN[request.model]
        machine = replace(
            default_machine(GPUS["H200"], gpus, request, shape),
            engines=chosen.engines,
            memory_fraction=chosen.engine_memory_fraction,
            trainer_tensor=chosen.train_tensor_parallel,
            trainer_data=chosen.train_data_parallel,
        )
        plan = make_plan(request, shape, machine, Assumptions(1000, 12_000, 64, 60, 120))
        assert plan.fits, plan.problems


# What a killed worker left behind ------------------------------------------------------------------------------------------
def sleeper(command: str = "sleep 300 & exec sleep 300") -> subprocess.Popen[bytes]:
    """A session of two processes, as an engine is."""
    process = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    deadline = time.monotonic() + 10
    while len(Session.of(process.pid).living()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_children_are_found_after_their_leader_died(tmp_path: Path) -> None:
    file = tmp_path / "engines" / "box.pid"
    engine = sleeper()
    session = Session.of(engine.pid)
    session.note(file)
    (child,) = (pid for pid in session.living() if pid != engine.pid)
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait()
    assert session.living() == [child]
    assert end_orphans(file) == [child]
    assert session.living() == []
    assert not file.exists()
    assert end_orphans(file) == []


def test_a_whole_engine_is_ended_even_when_it_is_stopped(tmp_path: Path) -> None:
    engine = sleeper()
    session = Session.of(engine.pid)
    session.note(tmp_path / "pid")
    os.kill(engine.pid, signal.SIGSTOP)
    assert len(end_orphans(tmp_path / "pid")) == 2
    assert engine.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("change", [{"started": 1}, {"machine": "another boot"}])
def test_a_stranger_that_got_the_number_is_left_alone(tmp_path: Path, change: dict[str, object]) -> None:
    stranger = sleeper()
    mine = Session.of(stranger.pid)
    try:
        replace(mine, **change).note(tmp_path / "pid")  # type: ignore[arg-type]
        assert end_orphans(tmp_path / "pid") == []
        assert len(mine.living()) == 2
    finally:
        mine.end()
        stranger.wait()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"leader": 1}'])
def test_a_torn_file_names_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "pid").write_text(text)
    assert end_orphans(tmp_path / "pid") == []
