"""Our client against recorded answers of SGLang (tests/data/sglang, made by scripts/gpu/record_sglang.py).

Each file holds a request, a status and an answer. What is asked here holds for any recording, whatever the numbers in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.engine_http import EngineClient, Generation, Sampling
from activities.engine_wire import parse_generations
from activities.errors import EngineError
from scripts.gpu.record_sglang import ADAPTER, PROMPTS, Case, cases

RECORDED: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((Path(__file__).parent / "data" / "sglang").glob("*"))
}
CASES: dict[str, Case] = {case.name: case for case in cases("/adapters/one")}
SAMPLED = Sampling(max_new_tokens=4, seed=7)
NOT_OURS = ("generate_too_long", "generate_unknown_parameter", "generate_bad_ids")
"""Requests that our client would not send."""


def client(name: str, **changes: Any) -> EngineClient:
    """A client whose engine answers as recorded, and checks that it is asked what the recording was asked."""
    found = RECORDED[name] | changes

    def answer(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == (found["method"], found["path"])
        sent = json.loads(request.content) if request.content else None
        assert name in NOT_OURS or sent == found["request"]
        body = found["answer"]
        return httpx.Response(found["status"], text=body) if isinstance(body, str) else httpx.Response(found["status"], json=body)

    return EngineClient("http://engine", transport=httpx.MockTransport(answer))


def ask(name: str, **changes: Any) -> list[Generation]:
    scored = name.startswith("generate_scored")
    new = RECORDED[name]["request"]["sampling_params"]["max_new_tokens"]
    sampling = Sampling(max_new_tokens=new, temperature=0.0) if scored else SAMPLED
    adapter = None if name == "generate_base" else ADAPTER
    return client(name, **changes).generate(PROMPTS, sampling, adapter=adapter, base=adapter is None, prompt_log_probs=scored)


def test_every_case_is_recorded_and_asks_what_the_recorder_asks() -> None:
    assert RECORDED.keys() == CASES.keys()
    for name, case in CASES.items():
        found = RECORDED[name]
        assert (found["method"], found["path"]) == (case.method, case.path)
        assert name == "generate_too_long" or found["request"] == case.body


@pytest.mark.parametrize("name", ["generate_sampled", "generate_base"])
def test_sampled_answers_are_understood(name: str) -> None:
    for generation in ask(name):
        assert 1 <= len(generation.tokens) == len(generation.log_probs) <= 4
        assert generation.finish_reason == ("length" if len(generation.tokens) == 4 else "stop")
        assert generation.prompt_log_probs is None


@pytest.mark.parametrize(("name", "new"), [("generate_scored", 0), ("generate_scored_one_new", 1)])
def test_prompts_are_scored(name: str, new: int) -> None:
    """SGLang draws a token even when asked for none, and tells its log-prob, but not the token among the output."""
    for prompt, generation in zip(PROMPTS, ask(name), strict=True):
        assert generation.prompt_log_probs is not None
        assert len(generation.prompt_log_probs) == len(prompt) - 1
        assert len(generation.tokens) == new


@pytest.mark.parametrize("name", ["generate_never_loaded", "generate_too_long", "generate_unknown_parameter", "generate_bad_ids"])
def test_refusals_carry_sglangs_words(name: str) -> None:
    engine, status = client(name), RECORDED[name]["status"]
    with pytest.raises(EngineError, match=rf"HTTP {status}: \S+"):
        engine.generate(PROMPTS, SAMPLED, adapter=ADAPTER)


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(("load", "unload"))])
def test_adapter_routes(name: str) -> None:
    engine, body = client(name), CASES[name].body
    assert body is not None

    def act() -> None:
        if name.startswith("load"):
            engine.load_adapter(body["lora_name"], body["lora_path"])
        else:
            engine.unload_adapter(body["lora_name"])

    if RECORDED[name]["answer"]["success"]:
        act()
    else:
        with pytest.raises(EngineError) as caught:
            act()
        assert f"HTTP 400: {RECORDED[name]['answer']['error_message']}" in str(caught.value)


def test_what_is_loaded_and_what_the_model_is() -> None:
    assert client("models").loaded_adapters() == {ADAPTER: "/adapters/one"}
    assert client("model_info").model_info()["is_generation"] is True
    assert client("health").health()
    assert not client("health", status=503).health()


def spoilt(name: str, change: str, value: Any) -> list[Any]:
    """The recorded answer with one thing changed in its first result; `path.to.it` leads there."""
    answer = json.loads(json.dumps(RECORDED[name]["answer"]))
    place: Any = answer[0]
    *path, last = change.split(".")
    for part in path:
        place = place[int(part) if isinstance(place, list) else part]
    place[int(last) if isinstance(place, list) else last] = value
    return list(answer)


@pytest.mark.parametrize(
    ("name", "change", "value", "says"),
    [
        ("generate_sampled", "meta_info.finish_reason", {"type": "stop", "matched": "NaN happened"}, "computed NaN"),
        ("generate_sampled", "meta_info.finish_reason", {"type": "abort", "message": "gone", "status_code": None}, "aborted.*gone"),
        ("generate_sampled", "meta_info.finish_reason", {"type": "bored"}, "'bored'"),
        ("generate_sampled", "meta_info.output_token_logprobs.1.0", None, "1 of 4 log-probs are none.*position 1"),
        ("generate_sampled", "meta_info.output_token_logprobs.1.0", 0.5, "log-probs are none, the first is 0.5"),
        ("generate_sampled", "output_ids", [40], "inconsistent"),
        ("generate_sampled", "output_ids", "no list", "inconsistent"),
        ("generate_sampled", "meta_info", None, "without the fields"),
        ("generate_scored", "meta_info.input_token_logprobs.2.0", None, "1 of 5 log-probs are none"),
        ("generate_scored", "meta_info.input_token_logprobs.2.1", 99, "of others"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(name: str, change: str, value: Any, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        ask(name, answer=spoilt(name, change, value))


def test_the_last_id_of_the_vocabulary_comes_back_as_zero() -> None:
    """SGLang clips what might be an image's hash; the log-prob beside it is the right one."""
    (first, _) = ask("generate_scored", answer=spoilt("generate_scored", "meta_info.input_token_logprobs.2.1", 0))
    assert first.prompt_log_probs is not None


def test_a_response_of_another_length_than_asked_for_is_refused() -> None:
    answer = RECORDED["generate_base"]["answer"]

    def read(asked: int) -> list[Generation]:
        return parse_generations(answer, PROMPTS, max_new_tokens=asked, prompt_log_probs=False, where="test")

    assert len(read(4)) == 2
    with pytest.raises(EngineError, match="4 tokens for at most 3 asked"):
        read(3)
    with pytest.raises(EngineError, match=r"cut the response at 4 of 5 tokens.*engine_memory_fraction"):
        read(5)


def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    read = 0

    def endless() -> Any:
        nonlocal read
        while True:
            read += 1 << 16
            yield b"[" * (1 << 16)

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=endless()))
    with pytest.raises(EngineError, match="larger than"):
        EngineClient("http://engine", transport=transport).generate(PROMPTS, SAMPLED, adapter=ADAPTER)
    assert read < 8 << 20
