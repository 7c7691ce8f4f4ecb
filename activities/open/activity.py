"""The `prepare_run` and `open_run` activities. Between the two the seed program is judged, on a judge host."""

from __future__ import annotations

from pathlib import Path

from temporalio import activity

from activities.blobs import Blobs
from activities.context import control_activity, log
from activities.models import find_model, model_digest
from activities.open.opening import open_run
from activities.open.resolve import check_identity, resolve
from activities.records import SEED, RunSpec, RunStore
from tasks.registry import TaskSource
from workflows import names
from workflows.contracts.base import RunRef
from workflows.contracts.messages import Opened, OpenRequest, Prepared, PrepareRequest


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
        asked = resolve(request.request, request.run_id, self._tasks, self._model_directories, self._prompt_text)
        store = RunStore(self._blobs, asked.run_id)
        digest, _ = store.claim(f"{store.root}/open", asked)
        spec = store.load(RunSpec, digest)
        check_identity(spec, asked)
        program = self._tasks.load(spec.task).start_program(spec.start)
        judged = store.find(store.rollout_key(SEED, "verdict")) is not None or store.last_step() is not None
        log.info("run_prepared", run=spec.run_id, identity=spec.identity, model=spec.request.model)
        return Prepared(
            run=RunRef(run_id=spec.run_id, identity=spec.identity, spec=digest), judge_seed=bool(program) and not judged
        )

    @activity.defn(name=names.OPEN_RUN)
    @control_activity
    def open_run(self, request: OpenRequest) -> Opened:
        store = RunStore(self._blobs, request.run.run_id)
        spec = store.spec(request.run)
        task = self._tasks.load(spec.task)
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
