"""The commands against a real Temporal server with the real workflows: run, attach, detach, pause, block, retry, extend, and waits.

Commands are processes of their own, as a person starts them; the activities are those of ``console_world.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from console.inquiry import look
from console.status import RunReport, StatusList, StatusReport
from console.stored import best_answer
from tasks.registry import TaskSource
from tests.console_world import ARGUMENTS, ENGINE, TASK, World
from workers.connect import use_quiet_runtime, workflow_runner
from workers.search_attributes import ensure_search_attributes
from workers.temporal_server import find_temporal
from workflows import names
from workflows.discovery_run import DiscoveryRun
from workflows.discovery_step import DiscoveryStep
from workflows.rollout_group import RolloutGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
ROOT = Path(__file__).parent.parent
ALL = ("control", "sample", "judge", "engine")


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Console:
    """The `tttd` command in a world with a server."""

    world: World
    client: Client
    environment: dict[str, str]

    async def begin(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "console.main",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.environment,
            cwd=ROOT,
        )

    async def tttd(self, *arguments: str) -> Ended:
        return await self.end(await self.begin(*arguments))

    async def end(self, process: asyncio.subprocess.Process) -> Ended:
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode is not None
        return Ended(process.returncode, out.decode(), err.decode())

    async def report(self, run: str) -> RunReport:
        shown = await self.tttd("status", run, "--json")
        assert shown.code == 0, shown.err
        return StatusReport.model_validate_json(shown.out)

    async def until(self, run: str, condition: Callable[[RunReport], bool]) -> RunReport:
        for _ in range(40):
            report = await self.report(run)
            if condition(report):
                return report
        raise AssertionError(f"never came true: {report}")

    async def wait_for(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(30):
            while not await condition():
                await asyncio.sleep(0.1)

    @asynccontextmanager
    async def workers(self, *roles: str) -> AsyncIterator[None]:
        started = [self._worker(role) for role in roles]
        tasks = [asyncio.create_task(worker.run()) for worker in started]
        try:
            yield
        finally:
            self.world.gate.set()
            await asyncio.gather(*(worker.shutdown() for worker in started))
            await asyncio.gather(*tasks)

    def _worker(self, role: str) -> Worker:
        w = self.world
        if role == "control":
            return Worker(
                self.client,
                task_queue=names.CONTROL_QUEUE,
                workflows=[DiscoveryRun, DiscoveryStep, RolloutGroup],
                activities=w.control_activities(),
                activity_executor=ThreadPoolExecutor(4),
                workflow_runner=workflow_runner(),
            )
        places = {
            "sample": (names.SAMPLE_QUEUE, [w.sample_activity()]),
            "judge": (names.JUDGE_QUEUE, w.judge_activities()),
            "engine": (names.engine_queue(ENGINE), [w.publish_activity()]),
        }
        queue, activities = places[role]
        return Worker(self.client, task_queue=queue, activities=activities)


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[WorkflowEnvironment]:
    use_quiet_runtime()
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=find_temporal(), data_converter=pydantic_data_converter, dev_server_log_level="error"
    )
    await ensure_search_attributes(env.client)
    yield env
    await env.shutdown()


@pytest.fixture
async def console(server: WorkflowEnvironment, tmp_path: Path) -> AsyncIterator[Console]:
    world = World.make(tmp_path / "home")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TEMPORAL_", "TTTD_"))}
    address = server.client.service_client.config.target_host
    yield Console(world, server.client, kept | world.environment | {"TEMPORAL_ADDRESS": address})
    # What is left open would be taken up by the next test's workers, whose store is another.
    async for left in server.client.list_workflows(f'WorkflowType = "{names.DISCOVERY_RUN}" AND ExecutionStatus = "Running"'):
        await server.client.get_workflow_handle(left.id).terminate("the test has ended")


def run_arguments(name: str, steps: int = 2) -> list[str]:
    return ["run", TASK, *ARGUMENTS, "--set", "timeouts.retry_seconds=0.3", "--set", f"search.steps={steps}", "--name", name]


def step_lines(text: str) -> list[str]:
    return [line.split(" · ")[0] for line in text.splitlines() if " · grid mean " in line]


async def test_a_run_from_start_to_end_and_the_same_command_again(console: Console) -> None:
    async with console.workers(*ALL):
        ended = await console.tttd(*run_arguments("whole"))
        assert ended.code == 0, ended.err
        assert "started run whole: 2 steps" in ended.err
        assert step_lines(ended.err) == ["step 1/2", "step 2/2"]
        assert "valid 4/6 · new 4 ·" in ended.err
        answer = best_answer(console.world.blobs, "whole", TaskSource())
        assert f"{answer.score:.17g}" in ended.out
        assert answer.commit in ended.out
        assert (console.world.home / "runs" / "whole" / "best.py").read_text(encoding="utf-8") == answer.program

        again = await console.tttd(*run_arguments("whole"), "--json")
        assert again.code == 0
        assert json.loads(again.out)["commit"] == answer.commit
        assert "has all 2 steps" in again.err

        report = await console.report("whole")
        assert (report.source, report.state, report.execution, report.step) == ("workflow", "completed", "COMPLETED", 2)
        listed = StatusList.model_validate_json((await console.tttd("status", "--json")).out)
        assert [(r.state, r.step) for r in listed.runs if r.run_id == "whole"] == [("completed", 2)]

        new = await console.tttd(*run_arguments("whole", 1), "--new", "--json")
        assert new.code == 0, new.err
        assert json.loads(new.out)["run_id"] == "whole-2"


async def test_more_steps_go_on_from_the_last_commit(console: Console) -> None:
    async with console.workers(*ALL):
        assert (await console.tttd(*run_arguments("longer", 1))).code == 0
        before = best_answer(console.world.blobs, "longer", TaskSource()).commit
        ended = await console.tttd(*run_arguments("longer", 2))
        assert ended.code == 0, ended.err
        assert "resuming run longer at step 1, to step 2" in ended.err
        extended = await console.tttd("extend", "longer", "--steps", "1")
        assert extended.code == 0, extended.err
        assert "goes on from step 2 to step 3 in a new execution" in extended.out
        watched = await console.tttd("watch", "longer")
        assert watched.code == 0, watched.err
        assert step_lines(watched.err)[-1] == "step 3/3"
    commits = [console.world.blobs.store.get(f"runs/longer/steps/{step:06d}/commit").decode() for step in range(4)]
    assert commits[1] == before
    assert len(set(commits)) == 4


async def test_detach_pause_attach_and_resume(console: Console) -> None:
    console.world.gate.clear()
    async with console.workers(*ALL):
        started = await console.tttd(*run_arguments("calm"), "--detach")
        assert (started.code, started.out.strip()) == (0, "calm")
        running = await console.until("calm", lambda r: r.grid is not None)
        assert running.grid is not None
        assert (running.state, running.grid.sampled, running.grid.rollouts) == ("running", 0, 6)
        assert {(w.kind, w.running, w.advice) for w in running.waits} == {("sample", 6, None)}

        assert (await console.tttd("pause", "calm")).code == 0
        twice = await console.tttd("pause", "calm")
        assert (twice.code, twice.err.strip()) == (1, "tttd: calm: the run is already paused, or will be after this step")
        assert (await console.report("calm")).pause_requested

        joined = await console.begin(*run_arguments("calm"))
        assert joined.stderr is not None
        assert "it is under way, joining it" in (await joined.stderr.readline()).decode()
        joined.send_signal(signal.SIGINT)
        left = await console.end(joined)
        assert left.code == 0
        assert "detached: run calm goes on" in left.err

        console.world.gate.set()
        await console.until("calm", lambda r: r.state == "paused" and r.step == 1)
        refused = await console.tttd("retry", "calm")
        assert (refused.code, "only a blocked run can be retried" in refused.err) == (1, True)
        assert (await console.tttd("extend", "calm", "--steps", "1")).out.strip() == "calm: the run now has 3 steps in total"
        assert (await console.tttd("resume", "calm")).code == 0
        watched = await console.tttd("watch", "calm")
        assert watched.code == 0, watched.err
        assert step_lines(watched.err)[-1] == "step 3/3"
        late = await console.tttd("pause", "calm")
        assert late.code == 1
        assert "the run is completed at step 3" in late.err


async def test_a_blocked_run_says_why_and_goes_on_after_retry(console: Console) -> None:
    console.world.broken.add(2)
    async with console.workers(*ALL):
        ended = await console.tttd(*run_arguments("stuck"))
        assert ended.code == 3, ended.err
        assert step_lines(ended.err) == ["step 1/2"]
        assert "run stuck is blocked after step 1: step 2 failed: CorruptBlob: blob 00 is missing from the store" in ended.err
        assert "`tttd retry stuck`" in ended.err
        blocked = await console.report("stuck")
        assert (blocked.state, blocked.execution) == ("blocked", "RUNNING")
        assert "CorruptBlob" in (blocked.error or "")
        console.world.broken.clear()
        assert (await console.tttd("retry", "stuck")).code == 0
        watched = await console.tttd("watch", "stuck")
        assert watched.code == 0, watched.err
        assert "run stuck completed at step 2" in watched.out


async def test_stop_ends_a_run_and_run_goes_on_with_it(console: Console) -> None:
    console.world.gate.clear()
    async with console.workers(*ALL):
        await console.tttd(*run_arguments("halt", 3), "--detach")
        await console.until("halt", lambda r: r.grid is not None)
        assert (await console.tttd("stop", "halt")).code == 0
        console.world.gate.set()
        watched = await console.tttd("watch", "halt")
        assert watched.code == 0, watched.err
        assert "run halt stopped at step 1" in watched.out
        ended = await console.tttd(*run_arguments("halt", 3))
        assert "resuming run halt at step 1, to step 3" in ended.err
        assert "run halt completed at step 3" in ended.out


async def test_joining_a_run_of_another_store_is_refused(console: Console, tmp_path: Path) -> None:
    console.world.gate.clear()
    async with console.workers(*ALL):
        await console.tttd(*run_arguments("theirs"), "--detach")
        await console.until("theirs", lambda r: r.grid is not None)
        other = replace(console, environment=console.environment | {"TTTD_STORE": str(tmp_path / "other")})
        refused = await other.tttd(*run_arguments("theirs"))
        assert refused.code == 1
        assert "its workers use another store; set TTTD_STORE" in refused.err


async def test_a_server_that_nobody_named_is_not_used(console: Console) -> None:
    port = console.environment["TEMPORAL_ADDRESS"].rpartition(":")[2]
    environment = {name: value for name, value in console.environment.items() if name != "TEMPORAL_ADDRESS"}
    unnamed = replace(console, environment=environment | {"TTTD_TEMPORAL_PORT": port})
    refused = await unnamed.tttd(*run_arguments("unnamed"), "--detach")
    assert refused.code == 1
    assert f"set TEMPORAL_ADDRESS=127.0.0.1:{port} to use it" in refused.err
    assert not (console.world.home / "services.json").exists()
    named = await replace(console, environment=unnamed.environment | {"TEMPORAL_ADDRESS": f"127.0.0.1:{port}"}).tttd(
        *run_arguments("unnamed"), "--detach"
    )
    assert (named.code, named.out.strip()) == (0, "unnamed")


async def test_the_same_failure_again_and_again_is_shown_while_following(console: Console) -> None:
    console.world.flaky.add(1)
    async with console.workers(*ALL):
        follower = await console.begin(*run_arguments("flaky", 1))
        assert follower.stderr is not None
        async with asyncio.timeout(90):
            while "JudgeError: no room in the sandbox" not in (line := (await follower.stderr.readline()).decode()):
                assert line, "the run ended"
        assert "it is tried again by itself" in line
        report = await console.report("flaky")
        (wait,) = report.waits
        assert (wait.kind, wait.failure) == (names.JUDGE, "JudgeError: no room in the sandbox")
        assert wait.attempts > 1
        later = await console.until("flaky", lambda r: bool(r.waits) and r.waits[0].attempts > wait.attempts)
        assert later.waits[0].since == wait.since, "a wait begins with its first attempt"
        assert datetime.fromisoformat(wait.since or "") <= datetime.now(UTC)
        console.world.flaky.clear()
        assert (await console.end(follower)).code == 0


async def test_waits_name_the_missing_worker(console: Console) -> None:
    async with console.workers("control", "sample", "engine"):
        await console.tttd(*run_arguments("alone", 1), "--detach")
        waiting = await console.until("alone", lambda r: any(w.kind == names.JUDGE_SEED for w in r.waits))
        (wait,) = waiting.waits
        assert (wait.queue, wait.role, wait.waiting) == (names.JUDGE_QUEUE, "judge", 1)
        shown = await console.tttd("status", "alone")
        assert "judge_seed: 1 waiting on tttd-judge" in shown.out
        follower = await console.begin("watch", "alone")
        assert follower.stderr is not None
        said = [(await asyncio.wait_for(follower.stderr.readline(), 40)).decode() for _ in range(2)]
        assert said[0].startswith("before step 1 · opening")
        # The workers of the test before may still count as pollers; they are not there all the same.
        assert re.search("waiting: no judge worker (is polling|has asked) tttd-judge.* start one with `tttd worker judge`", said[1])
        async with console.workers("judge"):
            ended = await console.end(follower)
            assert ended.code == 0, ended.err


async def test_waits_name_the_engine_whose_queue_nobody_serves(console: Console) -> None:
    async with console.workers("control", "sample", "judge"):
        await console.tttd(*run_arguments("unserved", 1), "--detach")
        waiting = await console.until("unserved", lambda r: any(w.kind == names.PUBLISH for w in r.waits))
        (wait,) = waiting.waits
        assert (wait.queue, wait.role, wait.waiting) == (names.engine_queue(ENGINE), "engine", 1)
        assert (waiting.phase.name if waiting.phase else None, waiting.model) == ("publish", "tiny")
        async with console.workers("engine"):
            ended = await console.tttd("watch", "unserved")
            assert ended.code == 0, ended.err


async def test_without_a_control_worker_status_and_watch_go_on(console: Console) -> None:
    started = await console.tttd(*run_arguments("orphan", 1), "--detach")
    assert started.code == 0, started.err
    report = await console.report("orphan")
    assert (report.execution, report.step, report.policy_version) == ("RUNNING", None, None)
    assert report.problem
    (wait,) = report.waits
    assert (wait.kind, wait.role) == ("workflow", "control")
    assert "`tttd worker control`" in (wait.advice or "")
    follower = await console.begin("watch", "orphan")
    assert follower.stderr is not None
    assert "waiting for a control worker" in (await follower.stderr.readline()).decode()
    async with console.workers(*ALL):
        ended = await console.end(follower)
    assert ended.code == 0, ended.err
    assert "run orphan completed at step 1" in ended.out


async def test_a_run_that_fails_at_opening_exits_3(console: Console) -> None:
    async with console.workers(*ALL):
        await console.client.start_workflow(
            names.DISCOVERY_RUN, {"task": TASK, "serch": 1}, id="run/bad", task_queue=names.CONTROL_QUEUE
        )
        ended = await console.tttd("watch", "bad")
        assert ended.code == 3
        assert "tttd: run bad failed: InputError: serch: unknown field" in ended.err
        report = await console.report("bad")
        assert (report.state, report.execution) == ("failed", "FAILED")
        assert "serch" in (report.error or "")
        assert (await look(console.client, "bad")).execution == "FAILED"


async def test_doctor_sees_the_server_and_its_workers(console: Console) -> None:
    async with console.workers("sample"):
        shown = await console.tttd("doctor", "--json")
    assert shown.out, shown.err
    checks = {check["name"]: check for check in json.loads(shown.out)["checks"]}
    assert checks["server"]["verdict"] == "ok"
    assert checks["search attributes"]["verdict"] == "ok"
    assert checks["sample workers"]["verdict"] == "ok"
    assert checks["train workers"]["verdict"] == "warning"
    assert "tttd worker train" in checks["train workers"]["hint"]
