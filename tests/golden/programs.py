"""Replays the program extraction of the reference parsers. Source: spec algorithm 3.4.

The target is the original's parser, or nanodiscover's, which is the same with spaces allowed after the language. Where we read a
response otherwise on purpose, the expectation is the plain rule of the specification applied to the text without that feature.
"""

from __future__ import annotations

import re
from typing import Any

from activities.sample.extract import extract_program
from tests.golden.outcome import Case

TARGETS = ("original_python_only_no_separators", "nanodiscover")
_PLAIN = re.compile(r"```python[ \t]*\r?\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^( {0,3})(`{3,}|~{3,})[ \t]*([A-Za-z]*)([^\n]*)$", re.MULTILINE)


def plain_rule(text: str) -> str:
    """The last ```python block anywhere in the text; an unclosed one runs to the end; "" if there is none."""
    blocks = _PLAIN.findall(text)
    return _stripped(blocks[-1]) if blocks else ""


def replay_program(name: str, record: dict[str, Any]) -> Case:
    """One response text."""
    case = Case(name)
    found = _stripped(extract_program(record["text"]) or "")
    case.checks += 1
    targets = {_stripped(record[tag] or "") for tag in TARGETS}
    if found in targets:
        return case
    # An explanation explains only what the plain rule reads otherwise.
    explanations = _explanations(record["text"]) if found != plain_rule(record["text"]) else []
    for kind, text in explanations:
        if found == plain_rule(text):
            case.differ("program", f"found {found!r}, references {sorted(targets)!r}", kind)
            return case
    case.differ("program", f"found {found!r}, expected one of {sorted(targets)!r}")
    return case


def _explanations(text: str) -> list[tuple[str, str]]:
    """(kind of documented difference, the text as the plain rule must see it to agree with us), for what the text shows."""
    answer = re.split(r"<think>", re.split(r"</think>", text)[-1])[0]
    found = [("thinking", answer)] if answer != text else []
    lines = _with_plain_fences(answer)
    found += [("fence_line", lines)] if lines != answer else []
    closed = _with_closed_blocks(lines)
    found += [("block_in_block", closed)] if closed != lines else []
    return found


def _with_plain_fences(text: str) -> str:
    """Every fence as three backticks at the start of its line, and the lines of an indented block moved left with it."""
    indent = max((len(mark[1]) for mark in _FENCE.finditer(text)), default=0)
    moved = re.sub(rf"^ {{1,{indent}}}", "", text, flags=re.MULTILINE) if indent else text
    return _FENCE.sub(lambda mark: f"```{mark[3]}" if mark[3] in ("", "python") else mark[0], moved)


def _with_closed_blocks(text: str) -> str:
    return re.sub(r"^```python", "```\n```python", text, flags=re.MULTILINE)


def _stripped(program: str) -> str:
    return program.replace("\r\n", "\n").strip("\n")
