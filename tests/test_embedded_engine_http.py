"""The engine over its HTTP routes, inside the test's own event loop: answers, errors, adapters, many requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from activities.engine_http import AsyncEngineClient, Sampling
from activities.errors import EngineError
from workers.engine.embedded.model import CausalModel, load_model
from workers.engine.embedded.server import EngineOptions, EngineServer
from workers.engine.embedded.tiny import make_tiny_adapter, make_tiny_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("engine")
    model = make_tiny_model(home / "model", context_tokens=512)
    for seed, name in enumerate(("v1", "v2"), start=1):
        make_tiny_adapter(home / name, model, seed=seed)
    return home


@pytest.fixture(scope="module")
def model(home: Path) -> CausalModel:
    return load_model(home / "model")


@pytest.fixture
async def engine(home: Path, model: CausalModel) -> AsyncIterator[EngineServer]:
    options = EngineOptions(str(home / "model"), decode="batched", threads=1, dtype="float32", device="cpu", max_batch=16)
    server = EngineServer(model, options)
    yield server
    server.shut_down()


@pytest.fixture
async def http(engine: EngineServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(engine.app()), base_url="http://engine", timeout=60) as client:
        yield client


def body(prompt: Any = (1, 2, 3), new: int = 8, seed: int | None = 1, **fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": new, "ignore_eos": True, "sampling_seed": seed}
    return {"input_ids": prompt, "sampling_params": params, "return_logprob": True} | fields


async def load(http: httpx.AsyncClient, home: Path, *names: str) -> None:
    for name in names:
        answer = await http.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(home / name)})
        assert answer.status_code == 200, answer.text


def token_log_probs(answer: httpx.Response) -> list[float]:
    assert answer.status_code == 200, answer.text
    return [entry[0] for entry in answer.json()["meta_info"]["output_token_logprobs"]]


async def test_our_own_client_samples_and_scores(engine: EngineServer, home: Path) -> None:
    client = AsyncEngineClient("http://engine", transport=httpx.ASGITransport(engine.app()))
    assert await client.health()
    await client.load_adapter("v1", str(home / "v1"))
    assert await client.loaded_adapters() == {"v1": str(home / "v1")}
    assert (await client.model_info())["is_generation"] is True
    prompts = [[4, 5, 6], [7, 8]]
    sampling = Sampling(max_new_tokens=6, seed=3, stop_token_ids=(9,), repeatable=True)
    sampled = await client.generate(prompts, sampling, adapter="v1", request_ids=["a", "b"])
    assert all(g.finish_reason in ("stop", "length") and len(g.tokens) == len(g.log_probs) for g in sampled)
    whole = [[*p, *g.tokens] for p, g in zip(prompts, sampled, strict=True)]
    scored = await client.generate(whole, Sampling(max_new_tokens=0), adapter="v1", prompt_log_probs=True)
    for one, again in zip(sampled, scored, strict=True):
        assert again.prompt_log_probs is not None
        assert again.prompt_log_probs[-len(one.tokens) :] == pytest.approx(one.log_probs, abs=1e-5)
    await client.unload_adapter("v1")
    with pytest.raises(EngineError, match="not loaded: v1"):
        await client.generate(prompts, sampling, adapter="v1")
    await client.close()


async def test_text_in_and_out(http: httpx.AsyncClient) -> None:
    spoken = {"text": "t5 t6", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True, "temperature": 0}}
    by_text = (await http.post("/generate", json=spoken)).json()
    by_ids = (await http.post("/generate", json=body([5, 6], new=3) | {"sampling_params": spoken["sampling_params"]})).json()
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["text"] == " ".join(f"t{i}" for i in by_text["output_ids"])
    assert "output_token_logprobs" not in by_text["meta_info"]


async def test_each_row_gets_its_own_adapter(http: httpx.AsyncClient, home: Path) -> None:
    await load(http, home, "v1", "v2")
    names = ["v1", "v2", None, "v1"]
    together = (await http.post("/generate", json=body([[1, 2, 3]] * 4, lora_path=names))).json()
    alone = [(await http.post("/generate", json=body(lora_path=name))).json() for name in names]
    for one, other in zip(together, alone, strict=True):
        assert one["output_ids"] == other["output_ids"]
    first = [entry["meta_info"]["output_token_logprobs"][0] for entry in together]
    assert first[0] == first[3]
    assert len({tuple(f[:2]) for f in first}) == 3


async def test_32_requests_at_once_give_what_each_gives_alone(http: httpx.AsyncClient, home: Path) -> None:
    await load(http, home, "v1", "v2")
    requests = [
        body(
            [i % 7 + 1] * (i % 5 + 1), new=5 + i % 11, seed=i, lora_path=(None, "v1", "v2")[i % 3], logprob_start_len=(-1, 0)[i % 2]
        )
        for i in range(32)
    ]
    together = await asyncio.gather(*(http.post("/generate", json=request) for request in requests))
    for request, answer in zip(requests, together, strict=True):
        alone = await http.post("/generate", json=request)
        assert answer.json()["output_ids"] == alone.json()["output_ids"]
        assert token_log_probs(answer) == pytest.approx(token_log_probs(alone), abs=1e-5)


async def test_repeatable_decoding_is_bit_identical_under_load(http: httpx.AsyncClient, home: Path) -> None:
    await load(http, home, "v1")
    wanted = body([3, 1, 4, 1, 5], new=40, seed=9, lora_path="v1", decode="repeatable", logprob_start_len=0)
    alone = (await http.post("/generate", json=wanted)).json()
    noise = [http.post("/generate", json=body([i, i + 1], new=30 + i, seed=i, lora_path="v1")) for i in range(1, 20)]
    answers = await asyncio.gather(*noise, *(http.post("/generate", json=wanted) for _ in range(4)))
    for answer in answers[-4:]:
        again = answer.json()
        assert again["output_ids"] == alone["output_ids"]
        for field in ("input_token_logprobs", "output_token_logprobs"):
            assert again["meta_info"][field] == alone["meta_info"][field]


async def test_sampling_without_a_seed_differs_from_call_to_call(http: httpx.AsyncClient) -> None:
    first, second = [(await http.post("/generate", json=body(new=30, seed=None))).json()["output_ids"] for _ in range(2)]
    assert first != second


async def test_more_requests_than_rows_are_all_answered(http: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(http.post("/generate", json=body([1 + i % 60], new=3 + i % 9, seed=i)) for i in range(60)))
    assert [len(a.json()["output_ids"]) for a in answers] == [3 + i % 9 for i in range(60)]


async def test_adapter_routes_answer_as_sglang(http: httpx.AsyncClient, home: Path) -> None:
    path = str(home / "v1")
    good = await http.post("/load_lora_adapter", json={"lora_name": "run.v1", "lora_path": path, "pinned": True})
    assert good.json() == {"success": True, "error_message": None, "loaded_adapters": {"run.v1": path}}
    again = await http.post("/load_lora_adapter", json={"lora_name": "run.v1", "lora_path": path})
    assert again.status_code == 400
    assert "already loaded" in again.json()["error_message"]
    broken = await http.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": str(home / "model")})
    assert (broken.status_code, broken.json()["success"]) == (400, False)
    assert broken.json()["loaded_adapters"] == {"run.v1": path}
    nameless = await http.post("/load_lora_adapter", json={"lora_path": path})
    assert nameless.status_code == 400
    assert "lora_name" in nameless.json()["error_message"]
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(m["id"], m["parent"] is None) for m in listed] == [(str(home / "model"), True), ("run.v1", False)]
    gone = await http.post("/unload_lora_adapter", json={"lora_name": "run.v1"})
    assert gone.json() == {"success": True, "error_message": None, "loaded_adapters": {}}
    assert (await http.post("/unload_lora_adapter", json={"lora_name": "run.v1"})).status_code == 400


async def test_unloading_waits_for_running_requests_and_never_breaks_them(http: httpx.AsyncClient, home: Path) -> None:
    await load(http, home, "v1")
    request = body(new=200, seed=5, lora_path="v1")
    wanted = (await http.post("/generate", json=request)).json()["output_ids"]
    running = asyncio.create_task(http.post("/generate", json=request))
    await asyncio.sleep(0.05)
    unloading = asyncio.create_task(http.post("/unload_lora_adapter", json={"lora_name": "v1"}))
    await asyncio.sleep(0.02)
    refused = await http.post("/generate", json=request)
    assert refused.status_code == 400
    assert "not loaded: v1" in refused.json()["error"]["message"]
    assert not unloading.done()
    assert (await running).json()["output_ids"] == wanted
    assert (await unloading).json()["success"] is True


async def test_malformed_requests_are_refused_and_the_engine_lives_on(http: httpx.AsyncClient) -> None:
    for content in (b"", b"{", b"[]", b'{"input_ids": "x"}', b'{"input_ids": [1], "sampling_params": {"n": 3}}', b"\x00" * 1000):
        answer = await http.post("/generate", content=content)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
    unknown = await http.post("/generate", json=body([[1], [2]], lora_path=[None, "nobody"]))
    assert unknown.status_code == 400
    assert "nobody" in unknown.json()["error"]["message"]
    assert (await http.get("/generate")).status_code == 405
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/health_generate")).status_code == 200
    assert len(token_log_probs(await http.post("/generate", json=body()))) == 8


async def test_a_failing_forward_pass_fails_its_requests_only(
    http: httpx.AsyncClient, model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "next_logits", lambda *_: torch.zeros(1, 2) @ torch.zeros(3, 1))
        failed = await http.post("/generate", json=body())
    assert failed.status_code == 500
    assert "RuntimeError" in failed.json()["error"]["message"]
    assert len(token_log_probs(await http.post("/generate", json=body()))) == 8


async def test_an_aborted_request_ends_where_it_stands(http: httpx.AsyncClient, engine: EngineServer) -> None:
    running = asyncio.create_task(http.post("/generate", json=body(new=400, rid="mine")))
    other = asyncio.create_task(http.post("/generate", json=body([9, 9], new=60, rid="yours")))
    while engine.batcher.stats.running < 2:
        await asyncio.sleep(0.005)
    assert (await http.post("/abort_request", json={"rid": "mine"})).status_code == 200
    answer = (await running).json()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) < 400
    assert len((await other).json()["output_ids"]) == 60


async def test_information_and_metrics(http: httpx.AsyncClient, home: Path) -> None:
    info = (await http.get("/model_info")).json()
    assert info == (await http.get("/get_model_info")).json()
    assert (info["model_path"], info["is_generation"], info["weight_version"]) == (str(home / "model"), True, "default")
    await http.post("/generate", json=body(new=8))
    server = (await http.get("/server_info")).json()
    assert (server["decode"], server["context_length"], server["vocab_size"]) == ("batched", 512, 64)
    assert (server["internal_states"][0]["new_tokens"], server["internal_states"][0]["prompt_tokens"]) == (8, 3)
    assert "sglang:generation_tokens_total 8" in (await http.get("/metrics")).text
