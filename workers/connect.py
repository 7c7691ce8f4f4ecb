"""Clients: Temporal (by its own configuration), the object store, and the workflow sandbox's pass-through list."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, NoReturn

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.envconfig import ClientConfig
from temporalio.runtime import LogForwardingConfig, LoggingConfig, PrometheusConfig, Runtime, TelemetryConfig
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from activities.blobs import Blobs, open_store
from tasks.bundles import BundleCache
from tasks.registry import TaskSource
from workers import temporal_server
from workers.settings import Settings, temporal_is_configured

_runtime_is_set = False


def use_quiet_runtime(metrics_address: str | None = None) -> None:
    """Forward Temporal Core's logs to Python's: by default they go to stdout and would corrupt what a command prints as JSON.

    Args:
        metrics_address: host:port at which Core shows its own numbers to Prometheus. The first call of a process decides.
    """
    global _runtime_is_set
    if _runtime_is_set:
        return
    logging_config = LoggingConfig(filter="WARN", forwarding=LogForwardingConfig(logger=logging.getLogger("temporal_core")))
    metrics = PrometheusConfig(bind_address=metrics_address, durations_as_seconds=True) if metrics_address else None
    Runtime.set_default(Runtime(telemetry=TelemetryConfig(logging=logging_config, metrics=metrics)))
    _runtime_is_set = True


def connect_options(settings: Settings) -> dict[str, Any]:
    """Options of Client.connect: the user's Temporal configuration if there is one, else the embedded server of `tttd up`.

    Raises:
        RuntimeError: the configuration, or a file that it names (a certificate, a key), cannot be read.
    """
    file = None if temporal_is_configured() or not settings.temporal_config.is_file() else str(settings.temporal_config)
    try:
        options = dict(ClientConfig.load_client_connect_config(config_file=file))
    except (OSError, ValueError, RuntimeError) as error:
        raise RuntimeError(f"Temporal's configuration (TEMPORAL_* variables, temporal.toml) cannot be used: {error}") from None
    # Before the first `tttd up` no file names an address.
    options.setdefault("target_host", temporal_server.address(settings))
    return options


async def connect_temporal(settings: Settings) -> Client:
    """Connect to Temporal.

    Raises:
        RuntimeError: the server cannot be reached; names its address and what to do.
    """
    use_quiet_runtime()
    options = connect_options(settings)
    try:
        return await Client.connect(**options, data_converter=pydantic_data_converter)
    except RuntimeError as error:
        raise RuntimeError(
            f"no Temporal server at {options.get('target_host')}: start one with `tttd up`, or set TEMPORAL_ADDRESS ({error})"
        ) from None


def connect_blobs(settings: Settings) -> Blobs:
    return Blobs(open_store(settings.store_url, endpoint=settings.s3_endpoint))


def connect_tasks(settings: Settings, blobs: Blobs) -> TaskSource:
    """Built-in tasks, those of the settings' directories, and those that runs bring along, unpacked below HOME/bundles."""
    return TaskSource(settings.task_dirs, BundleCache(settings.home / "bundles", blobs.get))


def workflow_runner() -> SandboxedWorkflowRunner:
    """Temporal's workflow sandbox, passing through what is immutable: importing pydantic anew for every workflow is slow."""
    return SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_modules(
            "annotated_types",
            "pydantic",
            "pydantic_core",
            "typing_inspection",
            "workflows.contracts",
            "workflows.names",
            "workflows.policies",
        )
    )


def leave(code: int) -> NoReturn:
    """End a process that used a Temporal client: its threads can crash the interpreter's own exit (spec temporal 8.7)."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)
