"""Random parts at random moments, until so many were killed; in the end the chain must be that of an undisturbed run.

Moments are counted in entries of the run, not in seconds: so the faults spread over all its steps on any machine, and the run makes
some progress between two of them. The next part goes down only when the last one is up again. One seed gives one sequence of parts,
places and pauses; which rollout is the next to arrive is the machine's own chance.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.faults.checks import Reference, check_run, entries_of, refer
from tests.faults.proxy import Hold, Request, Side
from tests.faults.world import GROUPS, PARTS, ROLLOUTS, STORE, World, request_of
from tests.system import ROLES, SHORT_TIMEOUTS

CHAOS, CALM = "chaos", "calm"
ENTRIES_PER_STEP = 5 + GROUPS * (2 * ROLLOUTS + 1)
"""plan, batch, train, commit and report; base scores of each group; a rollout and a verdict of each coordinate."""
_FREEZE_SHARE = 0.12
"""Of faults that are a SIGSTOP; these are not counted as kills."""
_LONGEST_PAUSE_SECONDS = 1.5
"""Between the moment and the fault, where the two do not coincide."""
_SECONDS_PER_FAULT = 60.0
"""On a machine that is busy with other things."""
_NEXT_ENTRY_SECONDS = 180.0

HEADING = "  n     at s  part      fault          down s  moment"


def most_kills(steps: int) -> int:
    """How many kills a run of so many steps has room for: one for every second entry."""
    return steps * ENTRIES_PER_STEP // 2


@dataclass
class Fault:
    """One thing that was done."""

    number: int
    at_seconds: float
    """Since the run began."""
    action: str
    part: str
    moment: str
    back_seconds: float
    """From the fault until the part was up again."""

    def __str__(self) -> str:
        return f"{self.number:3d}  {self.at_seconds:6.1f}  {self.part:8}  {self.action:13}  {self.back_seconds:6.1f}  {self.moment}"


@dataclass(frozen=True)
class _Planned:
    """The next fault."""

    part: str
    side: Side | None
    """Of the held entry; None: a while after it."""
    pause_seconds: float
    frozen_seconds: float | None
    """None: it is killed."""
    hold: Hold


@dataclass
class Chaos:
    """Disturbs one run, from a thread of its own.

    Args:
        say: gets each fault when it is over.
    """

    world: World
    run: str
    kills: int
    steps: int
    rng: random.Random
    say: Callable[[str], None]
    faults: list[Fault] = field(default_factory=list)
    stored: dict[str, str] = field(default_factory=dict)
    """Key -> digest of the run's entries, as they were before the first fault that came after them."""
    _began: float = 0.0

    def __call__(self) -> None:
        self._began = time.monotonic()
        self.say(HEADING)
        planned = self._plan()
        while self.killed < self.kills:
            planned = self._strike(planned)
        planned.hold.pass_on()

    @property
    def killed(self) -> int:
        return sum(fault.action == "kill -9" for fault in self.faults)

    def _plan(self) -> _Planned:
        """Choose everything now: the sequence is the seed's, whatever the machine does."""
        freeze = self.rng.random() < _FREEZE_SHARE
        part = self.rng.choice(ROLES if freeze else PARTS)
        side = self.rng.choice((Side.BEFORE, Side.AFTER, None))
        pause, beyond, chance = self.rng.uniform(0, _LONGEST_PAUSE_SECONDS), self.rng.uniform(1, 3), self.rng.random()
        hold = self.world.proxy.hold(self._is_entry, side or Side.AFTER, self._gap(chance))
        return _Planned(part, side, pause, SHORT_TIMEOUTS["heartbeat_seconds"] + beyond if freeze else None, hold)

    def _strike(self, planned: _Planned) -> _Planned:
        """Wait for the moment and strike. Returns what comes next, planned before the run goes on, so that no entry slips by."""
        request = planned.hold.wait(_NEXT_ENTRY_SECONDS)
        self._look()
        following = self._plan()
        what = request.key.removeprefix(f"runs/{self.run}/steps/")
        moment = f"{planned.pause_seconds:.1f} s after {what}"
        if planned.side is None:
            planned.hold.pass_on()
            time.sleep(planned.pause_seconds)
        else:
            moment = f"{what} held {planned.side} its effect"
        began = time.monotonic()
        action = self._kill(planned) if planned.frozen_seconds is None else self._freeze(planned, planned.frozen_seconds)
        number, back = len(self.faults) + 1, time.monotonic() - began
        self.faults.append(Fault(number, began - self._began, action, planned.part, moment, back))
        self.say(str(self.faults[-1]))
        return following

    def _look(self) -> None:
        store = self.world.blobs.store
        for key in store.keys(f"runs/{self.run}/"):
            if key not in self.stored:
                self.stored[key] = store.get(key).decode()

    def _gap(self, chance: float) -> int:
        """Entries until the next fault: on average as many as spread the faults that are left over the steps that are left."""
        done = sum("/steps/" in key and "/steps/000000/" not in key for key in self.stored)
        left = self.steps * ENTRIES_PER_STEP - done
        mean = left / (1 + (self.kills - self.killed) / (1 - _FREEZE_SHARE))
        return max(1, round(2 * mean * chance))

    def _is_entry(self, request: Request) -> bool:
        is_create = request.method == "PUT" and request.create
        return is_create and request.key.startswith(f"runs/{self.run}/steps/") and "/steps/000000/" not in request.key

    def _kill(self, planned: _Planned) -> str:
        part, hold = planned.part, planned.hold
        self.world.kill(part)
        if hold.request is not None and (part == hold.request.who or (part == STORE and hold.side is Side.AFTER)):
            hold.drop()
        else:
            hold.pass_on()
        self.world.bring_up(part)
        return "kill -9"

    def _freeze(self, planned: _Planned, seconds: float) -> str:
        self.world.freeze(planned.part)
        planned.hold.pass_on()
        time.sleep(seconds)
        self.world.thaw(planned.part)
        return f"SIGSTOP {seconds:.1f} s"


async def run_calm(world: World, steps: int) -> Reference:
    """The undisturbed run.

    Raises:
        AssertionError: it does not end completed.
    """
    result = await world.run(CALM, request_of(steps))
    reference = refer(world, CALM, steps)
    assert not (problems := check_run(world, result, steps, reference)), problems
    world.forget()
    return reference


async def run_chaos(world: World, chaos: Chaos, reference: Reference) -> list[str]:
    """The disturbed run. Returns what does not hold.

    Raises:
        AssertionError: it does not end, or the faults did not come.
    """
    limit = 400 + chaos.kills * _SECONDS_PER_FAULT
    result = await world.run(chaos.run, request_of(chaos.steps), chaos, seconds=limit)
    problems = check_run(world, result, chaos.steps, reference)
    after = entries_of(world, chaos.run)
    return problems + [f"{key} changed" for key, digest in chaos.stored.items() if after.get(key) != digest]


def verdict(chaos: Chaos, problems: list[str], seconds: float) -> str:
    """The last lines: what was done to the run, and what holds."""
    by_part = ", ".join(f"{part} {sum(f.part == part for f in chaos.faults)}" for part in PARTS)
    frozen = len(chaos.faults) - chaos.killed
    done = f"{chaos.killed} kills and {frozen} freezes over {chaos.steps} steps in {seconds:.0f} s ({by_part})"
    return "\n".join([done, *problems, "FAILED" if problems else "OK: every invariant holds, and the chain is the undisturbed one"])
