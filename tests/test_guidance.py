"""Guidance and executor responses: what counts, what does not, and under which class of error."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.errors import InputError
from activities.sample.extract import final_answer
from activities.sample.guidance import (
    SUMMARY_PLACEHOLDER,
    GuidanceError,
    GuidanceFault,
    parse_executor_response,
    parse_guidance,
)
from tests.golden.guidance import replay_executor, replay_guidance, replay_guidance_file

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden" / "parse_guidance.json").read_text(encoding="utf-8"))

COUNT, TERMINAL, EMPTY = GuidanceError.COUNT, GuidanceError.TERMINAL, GuidanceError.EMPTY


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<guidance>a</guidance>", "a"),
        ("First, what was tried.\n\n<guidance>\n- a\n- b\n</guidance>", "- a\n- b"),
        ("one line <guidance>a</guidance>\r\n\t ", "a"),
        ("<guidance>x < y and a > b</guidance>", "x < y and a > b"),
        ("", COUNT),
        ("a", COUNT),
        ("a</guidance>", COUNT),
        ("<GUIDANCE>a</GUIDANCE>", COUNT),
        ("<guidance >a</guidance>", COUNT),
        ("<guidance>a<guidance>b</guidance>", COUNT),
        ("<guidance>a</guidance></guidance>", COUNT),
        ("Put it between <guidance> and </guidance>.\n<guidance>a</guidance>", COUNT),
        ("<guidance>a</guidance>.", TERMINAL),
        ("<guidance>a</guidance>\n<done/>", TERMINAL),
        ("</guidance>a<guidance>", TERMINAL),
        ("</guidance><guidance>", TERMINAL),
        ("<guidance></guidance> and more", TERMINAL),
        ("<guidance></guidance>", EMPTY),
        ("words <guidance>\n\t\n</guidance>\n", EMPTY),
    ],
)
def test_guidance(content: str, expected: str) -> None:
    found = parse_guidance(content)
    assert (found.error if isinstance(found, GuidanceFault) else found) == expected
    assert isinstance(found, GuidanceFault) == isinstance(expected, GuidanceError)


def test_reasons_give_the_numbers() -> None:
    def reason(content: str) -> str:
        found = parse_guidance(content)
        assert isinstance(found, GuidanceFault)
        return found.reason

    assert reason("<guidance><guidance></guidance>").startswith("2 <guidance> and 1 </guidance>")
    assert reason("<guidance>a</guidance> end ").startswith("3 characters after </guidance>")
    assert "before <guidance>" in reason("</guidance><guidance>")


def test_thinking_must_be_off_the_content() -> None:
    response = "<think>I shall write <guidance>.</think>\n<guidance>a</guidance>"
    assert isinstance(parse_guidance(response), GuidanceFault)
    assert parse_guidance(final_answer(response)) == "a"


CPP = "```cpp\na;\n```"


@pytest.mark.parametrize(
    ("content", "program"),
    [
        # where
        (f"<solution>{CPP}</solution>", "a;\n"),
        (f"<solution>\n  {CPP}\n</solution>", "a;\n"),
        (f"prose\n{CPP}\nprose", "a;\n"),
        (f"{CPP}\n```cpp\nb;\n```", "b;\n"),
        (f"```cpp\nb;\n```\n<solution>{CPP}</solution>\n```cpp\nb;\n```", "a;\n"),
        (f"<solution></solution>\n{CPP}", None),
        (f"I use <solution> tags.\n<solution>\n{CPP}\n</solution>", "a;\n"),
        (f"Between <solution> and </solution>:\n<solution>{CPP}</solution>", "a;\n"),
        (f"<solution>{CPP}</solution><solution>```cpp\nb;\n```</solution>", "b;\n"),
        (f"<solution>{CPP}", "a;\n"),
        ('<solution>```cpp\nputs("<solution>");\n```</solution>', 'puts("<solution>");\n'),
        # which language
        ("```CPP\na;\n```", "a;\n"),
        ("```Cxx\na;\n```", "a;\n"),
        ("``` c++ title=a.cc\na;\n```", "a;\n"),
        ("```c\na;\n```", None),
        ("```\na;\n```", None),
        ("```cpp20\na;\n```", None),
        (f"{CPP}\n```text\nb\n```", "a;\n"),
        (f"```text\nb\n```\n{CPP}", "a;\n"),
        (f"{CPP}\n```text\n```cpp\nb;\n```", "b;\n"),
        # which lines
        ("~~~cpp\n```\na;\n~~~", "```\na;\n"),
        ("````cpp\n// ```\n```\na;\n````", "// ```\n```\na;\n"),
        ("  ```cpp\n  if (a)\n    b;\n  ```", "if (a)\n  b;\n"),
        ("```cpp\r\na;\r\nb;\r\n```\r\n", "a;\nb;\n"),
        ("```cpp\n\na;\n\n```", "a;\n"),
        ("```cpp\na;\n``` that is all", "a;\n"),
        ("```cpp\na;\n```cpp\nb;\n```", "b;\n"),
        # none
        ("", None),
        ("```cpp\na;", None),
        ("<solution>```cpp\na;\n</solution>", None),
        ("```cpp a; ```", None),
        (f"{CPP}\n```cpp\n \n```", None),
        (f"{CPP}\n```cpp\nb;", "a;\n"),
    ],
)
def test_executor_program(content: str, program: str | None) -> None:
    assert parse_executor_response(content, "cpp").program == program


@pytest.mark.parametrize("word", ["python", "py", "Python", "PY"])
def test_python_is_the_other_language(word: str) -> None:
    both = f"<solution>\n```{word}\nif a:\n    b()\n```\n{CPP}\n</solution>"
    assert parse_executor_response(both, "python").program == "if a:\n    b()\n"
    assert parse_executor_response(both, "cpp").program == "a;\n"


@pytest.mark.parametrize("language", ["rust", "c++", ""])
def test_other_languages_are_refused(language: str) -> None:
    with pytest.raises(InputError, match="use one of cpp, python"):
        parse_executor_response(CPP, language)


@pytest.mark.parametrize(
    ("content", "summary"),
    [
        ("<summary>\nsimulated annealing\n</summary>\n\n", "simulated annealing"),
        ("<summary>draft</summary>\n<summary>last</summary>", "last"),
        ("A <summary> follows.\n<summary>last</summary>", "last"),
        ("<summary>a</summary>.", None),
        (f"<summary>a</summary>\n<solution>{CPP}</solution>", None),
        ("<summary>a", None),
        ("a</summary>", None),
        ("<summary>\n \n</summary>", None),
        ("", None),
    ],
)
def test_executor_summary(content: str, summary: str | None) -> None:
    found = parse_executor_response(content, "cpp")
    assert found.summary == summary
    assert found.summary_or_placeholder == (summary or SUMMARY_PLACEHOLDER)


def test_program_and_summary_do_not_need_each_other() -> None:
    found = parse_executor_response("no program\n<summary>why not</summary>", "cpp")
    assert (found.program, found.summary) == (None, "why not")


TAGS = st.sampled_from(["<guidance>", "</guidance>", "<guidance", "a", " ", "\n", "```"])


@given(st.lists(TAGS, max_size=12))
def test_accepted_guidance_is_the_one_block_that_ends_the_response(parts: list[str]) -> None:
    content = "".join(parts)
    found = parse_guidance(content)
    if isinstance(found, str):
        assert found == found.strip() != ""
        assert content.count("<guidance>") == content.count("</guidance>") == 1
        assert content.rstrip().endswith("</guidance>")
        assert parse_guidance(f"{content}.") == GuidanceFault(
            TERMINAL, "1 characters after </guidance>; only white space may follow the block"
        )
    else:
        assert found.reason


lines = st.text("ab1=(): '\"#é\\/><", max_size=30)
programs = st.lists(lines, min_size=1, max_size=8).map("\n".join).filter(lambda text: text.strip() != "")


@given(programs, lines, st.sampled_from(["```", "~~~", "`````"]), st.sampled_from(["cpp", "C++", "cxx"]))
def test_a_fenced_program_comes_out_as_it_went_in(program: str, summary: str, marks: str, word: str) -> None:
    content = f"<solution>\n{marks}{word}\n{program}\n{marks}\n</solution>\n\n<summary>{summary}</summary>"
    found = parse_executor_response(content, "cpp")
    assert found.program == program.strip("\n") + "\n"
    assert found.summary == (summary.strip() or None)


def test_golden_file_is_replayed_whole_and_without_an_exception() -> None:
    cases = replay_guidance_file(GOLDEN)
    assert len(cases) == len(GOLDEN["guidance"]) + len(GOLDEN["executor"]) > 0
    assert [case.name for case in cases if case.differences or case.checks != 2] == []


@pytest.mark.parametrize(
    ("part", "name", "key", "value"),
    [
        ("guidance", "plain", "guidance", "use"),
        ("guidance", "plain", "error", "count"),
        ("guidance", "empty", "error", "terminal"),
        ("guidance", "two_blocks", "guidance", "a"),
        ("executor", "both_blocks", "solution", None),
        ("executor", "both_blocks", "summary", "does y"),
        ("executor", "two_fences_in_solution", "solution", "a"),
        ("executor", "wrong_language", "solution", "a"),
    ],
)
def test_a_changed_golden_case_fails(part: str, name: str, key: str, value: str | None) -> None:
    replay = replay_guidance if part == "guidance" else replay_executor
    record = copy.deepcopy(GOLDEN[part][name])
    assert replay(name, record).passed
    assert record[key] != value
    record[key] = value
    assert not replay(name, record).passed
