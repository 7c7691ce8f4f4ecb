"""What the object store knows of runs: enough to name a run's best answer and its steps when nobody else can be asked.

Knows no Temporal. The chain is what counts: scores and exact values come from commits, never from reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from activities.blobs import Blobs
from activities.commit.expand import best_node, child_id
from activities.errors import CorruptBlob, InputError
from activities.records import ArchiveState, Node, RunSpec, StepCommit, StepReport, Verdict, canonical_json
from activities.run_store import SEED, RunStore, seed_at
from console.lines import exact_digits
from tasks.registry import Task, TaskError, TaskSource
from workflows.contracts.base import RunId
from workflows.contracts.messages import StepSummary


@dataclass(frozen=True)
class StoredRun:
    """A run as its documents have it."""

    run_id: str
    spec: RunSpec | None
    """None for a run that was never opened with success."""
    step: int | None
    """Last committed step."""
    commit: str | None
    """Digest of that commit."""
    head: StepCommit | None


class Lineage(BaseModel):
    """Where a fork left another run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    run: RunId
    step: int
    """The last step that both have in common."""
    commit: str
    """Digest of that step's commit in the other run."""


class BestAnswer(BaseModel):
    """The best certified answer of a run, and where it stands in the chain."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    run_id: RunId
    task: str
    score_name: str
    score: float
    """Certified, rounded to a double against the program."""
    exact: str | None
    """The certified value as a fraction; None for a seed whose verdict is not in the store."""
    exact_digits: str | None
    """Its first 40 decimals."""
    best_known: float | None
    node: str
    found_step: int
    """Step that made it; 0 for the seed."""
    construction: str | None
    """Digest of the certified construction: `blobs/ab/<digest>` in the store."""
    step: int
    """Last committed step."""
    commit: str
    """Hash of the chain up to `step`."""
    policy_version: int
    policy: str
    program: str
    fork_of: Lineage | None = None
    """The run that this one is a fork of."""


def run_ids(blobs: Blobs) -> list[str]:
    """Every run that the store holds."""
    return blobs.store.folders("runs/")


def find_run(blobs: Blobs, run_id: str) -> StoredRun | None:
    """A run's last commit, or None if the store has never heard of it."""
    store = RunStore(blobs, run_id)
    spec = store.read(RunSpec, f"{store.root}/open")
    step = store.last_step()
    if spec is None and step is None:
        return None
    digest = None if step is None else store.commit_digest(step)
    return StoredRun(run_id, spec, step, digest, None if digest is None else store.load(StepCommit, digest))


def lineage_of(spec: RunSpec | None) -> Lineage | None:
    """Where a run left another one; None for a run that is no fork."""
    fork = None if spec is None else spec.request.fork
    return None if fork is None or fork.commit is None else Lineage(run=fork.run, step=fork.step, commit=fork.commit)


def lineage_text(fork: Lineage) -> str:
    """For people."""
    return f"fork of {fork.run} at step {fork.step} (commit {fork.commit[:12]})"


def commit_at(store: RunStore, head: StepCommit, step: int) -> StepCommit | None:
    """The commit that a step's grid was put into; of a fork's earlier steps that of the run it left, found by digest alone."""
    digest = store.commit_digest(step)
    at: StepCommit | None = head if digest is None else store.load(StepCommit, digest)
    while at is not None and at.step >= step:
        if at.step == step and at.origin is None:
            return at
        # A fork's opening commit stands at the step that it shares with the other run, and has no rows of its own.
        below = at.origin.commit if at.origin is not None else at.previous
        at = None if below is None else store.load(StepCommit, below)
    return None


def summary_of(blobs: Blobs, run_id: str, step: int) -> StepSummary | None:
    """A committed step in numbers; None if its report was lost in a crash, which the chain does not need."""
    store = RunStore(blobs, run_id)
    report = store.read(StepReport, store.step_key(step, "report"))
    return None if report is None else report.summary


def summaries(blobs: Blobs, run_id: str, steps: Iterable[int]) -> tuple[StepSummary, ...]:
    """The reports that exist of these steps."""
    found = (summary_of(blobs, run_id, step) for step in steps)
    return tuple(summary for summary in found if summary is not None)


def task_of(spec: RunSpec | None, tasks: TaskSource) -> Task | None:
    """The run's task: built in, or as the run brought it along; None if this machine has none of that name."""
    try:
        return None if spec is None else tasks.of(spec)
    except (TaskError, CorruptBlob):
        return None


def best_answer(blobs: Blobs, run_id: str, tasks: TaskSource) -> BestAnswer:
    """The best certified answer up to the run's last commit.

    Raises:
        InputError: no such run (names those that exist), nothing committed yet, or nothing certified yet.
    """
    run = find_run(blobs, run_id)
    if run is None:
        raise InputError(unknown_run(blobs, run_id))
    if run.head is None or run.step is None or run.commit is None:
        raise InputError(f"run {run_id} has no opening commit yet; `tttd status {run_id}` says what it waits for")
    node = best_node(RunStore(blobs, run_id).load(ArchiveState, run.head.archive))
    if node is None or node.score is None:
        raise InputError(
            f"run {run_id} has no certified answer yet: none of its programs up to step {run.step} was valid, "
            "and it began without one"
        )
    task = task_of(run.spec, tasks)
    exact = _exact(RunStore(blobs, run_id), run.head, node)
    return BestAnswer(
        run_id=run_id,
        task=run.spec.task if run.spec else "",
        score_name=task.score_name if task else "score",
        score=node.score,
        exact=exact,
        exact_digits=exact_digits(exact),
        best_known=task.best_known if task else None,
        node=node.id,
        found_step=node.step,
        construction=node.construction,
        step=run.step,
        commit=run.commit,
        policy_version=run.head.policy.version,
        policy=run.head.policy.name,
        program=node.code,
        fork_of=lineage_of(run.spec),
    )


def _exact(store: RunStore, head: StepCommit, node: Node) -> str | None:
    """From the commit that put the node into the archive; a root's from its verdict, or from the one that all roots share."""
    if node.step == 0:
        own = seed_at(int(node.id.removeprefix("seed-")))
        verdict = store.read(Verdict, store.rollout_key(own, "verdict")) or store.read(Verdict, store.rollout_key(SEED, "verdict"))
        return None if verdict is None else verdict.exact
    commit = commit_at(store, head, node.step)
    rows = () if commit is None else commit.rows
    return next((row.exact for row in rows if child_id(node.step, row.group, row.rollout) == node.id), None)


def unknown_run(blobs: Blobs, run_id: str) -> str:
    """The sentence for a run that does not exist."""
    known = run_ids(blobs)
    shown = ", ".join(known[-12:]) if known else "none yet; `tttd demo` makes one"
    return f"no run {run_id!r} in {blobs.store.url}; runs there: {shown}"


def write_best(answer: BestAnswer, home: Path) -> Path:
    """Write the program and its certificate to HOME/runs/RUN/best.py and best.json; returns the program's path."""
    folder = home / "runs" / answer.run_id
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "best.py"
    program.write_text(answer.program, encoding="utf-8")
    (folder / "best.json").write_bytes(canonical_json(answer.model_dump(exclude={"program"})) + b"\n")
    return program


def best_score(blobs: Blobs, run: StoredRun) -> float | None:
    """Best certified score at a run's last commit."""
    if run.head is None:
        return None
    node = best_node(RunStore(blobs, run.run_id).load(ArchiveState, run.head.archive))
    return None if node is None else node.score
