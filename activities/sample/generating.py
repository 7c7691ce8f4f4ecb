"""One response from one engine, in one phase or in two. Source: spec algorithm 3.3.

With a thinking budget the model first writes up to the budget. If that cuts it off while it thinks, a text that closes the thinking
and opens the answer is forced into the response, and a second request writes the answer in what is left of the context. Forced
tokens have log-prob 0.0 and mask 0: the policy did not choose them, so they are never trained, and every other token keeps the
log-prob under everything that stands before it, forced or not. Knows no store and no run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from activities.engine_http import AsyncEngineClient, Generation, Sampling
from activities.sample.tokens import RESERVE_TOKENS, EncodedPrompt, PromptCodec


@dataclass(frozen=True)
class Ask:
    """What is asked of the engine, whatever the prompt."""

    adapter: str
    sampling: Sampling
    """Of the first phase, but for its limit and stop tokens, which depend on prompt and model."""
    second_seed: int
    """A second phase must not repeat the draws of the first."""
    max_new_tokens: int
    """Of each phase."""
    context_tokens: int
    two_phases: bool
    seconds_left: Callable[[], float]
    """Until nobody waits for the response any more."""


@dataclass(frozen=True)
class Response:
    """A whole response. Lists have one entry per token (T)."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Under the policy that sampled, nats; 0.0 for forced tokens."""
    mask: tuple[int, ...]
    """1: sampled by the policy; 0: forced."""
    finish_reason: str
    """Of the last phase: `stop` or `length`."""


async def generate_response(client: AsyncEngineClient, codec: PromptCodec, prompt: EncodedPrompt, ask: Ask) -> Response:
    """Sample one response to a prompt.

    Raises:
        EngineError: the engine failed, its answer is not one to this request, or it cut the response short.
    """
    first = await _phase(client, codec, prompt.token_ids, prompt.max_new_tokens, ask.sampling, ask)
    if not ask.two_phases or _finish_reason(codec, first) == "stop":
        return _joined(codec, first)
    forced = tuple(codec.closing(first.tokens))
    begun = [*prompt.token_ids, *first.tokens, *forced]
    limit = min(ask.max_new_tokens, ask.context_tokens - RESERVE_TOKENS - len(begun))
    if limit < 1:
        return _joined(codec, first)
    second = await _phase(client, codec, begun, limit, replace(ask.sampling, seed=ask.second_seed), ask)
    return _joined(codec, first, forced, second)


async def _phase(
    client: AsyncEngineClient, codec: PromptCodec, token_ids: list[int], limit: int, sampling: Sampling, ask: Ask
) -> Generation:
    asked = replace(sampling, max_new_tokens=limit, stop_token_ids=tuple(codec.stop_token_ids))
    (generation,) = await client.generate([token_ids], asked, adapter=ask.adapter, timeout_seconds=ask.seconds_left())
    return generation


def _finish_reason(codec: PromptCodec, generation: Generation) -> str:
    """Engines look at the length first: a stop token in the last place is reported as `length`, but the answer is complete."""
    return "stop" if generation.tokens and generation.tokens[-1] in codec.stop_token_ids else generation.finish_reason


def _joined(codec: PromptCodec, first: Generation, forced: tuple[int, ...] = (), second: Generation | None = None) -> Response:
    later_tokens, later_log_probs = (second.tokens, second.log_probs) if second else ((), ())
    return Response(
        tokens=first.tokens + forced + later_tokens,
        log_probs=first.log_probs + (0.0,) * len(forced) + later_log_probs,
        mask=(1,) * len(first.tokens) + (0,) * len(forced) + (1,) * len(later_tokens),
        finish_reason=_finish_reason(codec, second or first),
    )
