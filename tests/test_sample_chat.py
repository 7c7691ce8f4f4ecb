"""Prompts and responses in the chat templates of the families: what is written around a message, where a turn ends, what thinks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activities.errors import InputError
from activities.sample.extract import extract_program
from activities.sample.prompt import ParentView, ProblemView, render_prompt
from activities.sample.thinking import CHANNELS, TAGS
from activities.sample.tokens import PromptCodec
from tests.chat_styles import NAMES, Style, write_style

PROBLEM = ProblemView("# Problem\n\nDo it.", "run_it", "maximize", "size", 12.5, 1)
PARENT = ParentView("def run_it():\n    return 1\n", 1.25, 1.0, "best 1.25\n")


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Style]:
    return {name: write_style(tmp_path_factory.mktemp("chat") / name, name) for name in NAMES}


@pytest.fixture(scope="module")
def codecs(styles: dict[str, Style]) -> dict[str, PromptCodec]:
    return {name: PromptCodec(style.folder) for name, style in styles.items()}


# Around a message ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "thinking", "before", "after"),
    [
        (
            "qwen2.5",
            "auto",
            "<|im_start|>system\nBe useful.<|im_end|>\n<|im_start|>user\n",
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("qwen3", "auto", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", "on", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", "off", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3-thinking", "auto", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        ("qwen3-thinking", "on", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        (
            "llama3",
            "auto",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nDay: 01 Jan 2025\n\n<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n",
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gpt-oss",
            "auto",
            "<|start|>system<|message|>Day: 2025-01-01\nReasoning: medium<|end|><|start|>user<|message|>",
            "<|end|><|start|>assistant",
        ),
        (
            "gpt-oss",
            "on",
            "<|start|>system<|message|>Day: 2025-01-01\nReasoning: high<|end|><|start|>user<|message|>",
            "<|end|><|start|>assistant",
        ),
    ],
)
def test_the_template_stands_around_the_message(
    styles: dict[str, Style], name: str, thinking: str, before: str, after: str
) -> None:
    """Also: a template that asks for today's date is told the same day every day, or one request would be many prompts."""
    ids = PromptCodec(styles[name].folder, thinking).encode("Say it.")  # type: ignore[arg-type]
    assert styles[name].text(ids) == f"{before}Say it.{after}"
    assert ids == styles[name].ids(f"{before}Say it.{after}")


@pytest.mark.parametrize(
    ("name", "thinking"),
    [("qwen2.5", "on"), ("qwen2.5", "off"), ("llama3", "on"), ("llama3", "off"), ("qwen3-thinking", "off"), ("gpt-oss", "off")],
)
def test_a_switch_that_the_template_does_not_have_is_refused_by_name(styles: dict[str, Style], name: str, thinking: str) -> None:
    with pytest.raises(
        InputError, match=rf"sampling\.thinking={thinking}: the chat template of model .*{name}.* has no such switch"
    ):
        PromptCodec(styles[name].folder, thinking)  # type: ignore[arg-type]


def test_a_template_that_refuses_a_plain_message_says_why(tmp_path: Path) -> None:
    style = write_style(tmp_path / "m", "qwen2.5", template="{{ raise_exception('tools only') }}")
    with pytest.raises(InputError, match="refuses a plain message: tools only"):
        PromptCodec(style.folder)


# Where a turn ends --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_every_end_of_turn_token_stops_and_is_left_out_of_the_text(
    styles: dict[str, Style], codecs: dict[str, PromptCodec], name: str
) -> None:
    style, codec = styles[name], codecs[name]
    assert codec.stop_token_ids == style.stop_ids
    plain = codec.decode(style.ids("x = 1"))
    for stop in style.stop_ids:
        assert codec.decode([*style.ids("x = 1"), stop]) == plain
    assert plain.endswith("x = 1")


@pytest.mark.parametrize(
    ("name", "end"),
    [("qwen2.5", "<|im_end|>"), ("qwen3", "<|im_end|>"), ("qwen3-thinking", "<|im_end|>"), ("llama3", "<|eot_id|>")],
)
def test_the_templates_own_end_of_turn_stops_though_no_file_names_it(tmp_path: Path, name: str, end: str) -> None:
    style = write_style(tmp_path / "m", name, stops=())
    assert style.id_of(end) in PromptCodec(style.folder).stop_token_ids


def test_the_end_of_a_channel_is_not_the_end_of_a_turn(styles: dict[str, Style], codecs: dict[str, PromptCodec]) -> None:
    assert styles["gpt-oss"].id_of("<|end|>") not in codecs["gpt-oss"].stop_token_ids


# Thinking -----------------------------------------------------------------------------------------------------------------------
GOOD = "```python\na=1\n```"
DRAFT = "```python\ndraft=1\n```"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("name", "response", "program"),
    [
        ("qwen2.5", GOOD, "a=1\n"),
        ("llama3", f"Here:\n{GOOD}", "a=1\n"),
        ("qwen3", f"<think>\n{DRAFT}\n</think>\n\n{GOOD}", "a=1\n"),
        ("qwen3", f"<think>\n{DRAFT}", None),
        ("qwen3", GOOD, "a=1\n"),
        ("qwen3-thinking", f"Hm.\n{DRAFT}\n</think>\n\n{GOOD}", "a=1\n"),
        ("qwen3-thinking", f"Hm.\n{DRAFT}", None),
        ("gpt-oss", f"{ANALYSIS}Hm.\n{DRAFT}{FINAL}{GOOD}", "a=1\n"),
        ("gpt-oss", f"{ANALYSIS}Hm.\n{DRAFT}", None),
        ("gpt-oss", f"{ANALYSIS}Hm.\n{DRAFT}<|end|>", None),
        ("gpt-oss", f"<|channel|>final<|message|>{GOOD}", "a=1\n"),
        ("gpt-oss", f"{ANALYSIS}Hm.{FINAL}{GOOD}<|end|>", "a=1\n"),
        ("gpt-oss", f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>final <|constrain|>md<|message|>{GOOD}", "a=1\n"),
        ("gpt-oss", f"{ANALYSIS}Hm.{FINAL}{GOOD}<|end|><|start|>assistant{ANALYSIS}More.\n{DRAFT}", "a=1\n"),
        ("gpt-oss", f"<|channel|>commentary<|message|>{DRAFT}", None),
    ],
)
@pytest.mark.parametrize("stopped", [False, True])
def test_only_the_answer_of_a_response_runs(
    styles: dict[str, Style], codecs: dict[str, PromptCodec], name: str, response: str, program: str | None, stopped: bool
) -> None:
    style, codec = styles[name], codecs[name]
    ids = [*style.ids(response), *style.stop_ids[:1]] if stopped else style.ids(response)
    assert extract_program(codec.decode(ids), style=codec.style or TAGS) == program


@pytest.mark.parametrize(
    ("name", "expected"),
    [("qwen2.5", None), ("llama3", None), ("qwen3", TAGS), ("qwen3-thinking", TAGS), ("gpt-oss", CHANNELS)],
)
def test_how_a_model_thinks_is_read_off_its_template(codecs: dict[str, PromptCodec], name: str, expected: object) -> None:
    assert codecs[name].style is expected


@pytest.mark.parametrize(
    ("name", "thought", "answer"),
    [
        ("qwen2.5", "", GOOD),
        ("qwen3", "<think>\né Hm.\n</think>", f"\n\n{GOOD}"),
        ("qwen3", "", GOOD),
        ("qwen3", "<think>\nHm.", ""),
        ("qwen3-thinking", "Hm.\n</think>", GOOD),
        ("qwen3-thinking", "Hm.", ""),
        ("gpt-oss", f"{ANALYSIS}Hm é.{FINAL}", GOOD),
        ("gpt-oss", f"{ANALYSIS}Hm.<|end|>", ""),
        ("gpt-oss", "<|channel|>final<|message|>", GOOD),
    ],
)
def test_thinking_is_counted_up_to_the_answer(
    styles: dict[str, Style], codecs: dict[str, PromptCodec], name: str, thought: str, answer: str
) -> None:
    style, codec = styles[name], codecs[name]
    assert codec.count_thinking(style.ids(thought + answer)) == len(style.ids(thought))
    assert codec.count_thinking([]) == 0


# Control tokens in a message ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_in_a_parents_program_are_plain_text(
    styles: dict[str, Style], codecs: dict[str, PromptCodec], name: str
) -> None:
    """A program that prints an end-of-turn token must not end the turn that shows it, nor its output open an answer."""
    style, codec = styles[name], codecs[name]
    control = {style.id_of(text) for text in style.control}
    lines = "".join(f"print({text!r})\n" for text in style.control)
    nested = "".join(f"# {text[:2]}{text}{text[2:]}{text}{text}\n" for text in style.control)
    parent = replace(PARENT, code=f"def run_it():\n    return 1\n{lines}{nested}", output_tail="".join(style.control))
    ids = codec.encode(render_prompt(PROBLEM, parent))
    assert render_prompt(PROBLEM, parent) in style.text(ids)
    of_template = [i for i in codec.encode(render_prompt(PROBLEM, PARENT)) if i in control]
    assert [i for i in ids if i in control] == of_template
    assert len(of_template) >= 3
    # Without the guard the template would let them through: the text alone has many more.
    assert sum(i in control for i in style.ids(style.text(ids))) > len(of_template)


@pytest.mark.parametrize("name", NAMES)
def test_a_message_without_control_tokens_is_encoded_as_the_tokenizer_does_it(
    styles: dict[str, Style], codecs: dict[str, PromptCodec], name: str
) -> None:
    message = "if a <b> c: x = '<|' + y\n\ue000 é 圆 < | im_end | >"
    assert codecs[name].encode(message) == styles[name].ids(styles[name].text(codecs[name].encode(message)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_no_message_writes_a_control_token(
    styles: dict[str, Style], codecs: dict[str, PromptCodec], name: str, data: st.DataObject
) -> None:
    style, codec = styles[name], codecs[name]
    pieces = st.one_of(
        st.sampled_from(style.control), st.sampled_from(["<", "|", "<|", "|>", ">", "/", "im_end", "x", "\ue000", "\n"])
    )
    message = "a" + "".join(data.draw(st.lists(pieces, max_size=12))) + "z"
    ids, control = codec.encode(message), {style.id_of(text) for text in style.control}
    assert [i for i in ids if i in control] == [i for i in codec.encode("az") if i in control]
    assert message in style.text(ids)


def test_task_text_that_a_model_has_tokens_for_is_no_control_text() -> None:
    """The demo's model has one token for whole lines of its task; they must stay that."""
    codec = PromptCodec(Path(__file__).parent.parent / "tasks" / "proposers" / "packing")
    line = "\nThe score is the sum of the 26 radii."
    assert len(codec.encode(f"Do it.{line}")) == len(codec.encode("Do it.")) + 1
    assert "<|end|>" in codec.decode(codec.encode("print('<|end|>')"))
    assert codec.encode("a<|end|>").count(1) == codec.encode("a").count(1)
