"""The one HTTP client for engines: SGLang's own protocol, which the embedded engine speaks too (design 4).

Two clients with the same methods, for blocking and for async callers; what they send and understand is written once, above them.
Knows nothing of prompts, policies or runs: adapter names and token ids in, token ids and log-probs out.

Every failure is an EngineError, which is worth another attempt: an engine that restarted refuses until it has its adapters back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from activities.errors import EngineError, InputError

CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 120.0
"""For loading an adapter, listing and health; generation takes its own limit."""
_BODY_SHOWN = 400
"""Characters of an engine's error text that are repeated in ours."""

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
def parse_generations(body: Any, prompts: Sequence[Sequence[int]], *, prompt_log_probs: bool, where: str) -> list[Generation]:
    """Read the answer to :func:`generate_payload`, checking that it is the answer to these prompts.

    Raises:
        EngineError: another number of results, log-probs that are missing, or that belong to other tokens.
    """
    items = body if isinstance(body, list) else [body]
    if len(items) != len(prompts) or not all(isinstance(item, dict) for item in items):
        raise EngineError(f"{where}: {len(items)} results for {len(prompts)} prompts; the engine does not speak this protocol")
    try:
        return [_generation(item, prompt, prompt_log_probs, where) for item, prompt in zip(items, prompts, strict=True)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{where}: answer without the fields of /generate ({type(error).__name__}: {error})") from None


def _generation(item: Json, prompt: Sequence[int], prompt_log_probs: bool, where: str) -> Generation:
    meta: Json = item["meta_info"]
    reason = meta.get("finish_reason") or {"type": "length"}
    kind = reason["type"] if isinstance(reason, dict) else str(reason)
    if kind == "abort":
        detail = reason.get("message", "") if isinstance(reason, dict) else ""
        raise EngineError(f"{where}: the engine aborted the request: {detail or 'no reason given'}; another attempt will be made")
    output = meta.get("output_token_logprobs") or []
    tokens = tuple(int(entry[1]) for entry in output)
    if (sent := item.get("output_ids")) is not None and tuple(sent) != tokens:
        raise EngineError(
            f"{where}: {len(sent)} response tokens but log-probs of {len(tokens)} others; the engine's answer is inconsistent"
        )
    return Generation(
        tokens=tokens,
        log_probs=tuple(float(entry[0]) for entry in output),
        text=str(item.get("text", "")),
        finish_reason=kind,
        prompt_log_probs=_prompt_log_probs(meta, prompt, where) if prompt_log_probs else None,
        meta=meta,
    )


def _prompt_log_probs(meta: Json, prompt: Sequence[int], where: str) -> tuple[float, ...]:
    entries = meta.get("input_token_logprobs") or []
    if [int(entry[1]) for entry in entries] != list(prompt):
        raise EngineError(
            f"{where}: asked for the log-probs of {len(prompt)} prompt tokens and got {len(entries)} of others; "
            "the engine must support logprob_start_len=0"
        )
    return tuple(float(entry[0]) for entry in entries[1:])  # nothing precedes the first token, so it has no log-prob


def parse_adapters(body: Any) -> dict[str, str]:
    """Name -> directory of the loaded adapters, from GET /v1/models: the entries that have a parent model."""
    return {str(card["id"]): str(card.get("root") or "") for card in body.get("data", []) if card.get("parent")}


def check(response: httpx.Response, what: str) -> Any:
    """The JSON of a good answer.

    Raises:
        EngineError: any other status, or no JSON; carries the engine's own words.
    """
    if response.status_code != 200:
        text = response.text[:_BODY_SHOWN].strip() or "no message"
        raise EngineError(f"{what}: HTTP {response.status_code}: {text}")
    try:
        return response.json()
    except json.JSONDecodeError:
        raise EngineError(
            f"{what}: the answer is not JSON: {response.text[:_BODY_SHOWN]!r}; is this an engine's address?"
        ) from None


def check_loaded(response: httpx.Response, what: str) -> None:
    """SGLang reports a failed load as `success: false`, in some versions with status 200."""
    body = check(response, what)
    if isinstance(body, dict) and body.get("success") is False:
        raise EngineError(f"{what}: {body.get('error_message') or 'refused without a reason'}")


def unreachable(url: str, what: str, error: httpx.HTTPError) -> EngineError:
    kind = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "cannot be reached"
    return EngineError(f"{what}: engine {url} {kind} ({type(error).__name__}: {error}); see the engine worker's log")


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=CONNECT_SECONDS)


def _describe(verb: str, adapter: str | None) -> str:
    return f"{verb} under {adapter or 'the base model'}"


# Clients ------------------------------------------------------------------------------------------------------------------
class EngineClient:
    """Blocking client of one engine. Thread-safe, as httpx is."""

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        # An engine is a neighbour: proxies from the environment would only break it.
        self._http = httpx.Client(base_url=self.url, timeout=_timeout(CONTROL_SECONDS), transport=transport, trust_env=False)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        adapter: str | None = None,
        base: bool = False,
        prompt_log_probs: bool = False,
        request_ids: Sequence[str] | None = None,
        timeout_seconds: float = 3600.0,
    ) -> list[Generation]:
        """One response per prompt.

        Raises:
            InputError: no adapter named and `base` not set.
            EngineError: no answer, an error, or an answer to another question.
        """
        payload = generate_payload(
            prompts, sampling, adapter=adapter, base=base, prompt_log_probs=prompt_log_probs, request_ids=request_ids
        )
        what = _describe("generate", adapter)
        body = check(self._send("POST", "/generate", what, payload, timeout_seconds), what)
        return parse_generations(body, prompts, prompt_log_probs=prompt_log_probs, where=what)

    def load_adapter(self, name: str, directory: str) -> None:
        """Make the engine serve the PEFT directory (a path on the engine's host) under this name, beside what it serves."""
        what = f"load adapter {name}"
        check_loaded(self._send("POST", "/load_lora_adapter", what, {"lora_name": name, "lora_path": directory}), what)

    def unload_adapter(self, name: str) -> None:
        what = f"unload adapter {name}"
        check_loaded(self._send("POST", "/unload_lora_adapter", what, {"lora_name": name}), what)

    def loaded_adapters(self) -> dict[str, str]:
        """Name -> directory, as the engine knows them now."""
        return parse_adapters(check(self._send("GET", "/v1/models", "list adapters"), "list adapters"))

    def model_info(self) -> Json:
        body: Json = check(self._send("GET", "/model_info", "model info"), "model info")
        return body

    def health(self) -> bool:
        """True if the engine answers and says that it is well. Never raises."""
        try:
            return self._http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        self._http.close()

    def _send(
        self, method: str, path: str, what: str, payload: Mapping[str, Any] | None = None, seconds: float = CONTROL_SECONDS
    ) -> httpx.Response:
        try:
            return self._http.request(method, path, json=payload, timeout=_timeout(seconds))
        except httpx.HTTPError as error:
            raise unreachable(self.url, what, error) from None


class AsyncEngineClient:
    """Async client of one engine; the same methods as :class:`EngineClient`.

    `connections` bounds the requests in flight: samplers run hundreds of long ones side by side.
    """

    def __init__(self, url: str, *, connections: int = 512, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=self.url, timeout=_timeout(CONTROL_SECONDS), limits=limits, transport=transport, trust_env=False
        )

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        adapter: str | None = None,
        base: bool = False,
        prompt_log_probs: bool = False,
        request_ids: Sequence[str] | None = None,
        timeout_seconds: float = 3600.0,
    ) -> list[Generation]:
        """See :meth:`EngineClient.generate`."""
        payload = generate_payload(
            prompts, sampling, adapter=adapter, base=base, prompt_log_probs=prompt_log_probs, request_ids=request_ids
        )
        what = _describe("generate", adapter)
        body = check(await self._send("POST", "/generate", what, payload, timeout_seconds), what)
        return parse_generations(body, prompts, prompt_log_probs=prompt_log_probs, where=what)

    async def load_adapter(self, name: str, directory: str) -> None:
        what = f"load adapter {name}"
        check_loaded(await self._send("POST", "/load_lora_adapter", what, {"lora_name": name, "lora_path": directory}), what)

    async def unload_adapter(self, name: str) -> None:
        what = f"unload adapter {name}"
        check_loaded(await self._send("POST", "/unload_lora_adapter", what, {"lora_name": name}), what)

    async def loaded_adapters(self) -> dict[str, str]:
        return parse_adapters(check(await self._send("GET", "/v1/models", "list adapters"), "list adapters"))

    async def model_info(self) -> Json:
        body: Json = check(await self._send("GET", "/model_info", "model info"), "model info")
        return body

    async def abort(self, request_id: str) -> None:
        """Ask the engine to drop a request that nobody waits for any more; best effort, so failures are ignored."""
        try:
            await self._http.post("/abort_request", json={"rid": request_id})
        except httpx.HTTPError:
            return

    async def health(self) -> bool:
        try:
            return (await self._http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(
        self, method: str, path: str, what: str, payload: Mapping[str, Any] | None = None, seconds: float = CONTROL_SECONDS
    ) -> httpx.Response:
        try:
            return await self._http.request(method, path, json=payload, timeout=_timeout(seconds))
        except httpx.HTTPError as error:
            raise unreachable(self.url, what, error) from None
