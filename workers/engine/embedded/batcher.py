"""The one thread that computes: it gathers waiting jobs into batches, advances them, and hands each back when it ends.

Each adapter in use has a decode session; every turn of the loop advances each session by one token, so that no adapter waits for
another's long rows, and scores what waits to be scored in between. Jobs that must be computed alone take turns, one at a time.
Knows no HTTP; results leave through `Job.on_done`, called on this thread.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import torch

from workers.engine.embedded.adapters import Adapter
from workers.engine.embedded.decoding import DecodeSession
from workers.engine.embedded.jobs import ComputeFailed, EngineStopped, Job
from workers.engine.embedded.model import CausalModel
from workers.engine.embedded.scoring import batches, score

GATHER_SECONDS = 0.004
"""How long an idle engine waits for company after a first job."""

log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(slots=True)
class Stats:
    """Counters since the start. Written by the compute thread, read by anybody."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    failed: int = 0
    progress_at: float = 0.0
    """`time.monotonic()` of the last forward pass that ended."""


class Batcher:
    """Owns the compute thread. `submit` and `stop` may be called from any thread."""

    def __init__(self, model: CausalModel, max_batch: int, threads: int) -> None:
        self.stats = Stats()
        self._model = model
        self._max_batch = max_batch
        self._threads = threads
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._to_score: list[Job] = []
        self._to_decode: deque[Job] = deque()
        self._sessions: dict[Adapter | None, DecodeSession] = {}
        self._alone: DecodeSession | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._inbox.put(job)

    def stop(self) -> None:
        """Fail every job with EngineStopped after the forward pass that is under way, and end the thread."""
        self._stopping = True
        self._inbox.put(None)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # The compute thread ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # holds for the thread that calls it
        while not self._stopping:
            self._gather()
            self._score_some()
            self._admit()
            for session in self._open_sessions():
                self._guarded(session.jobs, session.step)
            self._close_ended()
            self.stats.running = self._live_rows()
            self.stats.waiting = len(self._to_score) + len(self._to_decode)
        for job in self._all_jobs():
            job.fail(EngineStopped("the engine is shutting down"))

    def _gather(self) -> None:
        """Take in new jobs; sleep while there is nothing to do."""
        idle = not (self._to_score or self._to_decode or self._open_sessions())
        if idle:
            self.stats.running = self.stats.waiting = 0
            self._place(self._inbox.get())
            time.sleep(GATHER_SECONDS)
        while not self._inbox.empty():
            self._place(self._inbox.get())

    def _place(self, job: Job | None) -> None:
        if job is None:
            return
        if job.score_from >= 0 or job.single_forward:
            self._to_score.append(job)
        else:
            self._to_decode.append(job)

    def _score_some(self) -> None:
        """Score the oldest waiting jobs of the adapter that has waited longest."""
        self._to_score = [job for job in self._to_score if not job.cancelled]
        if not self._to_score:
            return
        adapter = self._to_score[0].adapter
        chosen = [job for job in self._to_score if job.adapter is adapter][: self._max_batch]
        taken = set(map(id, chosen))
        self._to_score = [job for job in self._to_score if id(job) not in taken]
        for batch in batches(chosen):
            self._guarded(batch, functools.partial(self._score, batch))

    def _score(self, batch: list[Job]) -> list[Job]:
        score(self._model, batch)
        self._to_decode.extend(job for job in batch if job.finish is None and job.error is None)
        return [job for job in batch if job.finish is not None or job.error is not None]

    def _admit(self) -> None:
        """Move waiting jobs into sessions, oldest first, as far as there is room."""
        room = self._max_batch - self._live_rows()
        entering: dict[Adapter | None, list[Job]] = {}
        staying: deque[Job] = deque()
        for job in self._to_decode:
            if job.cancelled:
                continue
            if job.alone:
                if self._alone is None:
                    self._alone = DecodeSession(self._model, job.adapter, 1)
                    self._enter(self._alone, [job])
                else:
                    staying.append(job)
            elif room > 0:
                room -= 1
                entering.setdefault(job.adapter, []).append(job)
            else:
                staying.append(job)
        self._to_decode = staying
        for adapter, jobs in entering.items():
            if adapter not in self._sessions:
                self._sessions[adapter] = DecodeSession(self._model, adapter, self._max_batch)
            self._enter(self._sessions[adapter], jobs)

    def _enter(self, session: DecodeSession, jobs: list[Job]) -> None:
        # Jobs that are in the session already would be lost with it, too.
        everyone = [*session.jobs, *jobs]
        self._guarded(everyone, functools.partial(session.admit, jobs))

    def _guarded(self, jobs: Sequence[Job], compute: Callable[[], list[Job]]) -> None:
        """Run one computation and hand back the jobs that it ended. If it raises, its jobs fail and the thread goes on."""
        involved = list(jobs)
        try:
            ended = compute()
        except Exception as error:
            log.exception("forward_failed", rows=len(involved))
            self._drop_sessions_of(involved)
            for job in involved:
                self.stats.failed += 1
                job.fail(ComputeFailed(f"{type(error).__name__}: {error}"))
            return
        self.stats.progress_at = time.monotonic()
        for job in ended:
            self.stats.finished += 1
            self.stats.failed += job.error is not None
            self.stats.prompt_tokens += len(job.prompt)
            self.stats.new_tokens += len(job.output_ids)
            job.on_done(job)

    def _drop_sessions_of(self, jobs: Sequence[Job]) -> None:
        lost = set(map(id, jobs))
        self._sessions = {a: s for a, s in self._sessions.items() if not lost.intersection(map(id, s.jobs))}
        if self._alone is not None and lost.intersection(map(id, self._alone.jobs)):
            self._alone = None

    def _close_ended(self) -> None:
        """Forget sessions without rows: their cache is the engine's largest memory, and they keep their adapter alive."""
        self._sessions = {adapter: session for adapter, session in self._sessions.items() if session.jobs}
        if self._alone is not None and not self._alone.jobs:
            self._alone = None

    def _open_sessions(self) -> list[DecodeSession]:
        return [*self._sessions.values(), *([self._alone] if self._alone is not None else [])]

    def _live_rows(self) -> int:
        return sum(len(session.jobs) for session in self._open_sessions())

    def _all_jobs(self) -> list[Job]:
        while not self._inbox.empty():
            self._place(self._inbox.get())
        running = [job for session in self._open_sessions() for job in session.jobs]
        return [*self._to_score, *self._to_decode, *running]
