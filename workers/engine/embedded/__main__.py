"""Start the embedded engine: ``python -m workers.engine.embedded --model-path DIR --port N``.

Logs go to stderr, as JSON lines unless it is a terminal; the line ``"event": "listening"`` tells the port once requests are
answered (`--port 0` takes a free one). SIGTERM and SIGINT end the process with status 0, requests under way being answered
with 503. Option errors, an unusable model and a taken port end it with status 2.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from workers.logs import configure_logging

_PR_SET_PDEATHSIG = 1

log: structlog.stdlib.BoundLogger = structlog.get_logger()


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.engine.embedded", description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=Path, required=True, help="Hugging Face folder of a causal language model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; there is no authentication")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free port")
    parser.add_argument("--decode", choices=("batched", "repeatable"), default="batched", help="for requests that do not say")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; small models are fastest with 1")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--max-batch", type=int, default=64, help="rows decoded together")
    parser.add_argument("--die-with-parent", action="store_true", help="be killed when the thread that started this ends")
    options = parser.parse_args(arguments)
    if options.threads < 1 or options.max_batch < 1:
        parser.error(f"--threads and --max-batch must be at least 1, got {options.threads} and {options.max_batch}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    begun = time.monotonic()
    options = parse_arguments(arguments)
    configure_logging("INFO", role="engine")
    if options.die_with_parent:
        _die_with_parent()
    try:
        listener = _bind(options.host, options.port)  # before the slow part, so that a taken port is told at once
    except OSError as error:
        log.error("cannot_listen", host=options.host, port=options.port, message=str(error))
        return 2
    # Here, because torch and transformers take seconds to import.
    from workers.engine.embedded.model import ModelError, load_model
    from workers.engine.embedded.server import EngineOptions
    from workers.engine.embedded.serving import serve

    _quiet_libraries(options.threads)
    try:
        model = load_model(options.model_path, options.dtype, options.device)
    except (ModelError, RuntimeError) as error:
        log.error("model_unusable", message=str(error))
        return 2
    settings = EngineOptions(
        model_path=str(options.model_path),
        decode=options.decode,
        threads=options.threads,
        dtype=options.dtype,
        device=options.device,
        max_batch=options.max_batch,
    )

    asyncio.run(serve(model, settings, listener, begun))
    return 0


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. An engine holds no state, so SIGKILL loses nothing.

    The kernel means the parent's *thread*: whoever passes --die-with-parent must start the engine from a thread that lives on.
    """
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; start without --die-with-parent")
    if os.getppid() != parent:  # it ended before the call
        sys.exit(0)


def _quiet_libraries(threads: int) -> None:
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The compute thread may be inside a forward pass, which the interpreter's own ending would neither wait for nor survive.
    os._exit(status)
