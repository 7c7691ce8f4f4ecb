"""The real thing, end to end, in separate processes: runs, kills, and one chain for one seed. Profile `repeatable`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from temporalio.client import WorkflowFailureError

from activities.blobs import digest_of
from activities.engine_http import EngineClient
from activities.errors import PublishRefused
from activities.fleet import read_notice
from activities.publish.placing import materialise
from activities.publish.publishing import publish
from activities.records import ArchiveState, StepCommit, StepReport
from activities.run_store import RunStore
from tests.system import SHORT_TIMEOUTS, System, coordinates
from workflows.contracts.base import Outcome, RunRef
from workflows.contracts.messages import PublishRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUEST = {"task": "circle_packing_26", "profile": "repeatable", "seed": 7, "timeouts": SHORT_TIMEOUTS, "search": {"steps": 2}}
ROLLOUTS = 8
"""Of the profile's grid: 2 groups of 4."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("system") / "home")
    system.start_all()
    yield system
    system.stop()


@pytest.fixture(scope="module")
async def undisturbed(system: System) -> str:
    """Name of a run that nobody disturbed."""
    result = await system.run("undisturbed", REQUEST)
    assert (result.state, result.step) == ("completed", 2)
    return "undisturbed"


async def test_a_run_ends_with_a_complete_chain_and_certified_answers(system: System, undisturbed: str) -> None:
    commits = system.chain(undisturbed)
    assert [commit.step for commit in commits] == [0, 1, 2]
    for commit in commits[1:]:
        assert sorted({(row.group, row.rollout) for row in commit.rows}) == [(g, r) for g in range(2) for r in range(4)]
        assert all((row.exact is not None) == (row.outcome is Outcome.VALID) for row in commit.rows)
    assert [commit.policy.version for commit in commits] == [0, 1, 2]
    archive = system.archive(undisturbed)
    assert archive.total_visits == 2 * ROLLOUTS
    assert max(node.value for node in archive.nodes) >= 2.5414
    report = RunStore(system.blobs, undisturbed).read(StepReport, f"runs/{undisturbed}/steps/000002/report")
    assert report is not None
    assert report.publish[0].passed
    assert report.summary.rollouts == ROLLOUTS


async def test_the_same_seed_gives_the_same_chain(system: System, undisturbed: str) -> None:
    result = await system.run("again", REQUEST)
    assert result.commit == RunStore(system.blobs, undisturbed).commit_digest(2)


async def test_the_empty_start_asks_for_the_first_program(system: System) -> None:
    search = {"steps": 1, "start": "empty", "groups": 1, "rollouts": 6}
    result = await system.run("empty-start", {**REQUEST, "search": search})
    assert result.step == 1
    opening = system.chain("empty-start")[0]
    (seed,) = RunStore(system.blobs, "empty-start").load(ArchiveState, opening.archive).nodes
    assert (seed.code, seed.score, seed.value) == ("", None, 0.0)
    assert result.best_score is not None, "none of six first programs was valid"


async def test_a_finished_run_goes_on_when_more_steps_are_asked_for(system: System, undisturbed: str) -> None:
    """One step, then the same request for two: a new execution goes on from the last commit, and the chain is the same."""
    first = await system.run("extended", {**REQUEST, "search": {"steps": 1}})
    assert first.step == 1
    result = await system.run("extended", REQUEST)
    assert result.commit == RunStore(system.blobs, undisturbed).commit_digest(2)


async def test_a_resume_with_another_science_is_refused_naming_the_fields(system: System, undisturbed: str) -> None:
    changed = {**REQUEST, "optimizer": {"learning_rate": 1e-3}}
    with pytest.raises(WorkflowFailureError) as failure:
        await system.run(undisturbed, changed)
    assert "optimizer.learning_rate: 0.003 -> 0.001" in str(failure.value.cause.__cause__)


def kill_when(system: System, run: str, role: str) -> Callable[[], bool]:
    """The moment in the middle of a role's own work in step 1."""
    moments: dict[str, Callable[[], bool]] = {
        "control": lambda: len(system.entries(run, 1, "/rollout")) >= 2,
        "sample": lambda: len(system.entries(run, 1, "/rollout")) >= 2,
        "judge": lambda: len(system.entries(run, 1, "/verdict")) >= 1,
        "train": lambda: system.has(run, 1, "batch"),
        "engine": lambda: len(system.entries(run, 1, "/rollout")) >= 2,
    }
    return moments[role]


@pytest.mark.parametrize("role", ["control", "sample", "judge", "train", "engine"])
async def test_kill_9_in_the_middle_of_a_step(system: System, undisturbed: str, role: str) -> None:
    run = f"killed-{role}"
    stored: dict[str, str] = {}
    seen: dict[str, int] = {}

    def disturb() -> None:
        system.wait_for(f"the middle of {role}'s work", kill_when(system, run, role))
        system.kill(role)
        stored.update(system.entries(run, 1, "/rollout") | system.entries(run, 1, "/verdict"))
        seen.update({name: len(system.events(name, event)) for name, event in WORK.items()})
        assert not system.has(run, 1, "commit"), "killed too late to prove anything"
        system.start(role)

    # Trainer and engine hold state from one step to the next, so their runs go on for another.
    steps = 2 if role in ("train", "engine") else 1
    result = await system.run(run, {**REQUEST, "search": {"steps": steps}}, disturb)
    assert (result.state, result.step) == ("completed", steps)
    commits = system.chain(run)
    assert [commit.step for commit in commits] == list(range(steps + 1))
    # What was recorded stays as it was, and nobody paid for it twice.
    after = system.entries(run, 1, "/rollout") | system.entries(run, 1, "/verdict")
    assert stored.items() <= after.items()
    for name, event in WORK.items():
        suffix = "rollout" if name == "sample" else "verdict"
        redone = coordinates(system.events(name, event)[seen[name] :], run)
        assert not {f"runs/{run}/steps/{s:06d}/g{g:02d}/r{r:02d}/{suffix}" for s, g, r in redone} & stored.keys()
    # One seed, one chain, whatever was killed.
    assert result.commit == RunStore(system.blobs, undisturbed).commit_digest(steps)


WORK = {"sample": "rollout_sampled", "judge": "rollout_judged"}


async def test_a_crashed_engine_process_comes_back_with_its_adapters(system: System, undisturbed: str) -> None:
    """Not the worker but the engine itself: it is restarted, its adapters are reloaded and proved, and only then is it asked."""
    run = "crashed-engine"

    def disturb() -> None:
        system.wait_for("sampling", lambda: len(system.entries(run, 2, "/rollout")) >= 2)
        boots = [e["pid"] for e in system.events("engine", "engine_started")]
        os.kill(boots[-1], signal.SIGKILL)

    result = await system.run(run, REQUEST, disturb)
    assert result.commit == RunStore(system.blobs, undisturbed).commit_digest(2)
    assert system.events("engine", "adapter_restored")


@dataclass
class LiveEngine:
    """The running system's engine, as the publish room sees it; nothing is reported to its worker."""

    url: str
    boot_id: str
    adapter_directory: Path
    engine_id: str = "here"

    @property
    def current(self) -> LiveEngine:
        return self

    def on_verified(self, request: PublishRequest, boot_id: str, served: dict[str, int]) -> None: ...

    def on_unloaded(self, names: tuple[str, ...]) -> None: ...


@pytest.fixture(scope="module")
async def stranger(system: System, undisturbed: str) -> StepCommit:
    """Last commit of a run with another seed: same task, same model, same learning rate, other draws."""
    result = await system.run("other-seed", {**REQUEST, "seed": 8})
    assert result.commit != RunStore(system.blobs, undisturbed).commit_digest(2)
    return system.chain("other-seed")[-1]


@pytest.mark.parametrize("impostor", ["no adapter", "the previous version", "another run's adapter"])
def test_the_gate_refuses(system: System, undisturbed: str, stranger: StepCommit, impostor: str, tmp_path: Path) -> None:
    """Real adapters of real steps at the profile's learning rate, on the engine that served them, under the new version's name."""
    last = system.chain(undisturbed)[-1]
    assert last.previous_policy is not None
    adapter = {
        "no adapter": last.initial_policy.adapter,
        "the previous version": last.previous_policy.adapter,
        "another run's adapter": stranger.policy.adapter,
    }[impostor]
    name = f"{last.policy.name.rpartition('-')[0]}-{digest_of(impostor.encode())[:12]}"
    notice = read_notice(system.blobs, "here")
    assert notice is not None
    with contextlib.closing(EngineClient(notice.url)) as client:
        client.load_adapter(name, str(materialise(system.blobs, adapter, tmp_path / "impostor", name)))
    spec = RunStore(system.blobs, undisturbed).find(f"runs/{undisturbed}/open")
    assert spec is not None
    request = PublishRequest(
        run=RunRef(run_id=undisturbed, identity=last.identity, spec=spec),
        engine="here",
        policy=last.policy.model_copy(update={"name": name}),
        previous=last.previous_policy,
        initial=last.initial_policy,
    )
    with pytest.raises(PublishRefused, match=name):
        publish(system.blobs, LiveEngine(notice.url, notice.boot_id, tmp_path / "adapters"), request)
    honest = request.model_copy(update={"policy": last.policy})
    assert publish(system.blobs, LiveEngine(notice.url, notice.boot_id, tmp_path / "adapters"), honest).passed


def test_started_by_the_temporal_cli_with_nothing_but_a_task(system: System) -> None:
    text = json.dumps({"task": "circle_packing_26", "search": {"groups": 2, "rollouts": 3, "steps": 1}})
    common = ["--workflow-id", "run/by-cli", "--task-queue", "tttd-control"]
    started = system.temporal("workflow", "start", "--type", "DiscoveryRun", *common, "--input", text)
    assert started.returncode == 0, started.stderr
    system.wait_for("the run's end", lambda: system.has("by-cli", 1, "commit"))
    result = system.temporal("workflow", "result", "--workflow-id", "run/by-cli", "--output", "json")
    assert json.loads(result.stdout)["result"]["state"] == "completed"


def test_bad_json_fields_end_the_run_as_failed_within_seconds(system: System) -> None:
    common = ["--workflow-id", "run/bad", "--task-queue", "tttd-control"]
    raw = '{"task": "circle_packing_26", "stepz": 3}'
    system.temporal("workflow", "start", "--type", "DiscoveryRun", *common, "--input", raw)

    def failed() -> bool:
        described = system.temporal("workflow", "describe", "--workflow-id", "run/bad", "--output", "json")
        return "FAILED" in described.stdout

    system.wait_for("the failure", failed, seconds=20)
    shown = system.temporal("workflow", "show", "--workflow-id", "run/bad", "--output", "json")
    assert "stepz: unknown field; allowed here: bundle, decode" in shown.stdout


def test_unknown_names_end_the_run_too(system: System) -> None:
    for name, raw, says in [
        ("bad-task", {"task": "no_such_task"}, "no task 'no_such_task'; there are: ac1, ac2, circle_packing_26"),
        ("bad-model", {"task": "circle_packing_26", "model": "nowhere/at-all"}, "model 'nowhere/at-all' is neither"),
        ("bad-start", {"task": "circle_packing_26", "search": {"start": "spiral"}}, "has no start 'spiral'"),
    ]:
        common = ["--workflow-id", f"run/{name}", "--task-queue", "tttd-control"]
        system.temporal("workflow", "start", "--type", "DiscoveryRun", *common, "--input", json.dumps(raw))
        result = system.temporal("workflow", "result", "--workflow-id", f"run/{name}")
        assert says in result.stdout + result.stderr


def test_status_and_best_read_the_run(system: System, undisturbed: str, tmp_path: Path) -> None:
    status = system.tttd("status", undisturbed, "--json")
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["step"] == 2
    program = tmp_path / "best.py"
    best = system.tttd("best", undisturbed, "-o", str(program))
    assert best.returncode == 0, best.stderr
    assert "def run_packing" in program.read_text()
    judged = system.tttd("judge", "circle_packing_26", str(program), "--json")
    assert json.loads(judged.stdout)["valid"]
