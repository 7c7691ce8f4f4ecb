"""One step's grid as the commit reads it: rows, children, and what is measured of each response. Knows no chain and no report."""

from __future__ import annotations

from dataclasses import dataclass

from activities.blobs import read_together
from activities.commit.expand import make_child, parents_of
from activities.errors import ArchiveFork
from activities.records import ArchiveState, Batch, BatchRow, Node, RolloutRecord, StepPlan, Verdict
from activities.run_store import RunStore
from workflows.contracts.base import Outcome
from workflows.contracts.messages import CommitRequest


@dataclass(frozen=True)
class Measured:
    """What is kept of one response; the whole records of a grid would fill a gigabyte."""

    prompt_tokens: int
    shortened: bool
    response_tokens: int
    sampled_tokens: int
    """Response tokens that the policy chose; the others were forced."""
    thinking_tokens: int
    log_prob_sum: float
    """Over sampled tokens, nats."""
    truncated: bool


@dataclass(frozen=True)
class Sample:
    """What the commit needs of one rollout."""

    row: BatchRow
    parent: Node
    child: Node | None
    """None unless valid."""
    measured: Measured


@dataclass(frozen=True)
class Grid:
    """Everything of one step that the commit reads."""

    plan: StepPlan
    samples: tuple[Sample, ...]
    """By group, then rollout: the order in which the archive takes them, whenever they arrived."""
    archive: ArchiveState
    """Before the step."""

    @property
    def rows(self) -> list[BatchRow]:
        return [sample.row for sample in self.samples]

    @property
    def groups(self) -> list[tuple[Sample, ...]]:
        """Samples by group, in order."""
        found: dict[int, list[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.row.at.group, []).append(sample)
        return [tuple(found[group]) for group in sorted(found)]


def load_grid(store: RunStore, request: CommitRequest) -> Grid:
    """Read a step's plan, batch and records.

    Raises:
        ArchiveFork: plan, batch and head are not of one step.
    """
    plan = store.load(StepPlan, request.plan)
    batch = store.load(Batch, request.batch)
    found = (plan.step, batch.step, batch.plan, plan.archive)
    if found != (request.step, request.step, request.plan, request.head.archive):
        raise ArchiveFork(
            f"run {store.run_id} step {request.step}: the plan is of step {plan.step} from archive {plan.archive[:12]}, the batch "
            f"of step {batch.step} from plan {batch.plan[:12]}; to be committed is plan {request.plan[:12]} on archive "
            f"{request.head.archive[:12]}. Resume the run from its last commit."
        )
    parents = parents_of(plan)
    samples = tuple(read_together(lambda row: _sample(store, row, parents[row.at.group]), batch.rows))
    return Grid(plan, samples, store.load(ArchiveState, request.head.archive))


def _sample(store: RunStore, row: BatchRow, parent: Node) -> Sample:
    record = store.load(RolloutRecord, row.rollout)
    child = None
    if row.outcome is Outcome.VALID:
        child = make_child(row, parent, record.program or "", store.load(Verdict, row.verdict).output_tail)
    return Sample(row, parent, child, _measure(record))


def _measure(record: RolloutRecord) -> Measured:
    sampled = [log_prob for log_prob, mask in zip(record.log_probs, record.mask, strict=True) if mask]
    return Measured(
        prompt_tokens=len(record.prompt_tokens),
        shortened=bool(record.prompt_shortened),
        response_tokens=len(record.response_tokens),
        sampled_tokens=len(sampled),
        thinking_tokens=record.thinking_tokens,
        log_prob_sum=sum(sampled),
        truncated=record.finish_reason == "length",
    )
