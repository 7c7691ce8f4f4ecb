"""Small real tokenizers whose chat templates have the form of the model families that are sampled from.

Role tags and special tokens are the models' own; all other words are made up. Text is one token a byte, so that any text can be
said in tokens, and control tokens stand out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

IM_TURNS = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "{{- '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
)

TEMPLATES = {
    "qwen2.5": (
        "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe useful.<|im_end|>\\n' }}{% endif %}"
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "qwen3": IM_TURNS
    + "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
    "qwen3-thinking": IM_TURNS + "{{ '<think>\\n' }}{% endif %}",
    "llama3": (
        "{{- bos_token }}{% set day = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}"
        "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nDay: ' + day + '\\n\\n<|eot_id|>' }}"
        "{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
        "{%- endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "gpt-oss": (
        "{{- '<|start|>system<|message|>Day: ' + strftime_now('%Y-%m-%d') }}"
        "{{- '\\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
        "{%- for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    ),
}

_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECIAL = {
    "qwen2.5": _IM,
    "qwen3": _IM,
    "qwen3-thinking": _IM,
    "llama3": ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
    "gpt-oss": (
        *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
        *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
    ),
}
TAG_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that Qwen3 does not call special."""
STOPS = {
    "qwen2.5": ("<|im_end|>", "<|endoftext|>"),
    "qwen3": ("<|im_end|>", "<|endoftext|>"),
    "qwen3-thinking": ("<|im_end|>", "<|endoftext|>"),
    "llama3": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "gpt-oss": ("<|return|>", "<|endoftext|>", "<|call|>"),
}
NAMES = tuple(TEMPLATES)


@dataclass(frozen=True)
class Style:
    """One model folder, as far as prompts need it."""

    name: str
    folder: Path
    tokenizer: Any

    @property
    def control(self) -> tuple[str, ...]:
        """Every text that steers this model."""
        return SPECIAL[self.name] + (TAG_TOKENS if self.name.startswith("qwen3") else ())

    @property
    def stop_ids(self) -> list[int]:
        return sorted(self.id_of(text) for text in STOPS[self.name])

    def id_of(self, token: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(token))

    def ids(self, text: str) -> list[int]:
        """Token ids of a text in which control tokens are meant."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: Any) -> str:
        """Everything that the tokens say, control tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def write_style(folder: Path, name: str, *, template: str | None = None, stops: tuple[str, ...] | None = None) -> Style:
    """Write the tokenizer of one family into a folder, beside whatever is there.

    Args:
        stops: end tokens that generation_config.json names; the family's own by default.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = SPECIAL[name]
    named = {"eos_token": STOPS[name][0]} | ({"bos_token": special[0]} if name == "llama3" else {})
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special], special_tokens=True)
    if name.startswith("qwen3"):
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAG_TOKENS])
    tokenizer.chat_template = TEMPLATES[name] if template is None else template
    tokenizer.save_pretrained(folder)
    ids = [tokenizer.convert_tokens_to_ids(text) for text in (STOPS[name] if stops is None else stops)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids} if ids else {}))
    return Style(name, folder, AutoTokenizer.from_pretrained(folder, local_files_only=True))
