"""A rank process: joins its group, and answers requests until it is told to stop.

    python -m activities.train.megatron.rank SPEC RANK REQUESTS LIFELINE

It ends with the train worker: the kernel kills it when the thread that started it ends, and a pipe that only the worker holds open
tells it the same where the kernel does not. Whatever goes wrong is reported and ends the process; the worker then ends the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from activities.train.megatron.place import Place
from activities.train.megatron.spec import RankSpec
from activities.train.megatron.wire import Answer, Beat, Done, Failed, Stop

_PR_SET_PDEATHSIG = 1


class Channel:
    """The rank's end of the pipe."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def say(self, answer: Answer) -> None:
        self._connection.send(answer)

    def beat(self, doing: str) -> None:
        self.say(Beat(doing))

    def hear(self) -> Any:
        """Raises EOFError once the worker is gone."""
        return self._connection.recv()


def main(arguments: list[str]) -> int:
    spec_file, rank, requests, lifeline = arguments
    spec = RankSpec.read(Path(spec_file))
    _end_with(spec.worker_pid, int(lifeline))
    channel = Channel(Connection(int(requests)))
    try:
        place = _join(spec, int(rank), channel)
        from activities.train.megatron.answering import Answering

        answering = Answering(place, spec.options, channel)
        channel.say(Done(answering.attention))
        while not isinstance(request := channel.hear(), Stop):
            channel.say(Done(answering.answer(request), answering.stats))
    except EOFError:
        return 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            channel.say(Failed(type(error).__name__, str(error), traceback.format_exc()))
        raise
    return 0


def _end_with(worker: int, lifeline: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != worker:  # it ended before we asked
            os._exit(1)

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline, 1)  # never written to: returns when the other end is closed
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


def _join(spec: RankSpec, rank: int, channel: Channel) -> Place:
    """Join torch's process group, then Megatron's."""
    options = spec.options
    torch.set_num_threads(options.threads)
    if not options.low_precision:
        torch.set_float32_matmul_precision("highest")  # some images turn TF32 on for everybody; float32 shall mean it
    channel.beat("join")
    if options.on_gpu:
        device = torch.device("cuda", options.gpu_of(rank))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        _quiet_on_cpu()
    dist.init_process_group(
        "nccl" if options.on_gpu else "gloo",
        init_method=f"file://{spec.meeting}",
        rank=rank,
        world_size=options.processes,
        timeout=timedelta(seconds=options.stall_seconds),
    )
    channel.beat("import")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.tensor_parallel)
    return Place(
        rank=rank,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_ranks=options.tensor_parallel,
        device=device,
        dtype=torch.bfloat16 if options.low_precision else torch.float32,
    )


def _quiet_on_cpu() -> None:
    """Two things that Megatron takes for granted and that a CPU does without."""
    # It asks for the current GPU in a few places, also where it then works on what it was given.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    # It has some functions compiled, which takes a C++ compiler and, to import alone, seconds; plain they do the same.
    torch.compile = lambda function=None, *_, **__: function or (lambda inner: inner)  # type: ignore[assignment]


if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
    # Not through the interpreter's end: a process group that lost a member can wait there for ever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
