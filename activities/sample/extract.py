"""The program in a response. Source: spec algorithm 3.4, with its BETTER lines. Knows no judge and never runs anything.

Thinking is cut off first: a draft in it never runs, however complete it looks.

Fences are read as CommonMark has them, with two liberties that published parsers take as well. A fence is a line of three or
more backticks or tildes, indented by at most three spaces; a list item indents its block, and the same indent comes off its lines.
    - text may follow a closing fence on its line after a space;
    - a fence with a language ends the block before it: it is either the model's next attempt, or the program inside a block of
      another language (a Markdown answer within a fence).
Inside a block of the wanted language, shorter fences and those of the other character are program text, so a program can hold
fenced text when its own fence is longer. The last block of the language counts. It may lack its closing fence at the end of the
text, since many models stop on it. If it is blank there is no program, whatever stood before: a model that ends on an empty
block has not answered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from activities.sample.thinking import TAGS, ThinkingStyle

FENCES: Final[Mapping[str, str]] = {"python": "python", "cpp17": "cpp"}
"""The word after an opening fence, by a task's language: what prompts ask for, and what is taken."""

_FENCE_LINE = re.compile(r"^(?P<indent> {0,3})(?P<marks>`{3,}|~{3,})(?P<info>[^`\r\n]*)\r?$", re.MULTILINE)


@dataclass(frozen=True)
class _Fence:
    """One fence line. `start` and `end` are its offsets in the text; its line break comes after `end`."""

    start: int
    end: int
    indent: int
    marks: str
    info: str

    @property
    def language(self) -> str:
        words = self.info.split()
        return words[0] if words else ""

    @property
    def is_tagged(self) -> bool:
        """A language stands directly at the marks, which no closing fence has."""
        return self.info[:1].strip() != ""

    def as_long_as(self, other: _Fence) -> bool:
        return self.marks[0] == other.marks[0] and len(self.marks) >= len(other.marks)


def extract_program(response: str, language: str = "python", style: ThinkingStyle = TAGS) -> str | None:
    """The last fenced block of the language in the final answer, with a single line break at its end; None if there is none.

    Args:
        response: decoded text of one response, thinking included.
        language: the word after the opening fence, as it is spelt there: `Python` and `py` do not count as `python`.
        style: how the model separates thinking from its answer.
    """
    answer = final_answer(response, style)
    program: str | None = None
    opened: _Fence | None = None
    for mark in _FENCE_LINE.finditer(answer):
        fence = _Fence(mark.start(), mark.end(), len(mark["indent"]), mark["marks"], mark["info"])
        if opened is None:
            opened = fence
            continue
        wanted = opened.language == language
        if wanted and not fence.as_long_as(opened):
            continue
        if fence.is_tagged or fence.as_long_as(opened):
            program = _body(answer, opened, fence.start) if wanted else program
            opened = fence if fence.is_tagged else None
    if opened is not None and opened.language == language:
        program = _body(answer, opened, len(answer))
    return program if program is not None and program.strip() else None


def final_answer(response: str, style: ThinkingStyle = TAGS) -> str:
    """What follows the thinking: for tags the text after the last ``</think>``, and nothing from a ``<think>`` on that is never
    closed; for channels the text of the last `final` message."""
    return style.final_answer(response)


def _body(text: str, opened: _Fence, end: int) -> str:
    """Lines of a block, without the fence's indent and with Unix line ends: the same program is the same text."""
    body = text[opened.end + 1 : end].replace("\r\n", "\n")
    if opened.indent:
        body = re.sub(rf"^ {{1,{opened.indent}}}", "", body, flags=re.MULTILINE)
    return body.strip("\n") + "\n"
