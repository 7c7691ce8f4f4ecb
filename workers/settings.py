"""Deployment settings: where things are. The only module that reads the environment.

Precedence: defaults < `tttd.toml` (in the working directory, or named by TTTD_CONFIG) < environment variables TTTD_*.
Nothing scientific stands here: moving a run to other hosts never changes its identity. Temporal's own connection settings are
Temporal's (TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, TEMPORAL_API_KEY, TEMPORAL_TLS_*, temporal.toml).
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

import tasks

BUILT_IN_PROPOSERS = Path(tasks.__file__).parent / "proposers"


def _host_id() -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-") or "host"


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
    """Names this engine's task queue; unique among engines."""
    engine_kind: Literal["embedded"] = "embedded"
    engine_model: str = "packing"
    """The model that this host's engine serves: a name below model_dirs, or a path."""
    engine_port: int = Field(default=0, ge=0, le=65535)
    """0: any free port."""
    engine_host: str = "127.0.0.1"
    """Address that samplers reach this engine at, and that it binds."""
    engine_threads: int = Field(default=1, ge=1)
    train_threads: int = Field(default=1, ge=1)
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
    environments: Path = Path(sys.prefix) / "share" / "tttd" / "environments"
    """Where `tttd task build` makes the Python environments of judged programs."""
    frontiercs_url: str | None = None
    """Of a FrontierCS judge, for tasks that are judged there."""
    sample_concurrency: int = Field(default=512, ge=1)
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
