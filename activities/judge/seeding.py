"""Certifies the constructions that a run begins with. Knows no Temporal; a start's program is judged as any other is."""

from __future__ import annotations

from activities.errors import InputError
from activities.judge.judging import certify, verdict_of
from activities.records import RunSpec
from activities.run_store import RunStore, seed_at
from tasks.registry import Task, TaskError
from tasks.starts import grade_answer, root_answer, verdicts_needed


def certify_roots(store: RunStore, spec: RunSpec, task: Task) -> None:
    """Store a verdict on the construction of every root that has one of its own, or one that all roots share.

    A root that has a verdict keeps it. What is not valid is stored too: opening the run then says why.

    Raises:
        InputError: the task's construction cannot be read or made; names the file.
        CorruptBlob, TransientError: the store failed.
    """
    judge = task.make_judge()
    for root in range(verdicts_needed(task.starts[spec.start], spec.request.search.groups)):
        at = seed_at(root)
        key = store.rollout_key(at, "verdict")
        if store.find(key) is not None:
            continue
        try:
            answer = root_answer(task, spec.start, spec.request.seed, root)
        except TaskError as error:
            raise InputError(f"run {spec.run_id}: {error}") from None
        judgement = certify(task, grade_answer(judge, answer), None)
        store.claim(key, verdict_of(judgement, at, store))
