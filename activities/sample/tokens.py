"""From a prompt to token ids and back, with the model's own chat template. Knows no engine.

transformers is used for the tokenizer alone: the chat template must be the one the engine's model was trained with.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from activities.errors import InputError
from activities.sample.chat import ChatTemplate, Thinking, control_pattern
from activities.sample.prompt import ParentView, ProblemView, render_prompt
from activities.sample.thinking import ThinkingStyle

RESERVE_TOKENS = 16
"""Kept free at the end of the context: engines count special tokens in their own way."""
MINIMUM_RESPONSE_TOKENS = 16
"""Room that is kept for an answer, and for the thinking before it where that has a budget of its own."""

_PRIVATE_USE = range(0xE000, 0xF8FF)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt that fits."""

    token_ids: list[int]
    max_new_tokens: int
    """Of the response, or of its first phase where thinking has a budget."""
    shortened: str
    """Empty, or what was left out of the prompt to make it fit: `output`, `code`, or `output and code`."""


class PromptCodec:
    """One model's tokenizer and chat template.

    Raises:
        InputError: see :class:`ChatTemplate`.
    """

    def __init__(self, folder: Path, thinking: Thinking = "auto") -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._template = ChatTemplate(self._tokenizer, str(folder), thinking)
        self._control = control_pattern(self._tokenizer)
        self._stops = self._stop_ids(folder)
        self._positions = _positions(folder)
        self._folder = folder

    @property
    def stop_token_ids(self) -> list[int]:
        """Every token that ends the model's turn."""
        return self._stops

    @property
    def style(self) -> ThinkingStyle | None:
        """How the model separates thinking from its answer; None if nothing says that it thinks."""
        return self._template.style

    # Prompts --------------------------------------------------------------------------------------------------------------
    def encode(self, message: str) -> list[int]:
        """Token ids of one user message with the opening of the model's answer.

        The text of a control token within the message, such as an end-of-turn token that a parent's program prints, becomes
        ordinary text tokens: nothing in a message can end the turn that it stands in.
        """
        if not self._control.search(message):
            return self._ids(self._template.render(message))
        mark = next(chr(c) for c in _PRIVATE_USE if chr(c) not in message)
        marked = self._control.sub(lambda found: f"{mark}{found.group()}{mark}", message)
        pieces = self._template.render(marked).split(mark)
        return [token for i, piece in enumerate(pieces) for token in (self._plain(piece) if i % 2 else self._ids(piece))]

    def encode_fitting(
        self,
        problem: ProblemView,
        parent: ParentView,
        *,
        context_tokens: int,
        max_new_tokens: int,
        thinking_tokens: int | None = None,
    ) -> EncodedPrompt:
        """Encode a prompt, shortening it by rule when it would leave the answer no room: output tail first, then code.

        Args:
            thinking_tokens: where thinking must end, counted from the beginning of the prompt; None: no such limit.

        Raises:
            InputError: even the problem statement alone does not fit; gives both numbers.
        """
        room, limit = context_tokens - RESERVE_TOKENS - MINIMUM_RESPONSE_TOKENS, f"sampling.context_tokens={context_tokens}"
        if thinking_tokens is not None and thinking_tokens - MINIMUM_RESPONSE_TOKENS < room:
            room, limit = thinking_tokens - MINIMUM_RESPONSE_TOKENS, f"sampling.thinking_tokens={thinking_tokens}"
        ids, shortened = self._shortened(problem, parent, room)
        if len(ids) > room:
            raise InputError(
                f"the problem statement takes {len(ids)} tokens, but {limit} leaves {max(0, room)} for a prompt; raise it"
            )
        end = context_tokens - RESERVE_TOKENS if thinking_tokens is None else min(thinking_tokens, context_tokens - RESERVE_TOKENS)
        return EncodedPrompt(ids, min(max_new_tokens, end - len(ids)), shortened)

    def _shortened(self, problem: ProblemView, parent: ParentView, room: int) -> tuple[list[int], str]:
        shortened = ""
        ids = self.encode(render_prompt(problem, parent))
        if len(ids) > room and parent.output_tail:
            parent, shortened = replace(parent, output_tail=""), "output"
            ids = self.encode(render_prompt(problem, parent))
        while len(ids) > room and parent.code:
            kept = max(0, int(len(parent.code) * room / len(ids)) - 64)
            code = _cut(parent.code, kept)
            parent = replace(parent, code=code, withheld=not code)
            shortened = "output and code" if "output" in shortened else "code"
            ids = self.encode(render_prompt(problem, parent))
        return ids, shortened

    def check(self, *, context_tokens: int, thinking_tokens: int | None) -> None:
        """Refuse settings that this model cannot meet, before anything is sampled.

        Raises:
            InputError: the context is longer than the model's, there is no thinking to limit, or its limit leaves no room for
                an answer; gives the numbers.
        """
        if self._positions is not None and context_tokens > self._positions:
            raise InputError(
                f"sampling.context_tokens={context_tokens} exceeds the {self._positions} tokens that model {self._folder} can "
                "attend to; lower it"
            )
        if thinking_tokens is None:
            return
        if self.style is None:
            raise InputError(
                f"sampling.thinking_tokens={thinking_tokens}: neither the chat template nor the tokens of model {self._folder} "
                "know of thinking, so there is nothing to limit; leave the setting out"
            )
        least = self.longest_closing() + RESERVE_TOKENS + MINIMUM_RESPONSE_TOKENS
        if thinking_tokens + least > context_tokens:
            raise InputError(
                f"sampling.thinking_tokens={thinking_tokens} leaves {context_tokens - thinking_tokens} of "
                f"sampling.context_tokens={context_tokens} for the answer, which needs at least {least}; lower it"
            )

    # Responses ------------------------------------------------------------------------------------------------------------
    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a response, without its stop token.

        Where the chat template itself opens the thinking, the tag stands first here too: otherwise a response that was cut off
        in its thinking would look like an answer.
        """
        if token_ids and token_ids[-1] in self._stops:
            token_ids = token_ids[:-1]
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._template.opened + text

    def closing(self, token_ids: Sequence[int]) -> list[int]:
        """What to append to an unfinished response so that its answer begins; empty if it has begun, or never thinks."""
        text = self.style.closing(self.decode(token_ids)) if self.style else ""
        return self._ids(text) if text else []

    def longest_closing(self) -> int:
        """Tokens of the longest text that `closing` may give."""
        texts = [] if self.style is None else [self.style.closing(begun) for begun in self.style.unfinished]
        return max((len(self._ids(text)) for text in texts), default=0)

    def count_thinking(self, token_ids: Sequence[int]) -> int:
        """Tokens of a response before its answer, whatever separates the two included; all of them if it never answers."""
        text = self.decode(token_ids)
        offset = self.style.answer_offset(text) if self.style else 0
        if offset == 0 or offset == len(text):
            return len(token_ids) if offset else 0
        # A prefix's text grows with its tokens, so the first prefix that reaches the answer can be looked up.
        return bisect_left(range(len(token_ids)), offset, key=lambda n: len(self.decode(token_ids[:n])))

    # Token ids ------------------------------------------------------------------------------------------------------------
    def _ids(self, text: str) -> list[int]:
        """Token ids of a text whose control tokens are meant."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def _plain(self, text: str) -> list[int]:
        """Token ids of a control token's text as ordinary text: in two parts, neither of which is one."""
        parts = [text[:1], text[1:]]
        return [token for part in (list(text) if self._control.search(text[1:]) else parts) for token in self._ids(part)]

    def _stop_ids(self, folder: Path) -> list[int]:
        """Every end-of-turn token: models name several in generation_config.json, and stopping at one of them only is a known
        trap. So is a tokenizer whose end token is the end of a document, while the template ends a turn with another one."""
        ids: set[int] = {self._tokenizer.eos_token_id} if self._tokenizer.eos_token_id is not None else set()
        eos = _json(folder / "generation_config.json").get("eos_token_id")
        ids |= set(eos) if isinstance(eos, list) else {eos} if eos is not None else set()
        if end := self._template.end_of_turn(self._control):
            ids |= set(self._ids(end))
        return sorted(ids)


def _cut(code: str, characters: int) -> str:
    """The beginning of a program up to a whole line, with a line that says so; empty once nothing useful is left."""
    if characters < 80:
        return ""
    return code[:characters].rpartition("\n")[0] + "\n# [the rest of this program was cut to fit the context]\n"


def _positions(folder: Path) -> int | None:
    """Tokens that the model was made to attend to, with its rotary scaling; None if its configuration does not say."""
    config = _json(folder / "config.json")
    config = config.get("text_config") or config
    longest = config.get("max_position_embeddings")
    if not isinstance(longest, int):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return max(longest, int(rope.get("factor", 1) * rope.get("original_max_position_embeddings", longest)))


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


_loading = threading.Lock()


def codec_for(folder: Path, thinking: Thinking = "auto") -> PromptCodec:
    """One codec per model, thinking mode and process: loading a tokenizer takes a second. May be called in several threads."""
    # transformers fills its module in at the first import, which fails in a second thread ("cannot import name"); and activities
    # that start together shall wait for one tokenizer, not each load their own.
    with _loading:
        return _load(folder, thinking)


@lru_cache(maxsize=4)
def _load(folder: Path, thinking: Thinking) -> PromptCodec:
    return PromptCodec(folder, thinking)
