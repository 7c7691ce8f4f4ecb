"""What must hold after a run, whatever was killed in it: complete, each effect once, nothing paid for twice, one chain.

Every check returns sentences about what does not hold; none is a good run. Reads the store, the logs and what the proxy saw.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from activities.records import StepCommit, TrainRecord
from activities.run_store import RunStore
from activities.train.checkpoints import read_state
from tests.faults.proxy import Answered
from tests.faults.world import GROUPS, ROLLOUTS, World
from tests.system import coordinates
from workflows.contracts.messages import RunResult

WORK = {"sample": ("rollout_sampled", "rollout"), "judge": ("rollout_judged", "verdict")}
"""Role -> (event that it logs for work that is paid for, entry that keeps it)."""
GRID = [(group, rollout) for group in range(GROUPS) for rollout in range(ROLLOUTS)]


@dataclass(frozen=True)
class Reference:
    """A run that nobody disturbed."""

    commits: tuple[str, ...]
    """Digest of each step's commit."""
    keys: frozenset[str]
    """Its entries, below the run."""
    seconds: dict[int, float]
    """Of each step."""


@dataclass(frozen=True)
class Before:
    """What there was at the moment of the fault."""

    entries: dict[str, str]
    """Key -> digest of every entry of the run."""
    seen: dict[str, int]
    """Worker -> how many events of paid work its log had."""


def entries_of(world: World, run: str) -> dict[str, str]:
    """Every entry of a run by key."""
    store = world.blobs.store
    return {key: store.get(key).decode() for key in store.keys(f"runs/{run}/")}


def look(world: World, run: str) -> Before:
    """Entries first: whatever is stored has been logged before."""
    entries = entries_of(world, run)
    seen = {worker: len(world.events(worker, event)) for role, (event, _) in WORK.items() for worker in world.workers_of(role)}
    return Before(entries, seen)


def refer(world: World, run: str, steps: int) -> Reference:
    """A finished run as the measure of all others."""
    store = RunStore(world.blobs, run)
    commits = tuple(digest for step in range(steps + 1) if (digest := store.commit_digest(step)))
    keys = frozenset(key.removeprefix(f"runs/{run}/") for key in entries_of(world, run))
    return Reference(commits, keys, step_seconds(world.proxy.answered(), run, steps))


def step_seconds(answered: Iterable[Answered], run: str, steps: int) -> dict[int, float]:
    """How long each step took: from the end of the one before (the first: from the opening commit) until its report was stored."""
    ends: dict[str, float] = {}
    for one in answered:
        if one.request.method == "PUT" and one.status == 200:
            ends.setdefault(one.request.key, one.at)
    marks = [ends.get(f"runs/{run}/steps/000000/commit")]
    marks += [ends.get(f"runs/{run}/steps/{step:06d}/report") for step in range(1, steps + 1)]
    return {step: end - begin for step, (begin, end) in enumerate(itertools.pairwise(marks), start=1) if begin and end}


def check_run(world: World, result: RunResult, steps: int, reference: Reference) -> list[str]:
    """The end of a run, and everything that it has stored."""
    run = result.run_id
    problems = [] if (result.state, result.step) == ("completed", steps) else [f"ended {result.state} after step {result.step}"]
    commits = world.chain(run)
    if [commit.step for commit in commits] != list(range(steps + 1)):
        return [*problems, f"the chain has steps {[commit.step for commit in commits]}"]
    problems += [problem for commit in commits[1:] for problem in _check_step(world, run, commit)]
    if (versions := [commit.policy.version for commit in commits]) != list(range(steps + 1)):
        problems.append(f"policy versions are {versions}")
    if (visits := world.archive(run).total_visits) != steps * len(GRID):
        problems.append(f"the archive counts {visits} visits for {steps * len(GRID)} rollouts")
    keys = {key.removeprefix(f"runs/{run}/") for key in entries_of(world, run)}
    if different := keys ^ reference.keys:
        problems.append(f"entries that are missing or too many: {sorted(different)[:3]}")
    if result.commit != reference.commits[steps]:
        problems.append(f"the chain ends in {result.commit}, the undisturbed one in {reference.commits[steps]}")
    problems += created_twice(run, keys, world.proxy.answered())
    for role, (event, entry) in WORK.items():
        logged = [line for worker in world.workers_of(role) for line in world.events(worker, event)]
        problems += done_again(run, entry, _of_rollouts(logged, run), world.proxy.answered())
    return problems


def _check_step(world: World, run: str, commit: StepCommit) -> list[str]:
    """One step: each coordinate once, trained once, as many optimizer steps as there were steps."""
    store, step = RunStore(world.blobs, run), commit.step
    problems = []
    if (rows := sorted((row.group, row.rollout) for row in commit.rows)) != GRID:
        problems.append(f"step {step} has coordinates {rows}")
    record = store.read(TrainRecord, store.step_key(step, "train"))
    if record is None or record.checkpoint != commit.policy.checkpoint:
        problems.append(f"step {step} was committed with a policy that its train record did not make")
    elif (taken := read_state(store, record.checkpoint).steps) != step:
        problems.append(f"after step {step} the optimizer has taken {taken} steps")
    return problems


def check_kept(world: World, run: str, before: Before) -> list[str]:
    """What was stored at the moment of the fault is as it was, and what was paid for was not done again."""
    after = entries_of(world, run)
    problems = [f"{key} changed" for key, digest in before.entries.items() if after.get(key) != digest]
    for role, (event, entry) in WORK.items():
        for worker in world.workers_of(role):
            late = _of_rollouts(world.events(worker, event)[before.seen.get(worker, 0) :], run)
            again = {f"runs/{run}/steps/{s:06d}/g{g:02d}/r{r:02d}/{entry}" for s, g, r in late} & before.entries.keys()
            problems += [f"{key} was made again by {worker}" for key in sorted(again)]
    return problems


def _of_rollouts(events: list[dict[str, Any]], run: str) -> list[tuple[int, int, int]]:
    """(step, group, rollout) of a run's events; the seed program is judged too, and is no rollout."""
    return coordinates([event for event in events if "step" in event], run)


def created_twice(run: str, keys: Iterable[str], answered: Iterable[Answered]) -> list[str]:
    """Each entry was created by exactly one request; by one without an answer at the most, where the store was killed.

    Args:
        keys: entries that there are, below the run.
    """
    made: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    problems = []
    for one in answered:
        if one.request.method != "PUT" or not one.request.key.startswith(f"runs/{run}/"):
            continue
        key = one.request.key.removeprefix(f"runs/{run}/")
        if not one.request.create:
            problems.append(f"{key} was written by {one.request.who} without a condition")
        if one.status is None:
            unknown[key] += 1
        elif one.status < 300:
            made[key] += 1
    problems += [f"{key} was created {count} times" for key, count in made.items() if count > 1]
    return problems + [f"{key} was created by nobody that the proxy saw" for key in keys if not made[key] + unknown[key]]


def done_again(run: str, entry: str, logged: list[tuple[int, int, int]], answered: Iterable[Answered]) -> list[str]:
    """No attempt that could have found a result made it again.

    Each attempt asks for the entry first, and works only where there is none. So there is at most one piece of work for each time
    that the store said 404 before the entry was created.
    """
    allowed: Counter[str] = Counter()
    for one in answered:
        if one.request.method == "GET" and one.request.key.startswith(f"runs/{run}/") and one.status == 404:
            allowed[one.request.key] += 1
    work: Mapping[str, int] = Counter(f"runs/{run}/steps/{s:06d}/g{g:02d}/r{r:02d}/{entry}" for s, g, r in logged)
    return [
        f"{key} was made {count} times, and looked for in vain {allowed[key]} times"
        for key, count in work.items()
        if count > allowed[key]
    ]
