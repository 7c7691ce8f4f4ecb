"""The doctor's checks of what runs: Temporal, its search attributes, workers on each queue, registered engines."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError

from activities.blobs import Blobs
from activities.errors import TttdError
from activities.fleet import PREFIX, STALE_SECONDS, read_notice
from console.doctor import Check, Verdict
from console.inquiry import RPC_TIMEOUT
from console.waits import POLLER_SECONDS, find_pollers
from workflows import names

_QUEUES = (
    ("control", names.CONTROL_QUEUE),
    ("sample", names.SAMPLE_QUEUE),
    ("judge", names.JUDGE_QUEUE),
    ("train", names.TRAIN_QUEUE),
)


def check_server(problem: str | None, address: str, is_ours: bool) -> Check:
    """Whether Temporal answers. A server of `tttd up` may simply not be running yet."""
    mechanism = "connect"
    if problem is None:
        return Check(name="server", mechanism=mechanism, verdict="ok", detail=f"Temporal answers at {address}")
    verdict: Verdict = "warning" if is_ours else "failed"
    hint = "`tttd up` starts one, and so do `tttd run` and `tttd demo`" if is_ours else "check TEMPORAL_ADDRESS and the network"
    return Check(name="server", mechanism=mechanism, verdict=verdict, detail=problem, hint=hint)


async def running_checks(client: Client, blobs: Blobs, is_ours: bool) -> AsyncIterator[Check]:
    """Everything that needs a server."""
    yield await check_search_attributes(client)
    for role, queue in _QUEUES:
        yield await check_queue(client, role, queue, is_ours)
    for check in await check_engines(client, blobs, is_ours):
        yield check


async def check_search_attributes(client: Client) -> Check:
    """A missing one stalls every run at its first step: the server refuses the workflow's commands."""
    mechanism = "list the namespace's search attributes"
    try:
        listed = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace), timeout=RPC_TIMEOUT
        )
    except RPCError as error:
        detail = f"the server does not list them ({error.message})"
        hint = f"make sure that namespace {client.namespace} has {_pairs(names.SEARCH_ATTRIBUTES)}"
        return Check(name="search attributes", mechanism=mechanism, verdict="warning", detail=detail, hint=hint)
    missing = {name: kind for name, kind in names.SEARCH_ATTRIBUTES.items() if name not in listed.custom_attributes}
    if missing:
        flags = " ".join(f"--name {name} --type {kind}" for name, kind in missing.items())
        own = f"temporal operator search-attribute create --namespace {client.namespace} {flags}"
        return Check(
            name="search attributes",
            mechanism=mechanism,
            verdict="warning",
            detail=f"namespace {client.namespace} lacks {_pairs(missing)}",
            hint=f"a control worker creates them when it starts; if it may not, do it yourself: {own}",
        )
    return Check(
        name="search attributes", mechanism=mechanism, verdict="ok", detail=f"all {len(names.SEARCH_ATTRIBUTES)} are there"
    )


def _pairs(attributes: dict[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in attributes.items())


async def check_queue(client: Client, role: str, queue: str, is_ours: bool) -> Check:
    """Whether a worker asks this queue for work. A control worker must also ask for workflows."""
    mechanism = "who polled it lately"
    count = (await find_pollers(client, queue)).count
    if role == "control":
        count = min(count, (await find_pollers(client, queue, workflows=True)).count)
    if count:
        return Check(name=f"{role} workers", mechanism=mechanism, verdict="ok", detail=f"{count} on {queue}")
    hint = f"start one with `tttd worker {role}`" + (", or everything with `tttd up`" if is_ours else "")
    detail = f"none asked {queue} for work in the last {POLLER_SECONDS:.0f} s"
    return Check(name=f"{role} workers", mechanism=mechanism, verdict="warning", detail=detail, hint=hint)


async def check_engines(client: Client, blobs: Blobs, is_ours: bool) -> list[Check]:
    """Registered engines, and whether a worker serves each one's own queue."""
    mechanism = "notices in the store, pollers of each engine's queue"
    now = time.time()
    engines = [key.removeprefix(PREFIX) for key in blobs.store.keys(PREFIX)]
    if not engines:
        hint = "start one with `tttd worker engine`" + (", or everything with `tttd up`" if is_ours else "")
        return [Check(name="engines", mechanism=mechanism, verdict="warning", detail="none is registered", hint=hint)]
    found = [await _check_engine(client, blobs, engine, mechanism, now) for engine in engines]
    return [check for check in found if check is not None]


async def _check_engine(client: Client, blobs: Blobs, engine: str, mechanism: str, now: float) -> Check | None:
    """None if the notice was withdrawn meanwhile."""
    name = f"engine {engine}"
    try:
        notice = read_notice(blobs, engine)
    except (TttdError, ValueError) as error:
        remedy = f"delete {PREFIX}{engine} in {blobs.store.url}"
        return Check(name=name, mechanism=mechanism, verdict="warning", detail=f"its notice cannot be read: {error}", hint=remedy)
    if notice is None:
        return None
    silent = now - notice.updated
    pollers = (await find_pollers(client, names.engine_queue(engine))).count
    detail = (
        f"{notice.url}, model {notice.model_digest[:16]}, {len(notice.verified)} adapters proved, "
        f"heard of {silent:.0f} s ago, {pollers} workers on its queue"
    )
    if silent < STALE_SECONDS and pollers > 0:
        return Check(name=name, mechanism=mechanism, verdict="ok", detail=detail)
    hint = f"its worker is silent: start it again with `tttd worker engine` on that host (TTTD_ENGINE_ID={engine})"
    return Check(name=name, mechanism=mechanism, verdict="warning", detail=detail, hint=hint)
