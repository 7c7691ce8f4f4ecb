"""Deployment settings: where things are. The only module that reads the environment.

Precedence: defaults < `tttd.toml` (in the working directory, or named by TTTD_CONFIG) < environment variables TTTD_*.
Nothing scientific stands here: moving a run to other hosts never changes its identity. Temporal's own connection settings are
Temporal's (TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, TEMPORAL_API_KEY, TEMPORAL_TLS_*, temporal.toml).
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

import tasks
from activities.train.megatron.options import AttentionKernel, Recompute
from tasks.environments import DEFAULT_DIRECTORY

BUILT_IN_PROPOSERS = Path(tasks.__file__).parent / "proposers"


def _host_id() -> str:
    """Another one for each host, and not its name: rollouts and reports hold it, and bundles of them are handed on."""
    return f"host-{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]}"


class Settings(BaseSettings):
    """One process's settings; every field is also TTTD_<NAME> in the environment."""

    model_config = SettingsConfigDict(
        env_prefix="TTTD_",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        toml_file=os.environ.get("TTTD_CONFIG", "tttd.toml"),
    )

    home: Path = Path(".tttd")
    """Directory of everything local: store, Temporal's database, logs, adapters."""
    store: str | None = None
    """Object store: a path, file:// or s3://bucket/prefix; by default `store` below home."""
    s3_endpoint: str | None = None
    """Endpoint of an S3 that is not Amazon's; credentials come as boto3 finds them."""
    task_dirs: tuple[Path, ...] = ()
    """Directories with task folders besides the built-in ones."""
    model_dirs: tuple[Path, ...] = ()
    """Directories with Hugging Face model folders."""
    temporal_port: int = Field(default=7233, ge=1, le=65535)
    """Of the embedded Temporal server (`tttd up`)."""
    temporal_ui_port: int = Field(default=8233, ge=1, le=65535)
    engine_id: str = Field(default_factory=_host_id, pattern=r"^[A-Za-z0-9-]{1,63}$")
    """Names this engine's task queue; unique among engines. The second engine of a host is ENGINE_ID-2, and so on."""
    engine_kind: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: our small server on transformers. `sglang`: the real one, in an environment of its own (docs/engines.md)."""
    engine_model: str = "packing"
    """The model that this host's engines serve: a name below model_dirs, or a path."""
    engines: int = Field(default=1, ge=1, le=64)
    """Engines that `tttd up` starts on this host, each with a worker, an id and a port of its own."""
    engine_gpus: tuple[str, ...] = ()
    """GPUs of each engine as CUDA_VISIBLE_DEVICES has them, for example ["0", "1"]; "0,1" is one engine over two GPUs (tensor
    parallel). Empty: engines see what their worker sees."""
    engine_port: int = Field(default=0, ge=0, le=65535)
    """0: any free port. Otherwise the first engine's; further ones count up."""
    engine_host: str = "127.0.0.1"
    """Address that samplers reach this engine at, and that it binds."""
    engine_threads: int = Field(default=1, ge=1)
    """Of the embedded engine."""
    engine_python: Path = Path(sys.executable)
    """Interpreter that has SGLang: it brings a torch of its own, so it has an environment of its own."""
    engine_environment: dict[str, str] = Field(default_factory=dict)
    """Variables set for the engine process alone, for example {"PYTHONPATH" = "/opt/sglang"}."""
    engine_args: tuple[str, ...] = ()
    """Appended to the engine's command line, after our own flags: the last one counts."""
    engine_memory_fraction: float = Field(default=0.85, gt=0.05, lt=1)
    """Share of a GPU that SGLang takes for weights, adapters and KV cache. Lower it where a trainer shares it (`tttd plan`)."""
    engine_context_tokens: int | None = Field(default=None, ge=64)
    """SGLang's context length; None: the model's own."""
    engine_concurrency: int | None = Field(default=None, ge=1)
    """Requests that SGLang runs at once; None: as its memory allows."""
    engine_lora_rank: int = Field(default=32, ge=1, le=512)
    """Largest rank that adapters may have; a run's lora.rank must not exceed it."""
    engine_lora_slots: int = Field(default=4, ge=2, le=64)
    """Adapters in one batch on the GPU, the base counted as one: the gate asks for three versions and the base."""
    engine_start_seconds: float = Field(default=900.0, gt=0)
    """How long an engine may take to answer; SGLang compiles kernels at its first start."""
    engine_hung_seconds: float = Field(default=120.0, gt=0)
    """Silence on /health after which a live engine is killed and started again."""
    trainer_kind: Literal["torch", "megatron"] = "torch"
    """`torch`: transformers + PEFT in one process. `megatron`: megatron-core in rank processes under the train worker."""
    train_device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """`cpu`, `cuda` or `cuda:N`. Megatron's ranks take the GPUs from N on, one each."""
    train_tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Megatron: ranks that share one copy of the model; divides its key/value heads."""
    train_data_parallel: int = Field(default=1, ge=1, le=64)
    """Megatron: copies of the model. Tensor parallel times data parallel processes are started."""
    train_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Tokens that go through the model at once; None: 2048 on a CPU, 16384 on a GPU. Longer sequences go alone."""
    train_recompute: Recompute = "auto"
    """Megatron: activations that the backward pass computes again; `auto`: as few as memory allows."""
    train_attention: AttentionKernel = "auto"
    """Megatron: attention kernel; `auto`: the first of these that runs here."""
    train_stall_seconds: float = Field(default=600.0, gt=0)
    """Megatron: silence after which ranks count as hung, are killed, and the step is tried again."""
    train_threads: int = Field(default=1, ge=1)
    """CPU threads of the trainer, of each rank with Megatron; equal bits are promised for equal numbers only."""
    judge_slots: int | None = Field(default=None, ge=1)
    """Programs judged at once on this host; by default cores − 1, at least 1."""
    judge_uid_base: int = Field(default=60_000, ge=1)
    """As root, sandbox slot k runs as user id judge_uid_base + k; two judge workers on one host need ranges of their own."""
    judge_backend: Literal["auto", "bwrap", "landlock", "remote", "unsafe"] = "auto"
    """Sandbox of judged programs; `auto` takes the strongest whose self-test passes."""
    judge_accept_unsafe: bool = False
    """Must be set, too, for the backend `unsafe`, which contains nothing; every verdict made with it says so."""
    judge_remote_url: str | None = None
    """Of the sandbox service that the backend `remote` uses (`tttd sandbox serve` on another host)."""
    judge_remote_token_file: Path | None = None
    """File with the secret that the sandbox service asks for."""
    environments: Path = DEFAULT_DIRECTORY
    """Where `tttd task build` makes the Python environments of judged programs."""
    frontiercs_url: str | None = None
    """Of a FrontierCS judge, for tasks that are judged there."""
    sample_concurrency: int = Field(default=512, ge=1)
    drain_seconds: float = Field(default=10.0, ge=0)
    """After SIGTERM a worker takes no new work and gives what runs this long to end; what is cut off is retried elsewhere."""
    probe_host: str = "127.0.0.1"
    """Address that /healthz, /readyz and /metrics listen on; containers need 0.0.0.0."""
    health_port: int = Field(default=0, ge=0, le=65535)
    """Of /healthz and /readyz; 0: off. Under `tttd up` the first worker has this port, and each further one ten more."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Of /metrics, for Prometheus; 0: off. May be the health port. Counted up under `tttd up`, like the next."""
    temporal_metrics_port: int = Field(default=0, ge=0, le=65535)
    """Of the Temporal SDK's own metrics (pollers, slots, latencies); 0: off."""
    log_file: Path | None = None
    """Where this process writes its JSON log; standard error by default."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    debug: bool = False
    """Commands print tracebacks with their errors."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @property
    def store_url(self) -> str:
        return self.store or str(self.home.resolve() / "store")

    @property
    def judge_services(self) -> dict[str, str | None]:
        """Addresses of judges that are services, by the names that judges have for them."""
        return {"frontiercs": self.frontiercs_url}

    @property
    def model_directories(self) -> tuple[Path, ...]:
        return (*self.model_dirs, BUILT_IN_PROPOSERS)

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def temporal_config(self) -> Path:
        """temporal.toml that `tttd up` writes; the Temporal CLI reads it too (`--config-file`)."""
        return self.home / "temporal.toml"


def load_settings() -> Settings:
    """Read the settings.

    Raises:
        SystemExit: a setting is wrong; names it.
    """
    try:
        return Settings()
    except ValueError as error:
        raise SystemExit(f"tttd: bad settings (tttd.toml or TTTD_* variables): {error}") from None


def child_environment(**extra: str) -> dict[str, str]:
    """The environment for a process of ours, with additions."""
    return {**os.environ, **extra}


def temporal_is_configured() -> bool:
    """Whether the user points at a Temporal server of their own."""
    return any(name in os.environ for name in ("TEMPORAL_ADDRESS", "TEMPORAL_CONFIG_FILE", "TEMPORAL_PROFILE"))
