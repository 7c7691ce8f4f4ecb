"""The kill matrix as one table: which part, at which point of its work, and how that point is recognised from outside.

    early    the part has begun: it reads what it is to do, and nothing of it is done
    middle   it is in the midst of it
    after    its effect is stored, and nobody has heard of it: the report is lost with the process

Each part has one run of three steps with one fault in each. Trainer and engine hold state from one step to the next, so `after`
comes first: the second step begins from what a process stored that never reported. Knows keys and requests; knows no process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from activities.blobs import Blobs, MissingKey
from tests.faults.proxy import Request, Side
from tests.faults.world import STORE, TEMPORAL


class Point(StrEnum):
    EARLY = "early"
    MIDDLE = "middle"
    AFTER = "after effect"


class Action(StrEnum):
    KILL = "kill -9"
    FREEZE = "SIGSTOP"


class Between(StrEnum):
    """A moment that lies between two requests: the held one goes on, and then this is waited for."""

    PROGRAM_RUNS = "a program runs in the judge's sandbox"
    COMPUTING = "the process computes, and has stored nothing since"


@dataclass(frozen=True)
class Watch:
    """The request that marks a moment.

    Args:
        who: role whose process makes it, a second process of that role included.
        what: its key below the step, with wildcards; `@entry` or `@entry.field` is the blob that this entry of the step, or this
            field of its document, names; anything with `blobs/` or `fleet/` in front is a key of the store.
        nth: which of those that match.
        least: bytes of its body, for blobs that are known by their size alone.
        since: entry of the step that must be stored already.
    """

    who: str
    method: str
    what: str
    side: Side
    nth: int = 1
    least: int = 0
    since: str | None = None

    def matcher(self, blobs: Blobs, step_root: str) -> Callable[[Request], bool]:
        """What the proxy asks of each request.

        Args:
            blobs: read straight from the store.
            step_root: key of the step, with a slash at its end.
        """

        def matches(request: Request) -> bool:
            return (
                (request.who.partition("-")[0], request.method) == (self.who, self.method)
                and request.size >= self.least
                and self._is_the_key(blobs, step_root, request.key)
                and (self.since is None or blobs.store.exists(step_root + self.since))
            )

        return matches

    def _is_the_key(self, blobs: Blobs, step_root: str, key: str) -> bool:
        if self.what.startswith(("blobs/", "fleet/")):
            return fnmatchcase(key, self.what)
        if not self.what.startswith("@"):
            return fnmatchcase(key, step_root + self.what)
        if not key.startswith("blobs/"):
            return False
        entry, _, field = self.what[1:].partition(".")
        try:
            digest = blobs.store.get(step_root + entry).decode()
        except MissingKey:
            return False
        return key == Blobs.key(json.loads(blobs.get(digest))[field] if field else digest)


@dataclass(frozen=True)
class Case:
    """One fault.

    Args:
        story: what was going on, for the table.
        effect: of a frozen one: it is woken when this entry of the step exists, which another process stores.
        late: of a frozen one: it then stores a result of its own, which the store must refuse. False where it may find out before.
    """

    part: str
    point: Point
    story: str
    watch: Watch
    action: Action = Action.KILL
    between: Between | None = None
    effect: str = ""
    late: bool = False

    @property
    def run(self) -> str:
        """Name of the run in which it happens, with the other points of this part."""
        return f"zombie-{self.part}" if self.action is Action.FREEZE else f"kill-{self.part}"

    @property
    def step(self) -> int:
        return STEP_OF[self.point]

    @property
    def name(self) -> str:
        return f"{self.run}-{self.point.split()[0]}"


STEP_OF = {Point.AFTER: 1, Point.EARLY: 2, Point.MIDDLE: 3}
STEPS = len(STEP_OF)

_ROLLOUT, _VERDICT = "g*/r*/rollout", "g*/r*/verdict"

_CONTROL = (
    Case("control", Point.EARLY, "parents selected, plan not stored", Watch("control", "PUT", "plan", Side.BEFORE)),
    Case(
        "control",
        Point.MIDDLE,
        "workflows of run, step and groups in its memory, third rollout coming",
        Watch("sample", "PUT", _ROLLOUT, Side.BEFORE, nth=3),
    ),
    Case("control", Point.AFTER, "commit stored, not reported", Watch("control", "PUT", "commit", Side.AFTER)),
)

_SAMPLE = (
    Case("sample", Point.EARLY, "looks whether the first rollout is there", Watch("sample", "GET", _ROLLOUT, Side.BEFORE)),
    Case("sample", Point.MIDDLE, "third rollout sampled, not stored", Watch("sample", "PUT", _ROLLOUT, Side.BEFORE, nth=3)),
    Case("sample", Point.AFTER, "fourth rollout stored, not reported", Watch("sample", "PUT", _ROLLOUT, Side.AFTER, nth=4)),
)

_JUDGE = (
    Case("judge", Point.EARLY, "looks whether the second verdict is there", Watch("judge", "GET", _VERDICT, Side.BEFORE, nth=2)),
    Case(
        "judge",
        Point.MIDDLE,
        "third program runs in the sandbox",
        Watch("judge", "GET", _VERDICT, Side.AFTER, nth=3),
        between=Between.PROGRAM_RUNS,
    ),
    Case("judge", Point.AFTER, "fourth verdict stored, not reported", Watch("judge", "PUT", _VERDICT, Side.AFTER, nth=4)),
)

_PASSES = Watch("train", "GET", "g*/base", Side.AFTER, since="batch")
"""A group's scores under the base, read just before the passes; those of a group whose rewards are all equal are not."""

_TRAIN = (
    Case("train", Point.EARLY, "reads the batch", Watch("train", "GET", "@batch", Side.BEFORE)),
    Case(
        "train",
        Point.MIDDLE,
        "forward and backward passes",
        _PASSES,
        between=Between.COMPUTING,
    ),
    Case("train", Point.AFTER, "train record stored, not reported", Watch("train", "PUT", "train", Side.AFTER)),
)

_ENGINE = (
    Case("engine", Point.EARLY, "reads the new adapter", Watch("engine", "GET", "@train.adapter", Side.BEFORE)),
    Case(
        "engine",
        Point.MIDDLE,
        "verification: scores the evidence",
        Watch("engine", "GET", "@train.gate", Side.AFTER),
        between=Between.COMPUTING,
    ),
    Case(
        "engine",
        Point.AFTER,
        "policy served and noted, report stored, not reported",
        Watch("engine", "PUT", "blobs/*", Side.AFTER, since="train"),
    ),
)

_TEMPORAL = (
    Case(TEMPORAL, Point.EARLY, "parents selected, plan not stored", Watch("control", "PUT", "plan", Side.BEFORE)),
    Case(TEMPORAL, Point.MIDDLE, "third rollout sampled, not stored", Watch("sample", "PUT", _ROLLOUT, Side.BEFORE, nth=3)),
    Case(TEMPORAL, Point.AFTER, "train record stored, to be reported", Watch("train", "PUT", "train", Side.AFTER)),
)

_ADAPTER_BYTES = 100_000
"""Adapter and optimizer state are larger, everything else that a trainer stores is smaller."""

_STORE = (
    Case(STORE, Point.EARLY, "third rollout on its way to it", Watch("sample", "PUT", _ROLLOUT, Side.BEFORE, nth=3)),
    Case(
        STORE,
        Point.MIDDLE,
        "has half of the adapter's bytes",
        Watch("train", "PUT", "blobs/*", Side.DURING, least=_ADAPTER_BYTES, since="batch"),
    ),
    Case(STORE, Point.AFTER, "train record stored, its answer lost", Watch("train", "PUT", "train", Side.AFTER)),
)

_ZOMBIES = (
    Case(
        "train",
        Point.EARLY,
        "frozen while it reads the batch, then does the whole step",
        Watch("train", "GET", "@batch", Side.BEFORE),
        Action.FREEZE,
        effect="train",
        late=True,
    ),
    Case(
        "train",
        Point.MIDDLE,
        "frozen in its passes, then goes on with them",
        _PASSES,
        Action.FREEZE,
        between=Between.COMPUTING,
        effect="train",
        late=True,
    ),
    Case(
        "train",
        Point.AFTER,
        "frozen before it reports, then reports",
        Watch("train", "PUT", "train", Side.AFTER),
        Action.FREEZE,
        effect="commit",
    ),
    Case(
        "judge",
        Point.EARLY,
        "frozen as it learns that there is no verdict",
        Watch("judge", "GET", _VERDICT, Side.AFTER, nth=2),
        Action.FREEZE,
        effect="batch",
    ),
    Case(
        "judge",
        Point.MIDDLE,
        "frozen with its verdict on the way to the store",
        Watch("judge", "PUT", _VERDICT, Side.BEFORE, nth=3),
        Action.FREEZE,
        effect="batch",
        late=True,
    ),
    Case(
        "judge",
        Point.AFTER,
        "frozen before it reports, then reports",
        Watch("judge", "PUT", _VERDICT, Side.AFTER, nth=3),
        Action.FREEZE,
        effect="batch",
    ),
)

CASES: tuple[Case, ...] = (*_CONTROL, *_SAMPLE, *_JUDGE, *_TRAIN, *_ENGINE, *_TEMPORAL, *_STORE, *_ZOMBIES)


def by_run(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Cases by the run that they share, in the order of their steps."""
    runs: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: case.step):
        runs.setdefault(case.run, []).append(case)
    return {run: runs[run] for run in dict.fromkeys(case.run for case in cases)}
