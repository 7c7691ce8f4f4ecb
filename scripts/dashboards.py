"""Write the Grafana dashboards, for the compose file and for the chart.

    python -m scripts.dashboards deploy/grafana/dashboards deploy/helm/tttd/dashboards

Three boards: `run` (what a run finds), `fleet` (workers, engines, queues) and `trainer` (the optimizer and the publish gate). A
panel is a line here; everything that Grafana wants around it is the same for all. Metrics: docs/observability.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]

_SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_BLOCKING = "PublishRefused|TrainConflict|TrainCheckFailed"
_NEWEST = "and on (run, instance) tttd:newest_step"


@dataclass(frozen=True)
class Panel:
    """One panel: each target is (expression, legend)."""

    title: str
    targets: tuple[tuple[str, str], ...]
    unit: str = "short"
    help: str = ""
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def of_run(name: str) -> str:
    """A number of the last step, of the chosen runs, from the control worker that has the newest."""
    return f'tttd_step_{name}{{run=~"$run"}} {_NEWEST}'


def step(title: str, *names: str, unit: str = "short", help: str = "", stacked: bool = False, width: int = 8) -> Panel:
    """A panel of numbers from steps' reports; the legend is the run and what the names do not share."""
    targets = tuple((of_run(name), "{{run}}" if len(names) == 1 else f"{{{{run}}}} {name.partition('_')[2]}") for name in names)
    return Panel(title, targets, unit=unit, help=help, stacked=stacked, width=width)


def stat(title: str, expression: str, *, legend: str = "{{run}}", unit: str = "short", help: str = "", width: int = 4) -> Panel:
    return Panel(title, ((expression, legend),), unit=unit, help=help, kind="stat", width=width, height=4)


def quantiles(title: str, metric: str, by: str, selector: str = "", help: str = "") -> Panel:
    """Median and 95th percentile of a histogram of seconds."""
    rate = f"sum by (le, {by}) (rate({metric}_bucket{{{selector}}}[$__rate_interval]))"
    targets = tuple((f"histogram_quantile({q}, {rate})", f"p{round(100 * q)} {{{{{by}}}}}") for q in (0.5, 0.95))
    return Panel(title, targets, unit="s", help=help)


def rate(
    title: str, metric: str, by: str, *, selector: str = "", unit: str = "short", help: str = "", stacked: bool = False
) -> Panel:
    expression = f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))"
    return Panel(title, ((expression, f"{{{{{by}}}}}"),), unit=unit, help=help, stacked=stacked)


RUN = (
    Row(
        "Now",
        (
            stat("Step", f'tttd_step{{run=~"$run"}} {_NEWEST}'),
            stat("Best score", of_run("search_best_score"), help="Best certified score of the run, in the task's own unit."),
            stat("Mean reward", of_run("reward_mean"), help="Of the last grid, invalid programs counted as 0. Not the best."),
            stat("Valid", of_run("judge_valid_fraction"), unit="percentunit"),
            stat("Policy version", of_run("policy_version")),
            stat("Since last commit", f'time() - tttd_step_timestamp_seconds{{run=~"$run"}} {_NEWEST}', unit="s"),
        ),
    ),
    Row(
        "Search",
        (
            step("Best score", "search_best_score", help="The best rises by trying often."),
            step("Reward of the grid", "reward_mean", "reward_max", help="The mean rises by learning."),
            step("New and improved", "judge_valid_and_new_fraction", "judge_improved_fraction", unit="percentunit"),
            step("Archive: values", "search_archive_value_mean", "search_archive_value_max"),
            step("Archive: size", "search_archive_size", "search_children_kept"),
            step("Parents", "search_parents", "search_parents_distinct"),
        ),
    ),
    Row(
        "Programs",
        (
            step(
                "Outcomes",
                *(f"judge_{o}_fraction" for o in ("valid", "invalid", "no_program", "timed_out", "memory", "crashed")),
                unit="percentunit",
                stacked=True,
                help="Choose one run to read this panel.",
            ),
            step("Response tokens", "sample_response_tokens_mean", "sample_response_tokens_max"),
            step("Truncated, unanswered", "sample_truncated_fraction", "sample_unanswered_fraction", unit="percentunit"),
            step(
                "Groups without a signal", "reward_groups_constant_fraction", "reward_groups_all_bad_fraction", unit="percentunit"
            ),
            step("Entropy", "sample_entropy", help="Nats per token."),
            step(
                "Time of a step",
                *(f"time_{p}_seconds" for p in ("select", "sample_judge", "barrier", "train", "publish")),
                unit="s",
                stacked=True,
                help="Choose one run to read this panel.",
            ),
        ),
    ),
)

FLEET = (
    Row(
        "Workers",
        (
            Panel(
                "Ready workers",
                (("sum by (role) (tttd_ready * on (instance) group_left (role) tttd_build_info)", "{{role}}"),),
                help="Workers whose /readyz says yes. One that is not says why on that page.",
            ),
            Panel("Activities running", (("sum by (activity) (tttd_activities_running)", "{{activity}}"),), stacked=True),
            rate(
                "Failed attempts per second",
                "tttd_activity_failures_total",
                "error",
                help="By type of error; most are tried again.",
            ),
            Panel("Memory", (("process_resident_memory_bytes{job='tttd'}", "{{service}} {{instance}}"),), unit="bytes"),
            rate("CPU of worker processes", "process_cpu_seconds_total", "service", selector="job='tttd'"),
            rate("Commits per second", "tttd_commits_total", "instance"),
        ),
    ),
    Row(
        "Judges",
        (
            Panel("Verdicts per second", (("tttd:judged:rate5m", "{{outcome}}"),), stacked=True),
            quantiles("Judging, queueing included", "tttd_activity_seconds", "activity", 'activity="judge"'),
            Panel(
                "Slots",
                (("sum (tttd_judge_slots)", "there are"), ("sum (tttd_judge_slots_in_use)", "in use")),
                help="Cores for programs, over all judges.",
            ),
            Panel(
                "Starved programs",
                (("sum (increase(tttd_programs_starved_total[10m]))", "in 10 minutes"),),
                help="Timed out while they waited for a core: something else runs on the judges' hosts.",
            ),
        ),
    ),
    Row(
        "Sampling and engines",
        (
            rate("Responses per second", "tttd_rollouts_sampled_total", "program", help="By whether they hold a complete program."),
            rate("Tokens of responses per second", "tttd_response_tokens_total", "instance"),
            Panel(
                "Engines",
                (("sum (tttd_engine_up)", "up"), ("sum (tttd_engine_adapters_verified)", "adapters verified")),
                help="An adapter is verified when the publish gate has proved that this boot serves it.",
            ),
            Panel("Requests running", (("sum by (instance) (sglang:num_running_reqs)", "{{instance}}"),)),
            Panel("Requests queued", (("sum by (instance) (sglang:num_queue_reqs)", "{{instance}}"),)),
            rate("Tokens generated per second", "sglang:generation_tokens_total", "instance"),
        ),
    ),
    Row(
        "Task queues",
        (
            Panel(
                "Backlog",
                (("sum by (taskqueue) (approximate_backlog_count{taskqueue=~'tttd_.*'})", "{{taskqueue}}"),),
                help="Tasks that no worker has taken yet, as the Temporal server counts them.",
            ),
            Panel(
                "Age of the oldest task",
                (("max by (taskqueue) (approximate_backlog_age_seconds{taskqueue=~'tttd_.*'})", "{{taskqueue}}"),),
                unit="s",
            ),
            quantiles("From scheduled to started", "temporal_activity_schedule_to_start_latency", "task_queue"),
            Panel("Pollers", (("sum by (service, poller_type) (temporal_num_pollers)", "{{service}} {{poller_type}}"),)),
            quantiles("Workflow tasks", "temporal_workflow_task_execution_latency", "workflow_type"),
            rate("Failed workflow tasks per second", "temporal_workflow_task_execution_failed", "workflow_type"),
        ),
    ),
)

TRAINER = (
    Row(
        "Optimizer",
        (
            step("Gradient norm", "train_grad_norm"),
            step("KL of the policy to its base", "train_kl_policy_base", help="Nats per token at sampling: how far it has moved."),
            step("How far a step moved log-probs", "train_update_rms", help="Root mean square, nats per token."),
            step("Importance ratio", "train_ratio_mean", "train_ratio_max", help="Trainer / engine before the step; mean near 1."),
            step("Norm of all LoRA B", "train_lora_b_norm"),
            step("Loss", "train_loss", help="Raw sum over tokens; its size says nothing by itself."),
            step("Advantages", "train_advantage_min", "train_advantage_mean", "train_advantage_max"),
            step("Inverse temperature β", "train_beta_mean"),
            step("Entropy of trained tokens", "train_entropy", help="Nats per token."),
        ),
    ),
    Row(
        "What was trained",
        (
            step("Tokens", "train_tokens_trained"),
            step("Rollouts", "train_rollouts_trained"),
            step("Groups", "train_groups_trained", "train_groups_constant"),
        ),
    ),
    Row(
        "Engine against trainer, and the publish gate",
        (
            step(
                "Gap of log-probs",
                "train_gap_engine_trainer_mean",
                "train_gap_engine_trainer_rms",
                help="Arithmetic noise if small.",
            ),
            step(
                "Gate: slope",
                "publish_gate_slope_min",
                "publish_gate_slope_max",
                help="Near 1 if the engine serves the new adapter.",
            ),
            step("Gate: evidence", "publish_gate_z_min", help="Standard errors; the weakest of all comparisons."),
            step("Gate: missed share", "publish_gate_residual_max", unit="percentunit"),
            step("Gap under the new adapter", "publish_engine_gap_rms_max"),
            step(
                "Share of the step that is served",
                "publish_served_share_min",
                unit="percentunit",
                help="Low in the first steps on a bfloat16 engine: rounding loses much of a small adapter.",
            ),
            Panel(
                "Refused or conflicting",
                (
                    (
                        f'sum by (error) (increase(tttd_activity_failures_total{{error=~"{_BLOCKING}"}}[1h]))',
                        "{{error}}",
                    ),
                ),
                help="In the last hour. Each of them blocks its run until somebody looks.",
            ),
        ),
    ),
    Row(
        "Time",
        (
            step(
                "In the trainer", *(f"time_train_{p}_seconds" for p in ("load", "base", "gradient", "evidence", "store")), unit="s"
            ),
            step("Slowest engine, load to proof", "time_publish_engine_seconds_max", unit="s"),
            quantiles("Attempts at training and publishing", "tttd_activity_seconds", "activity", 'activity=~"train|publish"'),
        ),
    ),
)


def dashboard(name: str, title: str, rows: Sequence[Row], *, by_run: bool) -> Json:
    """The JSON of one board."""
    panels: list[Json] = []
    y = 0
    for row in rows:
        panels.append(
            {"type": "row", "title": row.title, "collapsed": False, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []}
        )
        y += 1
        x = 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + panel.height
            panels.append(_panel(panel, x, y))
            x += panel.width
        y += row.panels[-1].height
    for number, each in enumerate(panels, start=1):
        each["id"] = number
    variables = [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]
    if by_run:
        variables.append(_run_variable())
    return {
        "uid": f"tttd-{name}",
        "title": title,
        "tags": ["tttd"],
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "tags": ["tttd"], "title": "tttd", "asDropdown": False, "includeVars": True, "keepTime": True}
        ],
        "panels": panels,
    }


def _run_variable() -> Json:
    return {
        "name": "run",
        "type": "query",
        "label": "Run",
        "datasource": _SOURCE,
        "query": {"query": "label_values(tttd_step, run)", "refId": "run"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel, x: int, y: int) -> Json:
    custom: Json = {"lineWidth": 1, "fillOpacity": 60 if panel.stacked else 5, "showPoints": "auto", "spanNulls": True}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    options: Json = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "stat":
        custom, options = {}, {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name", "colorMode": "none"}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(panel.targets)
        ],
    }


def boards() -> dict[str, Json]:
    """All boards by the name of their file."""
    return {
        "run.json": dashboard("run", "tttd: run", RUN, by_run=True),
        "fleet.json": dashboard("fleet", "tttd: fleet", FLEET, by_run=False),
        "trainer.json": dashboard("trainer", "tttd: trainer", TRAINER, by_run=True),
    }


def as_text(board: Json) -> str:
    return json.dumps(board, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        folder.mkdir(parents=True, exist_ok=True)
        for name, board in boards().items():
            (folder / name).write_text(as_text(board), encoding="utf-8")


if __name__ == "__main__":
    main()
