"""The embedded proposer: its files, its tokenizer, the generator behind it, and that the model still writes valid programs."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scripts.proposer.corpus import EMPTY_SHARE, Parent, make_pairs, problem_view, seed_program
from scripts.proposer.execute import Outcome, run_programs
from scripts.proposer.generate import MISTAKES, child_spec, parent_spec, render

FOLDER = Path(__file__).parents[1] / "tasks" / "proposers" / "packing"
WEIGHT_BYTES_LIMIT = 7_000_000
VALID_RATE = (0.30, 0.90)
"""Of 32 samples on held-out parents; the shipped weights reach about 0.6, and one standard error is 0.09."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER)


def test_sums_cover_and_match_every_file() -> None:
    sums = dict(reversed(line.split("  ")) for line in (FOLDER / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == {p.name for p in FOLDER.iterdir()} - {"SHA256SUMS"}
    assert sums == {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in sums}


def test_weights_stay_small() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= WEIGHT_BYTES_LIMIT


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n\n",
        "\r\n\t x",
        "  leading, trailing  ",
        "a\x00b\x07\x1b[0m\x7f",
        "Ġ is the tokenizer's own letter, and so is Ċ",
        "naïve Σ 漢字 🙂‍↔️ \u2028 e\u0301 \ufeff \U0010ffff",
        "1234567890 3.14e-5 ١٢٣",
        "def f():\n    return 1\n\n\n\tmixed\n",
        "```python\n```<|user|><|end|><|nothing|>",
        "# Pack 26 circles in the unit square\n",
    ],
)
def test_tokenizer_gives_any_text_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_tokenizer_gives_random_text_back(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    alphabet = [chr(c) for c in range(0x250)] + list("\n    0123456789αβ漢🙂")
    for _ in range(200):
        text = "".join(rng.choices(alphabet, k=rng.randrange(60)))
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_every_line_of_the_statement_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    instruction = problem_view().instruction
    lines = [line for line in instruction.splitlines() if line]
    assert len(tokenizer(instruction, add_special_tokens=False)["input_ids"]) == len(lines)


def test_chat_template_opens_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>Hello<|end|><|assistant|>"
    assert tokenizer.eos_token == "<|end|>"


def _programs(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return [render(child_spec(rng, parent_spec(rng))) for _ in range(count)]


def test_generator_repeats_a_seed() -> None:
    assert _programs(3, 50) == _programs(3, 50)
    assert _programs(3, 50) != _programs(4, 50)


def test_generator_knows_the_seed_program_as_a_parent() -> None:
    rng = random.Random(0)
    assert seed_program() in {render(parent_spec(rng)) for _ in range(300)}


def test_programs_behave_as_labelled() -> None:
    rng = random.Random(1)
    specs = [child_spec(rng, parent_spec(rng)) for _ in range(60)]
    outcomes = run_programs([render(spec) for spec in specs], workers=1)
    right = [o.score is not None for s, o in zip(specs, outcomes, strict=True) if not s.mistake]
    wrong = [o.score is not None for s, o in zip(specs, outcomes, strict=True) if s.mistake]
    # Numbers alone can make a program overlap, and a rare mistake does no harm, so both are shares.
    assert sum(right) / len(right) > 0.7
    assert sum(wrong) / len(wrong) < 0.3
    assert {s.mistake for s in specs} <= {"", *MISTAKES}
    for spec, outcome in zip(specs, outcomes, strict=True):
        broken = spec.mistake in {"open bracket", "no colon", "bad indent"}
        assert (outcome.reason == "syntax") == broken, render(spec)


def test_pairs_use_the_prompt_of_a_run() -> None:
    rng = random.Random(2)
    spec = parent_spec(rng)
    pairs = make_pairs(0, [Parent(spec, render(spec), Outcome(1.25, ""))], 400)
    assert all(pair.prompt.startswith(problem_view().instruction) for pair in pairs)
    assert all(pair.response.startswith("```python\n") and pair.response.endswith("\n```") for pair in pairs)
    empty = sum("There is no program yet." in pair.prompt for pair in pairs) / len(pairs)
    assert abs(empty - EMPTY_SHARE) < 0.04


@pytest.mark.slow
def test_model_writes_valid_programs() -> None:
    torch = pytest.importorskip("torch")
    from scripts.proposer.corpus import held_out_prompts
    from scripts.proposer.evaluate import load, measure

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, tokenizer = load(FOLDER)
        numbers, _ = measure(model, tokenizer, *held_out_prompts(32, workers=1), seed=0)
    finally:
        torch.set_num_threads(threads)
    assert VALID_RATE[0] <= numbers["valid rate"] <= VALID_RATE[1], numbers
    assert numbers["unfinished"] <= 3
