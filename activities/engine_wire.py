"""What is sent to engines and what is understood of their answers: SGLang's `/generate` and `/v1/models`, as plain functions.

Knows no HTTP: JSON values in and out. Written from SGLang 0.5.17 (docs/engines.md says where it surprises), tested against
recorded answers. An answer is checked before anybody trains on it: as many log-probs as tokens, all of them finite and none above
zero, never more tokens than asked for, and fewer only where the model itself ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from activities.errors import EngineError, InputError

_BYTES_PER_TOKEN = 512
"""Of an answer: a log-prob triple and the token's text take about 40."""
BYTES_ALWAYS = 1 << 20
"""Of any answer."""
_LOG_PROB_SLACK = 1e-3
"""Nats above zero that half-precision arithmetic may give a token that is all but certain."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Sampling:
    """How to decode. The defaults leave the model's distribution alone, which the importance ratio needs."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    """Fixes the draw where the engine honours it."""
    stop_token_ids: tuple[int, ...] = ()
    repeatable: bool = False
    """Ask the embedded engine to decode this request alone (its own extension; real SGLang is never sent the field)."""

    def wire(self) -> Json:
        """The engine's `sampling_params`."""
        out: Json = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            # The program is cut out of the text by us: no token may be hidden, and none trimmed at the end.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if self.seed is not None:
            out["sampling_seed"] = self.seed
        if self.stop_token_ids:
            out["stop_token_ids"] = list(self.stop_token_ids)
        return out


@dataclass(frozen=True)
class Generation:
    """One response."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Of each response token under the sampling policy, nats; empty unless asked for."""
    text: str
    finish_reason: str
    """`stop`, `length` or `abort`."""
    prompt_log_probs: tuple[float, ...] | None
    """Of every prompt token but the first; None unless asked for."""
    meta: Json
    """The engine's `meta_info`, untouched."""


# What is sent -------------------------------------------------------------------------------------------------------------
def generate_payload(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    adapter: str | None,
    base: bool = False,
    prompt_log_probs: bool = False,
    request_ids: Sequence[str] | None = None,
) -> Json:
    """Body of POST /generate for one or more prompts under one adapter.

    Raises:
        InputError: no adapter is named and `base` is not set, or both; or a prompt is empty.
    """
    if (adapter is None) != base:
        what = "names no adapter" if adapter is None else f"names adapter {adapter!r} and asks for the base model"
        raise InputError(f"engine request {what}: name the policy's adapter, or set base=True alone to mean the bare model")
    if not prompts or not all(prompts):
        raise InputError("engine request without prompt tokens: every prompt needs at least one token id")
    payload: Json = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": sampling.wire(),
        "return_logprob": True,
        "logprob_start_len": 0 if prompt_log_probs else -1,
        "stream": False,
    }
    if adapter is not None:
        payload["lora_path"] = [adapter] * len(prompts)
    if sampling.repeatable:
        payload["decode"] = "repeatable"
    if request_ids is not None:
        payload["rid"] = list(request_ids)
    return payload


# What is understood -------------------------------------------------------------------------------------------------------
def parse_generations(
    body: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, prompt_log_probs: bool, where: str
) -> list[Generation]:
    """Read the answer to :func:`generate_payload`, checking that it is the answer to these prompts.

    Raises:
        EngineError: another number of results; log-probs that are missing, are none, or belong to other tokens; a response that is
            longer than asked for, or was cut before that by the engine.
    """
    items = body if isinstance(body, list) else [body]
    if len(items) != len(prompts) or not all(isinstance(item, dict) for item in items):
        raise EngineError(f"{where}: {len(items)} results for {len(prompts)} prompts; the engine does not speak this protocol")
    try:
        return [
            _generation(item, prompt, max_new_tokens, prompt_log_probs, where) for item, prompt in zip(items, prompts, strict=True)
        ]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineError(f"{where}: answer without the fields of /generate ({type(error).__name__}: {error})") from None


def _generation(item: Json, prompt: Sequence[int], max_new_tokens: int, prompt_log_probs: bool, where: str) -> Generation:
    meta: Json = item["meta_info"]
    kind = _finish_kind(meta.get("finish_reason") or {"type": "length"}, where)
    tokens, log_probs = _response(item, meta, where)
    if len(tokens) > max_new_tokens:
        raise EngineError(f"{where}: {len(tokens)} tokens for at most {max_new_tokens} asked; the answer cannot be trained on")
    if kind == "length" and len(tokens) < max_new_tokens:
        raise EngineError(
            f"{where}: the engine cut the response at {len(tokens)} of {max_new_tokens} tokens, after a prompt of {len(prompt)}: "
            "its context or its KV memory is too small; raise engine_context_tokens or engine_memory_fraction, or lower "
            "sampling.max_new_tokens"
        )
    return Generation(
        tokens=tokens,
        log_probs=log_probs,
        text=str(item.get("text", "")),
        finish_reason=kind,
        prompt_log_probs=_prompt_log_probs(meta, prompt, where) if prompt_log_probs else None,
        meta=meta,
    )


def _finish_kind(reason: Any, where: str) -> str:
    """`stop` or `length`.

    Raises:
        EngineError: aborted, or ended because the engine's numbers were no numbers (SGLang puts an end token there and says so).
    """
    kind = reason["type"] if isinstance(reason, dict) else str(reason)
    detail = reason if isinstance(reason, dict) else {}
    if kind == "abort":
        raise EngineError(
            f"{where}: the engine aborted the request: {detail.get('message') or 'no reason given'}; another attempt will be made"
        )
    if kind not in ("stop", "length"):
        raise EngineError(f"{where}: finish reason {kind!r}; stop, length and abort are understood")
    if kind == "stop" and "nan" in str(detail.get("matched")).lower():
        raise EngineError(f"{where}: the engine computed NaN ({detail['matched']}); its adapter or its arithmetic overflows")
    return kind


def _response(item: Json, meta: Json, where: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    output = meta.get("output_token_logprobs") or []
    sent = item.get("output_ids")
    if sent == [] and len(output) == 1:  # asked for no new token, SGLang still says what it would have drawn
        output = []
    tokens = tuple(int(entry[1]) for entry in output)
    if sent is not None and tuple(sent) != tokens:
        raise EngineError(
            f"{where}: {len(sent)} response tokens but log-probs of {len(tokens)} others; the engine's answer is inconsistent"
        )
    return tokens, _log_probs(output, where)


def _prompt_log_probs(meta: Json, prompt: Sequence[int], where: str) -> tuple[float, ...]:
    entries = meta.get("input_token_logprobs") or []
    ids = [int(entry[1]) for entry in entries]
    # SGLang echoes the last id of the vocabulary as 0 (logprob_result_processor: ids that may be image hashes are clipped).
    if len(ids) != len(prompt) or any(got not in (token, 0) for got, token in zip(ids, prompt, strict=True)):
        raise EngineError(
            f"{where}: asked for the log-probs of {len(prompt)} prompt tokens and got {len(entries)} of others; "
            "the engine must support logprob_start_len=0"
        )
    return _log_probs(entries[1:], where)  # nothing precedes the first token, so it has no log-prob


def _log_probs(entries: Sequence[Any], where: str) -> tuple[float, ...]:
    values = tuple(math.nan if entry[0] is None else float(entry[0]) for entry in entries)
    bad = [i for i, value in enumerate(values) if not -math.inf < value <= _LOG_PROB_SLACK]
    if bad:
        raise EngineError(
            f"{where}: {len(bad)} of {len(values)} log-probs are none, the first is {entries[bad[0]][0]} at position {bad[0]}; "
            "the engine's arithmetic or the adapter overflows"
        )
    return values


def parse_adapters(body: Any) -> dict[str, str]:
    """Name -> directory of the loaded adapters, from GET /v1/models: the entries that have a parent model."""
    return {str(card["id"]): str(card.get("root") or "") for card in body.get("data", []) if card.get("parent")}


def answer_limit_bytes(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """More than an honest answer to these prompts can take."""
    return BYTES_ALWAYS + _BYTES_PER_TOKEN * sum(len(prompt) + max_new_tokens for prompt in prompts)
