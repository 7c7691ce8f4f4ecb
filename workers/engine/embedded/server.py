"""The HTTP side: routes, waiting for results, clients that go away. Knows the protocol and the batcher; computes nothing itself.

Errors of `/generate` are ``{"error": {"message": ...}}``: 400 for a request that cannot be answered as it stands, 500 for a failed
computation, 503 while shutting down. Adapter routes answer ``{"success", "error_message", "loaded_adapters"}`` with 200 or 400.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workers.engine.embedded.adapters import Adapter, AdapterError, AdapterRegistry
from workers.engine.embedded.batcher import Batcher
from workers.engine.embedded.jobs import EngineStopped, Job
from workers.engine.embedded.model import CausalModel
from workers.engine.embedded.protocol import (
    WEIGHT_VERSION,
    BadRequest,
    Decode,
    GenerateRequest,
    Item,
    Limits,
    answer,
    parse_generate,
    parse_json,
)
from workers.engine.embedded.sampling import Choice, Draws

HEALTH_SECONDS = 20.0
"""`/health_generate` fails when nothing was computed for so long although it was asked for."""

log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine was started with; `/server_info` shows it."""

    model_path: str
    decode: Decode
    threads: int
    dtype: str
    device: str
    max_batch: int


class EngineServer:
    """One engine: model, adapters, compute thread. Every method runs on the event loop."""

    def __init__(self, model: CausalModel, options: EngineOptions) -> None:
        self.options = options
        self.boot_id = uuid.uuid4().hex
        self.started = time.time()
        self.adapters = AdapterRegistry(model.hooks.linears)
        self.batcher = Batcher(model, options.max_batch, options.threads)
        self._model = model
        encode = None if model.tokenizer is None else model.tokenizer.encode
        self._limits = Limits(model.vocabulary, model.context_tokens, encode)
        self._pending: set[_Countdown] = set()
        self.batcher.start()

    def shut_down(self) -> None:
        """Answer everything that is waiting with 503, at once, whatever the compute thread is doing."""
        self.batcher.stop()
        for waiting in self._pending:
            waiting.fail(EngineStopped("the engine is shutting down; send the request to another one"))

    # Computing ------------------------------------------------------------------------------------------------------------
    async def run_items(self, request: GenerateRequest, http: Request | None) -> list[Job]:
        """Compute every sequence of a request; give up when its client goes away.

        Raises:
            AdapterError: an adapter is not loaded. Nothing was computed.
            EngineStopped, ComputeFailed: for the first sequence that failed.
        """
        countdown = _Countdown()
        held: list[Adapter | None] = []
        jobs: list[Job] = []
        try:
            for item in request.items:
                held.append(self.adapters.acquire(item.lora_name))
            self._pending.add(countdown)
            alone = (request.decode or self.options.decode) == "repeatable"
            jobs = [self._job(item, a, alone, countdown) for item, a in zip(request.items, held, strict=True)]
            countdown.expect([(item.rid, job) for item, job in zip(request.items, jobs, strict=True)])
            for job in jobs:
                self.batcher.submit(job)
            await _wait(countdown.done, http)
            return jobs
        finally:
            for job in jobs:
                job.cancelled = True
            for adapter in held:
                self.adapters.release(adapter)
            self._pending.discard(countdown)

    def _job(self, item: Item, adapter: Adapter | None, alone: bool, on_done: Callable[[Job], None]) -> Job:
        params = item.params
        return Job(
            prompt=item.prompt,
            choice=Choice(params.temperature, params.top_p, params.top_k),
            draws=Draws(params.sampling_seed),
            max_new_tokens=params.max_new_tokens,
            stop_ids=frozenset() if params.ignore_eos else self._model.eos_ids.union(params.stop_token_ids),
            adapter=adapter,
            alone=alone,
            score_from=item.logprob_start,
            on_done=on_done,
        )

    async def generate(self, http: Request) -> Response:
        begun = time.monotonic()
        try:
            request = parse_generate(await http.body(), self._limits)
            jobs = await self.run_items(request, http)
        except (BadRequest, AdapterError) as error:
            log.warning("request_refused", message=str(error))
            return _error(400, str(error))
        except EngineStopped as error:
            return _error(503, str(error))
        except ClientGone:
            log.info("client_gone")
            return Response(status_code=499)
        except Exception as error:  # a failed computation, already logged by the compute thread
            return _error(500, f"{type(error).__name__}: {error}")
        seconds = time.monotonic() - begun
        answers = [
            answer(item, item.rid or uuid.uuid4().hex, job, seconds, self._text)
            for item, job in zip(request.items, jobs, strict=True)
        ]
        return _json(200, answers if request.batched else answers[0])

    def _text(self, ids: Sequence[int], skip_special: bool) -> str:
        if self._model.tokenizer is None:
            return ""
        text: str = self._model.tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    async def abort_request(self, http: Request) -> Response:
        """End requests by their `rid` (or all of them) where they stand; unknown ones are none of our business, as in SGLang."""
        try:
            raw = parse_json(await http.body())
            rid = None if raw.get("abort_all") is True else _string(raw, "rid")
        except BadRequest as error:
            return _error(400, str(error))
        for waiting in tuple(self._pending):
            waiting.abort(rid)
        return Response(status_code=200)

    # Adapters -------------------------------------------------------------------------------------------------------------
    async def load_lora_adapter(self, http: Request) -> Response:
        try:
            raw = parse_json(await http.body())
            name, path = _string(raw, "lora_name"), _string(raw, "lora_path")
            await self.adapters.load(name, path)
        except (BadRequest, AdapterError) as error:
            return self._adapter_answer(error)
        log.info("adapter_loaded", name=name, path=path)
        return self._adapter_answer(None)

    async def unload_lora_adapter(self, http: Request) -> Response:
        try:
            name = _string(parse_json(await http.body()), "lora_name")
            await self.adapters.unload(name)
        except (BadRequest, AdapterError) as error:
            return self._adapter_answer(error)
        log.info("adapter_unloaded", name=name)
        return self._adapter_answer(None)

    def _adapter_answer(self, error: Exception | None) -> Response:
        if error is not None:
            log.warning("adapter_refused", message=str(error))
        body = {
            "success": error is None,
            "error_message": None if error is None else str(error),
            "loaded_adapters": self.adapters.paths(),
        }
        return _json(200 if error is None else 400, body)

    # Information ----------------------------------------------------------------------------------------------------------
    async def health(self, http: Request) -> Response:
        return Response(status_code=200 if self.batcher.alive else 503)

    async def health_generate(self, http: Request) -> Response:
        """Prove that tokens come out: one is sampled from the base model, unless others came out since the question was asked."""
        asked = time.monotonic()
        token = f'{{"input_ids": [0], "sampling_params": {{"max_new_tokens": 1}}, "decode": "{self.options.decode}"}}'
        probe = asyncio.create_task(self.run_items(parse_generate(token.encode(), self._limits), None))
        while not probe.done() and time.monotonic() - asked < HEALTH_SECONDS:
            await asyncio.wait({probe}, timeout=0.1)
            if self.batcher.stats.progress_at > asked:
                break
        healthy = self.batcher.stats.progress_at > asked or (probe.done() and probe.exception() is None)
        if not probe.done():
            probe.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await probe
        return Response(status_code=200 if healthy else 503)

    async def model_info(self, http: Request) -> Response:
        config = self._model.network.config
        body = {
            "model_path": self.options.model_path,
            "tokenizer_path": self.options.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": WEIGHT_VERSION,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": config.model_type,
            "architectures": config.architectures,
        }
        return _json(200, body)

    async def server_info(self, http: Request) -> Response:
        body = {
            "engine": "embedded",
            "boot_id": self.boot_id,
            "started": self.started,
            **{field: getattr(self.options, field) for field in EngineOptions.__slots__},
            "tokenizer_path": self.options.model_path,
            "context_length": self._model.context_tokens,
            "vocab_size": self._model.vocabulary,
            "max_running_requests": self.options.max_batch,
            "enable_lora": True,
            "loaded_adapters": self.adapters.paths(),
            "internal_states": [msgspec.to_builtins(self.batcher.stats)],
            "version": _version(),
        }
        return _json(200, body)

    async def models(self, http: Request) -> Response:
        base = self.options.model_path
        entries: list[tuple[str, str, str | None]] = [(base, base, None)]
        entries += [(name, path, base) for name, path in self.adapters.paths().items()]
        data = [
            {
                "id": name,
                "object": "model",
                "created": int(self.started),
                "owned_by": "tttd",
                "root": root,
                "parent": parent,
                "max_model_len": self._model.context_tokens if parent is None else None,
            }
            for name, root, parent in entries
        ]
        return _json(200, {"object": "list", "data": data})

    async def metrics(self, http: Request) -> Response:
        """Prometheus text under SGLang's names, so that one dashboard reads both."""
        stats = self.batcher.stats
        values = [
            ("num_running_reqs", "gauge", stats.running),
            ("num_queue_reqs", "gauge", stats.waiting),
            ("prompt_tokens_total", "counter", stats.prompt_tokens),
            ("generation_tokens_total", "counter", stats.new_tokens),
            ("num_requests_total", "counter", stats.finished),
            ("num_failed_requests_total", "counter", stats.failed),
        ]
        text = "".join(f"# TYPE sglang:{name} {kind}\nsglang:{name} {value}\n" for name, kind, value in values)
        return Response(text, media_type="text/plain; version=0.0.4")

    def app(self) -> Starlette:
        get = {
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/v1/models": self.models,
            "/metrics": self.metrics,
        }
        post = {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/load_lora_adapter": self.load_lora_adapter,
            "/unload_lora_adapter": self.unload_lora_adapter,
        }
        routes = [Route(path, handler, methods=["GET"]) for path, handler in get.items()]
        routes += [Route(path, handler, methods=["POST"]) for path, handler in post.items()]
        return Starlette(routes=routes)


class ClientGone(Exception):
    """The client closed its connection before the answer was ready."""


class _Countdown:
    """One request's wait: done after its last job has ended or was aborted, or at the first failure.

    Called by the compute thread for each job that ends; everything else happens on the event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._by_rid: Sequence[tuple[str | None, Job]] = ()
        self._left: set[Job] = set()

    def expect(self, jobs_by_rid: Sequence[tuple[str | None, Job]]) -> None:
        self._by_rid = jobs_by_rid
        self._left = {job for _, job in jobs_by_rid}

    def __call__(self, job: Job) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._ended, job)

    def abort(self, rid: str | None) -> None:
        """End the job of this request id as it stands; None ends all."""
        for key, job in self._by_rid:
            if rid in (None, key):
                job.cancelled = True
                self._ended(job)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _ended(self, job: Job) -> None:
        self._left.discard(job)
        if job.error is not None:
            self.fail(job.error)
        elif not self._left and not self.done.done():
            self.done.set_result(None)


async def _wait(done: asyncio.Future[None], http: Request | None) -> None:
    """Wait for a result or for the client's departure, whichever is first."""
    if http is None:
        return await done
    gone = asyncio.create_task(_departure(http))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            done.cancel()
            raise ClientGone
        done.result()
    finally:
        gone.cancel()
    return None


async def _departure(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _string(raw: dict[str, Any], key: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{key}: must be a non-empty string, got {value!r:.60}")
    return value


def _json(status: int, body: Any) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    return _json(status, {"error": {"message": message}})


def _version() -> str:
    try:
        return version("tttd")
    except Exception:  # started from a checkout that is not installed
        return "unknown"
