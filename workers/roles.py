"""The five roles. Each is one process with one Temporal worker: control, sample, judge, train, engine.

A role imports only its own rooms, so a judge host needs no torch and holds no engine's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.blobs import Blobs
from workers.connect import connect_blobs, connect_tasks, connect_temporal, use_quiet_runtime, workflow_runner
from workers.logs import configure_logging
from workers.rights import RestrictedStore
from workers.search_attributes import ensure_search_attributes
from workers.serving import Serving
from workers.settings import Settings
from workflows import names

log: structlog.stdlib.BoundLogger = structlog.get_logger()

WORKFLOW_TASKS = 8
"""Taken at once by a control worker. They share one core, and Temporal's ten seconds for each begin when it is taken: with the
SDK's 100, the first tasks of 64 groups x 64 rollouts ran out of time together, and began again together (docs/results/scale)."""
_CONNECT_PAUSE_SECONDS = 1.0


def run_role(role: str, settings: Settings) -> int:
    """Run one role until SIGTERM or SIGINT. Returns the process's exit code.

    Raises:
        SystemExit: unknown role; names the five.
    """
    if role not in _ROLES:
        raise SystemExit(f"tttd: no role {role!r}; roles are {', '.join(_ROLES)}")
    configure_logging(settings.log_level, role=role, file=settings.log_file)
    return asyncio.run(_serve(role, settings))


async def _serve(role: str, settings: Settings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if settings.temporal_metrics_port:  # the runtime is made once, so before the first client
        use_quiet_runtime(f"{settings.probe_host}:{settings.temporal_metrics_port}")
    serving = Serving(role, settings, stop)
    with serving.listening():
        client = await _connect(settings, stop)
        if client is None:
            return 0
        blobs = Blobs(RestrictedStore(connect_blobs(settings).store, role))
        log.info("worker_started", role=role, store=blobs.store.url, temporal=client.service_client.config.target_host)
        async with serving.watching(client, blobs):
            await _ROLES[role](settings, serving.counted(client), blobs, serving)
    log.info("worker_stopped", role=role)
    return 0


async def _connect(settings: Settings, stop: asyncio.Event) -> Client | None:
    """Connect, however long the server takes to come; None when told to stop meanwhile."""
    warned = False
    while not stop.is_set():
        try:
            return await connect_temporal(settings)
        except RuntimeError as error:
            if not warned:
                log.warning("waiting_for_temporal", message=str(error))
                warned = True
            await asyncio.sleep(_CONNECT_PAUSE_SECONDS)
    return None


async def _ensure_search_attributes(client: Client, serving: Serving) -> None:
    """Wait until they exist: a control worker that polled without them would hang every run on its first workflow task."""
    while not serving.stop.is_set():
        try:
            await ensure_search_attributes(client)
        except (RuntimeError, RPCError) as error:
            log.error("search_attributes_missing", message=str(error))
            serving.health.mark("search_attributes", False, str(error))
            await asyncio.sleep(5)
        else:
            serving.health.mark("search_attributes", True)
            return


async def _work(worker: Worker, serving: Serving) -> None:
    async with worker:
        serving.health.mark("polling", True)
        await serving.stop.wait()
        serving.health.drain()


async def _control(settings: Settings, client: Client, blobs: Blobs, serving: Serving) -> None:
    from activities.barrier.activity import BarrierActivities
    from activities.commit.activity import CommitActivities
    from activities.open.activity import OpenActivities
    from activities.publish.activity import FleetActivities
    from activities.sample.prompt import template_digest_source
    from activities.select.activity import SelectActivities
    from workers.step_numbers import StepNumbers
    from workflows.discovery_run import DiscoveryRun
    from workflows.discovery_step import DiscoveryStep
    from workflows.rollout_group import RolloutGroup

    numbers = StepNumbers(blobs)
    serving.show(numbers)
    serving.on_step = numbers.read
    await _ensure_search_attributes(client, serving)
    tasks = connect_tasks(settings, blobs)
    opening = OpenActivities(blobs, tasks, settings.model_directories, template_digest_source())
    with ThreadPoolExecutor(8) as threads:
        worker = Worker(
            client,
            task_queue=names.CONTROL_QUEUE,
            workflows=[DiscoveryRun, DiscoveryStep, RolloutGroup],
            activities=[
                opening.prepare_run,
                opening.open_run,
                SelectActivities(blobs).select_parents,
                BarrierActivities(blobs, tasks).assemble_batch,
                FleetActivities(blobs, time.time).list_engines,
                CommitActivities(blobs, tasks).commit_step,
            ],
            activity_executor=threads,
            max_concurrent_activities=8,
            max_concurrent_workflow_tasks=WORKFLOW_TASKS,
            workflow_runner=workflow_runner(),
            graceful_shutdown_timeout=serving.drain,
        )
        await _work(worker, serving)


async def _sample(settings: Settings, client: Client, blobs: Blobs, serving: Serving) -> None:
    from activities.sample.activity import SampleActivities
    from activities.sample.pool import EnginePool

    room = SampleActivities(blobs, connect_tasks(settings, blobs), settings.model_directories, EnginePool(blobs, time.time))
    worker = Worker(
        client,
        task_queue=names.SAMPLE_QUEUE,
        activities=[room.sample],
        max_concurrent_activities=settings.sample_concurrency,
        graceful_shutdown_timeout=serving.drain,
    )
    await _work(worker, serving)


async def _judge(settings: Settings, client: Client, blobs: Blobs, serving: Serving) -> None:
    from activities.judge.activity import JudgeActivities
    from activities.judge.sandbox import SandboxUnavailable, open_sandbox
    from activities.judge.slots import Slots
    from workers.sandboxes import sandbox_settings

    slots = Slots(settings.judge_slots)
    try:
        sandbox = await asyncio.to_thread(open_sandbox, sandbox_settings(settings))
    except SandboxUnavailable as error:
        log.error("no_sandbox", message=str(error))
        raise SystemExit(f"tttd: {error}") from None
    serving.health.mark("sandbox", True, str(sandbox.isolation))
    serving.show_slots(slots)
    room = JudgeActivities(blobs, connect_tasks(settings, blobs), sandbox, slots, settings.environments, settings.judge_services)
    try:
        worker = Worker(
            client,
            task_queue=names.JUDGE_QUEUE,
            activities=[room.judge, room.judge_seed],
            # More than there are slots would take work that another host could begin.
            max_concurrent_activities=slots.cores,
            graceful_shutdown_timeout=serving.drain,
        )
        await _work(worker, serving)
    finally:
        await sandbox.close()


async def _train(settings: Settings, client: Client, blobs: Blobs, serving: Serving) -> None:
    from activities.models import find_model
    from activities.train.activity import TrainActivities
    from workers.train_options import trainer_options

    room = TrainActivities(blobs, lambda name: find_model(name, settings.model_directories), trainer_options(settings))
    with contextlib.closing(room), ThreadPoolExecutor(1) as thread:
        worker = Worker(
            client,
            task_queue=names.TRAIN_QUEUE,
            activities=[room.score_base, room.train],
            activity_executor=thread,
            max_concurrent_activities=1,
            graceful_shutdown_timeout=serving.drain,
        )
        await _work(worker, serving)


async def _engine(settings: Settings, client: Client, blobs: Blobs, serving: Serving) -> None:
    from activities.publish.activity import PublishActivities
    from workers.engine.host import EngineHost, keep_running
    from workers.engine.numbers import EngineNumbers
    from workers.locks import alone

    host = EngineHost(settings, blobs)
    serving.show(EngineNumbers(host))
    serving.refresh = lambda: serving.health.mark("engine", host.current is not None, "" if host.current else "it starts")
    with alone(settings, f"engine-{host.engine_id}"), ThreadPoolExecutor(2) as threads:
        worker = Worker(
            client,
            task_queue=names.engine_queue(host.engine_id),
            activities=[PublishActivities(blobs, host).publish],
            activity_executor=threads,
            max_concurrent_activities=2,
            graceful_shutdown_timeout=serving.drain,
        )
        await asyncio.gather(keep_running(host, serving.stop), _work(worker, serving))


_ROLES: dict[str, Callable[[Settings, Client, Blobs, Serving], Any]] = {
    "control": _control,
    "sample": _sample,
    "judge": _judge,
    "train": _train,
    "engine": _engine,
}
