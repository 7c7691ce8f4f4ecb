"""From a request to a RunSpec: everything scientific resolved and hashed into the run's identity. Source: design 2, "Identity"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from activities.blobs import digest_of
from activities.errors import IdentityChanged, InputError
from activities.models import find_model, model_digest
from activities.records import RunSpec, canonical_json
from tasks.registry import Task, TaskError, TaskSource, judge_digest, task_digest
from workflows.contracts.request import RunRequest

_OPERATIONAL = ("name", "profile", "timeouts", "model", "task", "bundle", "fork")
"""Request fields outside the identity; model, task and fork enter it by digest instead of by name, the bundle by what is in it."""


def resolve(
    request: RunRequest, run_id: str | None, tasks: TaskSource, model_directories: tuple[Path, ...], prompt_text: str
) -> RunSpec:
    """Resolve a request against the task and the model on this host.

    Args:
        run_id: None derives TASK-IDENTITY8, so that the same request names the same run.
        prompt_text: every wording of the prompt template; its digest is part of the identity.

    Raises:
        InputError: unknown task, start or model, or a judge that cannot be loaded; says what exists or what is wrong.
    """
    if request.fork is not None and request.fork.commit is None:
        raise InputError("fork.commit: not known yet; it is filled in from the store, see `with_origin`")
    try:
        task = tasks.of(request)
        start = task.start_name(request.search.start)
        task.check_judge()
        judge = judge_digest(task)
    except TaskError as error:
        raise InputError(str(error)) from None
    limits = _limits(task, request)
    choices = {"start": start, "offer_construction": _offers(task, request)}
    digests = {
        "task": task_digest(task),
        "judge": judge,
        "model": model_digest(find_model(request.model, model_directories)),
        "prompt": digest_of(prompt_text.encode()),
    }
    science = _science(request, choices, limits, digests)
    identity = digest_of(canonical_json(science))
    return RunSpec(
        run_id=run_id or f"{task.name}-{identity[:8]}",
        request=request,
        identity=identity,
        task=task.name,
        bundle=request.bundle,
        task_digest=digests["task"],
        judge_digest=digests["judge"],
        model_digest=digests["model"],
        prompt_digest=digests["prompt"],
        science=science,
        **choices,
        **limits,
    )


def _limits(task: Task, request: RunRequest) -> dict[str, Any]:
    """The task's limits, overridden by the request's."""
    asked, own = request.judge, task.limits
    wall = asked.wall_seconds or own.wall_seconds
    if task.language == "cpp17":
        # The time of one case belongs to the problem: what a profile allows a whole program may lower it and never raise it.
        wall = min(wall, own.wall_seconds)
    return {
        "wall_seconds": wall,
        "cores": asked.cores or own.cores,
        "memory_bytes": asked.memory_bytes or own.memory_bytes,
        "processes": own.processes,
        "result_bytes": own.result_bytes,
    }


def _offers(task: Task, request: RunRequest) -> bool:
    asked = request.search.offer_construction
    return task.offer_construction if asked is None else asked


def _science(request: RunRequest, choices: dict[str, Any], limits: dict[str, Any], digests: dict[str, str]) -> dict[str, Any]:
    science = {k: v for k, v in request.model_dump(mode="json").items() if k not in _OPERATIONAL}
    search = {k: v for k, v in science["search"].items() if k != "steps"}
    # The run that a fork leaves enters by its commit. A run that is no fork says nothing of forks: identities are older than they.
    lineage = {} if request.fork is None else {"fork": {"commit": request.fork.commit, "step": request.fork.step}}
    return science | {"search": search | choices, "judge": limits, "digests": digests} | lineage


def check_identity(stored: RunSpec, asked: RunSpec) -> None:
    """A resume must mean the same science.

    Raises:
        IdentityChanged: names every field that differs, with both values.
    """
    if stored.identity == asked.identity:
        return
    before, after = _flat(stored.science), _flat(asked.science)
    changes = [
        f"{k}: {before[k]!r} -> {after[k]!r}" if k in before and k in after else f"{k}: {'no longer' if k in before else 'new'}"
        for k in sorted(before | after)
        if k not in before or k not in after or before[k] != after[k]
    ]
    raise IdentityChanged(
        f"run {stored.run_id} exists with another identity ({stored.identity[:8]}, now {asked.identity[:8]}): "
        f"{'; '.join(changes)}. "
        "Start it under a new name, or repeat the original request to resume it."
    )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    out: dict[str, Any] = {}
    for key, item in value.items():
        out |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return out
