"""Finds the numbers of one step. Pure: a grid, the archives before and after, and what training and publishing told."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from activities.commit.expand import best_node, node_key
from activities.commit.grid import Grid, Sample
from activities.commit.metrics import (
    JudgeMetrics,
    PublishMetrics,
    RewardMetrics,
    SampleMetrics,
    SearchMetrics,
    StepMetrics,
    TimeMetrics,
    TrainMetrics,
)
from activities.records import ArchiveState, PublishReport, TrainRecord
from workflows.contracts.base import Outcome

_PHASE_PREFIX = "seconds_"
"""Of the trainer's times in a TrainRecord's metrics."""


def measure_step(
    grid: Grid,
    archive: ArchiveState,
    train: TrainRecord | None,
    reports: Sequence[PublishReport],
    seconds: Mapping[str, float],
) -> StepMetrics:
    """All numbers of one step.

    Args:
        archive: after the step.
        train: None with train=off.
        reports: one for each engine.
        seconds: by phase of the step, as the workflow measured them.
    """
    kept = kept_samples(grid)
    return StepMetrics(
        search=_search(grid, archive),
        reward=_reward(grid, kept),
        sample=_sample(grid.samples, kept),
        judge=_judge(grid, kept),
        train=None if train is None else _train(train, len(grid.samples), len(grid.groups)),
        publish=_publish(reports) if reports else None,
        time=_time(train, reports, seconds),
    )


def kept_samples(grid: Grid) -> list[Sample]:
    """Samples of the groups that are trained: rewards not all equal, bit for bit; the first group where that leaves none."""
    kept = [group for group in grid.groups if not _is_constant(group)]
    return [sample for group in kept or grid.groups[:1] for sample in group]


def new_answers(grid: Grid) -> int:
    """Different valid answers of the step that the archive did not hold before."""
    children = {node_key(sample.child) for sample in grid.samples if sample.child is not None}
    return len(children - {node_key(node) for node in grid.archive.nodes})


def improved(grid: Grid) -> int:
    """Rollouts that are valid and better than their own parent."""
    return sum(s.child is not None and s.child.value > s.parent.value for s in grid.samples)


def _is_constant(group: Sequence[Sample]) -> bool:
    return all(sample.row.reward == group[0].row.reward for sample in group)


def _search(grid: Grid, archive: ArchiveState) -> SearchMetrics:
    values = [node.value for node in archive.nodes]
    parents = [group.parent for group in grid.plan.groups]
    parent_values = [parent.value for parent in parents]
    best = best_node(archive)
    return SearchMetrics(
        archive_size=len(values),
        archive_value_mean=statistics.fmean(values),
        archive_value_std=statistics.pstdev(values),
        archive_value_min=min(values),
        archive_value_max=max(values),
        best_score=best.score if best else None,
        children_kept=len({node.id for node in archive.nodes} - {node.id for node in grid.archive.nodes}),
        total_visits=archive.total_visits,
        scale=grid.plan.scale,
        parents=len(parents),
        parents_distinct=len({parent.id for parent in parents}),
        parents_expanded_fraction=statistics.fmean(group.pick.visits > 0 for group in grid.plan.groups),
        parent_value_mean=statistics.fmean(parent_values),
        parent_value_min=min(parent_values),
        parent_value_max=max(parent_values),
        parent_depth_mean=statistics.fmean(len(parent.ancestors) for parent in parents),
    )


def _reward(grid: Grid, kept: Sequence[Sample]) -> RewardMetrics:
    rewards, kept_rewards = [s.row.reward for s in grid.samples], [s.row.reward for s in kept]
    valid_by_group = [[s.row.outcome is Outcome.VALID for s in group] for group in grid.groups]
    return RewardMetrics(
        mean=statistics.fmean(rewards),
        min=min(rewards),
        max=max(rewards),
        std=statistics.pstdev(rewards),
        zero_fraction=statistics.fmean(reward == 0 for reward in rewards),
        kept_mean=statistics.fmean(kept_rewards),
        kept_min=min(kept_rewards),
        kept_max=max(kept_rewards),
        kept_std=statistics.pstdev(kept_rewards),
        groups_mixed_fraction=statistics.fmean(any(valid) and not all(valid) for valid in valid_by_group),
        groups_all_good_fraction=statistics.fmean(all(valid) for valid in valid_by_group),
        groups_all_bad_fraction=statistics.fmean(not any(valid) for valid in valid_by_group),
        groups_constant_fraction=statistics.fmean(_is_constant(group) for group in grid.groups),
        groups_kept=len({sample.row.at.group for sample in kept}),
    )


def _sample(samples: Sequence[Sample], kept: Sequence[Sample]) -> SampleMetrics:
    measured = [sample.measured for sample in samples]
    prompts, responses = [m.prompt_tokens for m in measured], [m.response_tokens for m in measured]
    forced = [m.response_tokens - m.sampled_tokens for m in measured]
    return SampleMetrics(
        rollouts=len(measured),
        prompt_tokens_mean=statistics.fmean(prompts),
        prompt_tokens_max=max(prompts),
        prompt_shortened_fraction=statistics.fmean(m.shortened for m in measured),
        response_tokens_mean=statistics.fmean(responses),
        response_tokens_min=min(responses),
        response_tokens_max=max(responses),
        response_tokens_sum=sum(responses),
        truncated_fraction=statistics.fmean(m.truncated for m in measured),
        thinking_tokens_mean=statistics.fmean(m.thinking_tokens for m in measured),
        unanswered_fraction=statistics.fmean(0 < m.thinking_tokens == m.response_tokens for m in measured),
        forced_fraction=statistics.fmean(count > 0 for count in forced),
        forced_tokens_sum=sum(forced),
        entropy=_entropy(samples),
        kept_response_tokens_mean=statistics.fmean(s.measured.response_tokens for s in kept),
        kept_truncated_fraction=statistics.fmean(s.measured.truncated for s in kept),
        kept_entropy=_entropy(kept),
    )


def _entropy(samples: Sequence[Sample]) -> float | None:
    tokens = sum(sample.measured.sampled_tokens for sample in samples)
    return -math.fsum(sample.measured.log_prob_sum for sample in samples) / tokens if tokens else None


def _judge(grid: Grid, kept: Sequence[Sample]) -> JudgeMetrics:
    size = len(grid.samples)
    shares = {f"{o.value}_fraction": sum(row.outcome is o for row in grid.rows) / size for o in Outcome if o.is_result}
    return JudgeMetrics(
        **shares,
        valid_and_new_fraction=new_answers(grid) / size,
        improved_fraction=improved(grid) / size,
        kept_valid_fraction=statistics.fmean(s.row.outcome is Outcome.VALID for s in kept),
    )


def _train(record: TrainRecord, rollouts: int, groups: int) -> TrainMetrics:
    told = {name: value for name, value in record.metrics.items() if not name.startswith(_PHASE_PREFIX)}
    return TrainMetrics.model_validate(told | _grid_advantages(told, rollouts, groups))


def _grid_advantages(told: Mapping[str, float], rollouts: int, groups: int) -> dict[str, float]:
    """Statistics over the whole grid from those over trained groups: all other advantages are 0."""
    names = ("advantage_mean", "advantage_min", "advantage_max", "advantage_std", "groups_trained")
    if not all(name in told for name in names):
        return {}
    mean, least, greatest, std, trained = (told[name] for name in names)
    share = trained * (rollouts / groups) / rollouts
    whole_mean = share * mean
    square = share * (std**2 + mean**2)
    return {
        "grid_advantage_mean": whole_mean,
        "grid_advantage_min": least if trained == groups else min(least, 0.0),
        "grid_advantage_max": greatest if trained == groups else max(greatest, 0.0),
        "grid_advantage_std": math.sqrt(max(0.0, square - whole_mean**2)),
    }


def _publish(reports: Sequence[PublishReport]) -> PublishMetrics:
    comparisons = [comparison for report in reports for comparison in report.comparisons]
    gaps = [report.engine_gap for report in reports if report.engine_gap is not None]
    return PublishMetrics(
        engines=len(reports),
        gate_slope_min=min((c.slope for c in comparisons), default=None),
        gate_slope_max=max((c.slope for c in comparisons), default=None),
        gate_z_min=min((c.z for c in comparisons), default=None),
        gate_residual_max=max((c.residual for c in comparisons), default=None),
        engine_gap_rms_max=max(gaps, default=None),
        gate_amplification=max((report.amplification for report in reports), default=None),
        served_share_min=min((r.served_share for r in reports if r.served_share is not None), default=None),
    )


def _time(train: TrainRecord | None, reports: Sequence[PublishReport], seconds: Mapping[str, float]) -> TimeMetrics:
    phases = {f"{name.replace('+', '_')}_seconds": value for name, value in seconds.items()}
    if train is not None:
        told = {name: value for name, value in train.metrics.items() if name.startswith(_PHASE_PREFIX)}
        phases |= {f"train_{name.removeprefix(_PHASE_PREFIX)}_seconds": value for name, value in told.items()}
    known = {name: value for name, value in phases.items() if name in TimeMetrics.model_fields}
    return TimeMetrics(**known, publish_engine_seconds_max=max((report.seconds for report in reports), default=None))
