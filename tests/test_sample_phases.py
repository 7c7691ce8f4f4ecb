"""One response in one phase or two, against an engine whose answers a test writes: limits, seeds, forced tokens, endings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.engine_http import AsyncEngineClient, Sampling
from activities.errors import EngineError
from activities.sample.generating import Ask, Response, generate_response
from activities.sample.sampling import rollout_seed
from activities.sample.thinking import SPENT
from activities.sample.tokens import RESERVE_TOKENS, EncodedPrompt, PromptCodec
from tests.chat_styles import NAMES, Style, write_style
from workflows.contracts.base import Coordinate

CONTEXT = 1000


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Style]:
    return {name: write_style(tmp_path_factory.mktemp("chat") / name, name) for name in NAMES}


@pytest.fixture(scope="module")
def codecs(styles: dict[str, Style]) -> dict[str, PromptCodec]:
    return {name: PromptCodec(style.folder) for name, style in styles.items()}


@dataclass
class ScriptedEngine:
    """Answers each request with the next tokens of its script, in SGLang's shape. Log-probs count down, so that each is unlike."""

    script: list[tuple[list[int], str]]
    """(tokens, finish reason)."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    _told: int = 0

    @property
    def client(self) -> AsyncEngineClient:
        return AsyncEngineClient("http://engine", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(json.loads(request.content))
        self.timeouts.append(request.extensions["timeout"]["read"])
        tokens, reason = self.script.pop(0)
        entries = [[-(self._told + i + 1) / 64, token, None] for i, token in enumerate(tokens)]
        self._told += len(tokens)
        meta = {"finish_reason": {"type": reason}, "output_token_logprobs": entries}
        return httpx.Response(200, json=[{"text": "", "output_ids": tokens, "meta_info": meta}])

    def parameters(self, request: int) -> dict[str, Any]:
        found: dict[str, Any] = self.seen[request]["sampling_params"]
        return found

    def prompt(self, request: int) -> list[int]:
        found: list[int] = self.seen[request]["input_ids"][0]
        return found


def ask(*, max_new_tokens: int = 500, two_phases: bool = True, seconds: Sequence[float] = (9.0, 7.0)) -> Ask:
    left = iter(seconds)
    return Ask(
        adapter="policy",
        sampling=Sampling(max_new_tokens=max_new_tokens, seed=11),
        second_seed=22,
        max_new_tokens=max_new_tokens,
        context_tokens=CONTEXT,
        two_phases=two_phases,
        seconds_left=lambda: next(left),
    )


def log_probs(count: int, before: int = 0) -> tuple[float, ...]:
    return tuple(-(before + i + 1) / 64 for i in range(count))


async def respond(codec: PromptCodec, engine: ScriptedEngine, limit: int, asked: Ask | None = None, prompt: int = 40) -> Response:
    return await generate_response(engine.client, codec, EncodedPrompt([65] * prompt, limit, ""), asked or ask())


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("name", "thought", "forced"),
    [
        ("qwen3", "<think>\nHm", f"\n\n{SPENT}\n</think>\n\n"),
        ("qwen3-thinking", "Hm", f"\n\n{SPENT}\n</think>\n\n"),
        ("gpt-oss", f"{ANALYSIS}Hm", f"\n\n{SPENT}<|end|>{FINAL}"),
        ("gpt-oss", f"{ANALYSIS}Hm<|end|>", FINAL),
    ],
)
async def test_thinking_that_reaches_its_limit_is_closed_and_answered(
    styles: dict[str, Style], codecs: dict[str, PromptCodec], name: str, thought: str, forced: str
) -> None:
    style, codec = styles[name], codecs[name]
    first, middle, second = style.ids(thought), style.ids(forced), [*style.ids("x = 1"), style.stop_ids[0]]
    engine = ScriptedEngine([(first, "length"), (second, "stop")])
    response = await respond(codec, engine, len(first))
    assert response.tokens == (*first, *middle, *second)
    assert response.mask == (1,) * len(first) + (0,) * len(middle) + (1,) * len(second)
    assert response.log_probs == log_probs(len(first)) + (0.0,) * len(middle) + log_probs(len(second), len(first))
    assert response.finish_reason == "stop"
    assert codec.style is not None
    assert codec.style.final_answer(codec.decode(response.tokens)).strip() == "x = 1"
    # The second request goes on where the first stopped, with what is left of the context, under a seed and a time of its own.
    assert engine.prompt(1) == [65] * 40 + first + middle
    assert [engine.parameters(i)["sampling_seed"] for i in (0, 1)] == [11, 22]
    assert [engine.parameters(i)["max_new_tokens"] for i in (0, 1)] == [len(first), 500]
    assert [seen["lora_path"] for seen in engine.seen] == [["policy"], ["policy"]]
    assert engine.parameters(1)["stop_token_ids"] == style.stop_ids
    assert engine.timeouts == [9.0, 7.0]


async def test_an_answer_that_has_begun_just_goes_on(styles: dict[str, Style], codecs: dict[str, PromptCodec]) -> None:
    style = styles["qwen3"]
    first, second = style.ids("<think>Hm</think>x ="), style.ids(" 1")
    engine = ScriptedEngine([(first, "length"), (second, "stop")])
    response = await respond(codecs["qwen3"], engine, len(first))
    assert response.tokens == (*first, *second)
    assert 0 not in response.mask
    assert response.finish_reason == "stop"
    assert engine.prompt(1) == [65] * 40 + first


@pytest.mark.parametrize(
    ("ending", "reason", "limit"),
    [
        ("", "stop", 4),  # the engine stopped at a token of its own
        ("<|im_end|>", "stop", 5),
        ("<|im_end|>", "length", 5),  # the stop token in the last place
    ],
)
async def test_a_finished_response_is_not_asked_for_more(
    styles: dict[str, Style], codecs: dict[str, PromptCodec], ending: str, reason: str, limit: int
) -> None:
    style = styles["qwen3"]
    tokens = style.ids(f"<think>abc{ending}")
    engine = ScriptedEngine([(tokens, reason)])
    response = await respond(codecs["qwen3"], engine, limit)
    assert len(engine.seen) == 1
    assert response.tokens == tuple(tokens)
    assert response.mask == (1,) * len(tokens)
    assert response.finish_reason == ("stop" if ending or reason == "stop" else "length")


async def test_without_a_budget_there_is_one_phase(styles: dict[str, Style], codecs: dict[str, PromptCodec]) -> None:
    tokens = styles["qwen3"].ids("<think>Hm")
    engine = ScriptedEngine([(tokens, "length")])
    response = await respond(codecs["qwen3"], engine, len(tokens), ask(two_phases=False))
    assert (response.tokens, response.finish_reason) == (tuple(tokens), "length")
    assert len(engine.seen) == 1


async def test_the_answer_gets_what_is_left_of_the_context(styles: dict[str, Style], codecs: dict[str, PromptCodec]) -> None:
    style, codec = styles["qwen3"], codecs["qwen3"]
    first = style.ids("<think>" + "a" * 600)
    forced = codec.closing(first)
    engine = ScriptedEngine([(first, "length"), (style.ids("b"), "stop")])
    await respond(codec, engine, len(first))
    assert engine.parameters(1)["max_new_tokens"] == CONTEXT - RESERVE_TOKENS - 40 - len(first) - len(forced) < 500
    # Where nothing is left, what there is stands, unforced.
    full = style.ids("<think>" + "a" * (CONTEXT - RESERVE_TOKENS - 40 - len(forced) - 1))
    engine = ScriptedEngine([(full, "length")])
    response = await respond(codec, engine, len(full))
    assert (response.tokens, response.finish_reason, len(engine.seen)) == (tuple(full), "length", 1)


@pytest.mark.parametrize("phase", [1, 2])
async def test_more_tokens_than_asked_for_are_refused_in_either_phase(
    styles: dict[str, Style], codecs: dict[str, PromptCodec], phase: int
) -> None:
    thought = styles["qwen3"].ids("<think>Hm")
    many = [66] * 501
    engine = ScriptedEngine([(many, "length")] if phase == 1 else [(thought, "length"), (many, "length")])
    with pytest.raises(EngineError, match=r"501 tokens for at most \d+ asked"):
        await respond(codecs["qwen3"], engine, len(thought))


async def test_a_response_that_the_engine_cut_is_refused(styles: dict[str, Style], codecs: dict[str, PromptCodec]) -> None:
    """An engine whose KV memory is short shortens what it was asked for, and says `length`: that is not the model's answer."""
    engine = ScriptedEngine([(styles["qwen3"].ids("<think>abc"), "length")])
    with pytest.raises(EngineError, match=r"cut the response at 4 of 5 tokens.*engine_memory_fraction"):
        await respond(codecs["qwen3"], engine, 5)


def test_every_coordinate_and_phase_has_its_own_seed() -> None:
    places = [Coordinate(step=s, group=g, rollout=r) for s in range(1, 4) for g in range(4) for r in range(16)]
    seeds = [rollout_seed(run, at, phase) for run in (0, 1) for at in places for phase in (1, 2)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    # What runs of one phase have always drawn.
    assert rollout_seed(3, Coordinate(step=1, group=2, rollout=3)) == 421384853


def test_fixtures_write_what_they_say(tmp_path: Path) -> None:
    style = write_style(tmp_path / "q", "qwen3")
    assert style.text(style.ids("<think>é</think>")) == "<think>é</think>"
    assert len(style.ids("<think>é</think>")) == 4
