"""From logits to one token and its log-prob, row by row. Pure mathematics: knows no model, no request and no clock.

Convention, the same as SGLang's default: the log-prob reported for a sampled token is that of the tempered distribution over the
whole vocabulary, log_softmax(logits / temperature) in float32, before top-k and top-p cut it. At temperature 1 it is the model's
own log-prob. Greedy rows (temperature 0) report the untempered one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

GREEDY_BELOW = 1e-6
"""Temperatures below this mean greedy, as in SGLang."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How one row is sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: off."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def truncated(self) -> bool:
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0)


class Draws:
    """One row's own uniform numbers in [0, 1): a function of the seed and the position alone, whoever shares the batch."""

    def __init__(self, seed: int | None) -> None:
        # Random(-1) equals Random(1); the mask keeps negative seeds apart. None seeds from the system.
        self._random = random.Random(None if seed is None else seed & (2**64 - 1))

    def next(self) -> float:
        return self._random.random()


def choose_tokens(logits_R: torch.Tensor, choices_R: Sequence[Choice], draws_R: Sequence[float]) -> tuple[list[int], list[float]]:
    """Sample one token for each row.

    Args:
        logits_R: float32 [R, vocabulary].
        choices_R: how each row is sampled.
        draws_R: a uniform number in [0, 1) for each row; greedy rows ignore theirs.

    Returns:
        Token ids, and their log-probs in nats (see the module's convention). A log-prob is NaN where the logits are not finite;
        the caller must not use such a token.
    """
    scaled_R = _tempered(logits_R, choices_R)
    tokens = _inverse_cdf(_cut(torch.softmax(scaled_R, dim=-1).double(), choices_R), draws_R)
    if any(choice.greedy for choice in choices_R):
        greedy = torch.tensor([choice.greedy for choice in choices_R], device=logits_R.device)
        tokens = torch.where(greedy, logits_R.argmax(dim=-1), tokens)
    log_probs = torch.log_softmax(scaled_R, dim=-1).gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), log_probs.tolist()


def _tempered(logits_R: torch.Tensor, choices_R: Sequence[Choice]) -> torch.Tensor:
    temperatures = [1.0 if choice.greedy else choice.temperature for choice in choices_R]
    if all(t == 1.0 for t in temperatures):
        return logits_R
    return logits_R / torch.tensor(temperatures, dtype=logits_R.dtype, device=logits_R.device)[:, None]


def _inverse_cdf(probs_R: torch.Tensor, draws_R: Sequence[float]) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the draw. float64, since 1e5 float32 terms would drift."""
    cumulative_R = probs_R.cumsum(dim=-1)
    total_R = cumulative_R[:, -1:]
    target_R = torch.tensor(draws_R, dtype=torch.float64, device=probs_R.device)[:, None] * total_R
    # The product may round up to the total itself, which no token exceeds.
    target_R = torch.minimum(target_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    found = torch.searchsorted(cumulative_R, target_R, right=True)[:, 0]
    return found.clamp_(max=probs_R.shape[-1] - 1)


def _cut(probs_R: torch.Tensor, choices_R: Sequence[Choice]) -> torch.Tensor:
    """Zero what top-k and top-p exclude, jointly: a token stays while fewer than k tokens and at most p of the mass precede it."""
    rows = [i for i, choice in enumerate(choices_R) if choice.truncated]
    if not rows:
        return probs_R
    index = torch.tensor(rows, device=probs_R.device)
    sorted_R, order_R = probs_R[index].sort(dim=-1, descending=True, stable=True)
    before_R = sorted_R.cumsum(dim=-1) - sorted_R
    top_p = torch.tensor([choices_R[i].top_p for i in rows], dtype=torch.float64, device=probs_R.device)[:, None]
    vocabulary = probs_R.shape[-1]
    top_k = torch.tensor([choices_R[i].top_k if choices_R[i].top_k > 0 else vocabulary for i in rows], device=probs_R.device)[
        :, None
    ]
    rank = torch.arange(vocabulary, device=probs_R.device)[None]
    kept_R = sorted_R.masked_fill((before_R > top_p) | (rank >= top_k), 0.0)
    return probs_R.index_copy(0, index, torch.zeros_like(kept_R).scatter_(1, order_R, kept_R))
