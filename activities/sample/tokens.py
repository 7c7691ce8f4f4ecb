"""From a prompt to token ids and back, with the model's own chat template. Knows no engine.

transformers is used for the tokenizer alone: the chat template must be the one the engine's model was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from activities.errors import InputError
from activities.sample.prompt import ParentView, ProblemView, render_prompt

RESERVE_TOKENS = 16
"""Kept free at the end of the context: engines count special tokens in their own way."""
MINIMUM_RESPONSE_TOKENS = 16


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt that fits."""

    token_ids: list[int]
    max_new_tokens: int
    shortened: str
    """Empty, or what was left out of the prompt to make it fit: `output`, `code`, or `output and code`."""


class PromptCodec:
    """One model's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if self._tokenizer.chat_template is None:
            raise InputError(f"model {folder} has no chat template in its tokenizer; tttd prompts chat models only")
        self._stops = _stop_ids(folder, self._tokenizer)
        self._opened = _opened_thinking(self._tokenizer)

    @property
    def stop_token_ids(self) -> list[int]:
        return self._stops

    def encode(self, message: str) -> list[int]:
        """Token ids of one user message with the opening of the model's answer."""
        encoded = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=True
        )
        ids = encoded["input_ids"] if hasattr(encoded, "keys") else encoded
        return [int(token) for token in ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a response, without its stop token.

        Where the chat template itself opens the thinking, the tag stands first here too: otherwise a response that was cut off
        in its thinking would look like an answer.
        """
        if token_ids and token_ids[-1] in self._stops:
            token_ids = token_ids[:-1]
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._opened + text

    def encode_fitting(
        self, problem: ProblemView, parent: ParentView, *, context_tokens: int, max_new_tokens: int
    ) -> EncodedPrompt:
        """Encode a prompt, shortening it by rule when it would leave the answer no room: output tail first, then code.

        Raises:
            InputError: even the problem statement alone does not fit; gives both numbers.
        """
        room = context_tokens - RESERVE_TOKENS - MINIMUM_RESPONSE_TOKENS
        shortened = ""
        ids = self.encode(render_prompt(problem, parent))
        if len(ids) > room and parent.output_tail:
            parent, shortened = replace(parent, output_tail=""), "output"
            ids = self.encode(render_prompt(problem, parent))
        while len(ids) > room and parent.code:
            kept = max(0, int(len(parent.code) * room / len(ids)) - 64)
            parent = replace(parent, code=_cut(parent.code, kept))
            shortened = "output and code" if "output" in shortened else "code"
            ids = self.encode(render_prompt(problem, parent))
        if len(ids) > room:
            raise InputError(
                f"the problem statement takes {len(ids)} tokens, but sampling.context_tokens={context_tokens} leaves {room} for a "
                "prompt; raise it"
            )
        return EncodedPrompt(ids, min(max_new_tokens, context_tokens - RESERVE_TOKENS - len(ids)), shortened)


def _cut(code: str, characters: int) -> str:
    """The beginning of a program up to a whole line, with a line that says so; empty once nothing useful is left."""
    if characters < 80:
        return ""
    return code[:characters].rpartition("\n")[0] + "\n# [the rest of this program was cut to fit the context]\n"


def _opened_thinking(tokenizer: Any) -> str:
    """``<think>`` and a line break if the template ends a prompt inside the thinking, else the empty string."""
    prompt: str = tokenizer.apply_chat_template([{"role": "user", "content": "-"}], add_generation_prompt=True, tokenize=False)
    _, tag, after = prompt.rpartition("<think>")
    return f"{tag}\n" if tag and "</think>" not in after else ""


def _stop_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Every end-of-turn token: models name several in generation_config.json, and stopping at one of them only is a known trap."""
    ids: set[int] = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    file = folder / "generation_config.json"
    if file.is_file():
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        ids |= set(eos) if isinstance(eos, list) else {eos} if eos is not None else set()
    return sorted(ids)


@lru_cache(maxsize=4)
def codec_for(folder: Path) -> PromptCodec:
    """One codec per model and process: loading a tokenizer takes a second."""
    return PromptCodec(folder)
