"""The one HTTP client for engines: SGLang's own protocol, which the embedded engine speaks too (design 4, docs/engines.md).

Two clients with the same methods, for blocking and for async callers; what they send and understand is in ``engine_wire.py``.
Knows nothing of prompts, policies or runs: adapter names and token ids in, token ids and log-probs out.

Every failure is an EngineError, which is worth another attempt: an engine that restarted refuses until it has its adapters back.
Answers are read up to a limit that no honest one reaches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from activities.engine_wire import (
    BYTES_ALWAYS,
    Generation,
    Json,
    Sampling,
    answer_limit_bytes,
    generate_payload,
    parse_adapters,
    parse_generations,
)
from activities.errors import EngineError

__all__ = ["AsyncEngineClient", "EngineClient", "Generation", "Sampling"]

CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 120.0
"""For loading an adapter, listing and health; generation takes its own limit."""
HEALTH_SECONDS = 30.0
"""SGLang's /health samples a token, takes a second at least, and gives up after 20."""
_BODY_SHOWN = 400
"""Characters of an engine's error text that are repeated in ours."""


def check(response: httpx.Response, what: str) -> Any:
    """The JSON of a good answer.

    Raises:
        EngineError: any other status, or no JSON; carries the engine's own words.
    """
    if response.status_code != 200:
        raise EngineError(f"{what}: HTTP {response.status_code}: {_words(response) or 'no message'}")
    try:
        return response.json()
    except json.JSONDecodeError:
        raise EngineError(
            f"{what}: the answer is not JSON: {response.text[:_BODY_SHOWN]!r}; is this an engine's address?"
        ) from None


def _words(response: httpx.Response) -> str:
    """What an engine says of its error. SGLang has forms of its own for bad requests, aborted ones and adapters, or just text."""
    try:
        body = response.json()
    except ValueError:
        body = None
    found: Any = None
    if isinstance(body, dict):
        error = body.get("error")
        found = body.get("error_message") or (error.get("message") if isinstance(error, dict) else error) or body.get("message")
    return (found if isinstance(found, str) else response.text)[:_BODY_SHOWN].strip()


def check_loaded(response: httpx.Response, what: str) -> None:
    """SGLang reports a failed load as `success: false`, in some versions with status 200."""
    body = check(response, what)
    if isinstance(body, dict) and body.get("success") is False:
        raise EngineError(f"{what}: {body.get('error_message') or 'refused without a reason'}")


def unreachable(url: str, what: str, error: httpx.HTTPError) -> EngineError:
    kind = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "cannot be reached"
    return EngineError(f"{what}: engine {url} {kind} ({type(error).__name__}: {error}); see the engine worker's log")


class _Bounded:
    """Collects an answer's body up to a limit."""

    def __init__(self, response: httpx.Response, limit_bytes: int, what: str) -> None:
        self._response, self._limit, self._what = response, limit_bytes, what
        self._parts: list[bytes] = []
        self._size = 0

    def take(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._limit:
            raise EngineError(f"{self._what}: the answer is larger than {self._limit} bytes; is this an engine's address?")
        self._parts.append(part)

    def whole(self) -> httpx.Response:
        """The response as if it had been read at once; its body is decoded already."""
        return httpx.Response(self._response.status_code, content=b"".join(self._parts), request=self._response.request)


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
        what, limit = _describe("generate", adapter), answer_limit_bytes(prompts, sampling.max_new_tokens)
        body = check(self._send("POST", "/generate", what, payload, timeout_seconds, limit), what)
        return parse_generations(
            body, prompts, max_new_tokens=sampling.max_new_tokens, prompt_log_probs=prompt_log_probs, where=what
        )

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

    def health(self, timeout_seconds: float = HEALTH_SECONDS) -> bool:
        """True if the engine answers in time and says that it is well. Never raises."""
        try:
            return self._http.get("/health", timeout=timeout_seconds).status_code == 200
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        self._http.close()

    def _send(
        self,
        method: str,
        path: str,
        what: str,
        payload: Mapping[str, Any] | None = None,
        seconds: float = CONTROL_SECONDS,
        limit_bytes: int = BYTES_ALWAYS,
    ) -> httpx.Response:
        try:
            with self._http.stream(method, path, json=payload, timeout=_timeout(seconds)) as response:
                body = _Bounded(response, limit_bytes, what)
                for part in response.iter_bytes():
                    body.take(part)
                return body.whole()
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
        what, limit = _describe("generate", adapter), answer_limit_bytes(prompts, sampling.max_new_tokens)
        body = check(await self._send("POST", "/generate", what, payload, timeout_seconds, limit), what)
        return parse_generations(
            body, prompts, max_new_tokens=sampling.max_new_tokens, prompt_log_probs=prompt_log_probs, where=what
        )

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

    async def health(self, timeout_seconds: float = HEALTH_SECONDS) -> bool:
        """See :meth:`EngineClient.health`."""
        try:
            return (await self._http.get("/health", timeout=timeout_seconds)).status_code == 200
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        what: str,
        payload: Mapping[str, Any] | None = None,
        seconds: float = CONTROL_SECONDS,
        limit_bytes: int = BYTES_ALWAYS,
    ) -> httpx.Response:
        try:
            async with self._http.stream(method, path, json=payload, timeout=_timeout(seconds)) as response:
                body = _Bounded(response, limit_bytes, what)
                async for part in response.aiter_bytes():
                    body.take(part)
                return body.whole()
        except httpx.HTTPError as error:
            raise unreachable(self.url, what, error) from None
