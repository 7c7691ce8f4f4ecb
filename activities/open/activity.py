"""The `prepare_run` and `open_run` activities. Between the two the start is judged, on a judge host."""

from __future__ import annotations

from pathlib import Path

from temporalio import activity

from activities.blobs import Blobs
from activities.context import control_activity, log
from activities.models import find_model, model_digest
from activities.open.forking import check_fork, with_origin
from activities.open.opening import open_run, verdict_keys
from activities.open.resolve import check_identity, resolve
from activities.records import RunSpec
from activities.run_store import RunStore
from tasks.bundles import pack
from tasks.registry import TaskSource
from workflows import names
from workflows.contracts.base import RunRef
from workflows.contracts.messages import Opened, OpenRequest, Prepared, PrepareRequest
from workflows.contracts.request import RunRequest


class OpenActivities:
    """Args:
    prompt_text: wording of the prompt template, whose digest enters the identity.
    """

    def __init__(self, blobs: Blobs, tasks: TaskSource, model_directories: tuple[Path, ...], prompt_text: str) -> None:
        self._blobs = blobs
        self._tasks = tasks
        self._model_directories = model_directories
        self._prompt_text = prompt_text

    @activity.defn(name=names.PREPARE_RUN)
    @control_activity
    def prepare_run(self, request: PrepareRequest) -> Prepared:
        wanted = with_origin(self._blobs, self._with_bundle(request.request), request.run_id)
        asked = resolve(wanted, request.run_id, self._tasks, self._model_directories, self._prompt_text)
        store = RunStore(self._blobs, asked.run_id)
        if wanted.fork is not None and store.last_step() is None:
            check_fork(self._blobs, asked)  # before anything of the fork is stored
        digest, _ = store.claim(f"{store.root}/open", asked)
        spec = store.load(RunSpec, digest)
        check_identity(spec, asked)
        needed = verdict_keys(store, spec, self._tasks.of(spec))
        judged = store.last_step() is not None or all(store.find(key) is not None for key in needed)
        log.info("run_prepared", run=spec.run_id, identity=spec.identity, model=spec.request.model)
        return Prepared(run=RunRef(run_id=spec.run_id, identity=spec.identity, spec=digest), judge_seed=not judged)

    def _with_bundle(self, request: RunRequest) -> RunRequest:
        """A task that only this host has is stored for all others; one that the request brings along is stored already."""
        if request.bundle is not None:
            return request
        task = self._tasks.load(request.task)
        return request if task.is_built_in else request.model_copy(update={"bundle": self._blobs.put(pack(task.folder))})

    @activity.defn(name=names.OPEN_RUN)
    @control_activity
    def open_run(self, request: OpenRequest) -> Opened:
        store = RunStore(self._blobs, request.run.run_id)
        spec = store.spec(request.run)
        task = self._tasks.of(spec)
        model = find_model(spec.request.model, self._model_directories)
        head, recent = open_run(store, spec, task, model)
        log.info("run_opened", run=spec.run_id, step=head.step, commit=head.commit, model=model_digest(model))
        return Opened(
            head=head,
            task=task.name,
            model=Path(spec.request.model).name,
            score_name=task.score_name,
            best_known=task.best_known,
            higher_is_better=task.sign > 0,
            recent=recent,
        )
