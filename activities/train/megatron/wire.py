"""What the train worker and its rank processes say to each other, over a pipe that only these two hold.

Every request has one answer from each rank: `Done` or `Failed`; in between a rank may say `Beat` and `Scored`. Plain data, pickled
by `multiprocessing`; the two ends are the same program on the same host, started by one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from activities.train.megatron.shape import ModelShape
from workflows.contracts.request import LoraSettings, OptimizerSettings

Array = NDArray[np.float32]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Packed:
    """One micro-batch of a rank."""

    number: int
    """Position among the micro-batches of the call, over all ranks."""
    tokens: tuple[NDArray[np.int64], ...]
    firsts: tuple[int, ...]


@dataclass(frozen=True)
class Open:
    """Read a model, in the place of the one that was open. Answer: None."""

    folder: Path
    shape: ModelShape
    lora: LoraSettings
    output_head: bool


@dataclass(frozen=True)
class Load:
    """This rank's part of a state. Answer: None."""

    adapter: Mapping[str, Array]
    exp_avg: Mapping[str, Array]
    exp_avg_sq: Mapping[str, Array]
    steps: int


@dataclass(frozen=True)
class GetState:
    """Answer: `Load` with this rank's part, which the rank also keeps under a number, as the last two of them."""

    number: int


@dataclass(frozen=True)
class Restore:
    """Load what was kept under a number: between two versions of an adapter there and back without sending them. Answer: None."""

    number: int


@dataclass(frozen=True)
class LogProbs:
    """A `Scored` for each micro-batch; answer: None."""

    batches: tuple[Packed, ...]
    adapter: bool
    in_float32: bool
    """Whatever precision the rank trains in."""


@dataclass(frozen=True)
class Accumulate:
    """For each micro-batch a `Scored`, after which the worker sends `Derivatives`; answer: None."""

    batches: tuple[Packed, ...]
    longest: int
    """Tokens of the largest micro-batch of any rank."""


@dataclass(frozen=True)
class Derivatives:
    """Of the loss with respect to each log-prob of a micro-batch, joined."""

    number: int
    values: Floats


@dataclass(frozen=True)
class Gradients:
    """Answer: {key: this rank's part of the accumulated gradient}."""


@dataclass(frozen=True)
class SquaredNorms:
    """Answer: {key: sum of the squared gradient, in float64, over this rank's part}."""


@dataclass(frozen=True)
class Apply:
    """Answer: None."""

    optimizer: OptimizerSettings


@dataclass(frozen=True)
class Trainable:
    """Answer: the keys or names of every parameter that gets a gradient."""


@dataclass(frozen=True)
class Fingerprint:
    """Answer: a digest of this rank's part of the base."""


@dataclass(frozen=True)
class Stop:
    """The rank ends. No answer."""


Request = (
    Open | Load | GetState | Restore | LogProbs | Accumulate | Gradients | SquaredNorms | Apply | Trainable | Fingerprint | Stop
)


@dataclass(frozen=True)
class Scored:
    """Log-probs of one micro-batch, one array per sequence."""

    number: int
    log_probs: tuple[Floats, ...]


@dataclass(frozen=True)
class Beat:
    """The rank is alive and does this."""

    doing: str


@dataclass(frozen=True)
class Done:
    """The request is answered."""

    value: Any = None
    stats: Mapping[str, float] = field(default_factory=dict)
    """Figures of the work just done: peak memory in bytes, layers recomputed."""


@dataclass(frozen=True)
class Failed:
    """The rank could not do it, and ends."""

    kind: str
    """Class of the exception."""
    message: str
    where: str
    """Its traceback."""


Answer = Scored | Beat | Done | Failed
