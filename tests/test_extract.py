"""Which text of a response becomes a program. Every case of the golden file has its decided outcome here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.sample.extract import extract_program, final_answer

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden" / "parse_codeblocks.json").read_text())

DECIDED: dict[str, tuple[str | None, str]] = {
    "simple": ("def run():\n    return 1\n", "as the references"),
    "no_block": (None, "as the original: bare code is prose until it is fenced"),
    "bare_def_run": (None, "as the original, unlike open-ttt-verl, which takes text that starts with `def run`"),
    "uppercase_language": (None, "as the references: the prompt asks for ```python"),
    "py_alias": (None, "as the references"),
    "space_after_language": ("a=1\n", "as nanodiscover: trailing blanks are invisible to the model's reader"),
    "cpp_then_python": ("a=1\n", "as the references"),
    "empty_block": (None, "as the references: the empty program"),
    "empty_block_blank_line": (None, "as the references"),
    "good_then_empty": (None, "as the references: the last block counts, and it is empty"),
    "inside_think_only": (None, "unlike the references: thinking never runs"),
    "inline_triple_backtick": ('s = "```"\nx=1\n', "as the original: a fence is a whole line"),
    "crlf": ("a=1\n", "as nanodiscover, with Unix line ends: the same program is one node"),
    "indented_fence": ("a=1\n", "as open-ttt-verl: a list item indents its block; the original keeps the closing fence as code"),
    "trailing_text_same_line_as_fence": ("a=1\n", "as the references: no Python line begins with backticks"),
    "strategy_tags": ("a=1\n", "as the references"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_cases_are_decided(name: str) -> None:
    expected, reason = DECIDED[name]
    assert extract_program(GOLDEN[name]["text"]) == expected, reason


def test_table_names_no_case_that_is_gone() -> None:
    assert set(DECIDED) == set(GOLDEN)


GOOD = "```python\na=1\n```"


@pytest.mark.parametrize(
    "response",
    [
        f"<think>\n{GOOD}\n</think>\nno code",
        f"<think>\n{GOOD}",
        f"  \n<think>{GOOD}",
        f"Let me think. <think>\n{GOOD}",
        f"<think>first</think>\nHm. <think>\n{GOOD}",
        f"{GOOD}\n</think>\nno code",  # the prompt opened the thinking
        f"<think>\n{GOOD}\n</think>\n<think>\n{GOOD}\n</think>",
        f"<think>{GOOD}</think></think>",
    ],
)
def test_thinking_never_runs(response: str) -> None:
    assert extract_program(response) is None


@pytest.mark.parametrize(
    "response",
    [
        f"<think>\n```python\ndraft=1\n```\n</think>\n{GOOD}",
        f"<think>\n```python\nunclosed draft\n</think>\n{GOOD}",
        f"```python\ndraft=1\n```\n</think>\n\n{GOOD}",
        f"<think></think>{GOOD}",
        f"{GOOD}\n<think>\n```python\nafterthought=1\n```",
    ],
)
def test_answer_outside_the_thinking_runs(response: str) -> None:
    assert extract_program(response) == "a=1\n"


def test_final_answer_of_plain_text_is_the_text() -> None:
    assert final_answer("plain") == "plain"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        # other fences
        ("~~~python\na=1\n~~~", "a=1\n"),
        ("````python\na=1\n````", "a=1\n"),
        ("``` python\na=1\n```", "a=1\n"),
        ("```python title=x.py\na=1\n```", "a=1\n"),
        ("``python\na=1\n``", None),
        ("```python a=1```", None),
        ("text ```python\na=1\n```", None),
        ("```python3\na=1\n```", None),
        ("~~~python\na=1\n```\nb=2\n~~~", "a=1\n```\nb=2\n"),
        # indents
        ("1. Do:\n   ```python\n   if a:\n       b\n   ```\n2. Done", "if a:\n    b\n"),
        (" ```python\na=1\n  b\n ```", "a=1\n b\n"),
        ("    ```python\n    a=1\n    ```", None),
        ("\t```python\n\ta=1\n\t```", None),
        (
            "```python\ndef f():\n    '''\n    ```\n    x\n    ```\n    '''\n```",
            "def f():\n    '''\n    ```\n    x\n    ```\n    '''\n",
        ),
        # nesting
        ('````python\nd = """\n```\nx\n```\n"""\n````', 'd = """\n```\nx\n```\n"""\n'),
        ('````python\nd = """\n```python\nx\n```\n"""\n````', 'd = """\n```python\nx\n```\n"""\n'),
        ("````markdown\nThe answer:\n```python\na=1\n```\n````", "a=1\n"),
        ("```text\nuse ~~~ here\n```\n```python\na=1\n```", "a=1\n"),
        # never closed
        ("```python\na=1", "a=1\n"),
        ("```python\na=1\n", "a=1\n"),
        ("```python\na=1\n```python\nb=2\n```", "b=2\n"),
        ("```python\na=1\n```text\nwords\n```", "a=1\n"),
        ("```python\na=1\n```\n```cpp\nint x;", "a=1\n"),
        ("```\nstray\n```python\na=1\n```", "a=1\n"),
        # the last block
        ("```python\na=1\n```\nor\n```python\nb=2\n```", "b=2\n"),
        ("```python\na=1\n```\n```python\n   \n```", None),
        ("```python\na=1\n```\n```python\n", None),
        ("```python\na=1\n```\n```python", None),
        ("```python\na=1\n```\n```\n\n```", "a=1\n"),
        ("```python\na=1\n```\n```text\nout\n```", "a=1\n"),
        # line ends and blank lines
        ("a\r\n```python\r\na=1\r\nb=2\r\n```\r\nbye\r\n", "a=1\nb=2\n"),
        ("```python\n\n\na=1\n\n\n```", "a=1\n"),
        ("```python\n  a=1\n```", "  a=1\n"),
        ("", None),
        ("```", None),
    ],
)
def test_fences(response: str, program: str | None) -> None:
    assert extract_program(response) == program


def test_language_is_the_tasks() -> None:
    both = "```cpp\nint x;\n```\n```python\na=1\n```"
    assert extract_program(both, "cpp") == "int x;\n"
    assert extract_program("```c++\nint x;\n```", "c++") == "int x;\n"


lines = st.text("ab1=(): '\"#\té圆\\/>", max_size=30)
programs = st.lists(lines, min_size=1, max_size=8).map("\n".join).filter(lambda text: text.strip() != "")


@given(programs, lines, lines, st.sampled_from(["```", "~~~", "`````"]))
def test_a_fenced_program_comes_out_as_it_went_in(program: str, before: str, after: str, marks: str) -> None:
    response = f"{before}\n{marks}python\n{program}\n{marks}\n{after}"
    assert extract_program(response) == program.strip("\n") + "\n"


@given(st.lists(st.sampled_from(["```", "```python", "~~~", "<think>", "</think>", "a=1", " ", "\n", "\r\n", "  "]), max_size=30))
def test_no_text_breaks_it_and_thinking_stays_out(parts: list[str]) -> None:
    program = extract_program("".join(parts))
    assert program is None or program.strip()
    assert extract_program("<think>" + "".join(p for p in parts if p != "</think>")) is None
