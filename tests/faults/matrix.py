"""Runs the table in one world: one run for each part, one fault in each of its steps, and says what came of every fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults.cases import STEPS, Action, Between, Case, Point
from tests.faults.checks import Before, Reference, check_kept, check_run, look, refer, step_seconds
from tests.faults.proxy import NotReached, Request, Side
from tests.faults.world import STORE, TEMPORAL, World, request_of, spare_of

UNDISTURBED = "undisturbed"
_REACH_SECONDS = 240.0
_INTO_SECONDS = 0.1
"""Into a computation that takes half a second and more."""
_AWAY_SECONDS = 1.0
"""How long a server stays away, so that others find it gone."""


@dataclass
class Result:
    """One line of the table."""

    case: Case
    seconds: float | None = None
    """Of the step in which it happened; None if that did not end."""
    extra_seconds: float | None = None
    """Beyond the same step of the undisturbed run."""
    problems: list[str] = field(default_factory=list)
    late: str = ""
    """Of a zombie: what became of it."""


class Strike:
    """The fault of one case: it waits for its moment beside the run."""

    def __init__(self, world: World, case: Case) -> None:
        self._world = world
        self.case = case
        self._root = f"runs/{case.run}/steps/{case.step:06d}/"
        self._victim = case.part
        self.before: Before | None = None
        self.late = ""
        # Armed before the run begins: no moment is missed.
        self._hold = world.proxy.hold(case.watch.matcher(world.blobs, self._root), case.watch.side, case.watch.nth)

    def __call__(self) -> None:
        """Wait for the moment, strike, and bring the part back."""
        held = self._wait_for_moment()
        since = time.monotonic()
        if self.case.action is Action.FREEZE:
            self._victim = held.who  # of two processes the one that has the work
        if self.case.between is not None:
            self._hold.pass_on()
            self._wait_between(self.case.between)
        if self.case.part in (STORE, TEMPORAL):
            self._kill_server()
        elif self.case.action is Action.FREEZE:
            self._freeze(held, since)
        else:
            self._kill_worker(since)

    def _wait_for_moment(self) -> Request:
        """Raises: NotReached, as soon as the step is over without it."""
        deadline = time.monotonic() + _REACH_SECONDS
        while not self._hold.reached:
            time.sleep(0.02)
            if time.monotonic() > deadline or self._step_ended():
                raise NotReached(f"the moment of {self.case.name} did not come: {self.case.story}")
        return self._hold.wait()

    def _step_ended(self) -> bool:
        return any(a.request.key == f"{self._root}report" and a.status == 200 for a in self._world.proxy.answered()[-20:])

    def _wait_between(self, between: Between) -> None:
        if between is Between.PROGRAM_RUNS:
            self._world.wait_for("a program in the sandbox", lambda: self._world.runs_a_program(self._victim), seconds=30)
        else:
            time.sleep(_INTO_SECONDS)

    def _kill_worker(self, since: float) -> None:
        self._world.kill(self._victim)
        self._check_moment(since)
        self.before = look(self._world, self.case.run)
        self._hold.drop()
        self._world.bring_up(self._victim)

    def _kill_server(self) -> None:
        part = self._victim
        self.before = look(self._world, self.case.run)
        self._world.kill(part)
        if part == STORE and self.case.watch.side is Side.AFTER:
            self._hold.drop()  # its answer is lost with it
        else:
            self._hold.pass_on()
        time.sleep(_AWAY_SECONDS)
        self._world.bring_up(part)

    def _freeze(self, held: Request, since: float) -> None:
        """Freeze it past its heartbeat, let the other process do its work, and wake it up again."""
        world, case = self._world, self.case
        world.freeze(self._victim)
        self._check_moment(since)
        self.before = look(world, case.run)
        world.wait_for(f"{case.effect} by another process", lambda: world.has(case.run, case.step, case.effect), pause=0.1)
        woken = time.monotonic()
        self._hold.pass_on()
        world.thaw(self._victim)
        self.late = self._await_late(held, woken) if case.late else "woken"

    def _check_moment(self, since: float) -> None:
        """Between two requests the part has stored nothing of its own: else the fault came too late to prove anything."""
        if self.case.between is None:
            return
        stored = [a.request.key for a in self._world.proxy.answered() if a.at > since and _is_result_of(self._victim, a.request)]
        if stored:
            raise NotReached(f"{self._victim} was faster than the harness: it has stored {stored}")

    def _await_late(self, held: Request, woken: float) -> str:
        """Wait for what the zombie stores late, and for what the store says to it."""
        key = held.key if held.method == "PUT" else self._root + self.case.effect

        def answers() -> list[int | None]:
            asked = [a for a in self._world.proxy.answered() if a.at >= woken and a.request.who == self._victim]
            return [a.status for a in asked if (a.request.method, a.request.key) == ("PUT", key)]

        self._world.wait_for(f"the late {key} of {self._victim}", lambda: bool(answers()), seconds=90, pause=0.1)
        return f"its late result was answered {answers()[0]}"


def _is_result_of(worker: str, request: Request) -> bool:
    """Engines renew their notices all the time, and a store is probed once by everybody."""
    return request.who == worker and request.method == "PUT" and not request.key.startswith(("fleet/engines/", "fleet/probe-"))


async def run_undisturbed(world: World) -> Reference:
    """The run that all others are compared with.

    Raises:
        AssertionError: it does not end completed, or is not the same twice.
    """
    warm_up = await world.run("warm-up", request_of(1))  # models are loaded, and engines are known
    world.forget()
    result = await world.run(UNDISTURBED, request_of(STEPS))
    reference = refer(world, UNDISTURBED, STEPS)
    assert warm_up.commit == reference.commits[1], "two undisturbed runs of one request differ"
    assert not (problems := check_run(world, result, STEPS, reference)), problems
    return reference


async def run_cases(world: World, cases: Sequence[Case], reference: Reference) -> list[Result]:
    """Run the cases of one run, in the order of their steps, and check everything; whatever goes wrong is in the results."""
    await asyncio.to_thread(world.heal)
    await asyncio.to_thread(world.forget)
    run = cases[0].run
    if cases[0].action is Action.FREEZE:
        await asyncio.to_thread(world.bring_up, spare_of(cases[0].part))
    strikes = [Strike(world, case) for case in cases]

    def strike() -> None:
        for one in strikes:
            one()

    shared: list[str] = []
    try:
        result = await world.run(run, request_of(STEPS), strike)
        shared = check_run(world, result, STEPS, reference)
    except Exception as error:  # the other runs go on, and the table shows this one
        shared = [f"{type(error).__name__}: {error}"]
        world.temporal("workflow", "terminate", "--workflow-id", f"run/{run}")
    seconds = step_seconds(world.proxy.answered(), run, STEPS)
    return [_result(world, one, seconds.get(one.case.step), reference, shared) for one in strikes]


def _result(world: World, strike: Strike, seconds: float | None, reference: Reference, shared: list[str]) -> Result:
    case = strike.case
    problems = list(shared)
    if strike.before is None:
        problems.append("the fault did not come")
    else:
        problems += check_kept(world, case.run, strike.before)
    if case.late and not strike.late.endswith("412"):
        problems.append(f"of the zombie's late result nothing is known but {strike.late!r}; 412 is what should come")
    extra = None if seconds is None else seconds - reference.seconds[case.step]
    return Result(case, seconds, extra, problems, strike.late)


def table(results: Sequence[Result]) -> str:
    """All cases as text, by part and point."""
    order = list(Point)
    runs = list(dict.fromkeys(r.case.run for r in results))
    ordered = sorted(results, key=lambda r: (runs.index(r.case.run), order.index(r.case.point)))
    rows = [("part", "point", "fault", "what was going on", "step s", "extra s", "invariants")]
    for r in ordered:
        story = f"{r.case.story}; {r.late}" if r.late else r.case.story
        times = ("-" if r.seconds is None else f"{r.seconds:.1f}", "-" if r.extra_seconds is None else f"{r.extra_seconds:+.1f}")
        rows.append((r.case.part, r.case.point, r.case.action, story, *times, "FAILED" if r.problems else "OK"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += [f"{r.case.name}: {problem}" for r in ordered for problem in r.problems]
    bad = sum(bool(r.problems) for r in results)
    return "\n".join([*lines, f"{len(results)} cases: {len(results) - bad} OK, {bad} failed"])
