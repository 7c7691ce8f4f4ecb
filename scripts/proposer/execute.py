"""Runs packing programs in worker processes and scores them in floating point.

Good enough for pre-training and for measuring; the judge of a run works in exact arithmetic and in a sandbox, and neither is
used here: these programs come from our own generator and from the model trained on it.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import FrameType

TOLERANCE = 1e-6
"""As in the task's statement: a smaller violation is taken off the radii, a larger one makes the answer invalid."""


@dataclass(frozen=True)
class Outcome:
    """What became of one program."""

    score: float | None
    """Sum of radii, None if the answer is invalid."""
    reason: str
    """"" if valid, else one of: syntax, error, time, shape, overlap."""
    output: str = ""


def run_program(code: str, circles: int = 26, seconds: float = 10.0) -> Outcome:
    """Run one program in this process, under an alarm. Call it in a worker: a program may leave anything behind."""
    try:
        compiled = compile(code, "<program>", "exec")
    except (SyntaxError, ValueError):
        return Outcome(None, "syntax")
    import numpy as np

    def expire(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError

    printed = io.StringIO()
    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with contextlib.redirect_stdout(printed), np.errstate(all="ignore"):
            space: dict[str, object] = {"__name__": "program"}
            exec(compiled, space)
            centers, radii, _ = space["run_packing"]()  # type: ignore[operator]
        points = np.asarray(centers, dtype=float)
        sizes = np.asarray(radii, dtype=float)
    except TimeoutError:
        return Outcome(None, "time")
    except Exception:  # any fault of the program is its own; the caller counts them
        return Outcome(None, "error")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if points.shape != (circles, 2) or sizes.shape != (circles,) or not np.isfinite([*points.flat, *sizes]).all():
        return Outcome(None, "shape")
    a, b = np.triu_indices(circles, 1)
    overlap = sizes[a] + sizes[b] - np.linalg.norm(points[a] - points[b], axis=1)
    outside = sizes[:, None] - np.minimum(points, 1 - points)
    violation = max(overlap.max(), outside.max(), -sizes.min(), 0.0)
    if violation > TOLERANCE:
        return Outcome(None, "overlap")
    return Outcome(float(np.maximum(sizes - violation, 0).sum()), "", printed.getvalue())


def _quiet() -> None:
    import warnings

    warnings.filterwarnings("ignore")


def run_programs(codes: Sequence[str], workers: int = 2, seconds: float = 10.0) -> list[Outcome]:
    """Run programs in fresh worker processes, in order."""
    import multiprocessing

    # One BLAS thread a worker: the matrices are tiny, and the workers share the cores. Set before the workers import NumPy.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_quiet) as pool:
        return list(pool.map(run_program, codes, [26] * len(codes), [seconds] * len(codes), chunksize=8))
