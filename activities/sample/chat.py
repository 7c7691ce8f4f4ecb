"""One model's chat template: the text around a message, how the model thinks, and which texts are control tokens.

Knows no token ids and no limits. Whatever can be known by rendering is found out by rendering, not by the model's name: templates
of one family differ from release to release.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from activities.errors import InputError
from activities.sample.thinking import CHANNELS, TAGS, ThinkingStyle

Thinking = Literal["auto", "on", "off"]

_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn thinking on and off: Qwen3's, and the one of DeepSeek and Granite."""
_EFFORT = "reasoning_effort"
"""gpt-oss: low, medium or high; there is no off."""
_DAY = {"%Y": "2025", "%y": "25", "%m": "01", "%d": "01", "%B": "January", "%b": "Jan", "%A": "Wednesday", "%a": "Wed"}
_FIXED_DAY = (
    "{%- macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('{directive}', '{value}')" for directive, value in _DAY.items())
    + " }}{%- endmacro %}{{- '' }}"
)
"""Put before a template that writes today's date: the same request must give the same prompt tomorrow."""
_LOOKS_LIKE_CONTROL = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""Added tokens such as ``<think>`` or ``<tool_call>`` steer a model although tokenizers do not call them special."""


class ChatTemplate:
    """The template of one tokenizer, with the thinking switch set.

    Raises:
        InputError: there is no template, it refuses a plain user message, or it has no such switch.
    """

    def __init__(self, tokenizer: Any, model: str, thinking: Thinking = "auto") -> None:
        if tokenizer.chat_template is None:
            raise InputError(f"model {model} has no chat template in its tokenizer; tttd prompts chat models only")
        template: str = tokenizer.get_chat_template()
        self._template = (_FIXED_DAY if "strftime_now" in template else "") + template
        self._tokenizer = tokenizer
        self._model = model
        self._options: dict[str, Any] = {}
        self.style = _style_of(tokenizer, template)
        """How the model thinks; None if nothing says that it does."""
        self._options = self._switched(thinking)
        self.opened = self._opened()
        """What the template itself writes of the response, such as ``<think>`` and a line break; usually empty."""

    def render(self, message: str) -> str:
        """One user message and the opening of the model's answer."""
        return self._render([{"role": "user", "content": message}], opening=True)

    def end_of_turn(self, pattern: re.Pattern[str]) -> str | None:
        """The control text that the template puts directly after an answer, if any.

        None for channel models, whose template ends a message within a turn and the turn itself in different ways.
        """
        if self.style is CHANNELS:
            return None
        probe = "An answer."
        messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": probe}]
        try:
            after = self._render(messages, opening=False).rpartition(probe)[2]
        except InputError:  # a template for single questions
            return None
        found = pattern.match(after)
        return found.group() if found else None

    def _render(self, messages: list[dict[str, str]], *, opening: bool, **options: Any) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                add_generation_prompt=opening,
                tokenize=False,
                **{**self._options, **options},
            )
        except TemplateError as error:
            raise InputError(f"the chat template of model {self._model} refuses a plain message: {error}") from None
        return text

    def _switched(self, thinking: Thinking) -> dict[str, Any]:
        if thinking == "auto":
            return {}
        for name in _SWITCHES:
            if self._obeys(name, True, False):
                return {name: thinking == "on"}
        if thinking == "on":
            if self._obeys(_EFFORT, "high", "low"):
                return {_EFFORT: "high"}
            if self._opened():
                return {}  # it always thinks
        known = f"{', '.join(_SWITCHES)}{f', {_EFFORT}' if thinking == 'on' else ''}"
        raise InputError(
            f"sampling.thinking={thinking}: the chat template of model {self._model} has no such switch (none of {known} changes "
            "its prompt); set sampling.thinking=auto to take the template as it is"
        )

    def _obeys(self, name: str, one: object, other: object) -> bool:
        message = [{"role": "user", "content": "-"}]
        return self._render(message, opening=True, **{name: one}) != self._render(message, opening=True, **{name: other})

    def _opened(self) -> str:
        message = [{"role": "user", "content": "-"}]
        whole, without = self._render(message, opening=True), self._render(message, opening=False)
        opening = whole.removeprefix(without)
        if self.style is CHANNELS:
            return opening.rpartition(CHANNELS.START + CHANNELS.ROLE)[2]
        _, tag, after = opening.rpartition(TAGS.OPEN)
        return tag + after if tag and TAGS.CLOSE not in after else ""


def _style_of(tokenizer: Any, template: str) -> ThinkingStyle | None:
    added = set(tokenizer.get_added_vocab())
    if CHANNELS.CHANNEL in added and CHANNELS.CHANNEL in template:
        return CHANNELS
    return TAGS if TAGS.OPEN in added or TAGS.OPEN in template or TAGS.CLOSE in template else None


def control_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Matches the text of every token that steers the model: special ones, and added ones that look like a tag.

    Added tokens that are ordinary text, such as whole lines of a task that a small model has one token for, are not among them.
    """
    added = tokenizer.added_tokens_decoder.values()
    texts = {t.content for t in added if t.special or _LOOKS_LIKE_CONTROL.fullmatch(t.content)} | set(tokenizer.all_special_tokens)
    longest_first = sorted((text for text in texts if len(text) > 1), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
