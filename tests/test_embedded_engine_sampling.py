"""From logits to tokens: frequencies, log-probs, truncation, seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from workers.engine.embedded.sampling import Choice, Draws, choose_tokens

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -30.0, 1.5])


def sample_many(choice: Choice, draws: int, seed: int = 7) -> tuple[np.ndarray, list[float]]:
    stream = Draws(seed)
    tokens, log_probs = choose_tokens(LOGITS.expand(draws, -1), [choice] * draws, [stream.next() for _ in range(draws)])
    return np.bincount(tokens, minlength=len(LOGITS)), log_probs


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_frequencies_match_the_distribution(temperature: float) -> None:
    counts, _ = sample_many(Choice(temperature=temperature), 20_000)
    expected = torch.softmax(LOGITS.double() / temperature, dim=-1).numpy() * 20_000
    seen = expected > 5
    assert counts[~seen].sum() <= 5 * (~seen).sum()
    assert stats.chisquare(counts[seen], expected[seen] / expected[seen].sum() * counts[seen].sum()).pvalue > 1e-3


def test_top_k_and_top_p_keep_what_they_should() -> None:
    counts, _ = sample_many(Choice(top_k=3), 5_000)
    assert set(np.flatnonzero(counts)) == {0, 6, 1}
    probs = torch.softmax(LOGITS, dim=-1)
    # The two most likely tokens hold 0.71 of the mass, so a third must join to reach 0.75.
    assert float(probs[0] + probs[6]) < 0.75 < float(probs[0] + probs[6] + probs[1])
    counts, _ = sample_many(Choice(top_p=0.75), 5_000)
    assert set(np.flatnonzero(counts)) == {0, 6, 1}
    kept = probs[[0, 6, 1]].double().numpy()
    assert stats.chisquare(counts[[0, 6, 1]], kept / kept.sum() * 5_000).pvalue > 1e-3


def test_truncation_of_one_row_leaves_the_others_alone() -> None:
    tokens, _ = choose_tokens(LOGITS.expand(3, -1), [Choice(), Choice(top_k=1), Choice(top_k=2)], [0.9999, 0.9999, 0.9999])
    assert tokens == [6, 0, 6]
    tokens, _ = choose_tokens(LOGITS.expand(2, -1), [Choice(), Choice(top_k=2)], [0.5, 0.5])
    assert tokens == [1, 0]


def test_log_probs_are_of_the_tempered_distribution_before_truncation() -> None:
    tokens, log_probs = choose_tokens(
        LOGITS.expand(3, -1), [Choice(temperature=0.5), Choice(top_k=2), Choice(temperature=0)], [0.5, 0.5, 0.5]
    )
    assert tokens[2] == 0
    wanted = [
        torch.log_softmax(LOGITS / 0.5, -1)[tokens[0]],
        torch.log_softmax(LOGITS, -1)[tokens[1]],
        torch.log_softmax(LOGITS, -1)[0],
    ]
    assert log_probs == pytest.approx([float(w) for w in wanted], abs=1e-6)


def test_extreme_draws_never_pick_an_impossible_token() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    for draw in (0.0, 0.5, 1 - 2**-53):
        (token,), (log_prob,) = choose_tokens(logits[None], [Choice()], [draw])
        assert token in (1, 3)
        assert log_prob == pytest.approx(math.log(0.5))


def test_a_large_vocabulary_is_divided_exactly() -> None:
    """Near 1 a float32 running sum is as coarse as 1 % of one of 150k equal tokens; a draw just inside a token must find it."""
    size = 150_000
    wanted = list(range(100_000, size, 1_250))
    draws = [(token + 0.001) / size for token in wanted]
    tokens, _ = choose_tokens(torch.zeros(1, size).expand(len(wanted), -1), [Choice()] * len(wanted), draws)
    assert tokens == wanted


def test_draws_depend_on_the_seed_alone() -> None:
    first, second, other = Draws(5), Draws(5), Draws(-5)
    a = [first.next() for _ in range(4)]
    assert a == [second.next() for _ in range(4)]
    assert a != [other.next() for _ in range(4)]
    assert Draws(None).next() != Draws(None).next()
