"""C++ programs judged on cases, and programs judged by a service: from a source to an outcome, a score and a reward."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from activities.blobs import Blobs
from activities.errors import InputError, JudgeError
from activities.judge import harbor
from activities.judge.cases import Services, limits_of_case
from activities.judge.judging import Case, Judgement, judge, limits_of_task, verdict_of
from activities.judge.sandbox import Limits, Outcome, Program, Sandbox, Status, open_sandbox
from activities.judge.sandbox.cpp_toolchain import installed
from activities.judge.single import judge_file
from activities.open.resolve import resolve
from activities.records import Node
from activities.run_store import RunStore
from activities.sample.extract import FENCES, extract_program
from activities.sample.prompt import ParentView, render_prompt, template_digest_source
from activities.sample.sampling import views
from tasks.judging import CaseRun, CasesJudge, Grade, ServiceJudge
from tasks.judging import TestCase as CaseInput
from tasks.registry import Task, TaskSource, load_task
from tests.frontiercs_service import Service, accepted, done, serving
from workers.settings import BUILT_IN_PROPOSERS
from workflows.contracts.base import Coordinate
from workflows.contracts.base import Outcome as Result
from workflows.contracts.request import parse_request

PACKING = load_task("polyomino_packing")
SMALL = PACKING.model_copy(update={"judge_parameters": {"cases": 2, "seed": 1, "final_cases": 1, "final_seed": 2}})
REMOTE = load_task("polyomino_frontiercs")

needs_compiler = pytest.mark.skipif(installed() is None, reason="needs g++")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as opened:
        yield opened


async def judged(task: Task, program: str | None, sandbox: Sandbox, services: Services | None = None) -> Judgement:
    return await judge(task, task.make_judge(), Case(program), limits_of_task(task), sandbox, services=services)


@needs_compiler
@pytest.mark.slow
async def test_the_seed_program_scores_what_its_description_says(sandbox: Sandbox) -> None:
    judgement = await judged(PACKING, PACKING.start_program("default"), sandbox)
    assert judgement.outcome is Result.VALID
    assert judgement.reason == ""
    assert judgement.reward == judgement.value == pytest.approx(45.854088401924756, rel=1e-12)
    assert judgement.run is not None
    assert judgement.run.cpu_seconds is not None
    assert judgement.run.cpu_seconds > 0


@needs_compiler
@pytest.mark.slow
async def test_the_baseline_is_far_better(sandbox: Sandbox) -> None:
    baseline = SMALL.baseline_source
    assert baseline is not None
    judgement = await judged(SMALL, baseline, sandbox)
    assert judgement.value is not None
    assert judgement.value > 65


def case_sizes() -> list[int]:
    made = SMALL.make_judge()
    assert isinstance(made, CasesJudge)
    return [int(case.stdin.split(maxsplit=1)[0]) for case in made.cases()]


def shelf_but(first_case: str) -> str:
    """The seed program, which does something else on the first case."""
    source = SMALL.start_program("default")
    place = 'if (std::scanf("%d", &n) != 1) return 1;'
    assert source.count(place) == 1
    return "#include <unistd.h>\n#include <cstdlib>\n" + source.replace(
        place, f"{place} if (n == {case_sizes()[0]}) {{ {first_case} }}"
    )


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("first_case", "reason"),
    [
        ('std::fputs("I give up\\n", stderr); std::abort();', "crashed"),
        ("return 1;", "crashed"),
        ("for (volatile int x = 0;; x++);", "ran out of time"),
        ("sleep(50);", "ran out of time"),
        ("std::vector<std::vector<long>> v; for (;;) v.emplace_back(1 << 22, 1);", "needed too much memory"),
        ('for (;;) std::puts("0 0 0 0");', "printed more than 1048576 bytes"),
        ('std::puts("1 1"); return 0;', "has 2 numbers"),
    ],
)
async def test_what_fails_on_one_case_costs_that_case(first_case: str, reason: str, sandbox: Sandbox) -> None:
    alone = await judged(SMALL, SMALL.start_program("default"), sandbox)
    judgement = await judged(SMALL, shelf_but(first_case), sandbox)
    assert judgement.outcome is Result.VALID
    assert judgement.reason.startswith("1 of 2 cases score 0: case 0")
    assert reason in judgement.reason
    assert judgement.value is not None
    assert alone.value is not None
    assert 0 < judgement.value < alone.value
    if "give up" in first_case:
        assert judgement.run is not None
        assert judgement.run.stderr_tail == "I give up\n"


@needs_compiler
async def test_no_valid_case_is_an_invalid_program(sandbox: Sandbox) -> None:
    judgement = await judged(SMALL, "int main() { return 1; }", sandbox)
    assert (judgement.outcome, judgement.reward, judgement.value) == (Result.INVALID, 0.0, None)
    assert judgement.reason.startswith("no case is valid: case 0")


@needs_compiler
async def test_a_program_that_does_not_compile_has_crashed(sandbox: Sandbox, blobs: Blobs) -> None:
    judgement = await judged(SMALL, "int main() { return x; }", sandbox)
    assert (judgement.outcome, judgement.reward) == (Result.CRASHED, 0.0)
    assert judgement.reason.startswith("compile error: program.cpp:1:21: error: 'x' was not declared")
    verdict = verdict_of(judgement, Coordinate(step=1, group=0, rollout=0), RunStore(blobs, "run"))
    assert "program.cpp:1:21" in verdict.error_tail
    assert verdict.construction is None


@needs_compiler
def test_a_file_on_the_hidden_cases(sandbox: Sandbox, tmp_path: Path) -> None:
    program = tmp_path / "program.cpp"
    program.write_text(SMALL.start_program("default"))
    folder = tmp_path / "polyomino_small"
    folder.mkdir()
    for name in ("instruction.md", "seeds", "solution"):
        (folder / name).symlink_to(PACKING.folder / name)
    text = (PACKING.folder / "task.toml").read_text()
    (folder / "task.toml").write_text(text.replace("final_cases = 70", "final_cases = 1").replace("cases = 70", "cases = 2"))
    public = judge_file("polyomino_small", program, task_directories=[tmp_path], sandbox=sandbox)
    hidden = judge_file("polyomino_small", program, task_directories=[tmp_path], sandbox=sandbox, final=True)
    assert public["valid"]
    assert hidden["valid"]
    assert public["score"] != hidden["score"]
    judge_of = SMALL.make_judge()
    assert judge_of.verify(hidden["construction"]).score == hidden["score"]
    assert judge_of.verify(public["construction"]).score == public["score"]


def test_a_task_without_hidden_cases_says_so(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("x = 1")
    with pytest.raises(InputError, match="has no hidden cases"):
        judge_file("circle_packing_26", program, final=True)


class Scripted(Sandbox):
    """Answers with given outcomes, one after the other."""

    def __init__(self, inner: Sandbox, outcomes: Sequence[Outcome]) -> None:
        self.isolation = inner.isolation
        self.outcomes = list(outcomes)
        self.asked: list[tuple[Program, Limits]] = []

    async def run(self, program: Program, limits: Limits) -> Outcome:
        self.asked.append((program, limits))
        return self.outcomes.pop(0)

    async def close(self) -> None: ...

    def close_blocking(self) -> None: ...


def outcome(sandbox: Sandbox, status: Status, **changes: Any) -> Outcome:
    bare = Outcome(
        status, "", b"" if status is Status.OK else None, None, None, 1.0, 0.5, 0.0, 1 << 20, "", "", 0, 0, sandbox.isolation
    )
    return replace(bare, **changes)


async def test_each_case_has_its_own_time_and_the_clock_allows_twice_as_much(sandbox: Sandbox) -> None:
    scripted = Scripted(sandbox, [outcome(sandbox, Status.OK), outcome(sandbox, Status.OK)])
    judgement = await judged(SMALL, "program", scripted)
    assert judgement.outcome is Result.INVALID
    assert [len(program.stdin) for program, _ in scripted.asked] == [len(case.stdin) for case in SMALL.make_judge().cases()]  # type: ignore[attr-defined]
    for program, limits in scripted.asked:
        assert (program.language, program.source) == ("cpp17", "program")
        assert (limits.cpu_limit_seconds, limits.kill_seconds, limits.memory_bytes, limits.result_bytes) == (
            2,
            4.0,
            256 << 20,
            1 << 20,
        )
    assert judgement.run is not None
    assert (judgement.run.wall_seconds, judgement.run.cpu_seconds, judgement.run.peak_memory_bytes) == (2.0, 1.0, 1 << 20)


def test_limits_of_a_case_follow_the_request() -> None:
    limits = limits_of_case(Limits(wall_seconds=10, cores=2))
    assert (limits.cpu_limit_seconds, limits.kill_seconds) == (20, 20.0)


async def test_a_sandbox_that_fails_is_no_result(sandbox: Sandbox) -> None:
    broken = outcome(sandbox, Status.SANDBOX_ERROR, reason="no C++ compiler: apt-get install g++")
    with pytest.raises(JudgeError, match=r"case 1 \(n=.*apt-get install g\+\+"):
        await judged(SMALL, "program", Scripted(sandbox, [outcome(sandbox, Status.OK), broken]))


@pytest.mark.parametrize(("waited", "starved"), [(0.9, True), (0.01, False)])
async def test_a_case_that_ran_out_of_time_while_it_had_no_core_is_worth_another_attempt(
    waited: float, starved: bool, sandbox: Sandbox
) -> None:
    late = outcome(sandbox, Status.TIMEOUT, wait_seconds=waited)
    judgement = await judged(SMALL, "program", Scripted(sandbox, [late, outcome(sandbox, Status.OK)]))
    assert judgement.starved_timeout is starved


class BrokenJudge:
    def cases(self) -> list[CaseInput]:
        return [CaseInput("one", b"1")]

    def grade_runs(self, runs: Sequence[CaseRun]) -> Grade:
        raise ZeroDivisionError("a mistake of the task")

    def verify(self, construction: Any) -> Grade:
        raise NotImplementedError


async def test_a_judge_that_fails_is_a_mistake_of_the_task(sandbox: Sandbox) -> None:
    scripted = Scripted(sandbox, [outcome(sandbox, Status.OK)])
    with pytest.raises(InputError, match="ZeroDivisionError: a mistake of the task"):
        await judge(SMALL, BrokenJudge(), Case("program"), limits_of_task(SMALL), scripted)


async def test_a_python_task_cannot_have_cases(sandbox: Sandbox) -> None:
    python = SMALL.model_copy(update={"language": "python"})
    with pytest.raises(InputError, match='set language = "cpp17"'):
        await judge(python, BrokenJudge(), Case("program"), limits_of_task(python), Scripted(sandbox, []))


def test_kinds_of_judges_are_told_apart() -> None:
    kinds = {name: load_task(name).make_judge() for name in ("circle_packing_26", "polyomino_packing", "polyomino_frontiercs")}
    assert [isinstance(made, CasesJudge) for made in kinds.values()] == [False, True, False]
    assert [isinstance(made, ServiceJudge) for made in kinds.values()] == [False, False, True]


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as server:
        yield server


def quick(cases: int = 2, **changes: Any) -> Task:
    parameters = {"problem": 0, "cases": cases, "poll_seconds": 0.01, "answer_seconds": 5.0}
    return REMOTE.model_copy(update={"judge_parameters": parameters | changes})


async def test_a_service_judges(service: Service, sandbox: Sandbox, blobs: Blobs) -> None:
    judgement = await judged(quick(), "int main() {}", sandbox, {"frontiercs": service.url})
    assert (judgement.outcome, judgement.reward) == (Result.VALID, 50.0)
    verdict = verdict_of(judgement, Coordinate(step=1, group=0, rollout=0), RunStore(blobs, "run"))
    assert verdict.exact == "50/1"
    assert verdict.isolation == ""


async def test_a_service_that_is_away_is_infrastructure(sandbox: Sandbox) -> None:
    with pytest.raises(JudgeError, match="ConnectionRefusedError"):
        await judged(quick(), "int main() {}", sandbox, {"frontiercs": "http://127.0.0.1:9"})
    for nothing in (None, {}, {"frontiercs": None}):
        with pytest.raises(JudgeError, match="TTTD_FRONTIERCS_URL"):
            await judged(quick(), "int main() {}", sandbox, nothing)


async def test_a_program_that_the_service_cannot_compile_is_invalid(service: Service, sandbox: Sandbox) -> None:
    service.result = {"status": "error", "error": "Error: compile failed: main.cpp:1:1: error: x"}
    judgement = await judged(quick(), "x", sandbox, {"frontiercs": service.url})
    assert (judgement.outcome, judgement.reward) == (Result.INVALID, 0.0)


class PatientService:
    """Waits until it is stopped."""

    service = "patient"

    def __init__(self) -> None:
        self.asked, self.ended = threading.Event(), threading.Event()

    def at(self, url: str | None) -> PatientService:
        assert url == "http://there"
        return self

    def submit(self, source: str, stop: threading.Event | None = None) -> Grade:
        assert stop is not None
        self.asked.set()
        if stop.wait(30):
            self.ended.set()
        return Grade(valid=False, reason="stopped")

    def verify(self, construction: Any) -> Grade:
        raise NotImplementedError


async def test_cancelling_stops_the_wait_for_a_service(sandbox: Sandbox) -> None:
    patient = PatientService()
    services = {"patient": "http://there"}
    waiting = asyncio.create_task(judge(REMOTE, patient, Case("x"), limits_of_task(REMOTE), sandbox, services=services))
    assert await asyncio.to_thread(patient.asked.wait, 20)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(patient.ended.wait, 20)


def test_exact_sums_beyond_doubles(service: Service) -> None:
    service.result = done(*[accepted("0.333333333")] * 3)
    made = quick(cases=3).make_judge()
    assert isinstance(made, ServiceJudge)
    grade = made.at(service.url).submit("x")
    assert grade.exact == Fraction(333333333, 10**7)
    assert grade.score is not None
    assert Fraction(grade.score) <= grade.exact


@pytest.mark.parametrize(("asked", "found"), [(None, 2.0), (60.0, 2.0), (0.5, 0.5)])
def test_a_profile_gives_no_case_more_time_than_the_problem_does(asked: float | None, found: float) -> None:
    request = parse_request({"task": "polyomino_packing", "judge": {"wall_seconds": asked}})
    spec = resolve(request, "run", TaskSource(), (BUILT_IN_PROPOSERS,), "prompt")
    assert spec.wall_seconds == found
    problem, _ = views(spec, PACKING, Node(id="n", step=0, value=1.0, score=1.0, code="int main() {}", construction="0" * 64))
    prompt = render_prompt(problem, ParentView("int main() {}", 1.0, None))
    assert f"Time limit: {found:g} seconds on 1 CPU core." in prompt
    assert "## Parent program\n\n```cpp\nint main() {}\n```" in prompt
    assert prompt.endswith("Answer with the complete program, defining `main()`, in one ```cpp block.")
    assert "global" not in prompt
    assert (
        extract_program("<think>```cpp\nno\n```</think>\n```cpp\nint main() {}\n```", FENCES[PACKING.language]) == "int main() {}\n"
    )


def test_wording_for_python_is_what_it_was() -> None:
    text = template_digest_source()
    assert "```cpp" not in text
    assert text.count("in one ```python block.") == text.count("Answer with the complete program")


def test_harbor_asks_the_service(service: Service, tmp_path: Path) -> None:
    folder = tmp_path / "polyomino_frontiercs"
    shutil.copytree(REMOTE.folder, folder)
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(text.replace("cases = 70", "cases = 2, poll_seconds = 0.01"))
    program, logs = tmp_path / "solution.cpp", tmp_path / "logs"
    program.write_text("int main() {}")
    arguments = ["--task", str(folder), "--program", str(program), "--logs", str(logs)]
    assert harbor.main([*arguments, "--service", f"frontiercs={service.url}"]) == 0
    assert json.loads((logs / "reward.json").read_text()) == {"reward": 50.0, "valid": 1, "score": 50.0}
    (logs / "reward.json").unlink()
    assert harbor.main(arguments) == 1
    assert not (logs / "reward.json").exists()
