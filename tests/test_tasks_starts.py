"""The built-in problems as data: starts certify to what they say, and the helper that programs get scores as the judge does."""

from __future__ import annotations

import itertools
import json
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from temporalio.testing import ActivityEnvironment

from activities.blobs import Blobs
from activities.judge.activity import JudgeActivities
from activities.judge.sandbox import Sandbox, open_sandbox
from activities.judge.single import judge_file
from activities.judge.slots import Slots
from activities.records import Node, Verdict
from activities.run_store import RunStore, seed_at
from tasks.errors import TaskError
from tasks.registry import Task, load_task, read_task, task_digest
from tasks.starts import grade_answer, root_answer, verdicts_needed
from tests.chain import Chain
from workflows.contracts.base import Outcome
from workflows.contracts.messages import Judged, JudgeSeedRequest

ERDOS, AC1, AC2 = load_task("erdos_min_overlap"), load_task("ac1"), load_task("ac2")
CP26, CP32 = load_task("circle_packing_26"), load_task("circle_packing_32")


def helper(task: Task, name: str) -> Callable[..., float]:
    assert task.helper is not None
    found: Callable[..., float] = runpy.run_path(str(task.folder / task.helper))[name]
    return found


def without_environment(task: Task, directory: Path) -> Task:
    """The task in a folder of its own, without a list of packages: its programs run in this interpreter, which has them."""
    folder = directory / task.name
    shutil.copytree(task.folder, folder, ignore=shutil.ignore_patterns("environment", "__pycache__"))
    return read_task(folder)


# Starts with constructions ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_erdos_roots_are_random_steps_around_one_half(seed: int) -> None:
    answers = [root_answer(ERDOS, "random", seed, root) for root in range(8)]
    assert all(40 <= len(h) <= 99 for h in answers)
    grades = [grade_answer(ERDOS.make_judge(), h) for h in answers]
    for grade in grades:
        assert grade.valid, grade.reason
        assert grade.score is not None
        assert 0.45 < grade.score < 0.56
    assert len({grade.score for grade in grades}) == 8


def test_constants_are_worth_what_a_constant_is_worth() -> None:
    for task, score in ((AC1, 2.0), (AC2, 2 / 3)):
        lengths = set()
        for root in range(3):
            answer = root_answer(task, "constant", 5, root)
            lengths.add(len(answer))
            assert 1000 <= len(answer) <= 8000
            assert grade_answer(task.make_judge(), answer).score == pytest.approx(score, abs=1e-15)
        assert len(lengths) == 3


@pytest.mark.parametrize(("task", "start"), [(ERDOS, "random"), (AC1, "constant"), (AC2, "constant")])
def test_roots_differ_by_number_and_by_the_runs_seed_alone(task: Task, start: str) -> None:
    first = [root_answer(task, start, 3, root) for root in range(4)]
    assert first == [root_answer(task, start, 3, root) for root in range(4)]
    assert len({json.dumps(answer) for answer in first}) == 4
    assert first[0] != root_answer(task, start, 4, 0)


def test_how_many_verdicts_a_start_needs() -> None:
    assert verdicts_needed(ERDOS.starts["random"], 8) == 8
    assert verdicts_needed(AC1.starts["constant"], 3) == 3
    assert verdicts_needed(CP26.starts["grid"], 8) == 1
    assert verdicts_needed(CP26.starts["empty"], 8) == 0


def test_the_default_starts_are_the_specified_ones() -> None:
    assert [task.default_start for task in (ERDOS, AC1, AC2, CP26, CP32)] == ["random", "constant", "constant", "grid", "grid"]
    assert ERDOS.start_program("random") == ""
    assert AC1.start_program("constant")
    assert AC2.start_program("constant")
    for task in (CP26, CP32):
        assert (task.starts["empty"].value, task.start_program("empty")) == (0.0, "")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as opened:
        yield opened


@pytest.mark.parametrize(
    ("task", "start", "score"),
    [(CP26, "grid", 2.54142135), (CP26, "ring", 0.95976421), (CP32, "grid", 2.78994949)],
)
def test_packing_seed_programs_certify_to_what_their_descriptions_say(
    task: Task, start: str, score: float, sandbox: Sandbox, tmp_path: Path
) -> None:
    here = without_environment(task, tmp_path)
    verdict = judge_file(task.name, here.folder / str(here.starts[start].program), task_directories=[tmp_path], sandbox=sandbox)
    assert verdict["score"] == pytest.approx(score, abs=1e-7)
    assert f"{score:.4f}" in here.starts[start].description


@pytest.mark.slow
@pytest.mark.parametrize(("task", "start", "better_than"), [(AC1, "lp", 1.56), (AC2, "adam", 0.88)])
def test_the_seed_programs_of_the_sequences_run(
    task: Task, start: str, better_than: float, sandbox: Sandbox, tmp_path: Path
) -> None:
    """With the helper that they call, and in the time that they are told (the linear programs stop by themselves)."""
    here = without_environment(task, tmp_path)
    program = here.folder / str(here.starts[start].program)
    verdict = judge_file(task.name, program, task_directories=[tmp_path], sandbox=sandbox, wall_seconds=60, seed=3)
    assert verdict["valid"], verdict["reason"] + verdict["error_tail"]
    assert task.sign * verdict["score"] > task.sign * better_than


# Files of constructions ---------------------------------------------------------------------------------------------------------
def start_in(folder: Path, construction: str, **files: str) -> Task:
    """The packing of 3 circles of `tests/chain.py` with one more start."""
    for name, text in files.items():
        (folder / "seeds" / name.replace("__", ".")).write_text(text)
    with (folder / "task.toml").open("a") as toml:
        toml.write(f'\n[metadata.discovery.starts.made]\nconstruction = "{construction}"\nprogram = "seeds/given.py"\n')
    return read_task(folder)


@pytest.fixture
def chain(blobs: Blobs, tmp_path: Path) -> Chain:
    return Chain.fresh(blobs, tmp_path).with_request(search={"groups": 3, "rollouts": 3, "start": "made"})


async def judged_seed(chain: Chain) -> Judged:
    """The judge's part of opening a run; no program runs here, so it has no sandbox."""
    nothing: Any = None
    room = JudgeActivities(chain.blobs, chain._tasks, nothing, Slots(cores=1))
    return await ActivityEnvironment().run(room.judge_seed, JudgeSeedRequest(run=chain.prepare().run))


def roots(chain: Chain) -> tuple[Node, ...]:
    _, opened = chain.open()
    return chain.archive(opened.head).nodes


THREE = "[[[0.2, 0.2], [0.8, 0.8], [0.2, 0.8]], [0.2, 0.2, 0.1]]"


@pytest.mark.parametrize("stored", [False, True])
async def test_a_file_of_an_answer_opens_the_archive_with_one_verdict(chain: Chain, stored: bool) -> None:
    """Numbers in lists are an answer, an object is a stored construction; the program beside it is the code, and does not run."""
    folder = chain.tasks_directory / "sizes"
    judge = read_task(folder).make_judge()
    text = json.dumps(judge.grade(THREE.encode()).construction) if stored else THREE
    start_in(folder, "seeds/three.json", three__json=text)
    assert chain.prepare().judge_seed
    assert (await judged_seed(chain)).score == pytest.approx(0.5)
    assert not chain.prepare().judge_seed
    nodes = roots(chain)
    assert {(n.value, n.code) for n in nodes} == {(nodes[0].value, "def run():\n    return 1\n")}
    assert nodes[0].construction is not None
    assert len({n.construction for n in nodes}) == 1
    assert len(chain.store.blobs.store.folders(f"{chain.store.root}/steps/000000/")) == 1


MAKER = """
def make(rng, root):
    r = rng.uniform(0.01, 0.02) + 0.05 * root
    return [[0.2, 0.2], [0.8, 0.8], [0.2, 0.8]], [r, r, r]
"""


async def test_a_function_makes_every_root_anew(chain: Chain) -> None:
    start_in(chain.tasks_directory / "sizes", "seeds/make.py:make", make__py=MAKER)
    await judged_seed(chain)
    verdicts = [chain.store.read(Verdict, chain.store.rollout_key(seed_at(root), "verdict")) for root in range(3)]
    assert [v.at.group for v in verdicts if v is not None] == [0, 1, 2]
    nodes = roots(chain)
    assert [n.value for n in nodes] == [v.value for v in verdicts if v is not None]
    assert [n.construction for n in nodes] == [v.construction for v in verdicts if v is not None]
    assert all(0.12 < b.value - a.value < 0.18 for a, b in itertools.pairwise(nodes))  # 3 x (0.05 +- 0.01)


async def test_a_verdict_that_is_there_is_kept(chain: Chain) -> None:
    """A worker killed between two roots: the next one goes on, and what was stored stands."""
    start_in(chain.tasks_directory / "sizes", "seeds/make.py:make", make__py=MAKER)
    chain.prepare()
    first = Verdict(at=seed_at(1), outcome=Outcome.VALID, reason="", score=0.25, exact="1/4", value=0.25, reward=0.25)
    chain.store.claim(chain.store.rollout_key(seed_at(1), "verdict"), first)
    assert chain.prepare().judge_seed
    await judged_seed(chain)
    assert roots(chain)[1].value == 0.25


async def test_an_invalid_root_is_refused_with_the_judges_reason(chain: Chain) -> None:
    start_in(chain.tasks_directory / "sizes", "seeds/make.py:make", make__py=MAKER.replace("0.05 * root", "0.9 * root"))
    await judged_seed(chain)
    with pytest.raises(Exception, match=r"seed construction 'made'.*invalid: worst violation"):
        chain.open()


@pytest.mark.parametrize(
    ("construction", "text", "message"),
    [
        ("seeds/make.py:make", "def make(rng, root): return 1 / 0", r"make\(rng, 0\) raised ZeroDivisionError"),
        ("seeds/make.py:make", "def make(rng, root): return {1, 2}", r"it must return numbers in lists"),
        ("seeds/make.py:make", "def make(rng, root): return [float('nan')]", r"it must return numbers in lists"),
        ("seeds/make.py:other", "def make(rng, root): return 1", "has no attribute 'other'"),
        ("seeds/make.py:make", "def make(", "SyntaxError"),
        ("seeds/make.txt:make", "x", "no Python file"),
        ("seeds/make.json", "{", "cannot be read"),
    ],
)
def test_a_start_that_cannot_be_made_names_its_file(chain: Chain, construction: str, text: str, message: str) -> None:
    file = construction.partition(":")[0].removeprefix("seeds/").replace(".", "__")
    task = start_in(chain.tasks_directory / "sizes", construction, **{file: text})
    with pytest.raises(TaskError, match=message) as caught:
        root_answer(task, "made", 0, 0)
    assert construction.partition(":")[0] in str(caught.value)


def test_the_digest_of_a_task_covers_its_constructions_and_helper(tmp_path: Path) -> None:
    task = without_environment(ERDOS, tmp_path)
    seen = {task_digest(task)}
    for file in ("seeds/random_steps.py", "helper.py"):
        path = task.folder / file
        path.write_text(path.read_text() + "\n# another\n")
        seen.add(task_digest(read_task(task.folder)))
    assert len(seen) == 3


# The task's own choice of offering constructions --------------------------------------------------------------------------------
@pytest.mark.parametrize(("own", "asked", "offered"), [("true", None, True), ("true", False, False), ("false", None, False)])
def test_a_task_says_whether_constructions_are_offered_and_the_request_may_say_otherwise(
    blobs: Blobs, tmp_path: Path, own: str, asked: bool | None, offered: bool
) -> None:
    chain = Chain.fresh(blobs, tmp_path).with_request(search={"groups": 2, "rollouts": 3, "offer_construction": asked})
    file = chain.tasks_directory / "sizes" / "task.toml"
    file.write_text(file.read_text().replace('entry = "run"', f'entry = "run"\noffer_construction = {own}'))
    spec = chain.store.spec(chain.prepare().run)
    assert (spec.offer_construction, spec.offers_construction) == (offered, offered)
    assert spec.science["search"]["offer_construction"] is offered


def test_a_spec_from_before_tasks_chose_keeps_its_requests_choice(blobs: Blobs, tmp_path: Path) -> None:
    for asked in (True, False):
        chain = Chain.fresh(blobs, tmp_path / str(asked)).with_request(
            search={"groups": 2, "rollouts": 3, "offer_construction": asked}
        )
        chain.run_id = f"run-{asked}"
        store: RunStore = chain.store
        older = store.spec(chain.prepare().run).model_copy(update={"offer_construction": None})
        assert older.offers_construction is asked


def test_the_sequence_problems_offer_and_packing_does_not() -> None:
    assert [task.offer_construction for task in (ERDOS, AC1, AC2, CP26, CP32)] == [True, True, True, False, False]


# Helpers ------------------------------------------------------------------------------------------------------------------------
def same(task: Task, result: Any, scored: float) -> None:
    grade = task.make_judge().grade(json.dumps(result).encode())
    assert grade.valid, grade.reason
    assert scored == pytest.approx(grade.score, abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_erdos_helper_scores_as_the_judge(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 300)) if seed < 5 else 2500
    h = rng.uniform(0, 1, n)
    h = np.clip(h + 0.5 - h.mean(), 0, 1)
    # Off by up to 0.05 %, either way: the judge repairs the integral, and so does the helper.
    h = h * (n / 2 / h.sum()) * (1 + rng.uniform(-5e-4, 5e-4))
    h = np.minimum(h, 1 + 1e-7)
    same(ERDOS, h.tolist(), helper(ERDOS, "evaluate_erdos_solution")(h, 0.1, 7))
    assert helper(ERDOS, "verify_c5_solution")(h.tolist()) == helper(ERDOS, "evaluate_erdos_solution")(h)


@pytest.mark.parametrize(("task", "seed"), [(task, seed) for task in (AC1, AC2) for seed in range(5)])
def test_sequence_helpers_score_as_the_judge(task: Task, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 400)) if seed < 4 else 2500
    f = rng.uniform(0, 1, n) ** 4 * 10 ** rng.uniform(-6, 5)
    same(task, f.tolist(), helper(task, "evaluate_sequence")(f))
    assert helper(task, "evaluate_sequence")(f.tolist()) == helper(task, "evaluate_sequence")(f)


@pytest.mark.parametrize(("task", "seed"), [(task, seed) for task in (CP26, CP32) for seed in range(4)])
def test_packing_helper_scores_as_the_judge(task: Task, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = task.judge_parameters["circles"]
    centers = rng.uniform(0.05, 0.95, (n, 2))
    gaps = np.hypot(*(centers[:, None] - centers[None]).transpose(2, 0, 1)) + 2 * np.eye(n)
    # Touching in places, and overlapping by up to 1e-7: the judge shrinks, and so does the helper. One circle is a mere point.
    radii = np.minimum(gaps.min(axis=1) / 2, np.minimum(centers, 1 - centers).min(axis=1)) + rng.uniform(0, 1e-7)
    radii[0] = 0.0
    score = helper(task, "evaluate_packing")
    same(task, [centers.tolist(), radii.tolist(), 0], score(centers, radii))
    assert score((centers, radii, 0)) == score(centers.tolist(), list(radii))


@pytest.mark.parametrize(
    ("task", "name", "worst", "bad"),
    [
        (ERDOS, "evaluate_erdos_solution", np.inf, [[0.9, 0.9], [2.0, -1.0], [float("nan"), 0.5], "no", [[0.5]], [0.5]]),
        (AC1, "evaluate_sequence", np.inf, [[], [-1e-300, 1.0], [0.0], [float("inf")], "no", [[1.0]], [1e7]]),
        (AC2, "evaluate_sequence", -np.inf, [[], [-1e-300, 1.0], [0.0], [float("inf")], "no", [[1.0]], [1e7]]),
        (
            CP26,
            "evaluate_packing",
            -np.inf,
            [([(0.5, 0.5)] * 26, [0.1] * 26), ([(0.5, 0.5)], [0.1]), ([(2.0, 0.5)] * 26, [0.0] * 26)],
        ),
    ],
)
def test_helpers_give_the_worst_score_to_what_is_invalid(task: Task, name: str, worst: float, bad: list[Any]) -> None:
    for answer in bad:
        assert helper(task, name)(answer) == worst
        if not isinstance(answer, str) and "nan" not in str(answer) and "inf" not in str(answer):
            assert not task.make_judge().grade(json.dumps(answer).encode()).valid


def test_the_packing_helpers_differ_in_the_number_of_circles_alone() -> None:
    assert CP26.helper_source.replace("= 26", "= 32") == CP32.helper_source
    assert (CP26.baseline_source or "").replace("= 26", "= 32") == CP32.baseline_source


# Statements ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", [ERDOS, AC1, AC2, CP32], ids=lambda task: task.name)
def test_a_statement_names_what_a_program_needs_to_know(task: Task) -> None:
    text = task.instruction
    assert f"`{task.entry}()`" in text
    assert f"`{task.construction_name}`" in text
    assert "`seed` or `budget_s`" in text
    defined = [line.split()[1].partition("(")[0] for line in task.helper_source.splitlines() if line.startswith("def ")]
    assert all(f"`{name}(" in text for name in defined if not name.startswith("_"))
    assert task.environment is not None
    packages = {pin.partition("==")[0] for pin in task.environment.pins}
    assert {"numpy", "scipy"} <= packages
    assert ("cvxpy" in packages) == ("CVXPY" in text)
