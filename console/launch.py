"""From the words of a command to a running workflow: the request, its run id, and whether to start, resume, attach or just answer.

Knows no terminal. The workflow's input is the user's own small JSON; the control worker resolves it again on its own host.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError

from activities.blobs import Blobs, digest_of
from activities.errors import InputError
from activities.open.resolve import check_identity, resolve
from activities.records import RunSpec
from activities.sample.prompt import template_digest_source
from console.inquiry import NO_SERVER, Snapshot, look
from console.output import USAGE, Failure
from console.stored import StoredRun, find_run
from tasks.bundles import pack
from tasks.registry import TaskError, TaskSource
from workers.settings import Settings
from workflows import names
from workflows.contracts.request import RunRequest, parse_request


@dataclass(frozen=True)
class Asked:
    """A valid request, resolved on this host."""

    raw: dict[str, Any]
    """What the user wrote, and what the workflow gets."""
    request: RunRequest
    spec: RunSpec
    bundle: bytes | None = field(default=None, repr=False)
    """The task's folder, for a task that is not built in; stored before the run starts, so that workers elsewhere have it too."""

    @property
    def run_id(self) -> str:
        return self.spec.run_id

    def named(self, run_id: str) -> Asked:
        """The same request under another run id; a `name` in the request follows, since both must agree."""
        raw = self.raw | ({"name": run_id} if "name" in self.raw else {})
        return Asked(raw, self.request, self.spec.model_copy(update={"run_id": run_id}), self.bundle)


@dataclass(frozen=True)
class Launched:
    """What became of a request."""

    how: Literal["started", "resumed", "attached", "finished"]
    """`resumed`: a new execution goes on from the last commit. `finished`: nothing is left to do."""
    step: int
    """Last committed step."""


def build_raw(task: str, profile: str, settings: Sequence[str], name: str | None) -> dict[str, Any]:
    """The user's JSON from a command line.

    Args:
        settings: `search.steps=4` and the like; values are JSON, or else text.

    Raises:
        Failure: a setting is not KEY=VALUE, or contradicts another; usage.
    """
    raw: dict[str, Any] = {"task": task, "profile": profile}
    if name is not None:
        raw["name"] = name
    return with_settings(raw, settings)


def with_settings(raw: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The user's JSON with `--set` options put into it, in place.

    Raises:
        Failure: a setting is not KEY=VALUE, or contradicts another; usage.
    """
    for setting in settings:
        key, equals, text = setting.partition("=")
        path = key.split(".")
        if not equals or not all(path):
            raise Failure(f"--set {setting!r}: write KEY=VALUE, for example --set search.steps=4", USAGE)
        if key in ("task", "profile", "name", "bundle"):
            raise Failure(f"--set {setting!r}: {key} has an argument or option of its own, see `tttd run --help`", USAGE)
        if path[0] == "fork":
            raise Failure(f"--set {setting!r}: `tttd fork RUN --at-step K` makes forks", USAGE)
        place = raw
        for part in path[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise Failure(f"--set {setting!r}: {part} was set to {place!r} before", USAGE)
        place[path[-1]] = _value(text)
    return raw


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def ask(raw: dict[str, Any], settings: Settings) -> Asked:
    """Validate and resolve.

    Raises:
        Failure: a field is wrong, or this host has no such task, start or model; names it; usage.
    """
    tasks = TaskSource(settings.task_dirs)
    try:
        request = parse_request(raw)
        task = tasks.load(request.task)
        bundle = None if task.is_built_in else pack(task.folder)
        spec = resolve(request, request.name, tasks, settings.model_directories, template_digest_source())
    except (ValueError, InputError, TaskError) as error:
        raise Failure(str(error), USAGE) from None
    if bundle is None:
        return Asked(raw, request, spec)
    named = {"bundle": digest_of(bundle)}
    return Asked(raw | named, request.model_copy(update=named), spec.model_copy(update=named), bundle)


def stored_run(blobs: Blobs, asked: Asked) -> StoredRun | None:
    """What the store has of the run.

    Raises:
        IdentityChanged: the run exists with another science; names what differs.
    """
    run = find_run(blobs, asked.run_id)
    if run is not None and run.spec is not None:
        check_identity(run.spec, asked.spec)
    return run


def is_finished(run: StoredRun | None, steps: int) -> bool:
    """Whether the store holds every step that was asked for."""
    return run is not None and run.step is not None and run.step >= steps


def fresh_names(base: str) -> Iterator[str]:
    """base, base-2, base-3, ..."""
    yield base
    number = 2
    while True:
        yield f"{base}-{number}"
        number += 1


async def with_free_name(asked: Asked, blobs: Blobs, client: Client | None) -> Asked:
    """The request under the first run id that neither the store nor Temporal knows.

    Args:
        client: None asks the store alone.
    """
    for run_id in fresh_names(asked.run_id):
        if find_run(blobs, run_id) is not None:
            continue
        if client is not None:
            seen = await look(client, run_id)
            if seen.missing == NO_SERVER:
                raise Failure("the Temporal server does not answer, so no free name can be found; try again in a moment")
            if seen.execution is not None:
                continue
        return asked.named(run_id)
    raise AssertionError("names do not run out")


async def launch(client: Client, blobs: Blobs, asked: Asked) -> Launched:
    """Attach to the run if it is under way, answer from the store if it is finished, else start it or go on with it.

    Raises:
        Failure: it is under way with another store than ours.
        IdentityChanged: the run exists with another science.
    """
    run = stored_run(blobs, asked)
    step = run.step or 0 if run else 0
    seen = await look(client, asked.run_id)
    if seen.is_running:
        _check_same_store(blobs, asked.run_id, run, seen)
        return Launched("attached", step)
    if is_finished(run, asked.request.search.steps):
        return Launched("finished", step)
    if asked.bundle is not None:
        blobs.put(asked.bundle)
    if not await start(client, asked.run_id, asked.raw, task=asked.spec.task, steps=asked.request.search.steps):
        return Launched("attached", step)
    return Launched("resumed" if run is not None and run.step is not None else "started", step)


def _check_same_store(blobs: Blobs, run_id: str, run: StoredRun | None, seen: Snapshot) -> None:
    """Joining a run whose documents we cannot see would end in a result that nobody can show.

    Raises:
        Failure: the workers' store is not ours.
    """
    if run is None and seen.status is not None and seen.status.commit is not None:
        raise Failure(
            f"run {run_id} is under way with commit {seen.status.commit[:12]}, which is not in {blobs.store.url}: "
            "its workers use another store; set TTTD_STORE (or TTTD_HOME) to theirs, or start your own run with --name"
        )


async def start(client: Client, run_id: str, raw: dict[str, Any], *, task: str, steps: int) -> bool:
    """Start an execution of a run; False if one is under way. A closed one is followed by a new one of the same id."""
    model, rollouts = _words(raw)
    try:
        await client.start_workflow(
            names.DISCOVERY_RUN,
            raw,
            id=names.run_workflow_id(run_id),
            task_queue=names.CONTROL_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            static_summary=f"{task}: {steps} steps of {rollouts} rollouts, {model}",
            static_details=f"Input:\n\n```json\n{json.dumps(raw, indent=2)}\n```\n\nFollow it with `tttd watch {run_id}`.",
        )
    except WorkflowAlreadyStartedError:
        return False
    return True


def _words(raw: dict[str, Any]) -> tuple[str, str]:
    request = parse_request(raw)
    return request.model, f"{request.search.groups} x {request.search.rollouts}"


def continuation(spec: RunSpec, steps: int) -> dict[str, Any]:
    """The input that goes on with a closed run to `steps` steps in total: what its request says beyond its profile."""
    plain = spec.request.model_copy(update={"name": None, "search": spec.request.search.model_copy(update={"steps": steps})})
    base = parse_request({"task": spec.request.task, "profile": spec.request.profile})
    raw = _beyond(plain.model_dump(mode="json"), base.model_dump(mode="json"))
    return {"task": spec.request.task, "profile": spec.request.profile, **raw}


def _beyond(value: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and isinstance(base[key], dict):
            if inner := _beyond(item, base[key]):
                out[key] = inner
        elif item != base[key]:
            out[key] = item
    return out
