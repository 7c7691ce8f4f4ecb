"""Every name that Temporal sees, once. A name here is a wire contract: changing one breaks running histories."""

from __future__ import annotations

from typing import Final

# Workflows
DISCOVERY_RUN: Final = "DiscoveryRun"
DISCOVERY_STEP: Final = "DiscoveryStep"
ROLLOUT_GROUP: Final = "RolloutGroup"

# Activities
PREPARE_RUN: Final = "prepare_run"
JUDGE_SEED: Final = "judge_seed"
OPEN_RUN: Final = "open_run"
SELECT_PARENTS: Final = "select_parents"
SAMPLE: Final = "sample"
JUDGE: Final = "judge"
ASSEMBLE_BATCH: Final = "assemble_batch"
SCORE_BASE: Final = "score_base"
TRAIN: Final = "train"
LIST_ENGINES: Final = "list_engines"
PUBLISH: Final = "publish"
COMMIT_STEP: Final = "commit_step"

# Task queues
CONTROL_QUEUE: Final = "tttd-control"
SAMPLE_QUEUE: Final = "tttd-sample"
JUDGE_QUEUE: Final = "tttd-judge"
TRAIN_QUEUE: Final = "tttd-train"


def engine_queue(engine_id: str) -> str:
    """The queue of one engine host: only the worker beside an engine can hand it an adapter directory."""
    return f"tttd-engine-{engine_id}"


# Updates and queries of DiscoveryRun
PAUSE: Final = "pause"
RESUME: Final = "resume"
STOP: Final = "stop"
EXTEND: Final = "extend"
RETRY: Final = "retry"
STATUS: Final = "status"

# Search attributes, created by `tttd up`
ATTRIBUTE_TASK: Final = "TttdTask"
ATTRIBUTE_STATE: Final = "TttdState"
ATTRIBUTE_MODEL: Final = "TttdModel"
ATTRIBUTE_STEP: Final = "TttdStep"
ATTRIBUTE_BEST: Final = "TttdBest"
ATTRIBUTE_VERSION: Final = "TttdVersion"
SEARCH_ATTRIBUTES: Final[dict[str, str]] = {
    ATTRIBUTE_TASK: "Keyword",
    ATTRIBUTE_STATE: "Keyword",
    ATTRIBUTE_MODEL: "Keyword",
    ATTRIBUTE_STEP: "Int",
    ATTRIBUTE_BEST: "Double",
    ATTRIBUTE_VERSION: "Int",
}


# Workflow ids
def run_workflow_id(run_id: str) -> str:
    return f"run/{run_id}"


def step_workflow_id(run_id: str, step: int) -> str:
    return f"run/{run_id}/step/{step:06d}"


def group_workflow_id(run_id: str, step: int, group: int) -> str:
    return f"{step_workflow_id(run_id, step)}/group/{group:02d}"
