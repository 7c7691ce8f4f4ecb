"""From `tttd fork` to a request: what the other run asked for, with changes, after one of its commits. Knows no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from activities.blobs import Blobs
from activities.errors import InputError
from activities.open.forking import check_fork, with_origin
from activities.open.resolve import resolve
from activities.sample.prompt import template_digest_source
from console.launch import Asked, continuation, with_settings
from console.output import USAGE, Failure
from console.stored import find_run, unknown_run
from tasks.registry import TaskError, TaskSource
from workers.settings import Settings
from workflows.contracts.request import parse_request


def ask_fork(
    blobs: Blobs, settings: Settings, tasks: TaskSource, run: str, step: int, *, name: str | None, changes: Sequence[str]
) -> Asked:
    """A fork's request, resolved on this host.

    Args:
        step: last step that the fork has in common with the run.
        name: the fork's; None: by its identity, so that the same command goes on with the same fork.
        changes: `optimizer.learning_rate=1e-4` and the like.

    Raises:
        Failure: no such run or step, a wrong field, or one that a fork cannot change; usage.
        Retired: that step cannot be gone on from any more.
    """
    stored = find_run(blobs, run)
    if stored is None:
        raise Failure(unknown_run(blobs, run), USAGE)
    if stored.spec is None:
        raise Failure(f"run {run} was never opened, so there is nothing to fork", USAGE)
    raw: dict[str, Any] = continuation(stored.spec, stored.spec.request.search.steps) | {"fork": {"run": run, "step": step}}
    with_settings(raw, changes)
    if name is not None:
        raw["name"] = name
    try:
        request = with_origin(blobs, parse_request(raw), name)
        spec = resolve(request, name, tasks, settings.model_directories, template_digest_source())
    except (ValueError, TaskError, InputError) as error:
        raise Failure(str(error), USAGE) from None
    if request.search.steps <= step:
        raise Failure(
            f"search.steps={request.search.steps} counts the steps up to {step} too, so the fork has nothing to do; give "
            f"--set search.steps=N with N above {step}",
            USAGE,
        )
    if (opened := find_run(blobs, spec.run_id)) is None or opened.step is None:
        check_fork(blobs, spec)
    assert request.fork is not None
    return Asked(raw | {"fork": request.fork.model_dump(mode="json")}, request, spec)
