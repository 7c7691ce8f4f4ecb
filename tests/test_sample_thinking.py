"""Closing a response's thinking wherever a limit cuts it: the answer begins then, and nothing is said where nothing may stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from activities.errors import InputError
from activities.sample.prompt import template_digest_source
from activities.sample.thinking import CHANNELS, SPENT, TAGS, ThinkingStyle
from activities.sample.tokens import MINIMUM_RESPONSE_TOKENS, RESERVE_TOKENS, PromptCodec
from tests.chat_styles import Style, write_style

ANALYSIS = "<|channel|>analysis<|message|>"
HEADER = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("begun", "closing"),
    [
        ("<think>\nHm", f"\n\n{SPENT}\n</think>\n\n"),
        ("<think>a</think>b<think>c", f"\n\n{SPENT}\n</think>\n\n"),
        ("<think>\nHm</think>", ""),
        ("<think>\nHm</think>\nThe", ""),
        ("The answer", ""),
        ("", ""),
    ],
)
def test_tags(begun: str, closing: str) -> None:
    assert TAGS.closing(begun) == closing


@pytest.mark.parametrize(
    ("begun", "closing"),
    [
        (f"{ANALYSIS}Hm", f"\n\n{SPENT}<|end|>{HEADER}"),
        (ANALYSIS, f"\n\n{SPENT}<|end|>{HEADER}"),
        ("<|channel|>commentary to=python<|message|>x", f"\n\n{SPENT}<|end|>{HEADER}"),
        # Closed already: no words may stand between two messages.
        (f"{ANALYSIS}Hm<|end|>", HEADER),
        # Within a header.
        ("", "<|channel|>final<|message|>"),
        (f"{ANALYSIS}Hm<|end|><|start|>", "assistant<|channel|>final<|message|>"),
        (f"{ANALYSIS}Hm<|end|><|start|>assist", "ant<|channel|>final<|message|>"),
        (f"{ANALYSIS}Hm<|end|><|start|>assistant", "<|channel|>final<|message|>"),
        (f"{ANALYSIS}Hm<|end|><|start|>assistant<|channel|>", "final<|message|>"),
        (f"{ANALYSIS}Hm<|end|><|start|>assistant<|channel|>fi", "nal<|message|>"),
        ("<|channel|>analysis", f"<|message|>{SPENT}<|end|>{HEADER}"),
        # The answer has begun.
        (f"{ANALYSIS}Hm<|end|><|start|>assistant<|channel|>final", ""),
        (f"{ANALYSIS}Hm<|end|>{HEADER}", ""),
        (f"{ANALYSIS}Hm<|end|>{HEADER}The answer", ""),
        ("<|channel|>final <|constrain|>json<|message|>{", ""),
    ],
)
def test_channels(begun: str, closing: str) -> None:
    assert CHANNELS.closing(begun) == closing


@pytest.mark.parametrize(
    ("style", "thought", "answer"),
    [
        (TAGS, "<think>\nHm, a < b.\n</think>", "\n\nThe answer"),
        (CHANNELS, f"{ANALYSIS}Hm, a < b.<|end|>{HEADER}", "The answer"),
        (CHANNELS, f"<|channel|>commentary<|message|>First.<|end|><|start|>assistant{ANALYSIS}Hm.<|end|>{HEADER}", "The answer"),
    ],
)
def test_wherever_the_limit_falls_the_answer_begins(style: ThinkingStyle, thought: str, answer: str) -> None:
    """Cut at every place where a token of the model can end: control tokens are whole."""
    whole = thought + answer
    inside = {i for found in re.finditer(r"<\|?[a-z/]+\|?>", whole) for i in range(found.start() + 1, found.end())}
    for cut in (i for i in range(len(whole) + 1) if i not in inside):
        begun = whole[:cut]
        closing = style.closing(begun)
        if cut >= len(thought):
            assert closing == ""
            assert style.final_answer(begun) == answer[: cut - len(thought)]
        elif closing:
            assert style.final_answer(begun) == ""
            assert style.final_answer(f"{begun}{closing}a = 1").strip() == "a = 1"
            assert style.answer_offset(f"{begun}{closing}a = 1") > cut
            assert closing.count(SPENT) <= 1
            assert "<|end|>\n" not in begun + closing


def test_forced_words_are_part_of_the_identity() -> None:
    source = template_digest_source()
    for style in (TAGS, CHANNELS):
        for begun in style.unfinished:
            assert style.closing(begun) in source


# Limits that a model cannot meet ------------------------------------------------------------------------------------------------
@pytest.fixture
def qwen3(tmp_path: Path) -> Style:
    return write_style(tmp_path / "qwen3", "qwen3")


def test_a_model_that_does_not_think_has_no_budget_for_it(tmp_path: Path) -> None:
    codec = PromptCodec(write_style(tmp_path / "m", "llama3").folder)
    codec.check(context_tokens=4096, thinking_tokens=None)
    with pytest.raises(InputError, match=r"sampling\.thinking_tokens=1000: .* nothing to limit"):
        codec.check(context_tokens=4096, thinking_tokens=1000)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_the_answer_keeps_room_for_itself_and_what_is_forced_before_it(tmp_path: Path, name: str) -> None:
    style = write_style(tmp_path / name, name)
    codec = PromptCodec(style.folder)
    begun = "<think>x" if name == "qwen3" else f"{ANALYSIS}x"
    forced = codec.closing(style.ids(begun))
    assert 0 < len(forced) <= codec.longest_closing()
    least = codec.longest_closing() + RESERVE_TOKENS + MINIMUM_RESPONSE_TOKENS
    codec.check(context_tokens=1000 + least, thinking_tokens=1000)
    with pytest.raises(InputError, match=rf"thinking_tokens=1000 leaves {least - 1} of .* needs at least {least}"):
        codec.check(context_tokens=999 + least, thinking_tokens=1000)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ('{"max_position_embeddings": 4096}', 4096),
        ('{"text_config": {"max_position_embeddings": 4096}}', 4096),
        ('{"max_position_embeddings": 4096, "rope_scaling": {"factor": 4.0}}', 16384),
        ('{"max_position_embeddings": 8192, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 2048}}', 8192),
        ('{"max_position_embeddings": 2048, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}', 2048),
        ("{}", None),
    ],
)
def test_a_context_beyond_the_models_is_refused(qwen3: Style, config: str, most: int | None) -> None:
    """An engine would refuse each request, and each would be asked again for ever."""
    (qwen3.folder / "config.json").write_text(config)
    codec = PromptCodec(qwen3.folder)
    codec.check(context_tokens=most or 1 << 20, thinking_tokens=None)
    if most:
        with pytest.raises(InputError, match=rf"context_tokens={most + 1} exceeds the {most} tokens"):
            codec.check(context_tokens=most + 1, thinking_tokens=None)
