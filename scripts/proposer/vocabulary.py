"""Builds the proposer's tokenizer: byte-level BPE whose tokens may be whole lines.

Text is split only before newlines and around single digits, so that a line of a known template is one token and every number
stays a free choice of digits. Whatever the corpus never had falls back to shorter tokens and in the end to bytes, so any text
comes back exactly. Known lines are looked up whole (`ignore_merges`): learning them as merges would spend the vocabulary on
their halves.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, END, SYSTEM, USER, ASSISTANT)
PIECE = r"\d|\n+[^\n\d]*|[^\n\d]+"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Sequence[str], constant_lines: Iterable[str], size: int, merges_until: int) -> Tokenizer:
    """Bytes and merges up to `merges_until` entries, then the commonest whole pieces up to `size`."""
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = splitter
    trainer = trainers.BpeTrainer(
        vocab_size=merges_until,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    pieces = Counter(piece for text in texts for piece, _ in splitter.pre_tokenize_str(text))
    constant = [AddedToken(line, normalized=False, special=False) for line in constant_lines]
    # By count, then by text: the order of equals must not hang on a hash.
    for piece, count in sorted(pieces.items(), key=lambda item: (-item[1], item[0])):
        if len(vocabulary) + len(constant) >= size or count < 20:
            break
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens(constant)
    return tokenizer


def constant_lines(instruction: str) -> list[str]:
    """Lines of the task's statement that a digit would cut up; each becomes one token, with the newlines before it."""
    lines = []
    start = 0
    while start < len(instruction):
        body = start + len(instruction[start:]) - len(instruction[start:].lstrip("\n"))
        end = instruction.find("\n", body)
        end = len(instruction) if end < 0 else end
        lines.append(instruction[start:end])
        start = end
    return [line for line in lines if any(c.isdigit() for c in line)]


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> PreTrainedTokenizerFast:
    """Write the standard files and give the tokenizer as transformers sees it."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    # transformers 5 writes its new class name; the old one is read by both 4 and 5, and by engines pinned to either.
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return fast
