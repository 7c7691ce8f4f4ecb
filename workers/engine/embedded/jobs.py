"""One sequence to score and continue: what the compute thread is asked for and what it hands back. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from workers.engine.embedded.adapters import Adapter
from workers.engine.embedded.sampling import Choice, Draws

MAX_SINGLE_FORWARD_TOKENS = 1
"""A request for so few new tokens needs no KV cache: the pass that scores its input also gives its next token."""


class EngineStopped(Exception):
    """The engine is shutting down; ask another one, or the same one after its restart."""


class ComputeFailed(Exception):
    """The forward pass failed, or gave numbers that are not finite."""


@dataclass(slots=True)
class Finish:
    """Why a sequence ended."""

    matched: int | None
    """The stop token that ended it; None: it reached its length."""
    length: int
    """The length limit in new tokens."""


@dataclass(slots=True, eq=False)
class Job:
    """One row. Written by the compute thread only; read by others after `on_done`."""

    prompt: list[int]
    choice: Choice
    draws: Draws
    max_new_tokens: int
    stop_ids: frozenset[int]
    """Tokens that end the sequence; empty when the request ignores them."""
    adapter: Adapter | None
    """None: the base model."""
    alone: bool
    """Computed by itself, so that its result depends on nothing but the request (decode: repeatable)."""
    score_from: int
    """First input token whose log-prob is wanted; -1: none."""
    on_done: Callable[[Job], None]
    cancelled: bool = False
    """Set by anybody: nobody waits for the result any more."""
    output_ids: list[int] = field(default_factory=list)
    output_log_probs: list[float] = field(default_factory=list)
    input_log_probs: list[float] = field(default_factory=list)
    """Of tokens score_from+1, score_from+2, ...: a first token has no log-prob, and neither has the one that scoring starts at."""
    finish: Finish | None = None
    error: Exception | None = None

    @property
    def single_forward(self) -> bool:
        return self.max_new_tokens <= MAX_SINGLE_FORWARD_TOKENS

    def length_finish(self) -> Finish:
        return Finish(None, self.max_new_tokens)

    def take(self, token: int, log_prob: float) -> bool:
        """Append a sampled token; True if the sequence ends with it. The length limit is checked first, as SGLang does."""
        self.output_ids.append(token)
        self.output_log_probs.append(log_prob)
        if len(self.output_ids) >= self.max_new_tokens:
            self.finish = self.length_finish()
        elif token in self.stop_ids:
            self.finish = Finish(token, self.max_new_tokens)
        return self.finish is not None

    def fail(self, error: Exception) -> None:
        self.error = error
        self.on_done(self)
