"""The engine client: what it sends, what it understands, and that every trouble comes back as an error that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from activities.engine_http import AsyncEngineClient, EngineClient, Sampling
from activities.errors import EngineError, InputError

Handler = Callable[[httpx.Request], httpx.Response]


def answer(prompt: list[int], output: list[int], **meta: Any) -> dict[str, Any]:
    """One result as SGLang words it."""
    return {
        "text": "abc",
        "output_ids": output,
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": 2},
            "input_token_logprobs": [[None, prompt[0], None], *[[-0.5, t, None] for t in prompt[1:]]],
            "output_token_logprobs": [[-0.25, t, None] for t in output],
        }
        | meta,
    }


def client(handler: Handler) -> EngineClient:
    return EngineClient("http://engine:1/", transport=httpx.MockTransport(handler))


def replying(body: Any, status: int = 200) -> Handler:
    return lambda _: httpx.Response(status, json=body)


def test_generate_sends_the_native_request_and_reads_the_answer() -> None:
    seen: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/generate"
        seen.append(json.loads(request.content))
        return httpx.Response(200, json=[answer([1, 2, 3], [7, 8]), answer([4, 5], [])])

    sampling = Sampling(max_new_tokens=9, seed=5, stop_token_ids=(2,))
    first, second = client(handler).generate([[1, 2, 3], [4, 5]], sampling, adapter="v1", prompt_log_probs=True)
    assert seen[0]["input_ids"] == [[1, 2, 3], [4, 5]]
    assert seen[0]["lora_path"] == ["v1", "v1"]
    assert (seen[0]["return_logprob"], seen[0]["logprob_start_len"]) == (True, 0)
    parameters = seen[0]["sampling_params"]
    assert (parameters["max_new_tokens"], parameters["sampling_seed"], parameters["stop_token_ids"]) == (9, 5, [2])
    assert (parameters["temperature"], parameters["top_p"], parameters["top_k"]) == (1.0, 1.0, -1)
    assert (first.tokens, first.log_probs, first.finish_reason) == ((7, 8), (-0.25, -0.25), "stop")
    assert first.prompt_log_probs == (-0.5, -0.5)
    assert (second.tokens, second.prompt_log_probs) == ((), (-0.5,))


def test_a_single_result_may_come_without_a_list() -> None:
    (generation,) = client(replying(answer([1, 2], [3]))).generate([[1, 2]], Sampling(1), adapter="v1")
    assert generation.tokens == (3,)
    assert generation.prompt_log_probs is None


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "names no adapter"), ({"adapter": "v1", "base": True}, "and asks for the base model")],
)
def test_a_request_must_say_which_model_it_means(options: dict[str, Any], message: str) -> None:
    def never(_: httpx.Request) -> httpx.Response:
        raise AssertionError("it was sent")

    with pytest.raises(InputError, match=message):
        client(never).generate([[1]], Sampling(1), **options)


def test_the_base_is_asked_by_name_of_nothing() -> None:
    seen: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return httpx.Response(200, json=[answer([1, 2], [3])])

    client(handler).generate([[1, 2]], Sampling(1), base=True)
    assert "lora_path" not in seen[0]


WRONG: dict[str, tuple[Any, str]] = {
    "other count": ([], "0 results for 1 prompts"),
    "no meta": ([{"text": "x"}], "without the fields of /generate"),
    "other prompt": ([answer([1, 9], [3])], "log-probs of 2 prompt tokens and got 2 of others"),
    "no prompt log-probs": ([answer([1, 2], [3], input_token_logprobs=[])], "must support logprob_start_len=0"),
    "tokens without log-probs": ([answer([1, 2], [3], output_token_logprobs=[])], "1 response tokens but log-probs of 0"),
    "aborted": ([answer([1, 2], [], finish_reason={"type": "abort", "message": "adapter v1 not loaded"})], "adapter v1 not loaded"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_answer_to_another_question_is_an_error(case: str) -> None:
    body, message = WRONG[case]
    with pytest.raises(EngineError, match=message):
        client(replying(body)).generate([[1, 2]], Sampling(1), adapter="v1", prompt_log_probs=True)


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_a_refusal_carries_the_engines_words(status: int) -> None:
    with pytest.raises(EngineError, match=rf"generate under v1: HTTP {status}: .*out of memory"):
        client(replying({"error": "out of memory"}, status)).generate([[1]], Sampling(1), adapter="v1")


def test_something_else_at_the_address_is_recognised() -> None:
    with pytest.raises(EngineError, match="not JSON"):
        client(lambda _: httpx.Response(200, text="<html>")).loaded_adapters()


@pytest.mark.parametrize(
    ("error", "message"),
    [(httpx.ConnectError("refused"), "cannot be reached"), (httpx.ReadTimeout("slow"), "did not answer in time")],
)
def test_an_engine_that_is_away_is_worth_another_attempt(error: httpx.HTTPError, message: str) -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        raise error

    engine = client(handler)
    with pytest.raises(EngineError, match=message) as caught:
        engine.load_adapter("v1", "/somewhere")
    assert caught.value.retryable
    assert engine.health() is False


def test_adapters_are_listed_loaded_and_unloaded() -> None:
    loaded: dict[str, str] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            cards = [{"id": "base", "parent": None}, *[{"id": n, "root": p, "parent": "base"} for n, p in loaded.items()]]
            return httpx.Response(200, json={"object": "list", "data": cards})
        body = json.loads(request.content)
        if request.url.path == "/load_lora_adapter":
            if body["lora_name"] in loaded:
                return httpx.Response(400, json={"success": False, "error_message": "already loaded"})
            loaded[body["lora_name"]] = body["lora_path"]
        else:
            del loaded[body["lora_name"]]
        return httpx.Response(200, json={"success": True, "loaded_adapters": loaded})

    engine = client(handler)
    engine.load_adapter("v1", "/a/v1")
    assert engine.loaded_adapters() == {"v1": "/a/v1"}
    with pytest.raises(EngineError, match="already loaded"):
        engine.load_adapter("v1", "/a/v1")
    engine.unload_adapter("v1")
    assert engine.loaded_adapters() == {}


def test_a_failed_load_with_status_200_is_a_failure() -> None:
    with pytest.raises(EngineError, match="load adapter v1: rank too large"):
        client(replying({"success": False, "error_message": "rank too large"})).load_adapter("v1", "/a")


async def test_the_async_client_does_the_same() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200)
        return httpx.Response(200, json=[answer([1, 2], [3])])

    engine = AsyncEngineClient("http://engine:1", transport=httpx.MockTransport(handler))
    (generation,) = await engine.generate([[1, 2]], Sampling(1), adapter="v1")
    assert generation.tokens == (3,)
    assert await engine.health()
    with pytest.raises(InputError, match="names no adapter"):
        await engine.generate([[1, 2]], Sampling(1))
    await engine.close()
