"""Reads what the two models of the second mode, Guidance-TTT, write. Source: spec algorithm 5.

In that mode the policy writes guidance only, and a frozen executor rewrites the parent program by it. This is the parsing half;
the run loop does not use it yet. Pure functions of text: they know no prompt, no engine, no executor and no judge, and they take
the final content of a response. Thinking must be off it already (:func:`activities.sample.extract.final_answer`), since a tag that
is only thought of would be counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from activities.errors import InputError

GUIDANCE_OPEN, GUIDANCE_CLOSE = "<guidance>", "</guidance>"
SUMMARY_OPEN, SUMMARY_CLOSE = "<summary>", "</summary>"

SUMMARY_PLACEHOLDER = "(The executor gave no summary of this program.)"
"""Stands in the next policy prompt where the executor's summary is missing, so that the prompt keeps its shape."""

LANGUAGES: dict[str, frozenset[str]] = {
    "cpp": frozenset({"cpp", "c++", "cxx"}),
    "python": frozenset({"python", "py"}),
}
"""Solution language of a task -> the words after a fence that mean it, in lower case."""

_SOLUTION = re.compile(r"<solution>(.*?)</solution>", re.DOTALL)
_FENCE = re.compile(r"(?:^(?P<indent> {0,3})|(?<=<solution>)[ \t]*)(?P<marks>`{3,}|~{3,})(?P<info>[^`\r\n]*)\r?$", re.MULTILINE)


class GuidanceError(StrEnum):
    """Why a response holds no guidance. The first that applies, in this order."""

    COUNT = "count"
    """Not exactly one opening and one closing tag; a tag mentioned in prose counts."""
    TERMINAL = "terminal"
    """The block does not end the response, or closes before it opens."""
    EMPTY = "empty"
    """Nothing but white space between the tags."""


@dataclass(frozen=True)
class GuidanceFault:
    """A response that is not well formed: reward 0, the executor is not asked, the visit counts."""

    error: GuidanceError
    reason: str
    """One sentence for the rollout's record."""


@dataclass(frozen=True)
class ExecutorResponse:
    """What an executor's response holds."""

    program: str | None
    """Complete program with a single line break at its end; None where there is none (status parse_error)."""
    summary: str | None
    """The terminal summary, trimmed; None where there is none or it is blank."""

    @property
    def summary_or_placeholder(self) -> str:
        """What the next policy prompt shows."""
        return self.summary if self.summary is not None else SUMMARY_PLACEHOLDER


def parse_guidance(content: str) -> str | GuidanceFault:
    """The guidance of a policy response, trimmed, or what is wrong with the response. Never repaired, never guessed.

    Text before the block is allowed. Tags count in exactly their spelling.

    Args:
        content: final content of the response, without thinking.
    """
    opens, closes = content.count(GUIDANCE_OPEN), content.count(GUIDANCE_CLOSE)
    if (opens, closes) != (1, 1):
        return GuidanceFault(
            GuidanceError.COUNT,
            f"{opens} {GUIDANCE_OPEN} and {closes} {GUIDANCE_CLOSE} in the response; exactly one of each is allowed",
        )
    before, _, after = content.partition(GUIDANCE_CLOSE)
    _, opened, body = before.partition(GUIDANCE_OPEN)
    if not opened:
        return GuidanceFault(GuidanceError.TERMINAL, f"{GUIDANCE_CLOSE} stands before {GUIDANCE_OPEN}; the block must open first")
    if after.strip():
        return GuidanceFault(
            GuidanceError.TERMINAL,
            f"{len(after.strip())} characters after {GUIDANCE_CLOSE}; only white space may follow the block",
        )
    guidance = body.strip()
    if not guidance:
        return GuidanceFault(GuidanceError.EMPTY, f"nothing between {GUIDANCE_OPEN} and {GUIDANCE_CLOSE}; guidance must be text")
    return guidance


def parse_executor_response(content: str, language: str) -> ExecutorResponse:
    """Program and summary of an executor response.

    The program is the last fenced block of the language inside the last ``<solution>...</solution>``, and only there; without
    such a pair of tags the last one anywhere. The summary counts only where it ends the response.

    Args:
        content: final content of the response, without thinking.
        language: the task's solution language, a key of `LANGUAGES`.

    Raises:
        InputError: a language that is no key of `LANGUAGES`.
    """
    if language not in LANGUAGES:
        raise InputError(f"solution language {language!r} is not known; use one of {', '.join(sorted(LANGUAGES))}")
    solutions = _SOLUTION.findall(content)
    program = _last_block(solutions[-1] if solutions else content, LANGUAGES[language])
    return ExecutorResponse(program, _terminal_summary(content))


def _terminal_summary(content: str) -> str | None:
    text = content.rstrip()
    if not text.endswith(SUMMARY_CLOSE):
        return None
    _, opened, body = text.removesuffix(SUMMARY_CLOSE).rpartition(SUMMARY_OPEN)
    return (body.strip() or None) if opened else None


def _last_block(text: str, words: frozenset[str]) -> str | None:
    """The last fenced block whose language is one of the words; None if it is blank or there is none.

    A block ends at a fence at least as long as its own, or, if it is of another language, at any fence with a language. One that
    never ends is not taken, unlike in the first mode: here the executor is asked for a summary after the program, so a response
    that stops inside it was cut off and the program is not complete.
    """
    block = ""
    opened: re.Match[str] | None = None
    for mark in _FENCE.finditer(text):
        if opened is None:
            opened = mark
            continue
        wanted, closes = _language(opened) in words, _closes(mark, opened)
        if wanted and not closes:
            continue  # a shorter fence, or one of the other character, is program text
        if wanted:
            block = _body(text, opened, mark)
        if _is_tagged(mark):
            opened = mark
        elif closes:
            opened = None
    return block.strip("\n") + "\n" if block.strip() else None


def _language(mark: re.Match[str]) -> str:
    """The first word after a fence, in lower case; empty for a bare one."""
    words = mark["info"].split()
    return words[0].lower() if words else ""


def _is_tagged(mark: re.Match[str]) -> bool:
    """A language stands directly at the marks, which no closing fence has; ``</solution>`` at them is none."""
    return mark["info"][:1].strip() not in ("", "<")


def _closes(mark: re.Match[str], opened: re.Match[str]) -> bool:
    return mark["marks"][0] == opened["marks"][0] and len(mark["marks"]) >= len(opened["marks"])


def _body(text: str, opened: re.Match[str], closing: re.Match[str]) -> str:
    """Lines between two fences, without the opening fence's indent and with Unix line ends."""
    body = text[opened.end() + 1 : closing.start()].replace("\r\n", "\n")
    indent = len(opened["indent"] or "")
    return re.sub(rf"^ {{1,{indent}}}", "", body, flags=re.MULTILINE) if indent else body
