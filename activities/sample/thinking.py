"""Where a response stops thinking and starts to answer. Source: spec algorithm 3.3 and 3.4.

Two ways in which models think: between tags (Qwen3, DeepSeek: ``<think> ... </think>`` and then the answer) and in channels
(gpt-oss: messages with an `analysis` and a `final` header). Pure functions of text: knows no tokenizer, no engine and no limit. A
response's text is read as :meth:`PromptCodec.decode` gives it, so that what the chat template opened stands at its beginning.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

SPENT = "The thinking budget is spent, so I answer now with the best program I have."
"""Said in the model's own voice at the place where its thinking is cut; forced, so it is never trained."""


class ThinkingStyle(ABC):
    """How one family of models separates thinking from its answer."""

    unfinished: tuple[str, ...]
    """Beginnings of responses whose closings are the longest ones."""

    @abstractmethod
    def answer_offset(self, text: str) -> int:
        """Characters before the answer; the whole length while the response is still thinking."""

    @abstractmethod
    def final_answer(self, text: str) -> str:
        """The answer alone; empty when thinking was never closed."""

    @abstractmethod
    def closing(self, text: str) -> str:
        """What must follow so that the answer begins; empty if it has begun already."""


class TagThinking(ThinkingStyle):
    """``<think>`` opens, ``</think>`` closes; what follows the last close is the answer."""

    OPEN, CLOSE = "<think>", "</think>"
    unfinished = (OPEN,)

    def answer_offset(self, text: str) -> int:
        start = text.rfind(self.CLOSE) + len(self.CLOSE) if self.CLOSE in text else 0
        return len(text) if self.OPEN in text[start:] else start

    def final_answer(self, text: str) -> str:
        """Nothing counts from a ``<think>`` on that is never closed."""
        return text.rpartition(self.CLOSE)[2].partition(self.OPEN)[0]

    def closing(self, text: str) -> str:
        inside = self.OPEN in text.rpartition(self.CLOSE)[2]
        return f"\n\n{SPENT}\n{self.CLOSE}\n\n" if inside else ""


class ChannelThinking(ThinkingStyle):
    """Messages ``<|start|>ROLE<|channel|>NAME<|message|>TEXT<|end|>``; the answer is the text of channel `final`.

    A response begins inside the first message, after the ``<|start|>assistant`` that ends the prompt.
    """

    START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
    ROLE, FINAL = "assistant", "final"
    unfinished = ("<|channel|>analysis", "<|channel|>analysis<|message|>")
    _FINAL_HEADER = re.compile(r"<\|channel\|>final\b(?:(?!<\|message\|>|<\|channel\|>|<\|end\|>).)*<\|message\|>", re.DOTALL)

    def answer_offset(self, text: str) -> int:
        headers = list(self._FINAL_HEADER.finditer(text))
        return headers[-1].end() if headers else len(text)

    def final_answer(self, text: str) -> str:
        answer = text[self.answer_offset(text) :]
        # A program may spell an end-of-message out; a real one stands last, or before the next message.
        return answer.partition(self.END + self.START)[0].removesuffix(self.END)

    def closing(self, text: str) -> str:
        """Complete whatever was being written, up to the opening of channel `final`.

        A message that is closed already is followed by no more words: they would stand after an end-of-message token.
        """
        last = self.START + self.ROLE + text
        tail = last.rpartition(self.START)[2]
        opens_answer = f"{self.START}{self.ROLE}{self.CHANNEL}{self.FINAL}{self.MESSAGE}"
        if self.MESSAGE in tail:
            header, _, body = tail.partition(self.MESSAGE)
            if self._channel_of(header).startswith(self.FINAL):
                return ""
            return opens_answer if body.endswith(self.END) else f"\n\n{SPENT}{self.END}{opens_answer}"
        return self._rest_of_header(tail, opens_answer)

    def _channel_of(self, header: str) -> str:
        return header.rpartition(self.CHANNEL)[2] if self.CHANNEL in header else ""

    def _rest_of_header(self, header: str, opens_answer: str) -> str:
        """The limit fell between ``<|start|>`` and ``<|message|>``."""
        if self.CHANNEL not in header:
            role = self.ROLE[len(header) :] if self.ROLE.startswith(header) else ""
            return f"{role}{self.CHANNEL}{self.FINAL}{self.MESSAGE}"
        channel = self._channel_of(header)
        if channel.startswith(self.FINAL):
            return ""  # the model is opening its answer itself
        if self.FINAL.startswith(channel):
            return f"{self.FINAL[len(channel) :]}{self.MESSAGE}"
        return f"{self.MESSAGE}{SPENT}{self.END}{opens_answer}"


TAGS = TagThinking()
CHANNELS = ChannelThinking()
