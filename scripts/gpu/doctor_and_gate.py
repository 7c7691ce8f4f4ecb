"""Is this machine fit to run, and does the publish gate hold on its engine?

Parts: `doctor`; `steps`: two runs of real steps with their gate numbers; `refusals`: what is served in the new version's stead is
refused, with the cause that is named; `killed`: an engine killed in the middle of sampling comes back, is given its adapters and
proves them, and the step completes with every rollout once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.blobs import digest_of
from activities.engine_http import EngineClient
from activities.errors import PublishRefused
from activities.fleet import read_notice
from activities.publish.placing import materialise
from activities.publish.publishing import publish
from activities.records import EngineNotice, StepCommit
from activities.run_store import RunStore
from scripts.gpu.lab import Lab
from workflows.contracts.base import PolicyRef, RunRef
from workflows.contracts.messages import PublishRequest

_KILLED_AFTER = 8
"""One of so many rollouts is stored when the engine is killed."""
_RUN_SECONDS = 3 * 3600.0


@dataclass
class ServedEngine:
    """The running engine, as the publish room sees it; nothing is reported to its worker."""

    url: str
    boot_id: str
    engine_id: str
    adapter_directory: Path

    @property
    def current(self) -> ServedEngine:
        return self

    def on_verified(self, request: PublishRequest, boot_id: str, served: dict[str, int]) -> None: ...

    def on_unloaded(self, names: tuple[str, ...]) -> None: ...


def experiment(lab: Lab) -> None:
    """All parts, one after the other."""
    lab.up()
    doctor = lab.tttd("doctor", "--json", check=False)
    lab.keep("doctor", {"exit_code": doctor.returncode, **json.loads(doctor.stdout or "{}")})
    own, other = (lab.run(f"gate-{seed}", f"seed={seed}") for seed in (1, 2))
    lab.keep("steps", {run.run_id: gate_numbers(lab, run) for run in (own, other)})
    lab.keep("refusals", refusals(lab, own, other))
    lab.keep("killed", engine_killed(lab))
    lab.down()


def gate_numbers(lab: Lab, run: RunStore) -> list[dict[str, Any]]:
    """Noise floor, slope and z of every published version, and seconds from its training to its proof."""
    rows = []
    for report in lab.reports(run):
        for published in report.publish:
            rows.append(
                {
                    "step": report.step,
                    "engine": published.engine,
                    "passed": published.passed,
                    "engine_gap_rms": published.engine_gap,
                    "seconds_to_prove": published.seconds,
                    "seconds_publish_phase": report.seconds.get("publish"),
                    "comparisons": [comparison.model_dump(mode="json") for comparison in published.comparisons],
                }
            )
    return rows


# Refusals -------------------------------------------------------------------------------------------------------------------
def refusals(lab: Lab, own: RunStore, other: RunStore) -> dict[str, Any]:
    """Serve four wrong things under the name of `own`'s last version, and the right one; what the gate says of each."""
    last, stranger = last_commit(own), last_commit(other)
    assert last.previous_policy is not None
    adapters = {
        "no adapter (version 0)": last.initial_policy.adapter,
        "stale (the previous version)": last.previous_policy.adapter,
        "wrong (another run's)": stranger.policy.adapter,
        "the right one": last.policy.adapter,
    }
    notice = first_engine(lab)
    return {what: _serve_and_ask(lab, own, last, notice, what, adapter) for what, adapter in adapters.items()}


def _serve_and_ask(lab: Lab, run: RunStore, last: StepCommit, notice: EngineNotice, what: str, adapter: str) -> dict[str, Any]:
    directory = lab.settings.home.resolve() / "adapters" / "impostors"
    honest = adapter == last.policy.adapter
    name = last.policy.name if honest else f"{last.policy.name.rpartition('-')[0]}-{digest_of(what.encode())[:12]}"
    with contextlib.closing(EngineClient(notice.url)) as client:
        if not honest and name not in client.loaded_adapters():
            client.load_adapter(name, str(materialise(run.blobs, adapter, directory, name)))
    request = PublishRequest(
        run=reference(lab, run),
        engine=notice.engine,
        policy=last.policy.model_copy(update={"name": name}),
        previous=last.previous_policy,
        initial=last.initial_policy,
    )
    engine = ServedEngine(notice.url, notice.boot_id, notice.engine, lab.settings.home.resolve() / "adapters" / notice.engine)
    began = time.monotonic()
    try:
        published = publish(run.blobs, engine, request)
        said = "passed" if published.passed else "not passed"
    except PublishRefused as refused:
        said = str(refused)
    right = (said == "passed") == honest
    return {"said": said, "as_it_should": right, "seconds": round(time.monotonic() - began, 2)}


# An engine dies -------------------------------------------------------------------------------------------------------------
def engine_killed(lab: Lab) -> dict[str, Any]:
    """Kill the engine while it samples; what was stored stays, and everything else is done once."""
    # A run whose step is done has nothing to kill in: a repeated command takes another one.
    names = (f"gate-killed-{number}" for number in itertools.count(1))
    run = next(store for store in (RunStore(lab.blobs, name) for name in names) if store.commit_digest(1) is None)
    lab.tttd("run", *lab.request("seed=3", "search.steps=1"), "--name", run.run_id, "--detach")
    rollouts = lab.wish.groups * lab.wish.rollouts
    enough = max(1, rollouts // _KILLED_AFTER)
    lab.wait_for("the middle of sampling", lambda: len(stored(run, "rollout")) >= enough, _RUN_SECONDS)
    before = stored(run, "rollout")
    notice = first_engine(lab)
    os.kill(engine_pid(lab, notice.engine), signal.SIGKILL)
    policy = commit_of(run, 0).policy
    back = lab.wait_for("the engine comes back with its adapters", _proved_again(lab, notice, policy), _RUN_SECONDS)
    whole = lab.wait_for("the step's commit", lambda: run.commit_digest(1) is not None, _RUN_SECONDS)
    after = stored(run, "rollout")
    rows = commit_of(run, 1).rows
    return {
        "stored_when_killed": len(before),
        "of": rollouts,
        "seconds_until_proved_again": back,
        "seconds_from_then_to_the_commit": whole,
        "stored_entries_unchanged": before.items() <= after.items(),
        "every_coordinate_once": len({(row.group, row.rollout) for row in rows}) == len(rows) == rollouts,
    }


def _proved_again(lab: Lab, before: EngineNotice, policy: PolicyRef) -> Callable[[], bool]:
    def proved() -> bool:
        now = read_notice(lab.blobs, before.engine)
        return now is not None and now.boot_id != before.boot_id and policy.name in now.verified

    return proved


def stored(run: RunStore, what: str) -> dict[str, str]:
    """Entries of step 1 by key."""
    store = run.blobs.store
    return {key: store.get(key).decode() for key in store.keys(f"{run.root}/steps/000001/") if key.endswith(f"/{what}")}


def engine_pid(lab: Lab, engine: str) -> int:
    file = lab.settings.home.resolve() / "engines" / f"{engine}.pid"
    return int(json.loads(file.read_text(encoding="utf-8"))["leader"])


def first_engine(lab: Lab) -> EngineNotice:
    notice = read_notice(lab.blobs, lab.settings.engine_id)
    if notice is None:
        raise SystemExit(f"engine {lab.settings.engine_id} is not there; logs are in {lab.settings.logs}")
    return notice


def commit_of(run: RunStore, step: int) -> StepCommit:
    digest = run.commit_digest(step)
    assert digest is not None, f"run {run.run_id} has no commit of step {step}"
    return run.load(StepCommit, digest)


def last_commit(run: RunStore) -> StepCommit:
    return commit_of(run, run.last_step() or 0)


def reference(lab: Lab, run: RunStore) -> RunRef:
    digest = run.find(f"{run.root}/open")
    assert digest is not None
    return RunRef(run_id=run.run_id, identity=lab.spec(run).identity, spec=digest)
