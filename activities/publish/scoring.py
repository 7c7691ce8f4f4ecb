"""An engine's log-probs of given sequences under one adapter, in requests of bounded size. Knows no version and no gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from activities.engine_http import Generation, Sampling
from activities.errors import EngineError

Floats = NDArray[np.float64]

TOKENS_PER_REQUEST = 8192
SEQUENCES_PER_REQUEST = 16
SCORE_SECONDS = 300.0
"""For one scoring request; seconds on a GPU, but the embedded engine may share its cores."""


class EngineApi(Protocol):
    """What publishing needs of an engine's client; `EngineClient` is one."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        adapter: str | None = None,
        base: bool = False,
        prompt_log_probs: bool = False,
        timeout_seconds: float = 3600.0,
    ) -> list[Generation]: ...

    def load_adapter(self, name: str, directory: str) -> None: ...

    def unload_adapter(self, name: str) -> None: ...

    def loaded_adapters(self) -> dict[str, str]: ...


@dataclass
class Scorer:
    """Scores on one engine."""

    api: EngineApi
    progress: Callable[[str], None] = lambda _: None
    _new_tokens: int = field(default=0, init=False)
    """Scoring asks for no new token, or for one where an engine refuses that."""

    def score(self, sequences: Sequence[Sequence[int]], adapter: str | None) -> tuple[Floats, ...]:
        """The engine's log-probs of every token but the first of each sequence, under an adapter or (None) the base model."""
        out: list[Floats] = []
        for part in _requests(sequences):
            self.progress(f"scoring {adapter or 'the base'}: {len(out)}/{len(sequences)}")
            out.extend(np.array(g.prompt_log_probs, dtype=np.float64) for g in self._ask(part, adapter))
        return tuple(out)

    def _ask(self, part: Sequence[Sequence[int]], adapter: str | None) -> list[Generation]:
        def ask(new_tokens: int) -> list[Generation]:
            return self.api.generate(
                part,
                Sampling(max_new_tokens=new_tokens, temperature=0.0),
                adapter=adapter,
                base=adapter is None,
                prompt_log_probs=True,
                timeout_seconds=SCORE_SECONDS,
            )

        if self._new_tokens:
            return ask(self._new_tokens)
        try:
            return ask(0)
        except EngineError as refused:
            # Some engines want at least one new token. Any other trouble shows again here, and is reported as it was first.
            try:
                answer = ask(1)
            except EngineError:
                raise refused from None
            self._new_tokens = 1
            return answer


def _requests(sequences: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Cut into requests of bounded size, in order."""
    parts: list[list[Sequence[int]]] = []
    tokens = 0
    for sequence in sequences:
        if not parts or len(parts[-1]) == SEQUENCES_PER_REQUEST or tokens + len(sequence) > TOKENS_PER_REQUEST:
            parts.append([])
            tokens = 0
        parts[-1].append(sequence)
        tokens += len(sequence)
    return parts
