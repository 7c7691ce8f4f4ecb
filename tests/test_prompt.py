"""The prompt: what it promises is what the task and the limits say, and it is made to fit by rule."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activities.errors import InputError
from activities.sample import tokens
from activities.sample.extract import extract_program
from activities.sample.prompt import (
    OUTPUT_TAIL_CHARACTERS,
    ParentView,
    ProblemView,
    render_prompt,
    template_digest_source,
)
from activities.sample.tokens import MINIMUM_RESPONSE_TOKENS, RESERVE_TOKENS, PromptCodec
from tasks.registry import load_task

PROPOSER = Path(__file__).parent.parent / "tasks" / "proposers" / "packing"
PROBLEM = ProblemView("# Problem\n\nDo it.", "run_it", "maximize", "size", 12.5, 1)
PARENT = ParentView("def run_it():\n    return 1\n", 1.25, 1.0, "best 1.25\n")


# Every promise comes from the task or the limits --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("field", "value", "appears", "disappears"),
    [
        ("instruction", "Another problem.", "Another problem.", "Do it."),
        ("entry", "solve", "`solve()`", "run_it()`"),
        ("direction", "minimize", "A lower score is better.", "A higher score is better."),
        ("score_name", "length", "Its length: ", "Its size: "),
        ("wall_seconds", 480.0, "Time limit: 480 seconds", "12.5"),
        ("wall_seconds", 86_400.0, "Time limit: 86400 seconds", "12.5"),
        ("cores", 2, "on 2 CPU cores.", "1 CPU core"),
        ("construction_name", "parent_x", "global `parent_x`", "no such text"),
    ],
)
def test_changing_the_problem_changes_the_text(field: str, value: Any, appears: str, disappears: str) -> None:
    before, after = render_prompt(PROBLEM, PARENT), render_prompt(replace(PROBLEM, **{field: value}), PARENT)
    assert appears not in before
    assert appears in after
    assert disappears not in after


@pytest.mark.parametrize(
    ("field", "value", "appears", "disappears"),
    [
        ("code", "pass", "```python\npass\n```", "return 1"),
        ("score", 2.635983, "1.00000000 -> 2.63598300", "1.25000000"),
        ("score", None, "It has no size yet.", "Its size"),
        ("previous_score", None, "Its size: 1.25000000", "->"),
        ("output_tail", "another line", "another line", "best 1.25"),
        ("output_tail", "", "", "The end of its output"),
        ("code", "", "There is no program yet. Write the first one.", "Parent program"),
    ],
)
def test_changing_the_parent_changes_the_text(field: str, value: Any, appears: str, disappears: str) -> None:
    after = render_prompt(PROBLEM, replace(PARENT, **{field: value}))
    assert appears in after
    assert disappears in render_prompt(PROBLEM, PARENT) or disappears == "Its size"
    assert disappears not in after


def test_output_is_its_end_with_a_mark_where_it_was_cut() -> None:
    exact = "x" * OUTPUT_TAIL_CHARACTERS
    assert f"\n{exact}\n" in render_prompt(PROBLEM, replace(PARENT, output_tail=exact))
    longer = render_prompt(PROBLEM, replace(PARENT, output_tail="lost" + exact[:-4] + "kept"))
    assert f"[...] {exact[:-4]}kept"[:506] in longer
    assert "lost" not in longer


def test_a_construction_is_only_promised_with_a_score() -> None:
    offered = replace(PROBLEM, construction_name="parent_x")
    assert "parent_x" not in render_prompt(offered, ParentView("", None, None))


def test_a_construction_without_a_program_is_described() -> None:
    root = ParentView("", 0.50512345, None)
    offered = render_prompt(replace(PROBLEM, construction_name="parent_x"), root)
    for words in ("There is no program yet. Write the first one.", "that no program made", "global `parent_x`", "size: 0.50512345"):
        assert words in offered
    withheld = render_prompt(PROBLEM, root)
    assert "global" not in withheld
    assert "Its size: 0.50512345" in withheld
    assert "Parent program" not in offered + withheld


def test_asked_for_format_is_what_extraction_reads() -> None:
    prompt = render_prompt(PROBLEM, PARENT)
    assert "one ```python block" in prompt.splitlines()[-1]
    assert extract_program("```python\ndef run_it():\n    return 2\n```") == "def run_it():\n    return 2\n"


def test_every_template_word_is_in_the_digest_source() -> None:
    """Each line that some prompt shows, beyond the values put in, must enter the identity through the digest."""
    source = template_digest_source()
    problem = ProblemView("INSTRUCTION", "ENTRY", "maximize", "SCORE", 10.0, 1, "CONSTRUCTION")
    for direction in ("maximize", "minimize"):
        for cores in (1, 2):
            for parent in (
                *(ParentView("CODE", 1.0, 0.5, "OUT"), ParentView("CODE", None, None), ParentView("", None, None)),
                *(ParentView("", 1.0, 0.5, withheld=True), ParentView("", 1.0, None)),
            ):
                for line in render_prompt(replace(problem, direction=direction, cores=cores), parent).splitlines():
                    assert line in source or line.startswith("Time limit")
    assert "on 1 CPU core." in source
    assert "on 2 CPU cores." in source


def test_built_in_task_fits_its_own_words() -> None:
    task = load_task("circle_packing_26")
    problem = ProblemView(
        task.instruction, task.entry, task.direction, task.score_name, task.limits.wall_seconds, task.limits.cores
    )
    text = render_prompt(problem, ParentView(task.start_program("default"), 2.5414, None))
    for words in ("`run_packing()`", "480 seconds on 1 CPU core", "A higher score", "Its sum of radii: 2.54140000", "26 circles"):
        assert words in text


# Fitting ------------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def codec() -> PromptCodec:
    return PromptCodec(PROPOSER)


def test_codec_ends_prompts_at_the_answer_and_drops_the_stop_token(codec: PromptCodec) -> None:
    ids = codec.encode("Say it.")
    assert ids
    assert codec.stop_token_ids
    answer = codec.encode("Say it again and again.")[:5]
    assert codec.decode([*answer, codec.stop_token_ids[0]]) == codec.decode(answer)
    assert codec.decode([]) == ""


def test_a_prompt_that_fits_is_left_alone(codec: PromptCodec) -> None:
    encoded = codec.encode_fitting(PROBLEM, PARENT, context_tokens=2048, max_new_tokens=100)
    assert encoded.token_ids == codec.encode(render_prompt(PROBLEM, PARENT))
    assert (encoded.shortened, encoded.max_new_tokens) == ("", 100)


def test_answer_gets_the_rest_of_the_context(codec: PromptCodec) -> None:
    length = len(codec.encode(render_prompt(PROBLEM, PARENT)))
    encoded = codec.encode_fitting(PROBLEM, PARENT, context_tokens=length + 200, max_new_tokens=1000)
    assert encoded.max_new_tokens == 200 - RESERVE_TOKENS


def test_output_goes_first_then_code_from_its_end(codec: PromptCodec) -> None:
    code = "".join(f"x{i} = {i}\n" for i in range(300))
    full = len(codec.encode(render_prompt(PROBLEM, replace(PARENT, code=code))))
    smallest = RESERVE_TOKENS + MINIMUM_RESPONSE_TOKENS
    parent = replace(PARENT, code=code)
    without_output = codec.encode_fitting(PROBLEM, parent, context_tokens=full + smallest - 1, max_new_tokens=100)
    assert without_output.shortened == "output"
    assert without_output.token_ids == codec.encode(render_prompt(PROBLEM, replace(parent, output_tail="")))
    both = codec.encode_fitting(PROBLEM, parent, context_tokens=full // 2, max_new_tokens=100)
    assert both.shortened == "output and code"
    text = codec.decode(both.token_ids)
    assert "x1 = 1\n" in text
    assert "x299" not in text
    assert "# [the rest of this program was cut to fit the context]" in text
    assert text.count("# [the rest") == 1
    alone = codec.encode_fitting(PROBLEM, replace(parent, output_tail=""), context_tokens=full // 2, max_new_tokens=100)
    assert alone.shortened == "code"


def test_a_program_of_which_nothing_fits_is_not_denied(codec: PromptCodec) -> None:
    offered = replace(PROBLEM, construction_name="parent_x")
    parent = replace(PARENT, code=f"x = [{'0.25, ' * 3000}]\n", output_tail="")
    bare = render_prompt(offered, replace(parent, code="", withheld=True))
    for words in ("The parent program is too long to be shown.", "Its size: 1.00000000 -> 1.25000000", "global `parent_x`"):
        assert words in bare
    assert "There is no program yet" not in bare
    room = len(codec.encode(bare)) + 4
    encoded = codec.encode_fitting(
        offered, parent, context_tokens=room + RESERVE_TOKENS + MINIMUM_RESPONSE_TOKENS, max_new_tokens=100
    )
    assert (encoded.token_ids, encoded.shortened) == (codec.encode(bare), "code")


def test_thinking_that_must_end_early_leaves_the_prompt_less_room(codec: PromptCodec) -> None:
    """Where thinking ends is counted from the beginning of the prompt, so a long prompt is shortened for it."""
    full = len(codec.encode(render_prompt(PROBLEM, PARENT)))
    encoded = codec.encode_fitting(PROBLEM, PARENT, context_tokens=2048, max_new_tokens=1000, thinking_tokens=full + 50)
    assert (len(encoded.token_ids), encoded.max_new_tokens, encoded.shortened) == (full, 50, "")
    encoded = codec.encode_fitting(PROBLEM, PARENT, context_tokens=2048, max_new_tokens=30, thinking_tokens=full + 50)
    assert encoded.max_new_tokens == 30
    tight = full + MINIMUM_RESPONSE_TOKENS - 1
    encoded = codec.encode_fitting(PROBLEM, PARENT, context_tokens=2048, max_new_tokens=1000, thinking_tokens=tight)
    assert encoded.shortened == "output"
    assert len(encoded.token_ids) + encoded.max_new_tokens == tight
    with pytest.raises(InputError, match=r"statement takes \d+ tokens, but sampling\.thinking_tokens=40 leaves 24"):
        codec.encode_fitting(PROBLEM, PARENT, context_tokens=2048, max_new_tokens=1000, thinking_tokens=40)


def test_statement_that_is_too_long_gives_both_numbers(codec: PromptCodec) -> None:
    problem = replace(PROBLEM, instruction="word " * 3000)
    with pytest.raises(InputError, match=r"statement takes \d+ tokens, but sampling\.context_tokens=1024 leaves 992"):
        codec.encode_fitting(problem, PARENT, context_tokens=1024, max_new_tokens=100)


code_lines = st.sampled_from(["x = 1", "    return [" + "0.123, " * 40 + "]", "", "# é ∑ 圆", "a" * 400])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(code_lines, max_size=80).map("\n".join), st.text(max_size=900), st.integers(16, 2500))
def test_fitting_never_fails_when_the_statement_fits(codec: PromptCodec, code: str, output: str, context: int) -> None:
    parent = replace(PARENT, code=code, output_tail=output)
    bare = len(codec.encode(render_prompt(PROBLEM, replace(PARENT, code="", output_tail="", withheld=bool(code)))))
    room = context - RESERVE_TOKENS - MINIMUM_RESPONSE_TOKENS
    if bare > room:
        with pytest.raises(InputError, match="raise it"):
            codec.encode_fitting(PROBLEM, parent, context_tokens=context, max_new_tokens=300)
        return
    encoded = codec.encode_fitting(PROBLEM, parent, context_tokens=context, max_new_tokens=300)
    assert len(encoded.token_ids) <= room
    assert MINIMUM_RESPONSE_TOKENS <= encoded.max_new_tokens <= 300
    assert len(encoded.token_ids) + encoded.max_new_tokens + RESERVE_TOKENS <= context
    assert bool(encoded.shortened) == (encoded.token_ids != codec.encode(render_prompt(PROBLEM, parent)))


# Chat templates -------------------------------------------------------------------------------------------------------------------
def codec_with_template(tmp_path: Path, template: str | None, **generation: object) -> PromptCodec:
    folder = tmp_path / "model"
    shutil.copytree(PROPOSER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in folder.iterdir():
        file.chmod(0o644)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return PromptCodec(folder)


MESSAGES = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("ending", "opened"),
    [("{{ '<think>\\n' }}", True), ("{{ '<think>\\n\\n</think>\\n\\n' }}", False), ("", False)],
)
def test_thinking_that_the_template_opened_does_not_run(tmp_path: Path, ending: str, opened: bool) -> None:
    codec = codec_with_template(tmp_path, MESSAGES + "{% if add_generation_prompt %}" + ending + "{% endif %}")
    # Any ids will do for the text of a response; what counts is what stands before it.
    text = codec.decode(codec.encode("return")[:3])
    assert text.startswith("<think>\n") == opened
    assert (extract_program(text + "\n```python\na=1\n```") is None) == opened
    assert extract_program(text + "\n</think>\n```python\na=1\n```") == "a=1\n"


def test_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no chat template"):
        codec_with_template(tmp_path, None)


def test_every_end_of_turn_token_stops(tmp_path: Path) -> None:
    codec = codec_with_template(tmp_path, MESSAGES, eos_token_id=[5, 3])
    assert {3, 5} <= set(codec.stop_token_ids)
    assert codec.stop_token_ids == sorted(set(codec.stop_token_ids))


def test_codecs_are_loaded_one_at_a_time_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own first import fails if two threads make it at once."""
    loaded: list[Path] = []
    free, ready = threading.Lock(), threading.Barrier(6)

    def load(folder: Path, _: str) -> Path:
        assert free.acquire(blocking=False), "two threads load at once"
        time.sleep(0.02)  # long enough for the others to come here
        loaded.append(folder)
        free.release()
        return folder

    def ask(index: int) -> object:
        ready.wait()
        return tokens.codec_for(Path(f"model-{index % 2}"))

    tokens._load.cache_clear()
    monkeypatch.setattr(tokens, "PromptCodec", load)
    try:
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(ask, range(6)))
    finally:
        tokens._load.cache_clear()
    assert found == [Path(f"model-{i % 2}") for i in range(6)]
    assert sorted(loaded) == [Path("model-0"), Path("model-1")]
