"""Follows a run until it ends: one line per committed step, one changing line for what happens now, a sentence for what is wrong.

Knows neither how a run is started nor what a terminal is. Workers and servers may come and go while it watches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from temporalio.client import Client, WorkflowFailureError
from temporalio.service import RPCError

from console.inquiry import NO_SUCH_RUN, GroupCache, Snapshot, look
from console.lines import duration, note_lines, phase_line, step_line
from console.screen import Screen
from console.waits import find_waits
from workflows.contracts.messages import RunResult, RunStatus, StepSummary
from workflows.publishing import explain

POLL_SECONDS = 1.0
STALL_SECONDS = 10.0
"""Without any progress for this long, it is looked up what the run waits for."""
PATIENCE_SECONDS = 30.0
"""A failure that is retried by itself is shown only after this long: at every start the engine comes last."""
SHOWN_STEPS = 20
"""Committed steps printed when a run is joined."""


@dataclass(frozen=True)
class Ending:
    """How following ended."""

    state: Literal["completed", "stopped", "blocked", "failed", "terminated"]
    result: RunResult | None = None
    error: str | None = None


@dataclass(frozen=True)
class Watched:
    """What is followed, and with what.

    Args:
        link: the run's page in the Web UI.
        summary_of: a committed step's numbers from the store.
        wall, clock: Unix seconds, and monotonic seconds.
        leave_blocked: end when the run is blocked, instead of waiting for somebody to mend it.
    """

    client: Client
    run_id: str
    screen: Screen
    link: str | None
    summary_of: Callable[[int], StepSummary | None]
    wall: Callable[[], float]
    clock: Callable[[], float]
    leave_blocked: bool = True
    poll_seconds: float = POLL_SECONDS


class Follower:
    """One run being followed."""

    def __init__(self, watched: Watched) -> None:
        self._w = watched
        self._cache = GroupCache()
        self._printed: int | None = None
        """Last step whose line stands on the screen; None before the first look."""
        self._said: dict[str, str] = {}
        self._progress: object = None
        self._progress_at = watched.clock()
        self._explained_at = watched.clock()
        self._missing_since: float | None = None

    async def follow(self) -> Ending:
        """Until the run ends or, with `leave_blocked`, is blocked. Cancel it to detach."""
        while True:
            seen = await look(self._w.client, self._w.run_id, self._cache)
            if seen.status is not None:
                self._print_steps(seen.status)
            ending = await self._ending(seen)
            if ending is not None:
                return ending
            await self._show(seen)
            groups = seen.step.groups if seen.step else 0
            await asyncio.sleep(self._w.poll_seconds * max(1.0, groups / 16))

    async def _ending(self, seen: Snapshot) -> Ending | None:
        if seen.missing == NO_SUCH_RUN:
            return Ending("failed", error=f"Temporal no longer knows run {self._w.run_id}; its commits are in the store")
        if seen.execution is not None and not seen.is_running and seen.execution != "CONTINUED_AS_NEW":
            return await self._closed(seen)
        if seen.status is not None and seen.status.state == "blocked":
            self._say_once("blocked", blocked_text(self._w.run_id, seen.status), loud=True)
            if self._w.leave_blocked:
                return Ending("blocked", error=seen.status.error)
        elif seen.status is not None:
            self._said.pop("blocked", None)
        return None

    async def _closed(self, seen: Snapshot) -> Ending | None:
        handle = self._w.client.get_workflow_handle(seen.workflow_id, result_type=RunResult)
        try:
            result = await handle.result()
        except WorkflowFailureError as error:
            if seen.execution in ("TERMINATED", "CANCELED"):
                how = f"the run was {seen.execution.lower()}; the same `tttd run` command goes on from its last commit"
                return Ending("terminated", error=how)
            return Ending("failed", error=explain(error))
        except RPCError:
            return None  # the server went away in this moment: look again
        self._print_up_to(result.step, result.step, {})
        return Ending("stopped" if result.state == "stopped" else "completed", result)

    # Showing --------------------------------------------------------------------------------------------------------------
    def _print_steps(self, status: RunStatus) -> None:
        self._print_up_to(status.step, status.steps, {s.step: s for s in status.recent})

    def _print_up_to(self, step: int, steps: int, known: dict[int, StepSummary]) -> None:
        first = max(0 if self._printed is None else self._printed, step - SHOWN_STEPS) + 1
        for number in range(first, step + 1):
            summary = known.get(number) or self._w.summary_of(number)
            if summary is not None:
                self._w.screen.keep(step_line(summary, steps))
                for note in note_lines(summary):
                    self._w.screen.keep(note)
        self._printed = max(step, self._printed or 0)

    async def _show(self, seen: Snapshot) -> None:
        now = self._w.clock()
        if seen.status is None:
            self._missing_since = now if self._missing_since is None else self._missing_since
            self._w.screen.show(f"waiting for {seen.missing} (since {duration(now - self._missing_since)})")
            await self._explain_waits(seen, now, now - self._missing_since)
            return
        self._missing_since = None
        phase = seen.step.phase if seen.step else seen.status.phase
        elapsed = self._w.wall() - datetime.fromisoformat(phase.since).timestamp()
        self._w.screen.show(phase_line(seen.status, seen.step, seen.grid, elapsed, self._w.link))
        progress = (seen.status.state, seen.status.step, phase, seen.grid)
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
            self._said.pop("waits", None)
        elif seen.status.state in ("opening", "running"):
            await self._explain_waits(seen, now, now - self._progress_at)

    async def _explain_waits(self, seen: Snapshot, now: float, stalled_seconds: float) -> None:
        if stalled_seconds < STALL_SECONDS or now - self._explained_at < STALL_SECONDS:
            return
        self._explained_at = now
        step = seen.step.step if seen.step else None
        if not seen.workflow_id:
            return
        groups = seen.step.groups if seen.step else 0
        waits = await find_waits(self._w.client, seen.workflow_id, step, groups, answered=seen.status is not None)
        patient = stalled_seconds < PATIENCE_SECONDS
        told = [wait for wait in waits if wait.advice and not (patient and wait.failure and wait.pollers)]
        advice = [f"{wait.failure} ({wait.advice})" if wait.failure else str(wait.advice) for wait in told]
        if advice:
            self._say_once("waits", "\n".join(f"  waiting: {line}" for line in advice), loud=True)

    def _say_once(self, topic: str, text: str, *, loud: bool) -> None:
        if self._said.get(topic) != text:
            self._said[topic] = text
            self._w.screen.keep(text, loud=loud)


def blocked_text(run_id: str, status: RunStatus) -> str:
    """Why a run is blocked and what to do about it."""
    return (
        f"run {run_id} is blocked after step {status.step}: {status.error}\n"
        f"  mend the cause, then `tttd retry {run_id}` (what is stored is used, not made again); "
        f"`tttd stop {run_id}` ends it at step {status.step}"
    )
