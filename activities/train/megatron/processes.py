"""The rank processes of one trainer: start them, talk to them, end them all when one is lost. Knows nothing of what they compute.

    train worker ──pipe── rank 0 ┐
                 ──pipe── rank 1 ┤ torch.distributed (gloo or NCCL), meeting at a file
                 ──pipe── ...    ┘

A rank that dies, reports an error or says nothing for too long makes the whole group useless: its partners wait in a collective
operation. So the group is killed and the request fails with `TrainerLost`; the next one starts a new group.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from activities.errors import CorruptBlob, InputError, TrainerLost
from activities.train.megatron.options import MegatronOptions
from activities.train.megatron.spec import RankSpec
from activities.train.megatron.wire import Answer, Beat, Done, Failed, Request, Stop

_KNOWN_ERRORS: dict[str, type[Exception]] = {"InputError": InputError, "CorruptBlob": CorruptBlob}
"""What a rank may find wrong with its input: no other attempt would mend it."""
_LAST_WORDS_BYTES = 2000
_STOP_SECONDS = 5.0


class RankGroup:
    """All ranks of one trainer. Not thread-safe."""

    def __init__(
        self, options: MegatronOptions, processes: Sequence[subprocess.Popen[bytes]], pipes: Sequence[Any], folder: Path
    ) -> None:
        self.options = options
        self._processes = list(processes)
        self._pipes = list(pipes)
        self._folder = folder
        self._closed = threading.Event()
        self.stats: dict[str, float] = {}
        """Figures of the last request, the largest over the ranks."""
        self.attention = ""
        """The attention kernel that the ranks have chosen."""

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    @property
    def alive(self) -> bool:
        return not self._closed.is_set() and all(p.poll() is None for p in self._processes)

    def ask(
        self,
        requests: Sequence[Request],
        hear: Callable[[int, Answer], None] | None = None,
        patience_seconds: float | None = None,
    ) -> list[Any]:
        """Send one request to each rank and return their answers, in the order of ranks.

        Args:
            hear: gets (rank, message) for everything that a rank says before its answer, beats left out.
            patience_seconds: longest silence of all ranks; None: as the options say.

        Raises:
            TrainerLost: a rank died, failed or hangs; all have been killed.
            InputError, CorruptBlob: a rank said so.
        """
        try:
            for rank, request in enumerate(requests):
                self.tell(rank, request)
            return self.answers(self.options.stall_seconds if patience_seconds is None else patience_seconds, hear)
        except BaseException:
            # Ranks may be in the middle of anything now, also if it was our own caller who failed.
            self.kill()
            raise

    def tell(self, rank: int, message: Any) -> None:
        """Send a message that has no answer of its own."""
        try:
            self._pipes[rank].send(message)
        except OSError:
            raise self._lost(rank) from None

    def answers(self, patience_seconds: float, hear: Callable[[int, Answer], None] | None = None) -> list[Any]:
        """Wait for one `Done` of each rank. See :meth:`ask`."""
        done: dict[int, Any] = {}
        stats: dict[str, float] = {}
        rank_of = {id(pipe): rank for rank, pipe in enumerate(self._pipes)}
        while len(done) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in done]
            ready = wait(waiting, patience_seconds)
            if not ready:
                silent = ", ".join(str(rank) for rank in range(len(self._pipes)) if rank not in done)
                raise TrainerLost(
                    f"trainer ranks {silent} said nothing for {patience_seconds:.0f} s and were killed; the step is tried again. "
                    f"If it takes longer than that, raise TTTD_TRAIN_STALL_SECONDS. Their logs: {self._folder}"
                )
            for pipe in ready:
                rank = rank_of[id(pipe)]
                message = self._receive(rank)
                if isinstance(message, Done):
                    done[rank] = message.value
                    stats = {k: max(v, stats.get(k, v)) for k, v in {**stats, **message.stats}.items()}
                elif not isinstance(message, Beat) and hear is not None:
                    hear(rank, message)
        self.stats = stats
        return [done[rank] for rank in range(len(self._pipes))]

    def _receive(self, rank: int) -> Answer:
        try:
            message: Answer = self._pipes[rank].recv()
        except (EOFError, OSError):
            raise self._lost(rank) from None
        if isinstance(message, Failed):
            if (known := _KNOWN_ERRORS.get(message.kind)) is not None:
                raise known(message.message)
            raise TrainerLost(f"trainer rank {rank} failed: {message.kind}: {message.message}\n{message.where}")
        return message

    def _lost(self, rank: int) -> TrainerLost:
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        code = process.returncode
        how = "closed its pipe" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        said = _last_words(self._folder / f"rank-{rank}.log")
        return TrainerLost(f"trainer rank {rank} {how}; all ranks are started again for the next attempt{said}")

    def stop(self) -> None:
        """End the ranks: politely, then by force. Waits until they are gone."""
        if not self._closed.is_set():
            for pipe in self._pipes:
                with contextlib.suppress(OSError, ValueError):
                    pipe.send(Stop())
            deadline = time.monotonic() + _STOP_SECONDS
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the ranks at once. Waits until they are gone."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._closed.set()
        if self.options.folder is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def wait_closed(self) -> None:
        """Block until the group has been ended."""
        self._closed.wait()


def start_ranks(options: MegatronOptions) -> RankGroup:
    """Start all ranks and wait until they have joined.

    Raises:
        TrainerLost: a rank did not come up.
        InputError: an option is not supported here; names it.
    """
    options.check()
    group = _spawn(options, _own_folder(options.folder))
    try:
        group.attention = group.answers(options.start_seconds)[0]
    except BaseException:
        group.kill()
        raise
    return group


def _own_folder(parent: Path | None) -> Path:
    """A folder for this process's ranks; those of processes that are gone are removed."""
    if parent is None:
        return Path(tempfile.mkdtemp(prefix="tttd-ranks-"))
    own = parent / str(os.getpid())
    own.mkdir(parents=True, exist_ok=True)
    for other in parent.iterdir():
        if other.name.isdigit() and not _runs(int(other.name)):
            shutil.rmtree(other, ignore_errors=True)
    return own


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _spawn(options: MegatronOptions, folder: Path) -> RankGroup:
    """Start the processes in a thread that lives as long as they do: the kernel's signal to a child comes when the *thread* ends
    that started it, and activities run in threads of a pool."""
    made: list[RankGroup] = []
    failed: list[BaseException] = []
    ready = threading.Event()

    def run() -> None:
        try:
            made.append(_popen(options, folder))
        except BaseException as error:
            failed.append(error)
        ready.set()
        if made:
            made[0].wait_closed()

    threading.Thread(target=run, daemon=True, name="trainer-ranks").start()
    ready.wait()
    if failed:
        raise failed[0]
    return made[0]


def _popen(options: MegatronOptions, folder: Path) -> RankGroup:
    meeting = folder / f"meeting-{os.getpid()}-{time.monotonic_ns()}"
    spec_file = folder / "spec.pickle"
    RankSpec(options, meeting, os.getpid()).write(spec_file)
    lifeline, held = os.pipe()  # `held` stays open in this process alone, until it ends
    processes: list[subprocess.Popen[bytes]] = []
    pipes: list[Connection[Any, Any]] = []
    try:
        for rank in range(options.processes):
            ours, theirs = Pipe()
            pipes.append(ours)
            processes.append(_popen_rank(options, folder, spec_file, rank, theirs, lifeline))
            theirs.close()
    except BaseException:
        for process in processes:
            process.kill()
        os.close(held)
        raise
    finally:
        os.close(lifeline)
    group = RankGroup(options, processes, pipes, folder)
    threading.Thread(target=_hold, args=(group, held), daemon=True, name="lifeline-end").start()
    return group


def _popen_rank(
    options: MegatronOptions, folder: Path, spec_file: Path, rank: int, pipe: Connection[Any, Any], lifeline: int
) -> subprocess.Popen[bytes]:
    arguments = [str(spec_file), str(rank), str(pipe.fileno()), str(lifeline)]
    with (folder / f"rank-{rank}.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "activities.train.megatron.rank", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(pipe.fileno(), lifeline),
            # Micro-batches differ in size, and what is freed by one must not be lost to the next by fragmentation.
            env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ},
        )


def _hold(group: RankGroup, descriptor: int) -> None:
    group.wait_closed()
    os.close(descriptor)


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        text = log.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace").strip()
        if text:
            return f". The end of {log}:\n{text}"
    return ""
