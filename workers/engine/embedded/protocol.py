"""SGLang's `/generate` as this engine understands it: JSON to validated items, results to JSON. Knows no threads and no tensors.

A field that SGLang has and this engine lacks is refused unless it says nothing (null, false, 0, empty, or the neutral value of a
sampling parameter): a request is answered as it was meant, or not at all. Shapes follow SGLang 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workers.engine.embedded.jobs import Job

WEIGHT_VERSION = "default"
"""What SGLang reports for base weights that nobody has updated; adapters do not change it."""

MAX_ROWS = 4096
"""Sequences in one request."""

Decode = Literal["batched", "repeatable"]

_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "min_p": 0,
    "min_new_tokens": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}
"""Sampling parameters of SGLang that may only be given with these values, which do nothing."""


class BadRequest(ValueError):
    """The request cannot be answered; the message says which field, what it was and what is allowed."""


class SamplingParams(BaseModel):
    """`sampling_params` of one sequence; defaults are SGLang's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    temperature: float = Field(default=1.0, ge=0, le=1e6, allow_inf_nan=False)
    """0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1: off."""
    max_new_tokens: int = Field(default=128, ge=0)
    """0: only score the input; as in SGLang, `output_token_logprobs` still holds the token that would have come."""
    stop_token_ids: tuple[int, ...] = Field(default=(), strict=False)
    """Besides the model's own end tokens."""
    ignore_eos: bool = False
    """Stop at no token at all, also not at `stop_token_ids` (as SGLang)."""
    sampling_seed: int | None = None
    """Fixes the random draws of this sequence, whoever shares its batch."""
    skip_special_tokens: bool = True
    """In `text`."""
    no_stop_trim: bool = False
    """Keep the stop token in `text`."""
    spaces_between_special_tokens: bool = True
    """Without effect, as with every fast tokenizer."""


@dataclass(frozen=True, slots=True)
class Item:
    """One validated sequence of a request."""

    rid: str | None
    prompt: list[int]
    params: SamplingParams
    lora_name: str | None
    return_logprob: bool
    logprob_start: int
    """-1: no input log-probs."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    items: list[Item]
    batched: bool
    """The input was a list: answer with a list, also for one."""
    decode: Decode | None
    """None: as the engine was started."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is checked against."""

    vocabulary: int
    context_tokens: int
    encode: Callable[[str], list[int]] | None
    """Text to ids; None when the model has no tokenizer."""


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object from a request's body.

    Raises:
        BadRequest: it is not JSON, or not an object.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, got {type(value).__name__}")
    return value


_KNOWN = (
    "input_ids", "text", "sampling_params", "return_logprob", "logprob_start_len", "lora_path", "rid", "decode",
)  # fmt: skip
_HARMLESS = ("stream", "log_metrics", "return_text_in_logprobs", "priority", "routing_key", "extra_key", "cache_salt")


def parse_generate(body: bytes, limits: Limits) -> GenerateRequest:
    """Validate a `/generate` request.

    Raises:
        BadRequest: names the field, what it was and what is allowed.
    """
    raw = parse_json(body)
    if raw.get("stream"):
        raise BadRequest("stream: this engine answers only whole sequences; leave it out or set it to false")
    for key, value in raw.items():
        if key not in _KNOWN and key not in _HARMLESS and value not in (None, False, 0, -1, "", [], {}):
            raise BadRequest(f"{key}: this engine does not support it; it takes {', '.join(_KNOWN)}")
    decode = raw.get("decode")
    if decode not in (None, "batched", "repeatable"):
        raise BadRequest(f"decode: must be batched or repeatable, got {decode!r}")
    prompts, batched = _prompts(raw, limits)
    rows = len(prompts)
    params = [_params(p) for p in _per_row(raw, "sampling_params", rows, {})]
    names = _per_row(raw, "lora_path", rows, None, str)
    log_probs = _per_row(raw, "return_logprob", rows, False, bool)
    starts = _per_row(raw, "logprob_start_len", rows, -1, int)
    rids = _per_row(raw, "rid", rows, None, str, spread=not batched)
    items = [
        Item(rids[i], prompts[i], params[i], names[i], log_probs[i], _start(i, starts[i], prompts[i], log_probs[i]))
        for i in range(rows)
    ]
    for i, item in enumerate(items):
        _check_length(i, item, limits)
    return GenerateRequest(items, batched, decode)


def _prompts(raw: Mapping[str, Any], limits: Limits) -> tuple[list[list[int]], bool]:
    ids, text = raw.get("input_ids"), raw.get("text")
    if (ids is None) == (text is None):
        raise BadRequest("give either input_ids or text")
    if text is not None:
        batched = isinstance(text, list)
        prompts = [_encoded(t, limits) for t in (text if batched else [text])]
    else:
        if not isinstance(ids, list) or not ids:
            raise BadRequest(f"input_ids: must be a non-empty list of ids or of lists of ids, got {_short(ids)}")
        batched = isinstance(ids[0], list)
        prompts = ids if batched else [ids]
    if not 1 <= len(prompts) <= MAX_ROWS:
        raise BadRequest(f"{len(prompts)} sequences in one request; 1 to {MAX_ROWS} are allowed")
    for row, prompt in enumerate(prompts):
        _check_ids(f"input_ids[{row}]", prompt, limits.vocabulary)
    return prompts, batched


def _encoded(text: object, limits: Limits) -> list[int]:
    if limits.encode is None:
        raise BadRequest("text: this model's folder has no tokenizer; send input_ids")
    if not isinstance(text, str):
        raise BadRequest(f"text: must be a string or a list of strings, got {_short(text)}")
    return limits.encode(text)


def _check_ids(where: str, ids: object, vocabulary: int) -> None:
    if not isinstance(ids, list) or not ids:
        raise BadRequest(f"{where}: must be a non-empty list of token ids, got {_short(ids)}")
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BadRequest(f"{where}[{position}]: must be a token id from 0 to {vocabulary - 1}, got {_short(token)}")


def _per_row(raw: Mapping[str, Any], key: str, rows: int, default: Any, kind: type | None = None, spread: bool = True) -> list[Any]:
    """A field that may be given once for all rows or as one list entry for each."""
    value = raw.get(key)
    if value is None:
        return [default] * rows
    if isinstance(value, list):
        if len(value) != rows:
            raise BadRequest(f"{key}: {len(value)} entries for {rows} sequences")
        values = [default if entry is None else entry for entry in value]
    elif spread or rows == 1:
        values = [value] * rows
    else:
        values = [f"{value}_{row}" for row in range(rows)]
    if kind is not None:
        for entry in values:
            if entry is not default and type(entry) is not kind:
                raise BadRequest(f"{key}: must be {kind.__name__}, got {_short(entry)}")
    return values


def _params(raw: object) -> SamplingParams:
    if not isinstance(raw, dict):
        raise BadRequest(f"sampling_params: must be an object, got {_short(raw)}")
    given = {key: value for key, value in raw.items() if value is not None and key in SamplingParams.model_fields}
    for key, value in raw.items():
        if key in given or value is None:
            continue
        if key in _NEUTRAL:
            if value != _NEUTRAL[key]:
                raise BadRequest(f"sampling_params.{key}: only {_NEUTRAL[key]} is supported, got {_short(value)}")
        elif value not in (False, "", [], {}):
            raise BadRequest(f"sampling_params.{key}: this engine does not support it")
    try:
        return SamplingParams.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["sampling_params", *map(str, first["loc"])])
        raise BadRequest(f"{where}: {first['msg']}, got {_short(first['input'])}") from None


def _start(row: int, start: int, prompt: Sequence[int], wanted: bool) -> int:
    if start < -1 or start >= len(prompt):
        raise BadRequest(f"logprob_start_len: {start} for sequence {row} of {len(prompt)} tokens; -1 means none")
    return start if wanted else -1


def _check_length(row: int, item: Item, limits: Limits) -> None:
    total = len(item.prompt) + item.params.max_new_tokens
    if total > limits.context_tokens:
        raise BadRequest(
            f"sequence {row}: {len(item.prompt)} input tokens and max_new_tokens={item.params.max_new_tokens} exceed the "
            f"model's context of {limits.context_tokens} tokens by {total - limits.context_tokens}"
        )
    for token in item.params.stop_token_ids:
        if not 0 <= token < limits.vocabulary:
            raise BadRequest(f"sampling_params.stop_token_ids: {token} is no token id below {limits.vocabulary}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def answer(item: Item, rid: str, job: Job, seconds: float, decode: Callable[[Sequence[int], bool], str]) -> dict[str, Any]:
    """One sequence's answer in SGLang's shape.

    Args:
        seconds: time since the request arrived.
        decode: (ids, whether to skip special tokens) -> text.
    """
    reason = finish_reason(job)
    # An aborted job may still be growing on the compute thread, which appends the id first.
    output_log_probs = list(job.output_log_probs)
    drawn = job.output_ids[: len(output_log_probs)]
    output_ids = drawn[: item.params.max_new_tokens]
    trimmed = reason["type"] == "stop" and not item.params.no_stop_trim
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": reason,
        "prompt_tokens": len(job.prompt),
        "weight_version": WEIGHT_VERSION,
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": len(output_ids),
        "cached_tokens": 0,
        "e2e_latency": seconds,
    }
    if item.return_logprob:
        scored = item.logprob_start >= 0 and reason["type"] != "abort"
        meta["input_token_logprobs"] = []
        if scored:
            meta["input_token_logprobs"] = _triples([None, *job.input_log_probs], job.prompt[item.logprob_start :])
        meta["output_token_logprobs"] = _triples(output_log_probs, drawn)
        meta["output_token_logprobs_length"] = len(drawn)
    text = decode(output_ids[:-1] if trimmed else output_ids, item.params.skip_special_tokens)
    return {"text": text, "output_ids": output_ids, "meta_info": meta}


def finish_reason(job: Job) -> dict[str, Any]:
    """SGLang's `finish_reason`; a job that was cancelled before it ended counts as aborted."""
    if job.finish is None:
        return {"type": "abort", "message": "aborted on request", "status_code": None, "err_type": None}
    if job.finish.matched is None:
        return {"type": "length", "length": job.finish.length}
    return {"type": "stop", "matched": job.finish.matched}


def _triples(log_probs: Sequence[float | None], ids: Sequence[int]) -> list[tuple[float | None, int, None]]:
    """[log-prob, id, null]: the null stands where SGLang can put the token's text."""
    return [(value, token, None) for value, token in zip(log_probs, ids, strict=True)]
