"""The status report's shape is a contract: its schema is a file, and what is gathered from groups and waits fits it."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jsonschema
import pytest
from botocore.exceptions import EndpointConnectionError

from activities.blobs import Blobs
from activities.errors import CorruptBlob
from console import store_answers
from console.cli.control import run_name
from console.cli.status import list_lines, run_lines, service_lines
from console.inquiry import sum_groups, web_link
from console.status import SCHEMA_FILE, RunReport, ServicesReport, StatusList, StatusReport, Wait, schema_text
from console.waits import Pending, Pollers, advise, summarise, wait_text
from workflows import names
from workflows.contracts.messages import GroupProgress, Phase

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
POLLING = Pollers(1, NOW)


def progress(group: int, sampled: int, judged: int, valid: int, best: float | None, mean: float | None) -> GroupProgress:
    return GroupProgress(group=group, rollouts=8, sampled=sampled, judged=judged, valid=valid, best_score=best, mean_reward=mean)


SERVICES = ServicesReport(
    temporal="127.0.0.1:7233", namespace="default", reachable=True, ui="http://ui", supervised=False, home="h", store="s", logs="l"
)


def run_report(**changes: object) -> RunReport:
    fields: dict[str, object] = {
        "run_id": "r1",
        "source": "workflow",
        "state": "running",
        "execution": "RUNNING",
        "task": "circle_packing_26",
        "step": 3,
        "steps": 8,
        "best_score": 2.5,
        "policy_version": 3,
    }
    return RunReport.model_validate(fields | changes)


def test_schema_file_is_the_models_schema() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "run `python -m console.status` after changing the report"


def test_a_report_fits_the_schema_file() -> None:
    schema = json.loads(Path(SCHEMA_FILE).read_text(encoding="utf-8"))
    at = "2026-01-01T00:00:00+00:00"
    run = StatusReport(at=at, services=SERVICES, **run_report().model_dump()).model_dump(mode="json")
    everything = StatusList(at=at, services=SERVICES, runs=(run_report(),)).model_dump(mode="json")
    for document in (run, everything):
        jsonschema.validate(document, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document | {"surprise": 1}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(run | {"state": "asleep"}, schema)


def test_grid_weighs_groups_by_what_is_judged() -> None:
    found = [progress(0, 8, 8, 4, 2.5, 1.0), progress(1, 5, 2, 1, 2.6, 2.0), progress(2, 0, 0, 0, None, None)]
    grid = sum_groups(found, groups=4, rollouts=8, higher_is_better=True)
    assert (grid.rollouts, grid.sampled, grid.judged, grid.valid) == (32, 13, 10, 5)
    assert grid.mean_reward == pytest.approx(1.2)
    assert grid.best_score == 2.6
    assert sum_groups(found, 4, 8, higher_is_better=False).best_score == 2.5
    assert sum_groups([], 4, 8, higher_is_better=True).mean_reward is None


def test_web_link_escapes_the_workflow_id() -> None:
    assert web_link("http://ui", "default", "a.b-1") == "http://ui/namespaces/default/workflows/run%2Fa.b-1"
    assert web_link(None, "default", "a") is None


def pending(
    kind: str = names.JUDGE, *, running: bool = False, attempt: int = 1, failure: str | None = None, minute: int = 0
) -> Pending:
    scheduled = datetime(2026, 1, 1, 0, minute, tzinfo=UTC)
    return Pending(kind, names.JUDGE_QUEUE, running, attempt, scheduled, failure)


def test_a_queue_without_pollers_names_the_worker_to_start() -> None:
    (wait,) = summarise([pending(minute=5), pending(minute=2)], {names.JUDGE_QUEUE: Pollers(0)}, NOW)
    assert (wait.waiting, wait.running, wait.pollers, wait.role) == (2, 0, 0, "judge")
    assert wait.since == "2026-01-01T00:02:00+00:00"
    assert wait.advice is not None
    assert "no judge worker is polling tttd-judge" in wait.advice
    assert "`tttd worker judge`" in wait.advice


def test_a_poller_that_has_not_asked_since_the_work_was_ready_is_gone_or_busy() -> None:
    silent = Pollers(1, datetime(2026, 1, 1, 0, 4, tzinfo=UTC))
    (wait,) = summarise([pending(minute=5)], {names.JUDGE_QUEUE: silent}, NOW)
    assert wait.last_poll == "2026-01-01T00:04:00+00:00"
    assert "no judge worker has asked tttd-judge for work since 2026-01-01T00:04:00+00:00" in (wait.advice or "")
    (busy,) = summarise([pending(minute=5), pending(running=True)], {names.JUDGE_QUEUE: silent}, NOW)
    assert busy.advice is None
    (just_now,) = summarise([pending(minute=10)], {names.JUDGE_QUEUE: silent}, NOW)
    assert just_now.advice is None


def test_work_in_progress_needs_no_advice() -> None:
    (wait,) = summarise([pending(running=True), pending()], {names.JUDGE_QUEUE: POLLING}, NOW)
    assert wait.advice is None
    assert wait_text(wait) == "judge: 1 waiting, 1 running on tttd-judge (1 workers) · since 2026-01-01T00:00:00"


def test_a_worker_that_runs_something_is_there_even_if_it_does_not_poll() -> None:
    (wait,) = summarise([pending(running=True)], {names.JUDGE_QUEUE: Pollers(0)}, NOW)
    assert wait.advice is None


def test_a_wait_is_as_old_as_its_first_attempt() -> None:
    """Temporal tells when the next attempt is due, which may be in the future."""
    again = replace(pending(attempt=9, failure="JudgeError: x", minute=11), first=NOW - timedelta(minutes=7))
    (wait,) = summarise([again, pending(minute=8)], {names.JUDGE_QUEUE: POLLING}, NOW)
    assert wait.since == "2026-01-01T00:03:00+00:00"


def test_what_a_worker_told_of_its_work_is_shown() -> None:
    told = replace(pending(running=True), progress="scoring v1: 3/8")
    (wait,) = summarise([told, pending()], {names.JUDGE_QUEUE: POLLING}, NOW)
    assert wait.progress == "scoring v1: 3/8"
    assert " · at scoring v1: 3/8 · since " in wait_text(wait)


def test_a_store_that_does_not_answer_a_worker_is_named() -> None:
    advice = advise("judge", names.JUDGE_QUEUE, POLLING, "EndpointConnectionError: Could not connect")
    assert "object store" in (advice or "")
    assert "judge worker's host" in (advice or "")


@pytest.mark.parametrize(
    "given", ["first", "run/first", "run/first/step/000001", "run/first/step/000001/group/00", "first/step/000001"]
)
def test_a_run_is_known_by_every_workflow_id_of_it(given: str) -> None:
    assert run_name(given) == "first"


async def test_a_store_that_fails_is_a_sentence_and_not_the_end(blobs: Blobs) -> None:
    def refuse() -> int:
        raise EndpointConnectionError(endpoint_url="http://store:8333")

    def damaged() -> int:
        raise CorruptBlob("blob 00 is missing")

    def wrong() -> int:
        raise KeyError("a slip of ours")

    assert await store_answers.ask_store(blobs, lambda: 3) == (3, None)
    answer, why = await store_answers.ask_store(blobs, refuse)
    assert answer is None
    assert 'does not answer (Could not connect to the endpoint URL: "http://store:8333"): see whether' in (why or "")
    assert await store_answers.ask_store(blobs, damaged) == (None, "blob 00 is missing")
    with pytest.raises(KeyError):
        await store_answers.ask_store(blobs, wrong)


async def test_a_store_that_is_silent_holds_nobody_up(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_answers, "ANSWER_SECONDS", 0.1)
    silence = threading.Event()
    answer, why = await store_answers.ask_store(blobs, silence.wait)
    assert answer is None
    assert "did not answer within 0 s" in (why or "")
    silence.set()
    await asyncio.sleep(0.05)  # an answer that comes too late is nobody's


def test_failures_show_the_worst_attempt_and_where_to_look() -> None:
    found = [pending(attempt=2, failure="JudgeError: no slot"), pending(attempt=7, failure="JudgeError: fork failed")]
    (wait,) = summarise(found, {names.JUDGE_QUEUE: POLLING}, NOW)
    assert wait.attempts == 7
    assert wait.failure == "JudgeError: fork failed"
    assert "tttd doctor" in (wait.advice or "")
    assert "install that version" in (advise("train", names.TRAIN_QUEUE, POLLING, "NewerDocument: run r: Batch") or "")
    assert "engine" in (advise("sample", names.SAMPLE_QUEUE, POLLING, "NotReady: no engine") or "")
    assert "log of the train worker" in (advise("train", names.TRAIN_QUEUE, POLLING, "MemoryError: 3 GiB") or "")


def test_run_lines_say_what_is_wrong_and_what_to_do() -> None:
    wait = Wait(
        kind="judge",
        role="judge",
        queue="tttd-judge",
        pollers=0,
        waiting=3,
        running=0,
        attempts=1,
        advice="start one with `tttd worker judge`",
    )
    shown = "\n".join(run_lines(run_report(waits=(wait,), phase=Phase(name="sample+judge", since="2026-01-01T00:00:00+00:00"))))
    assert "judge: 3 waiting on tttd-judge (0 workers)" in shown
    assert "start one with `tttd worker judge`" in shown
    blocked = "\n".join(run_lines(run_report(state="blocked", error="step 4 failed: InputError: x")))
    assert "step 4 failed: InputError: x" in blocked
    assert "`tttd retry r1`" in blocked
    since = Phase(name="paused", since="2026-01-01T00:00:00.5+00:00")
    paused = "\n".join(run_lines(run_report(state="paused", phase=since), "the object store is silent"))
    assert "waits     for a person since 2026-01-01T00:00:00\n          `tttd resume r1` lets it go on" in paused
    assert "note      the object store is silent" in paused


def test_list_says_where_a_line_comes_from() -> None:
    report = StatusList(
        at="2026-01-01T00:00:00+00:00",
        services=SERVICES,
        runs=(run_report(), run_report(run_id="old", source="store", state="unknown", step=None, best_score=None)),
    )
    lines = list_lines(report)
    assert any(line.split() == ["r1", "running", "3/8", "2.50000000", "3"] for line in lines)
    assert any(line.startswith("old") and "unknown (store)" in line for line in lines)
    gone = SERVICES.model_copy(update={"reachable": False, "problem": "no server"})
    assert "not reachable: no server" in "\n".join(service_lines(gone))
