"""The `publish` activity. It runs in the worker beside the engine, which alone can hand it an adapter directory."""

from __future__ import annotations

from collections.abc import Callable

from temporalio import activity

from activities.blobs import Blobs
from activities.context import beating, control_activity, log, translate_errors
from activities.errors import NotReady
from activities.fleet import live_engines
from activities.publish.publishing import EngineAccess, publish
from activities.run_store import RunStore
from workflows import names
from workflows.contracts.messages import Engines, ListEnginesRequest, Published, PublishRequest


class FleetActivities:
    """Which engines there are to publish to. Runs on the control queue.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, blobs: Blobs, clock: Callable[[], float]) -> None:
        self._blobs = blobs
        self._clock = clock

    @activity.defn(name=names.LIST_ENGINES)
    @control_activity
    def list_engines(self, request: ListEnginesRequest) -> Engines:
        spec = RunStore(self._blobs, request.run.run_id).spec(request.run)
        engines = live_engines(self._blobs, spec.model_digest, self._clock())
        if not engines:
            raise NotReady(
                f"no engine serves model {spec.request.model} ({spec.model_digest[:12]}): start one with `tttd worker engine` "
                "and TTTD_ENGINE_MODEL set to that model"
            )
        return Engines(engines=tuple(engine.engine for engine in engines))


class PublishActivities:
    """Publishes to the engine beside this worker, one version at a time."""

    def __init__(self, blobs: Blobs, access: EngineAccess) -> None:
        self._blobs = blobs
        self._access = access

    @activity.defn(name=names.PUBLISH, no_thread_cancel_exception=True)
    @translate_errors
    def publish(self, request: PublishRequest) -> Published:
        phase = "start"

        def progress(now: str) -> None:
            nonlocal phase
            phase = now

        with beating(lambda: phase):
            published = publish(self._blobs, self._access, request, progress=progress)
        log.info("policy_published", engine=published.engine, boot=published.boot_id, policy=request.policy.name)
        return published
