"""How thinking is marked in the answers of a target, and an answer without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashdraft.text import split_thinking

TAIL = 16  # tokens of a prompt's end that may open the thinking


@dataclass(frozen=True)
class ReasoningFormat:
    """How thinking is marked. `label` is what follows the start marker and is no thought; `again`: it may come repeatedly."""

    name: str
    start: str
    end: str
    label: str = ""
    again: bool = False

    def is_open(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has begun the thinking."""
        tail = prompt_end.rstrip()
        return tail.endswith(self.start) or (bool(self.label) and tail.endswith(self.start + self.label.rstrip()))


THINK = ReasoningFormat("think", "<think>", "</think>")
GEMMA4 = ReasoningFormat("gemma4", "<|channel>", "<channel|>", "thought\n", again=True)


def format_of(tokenizer: Any) -> ReasoningFormat | None:
    """The format that a tokenizer's chat template speaks of, if any."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return next((form for form in (GEMMA4, THINK) if form.start in template or form.end in template), None)


def without_thinking(tokenizer: Any, form: ReasoningFormat, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of an answer but its thinking and special tokens. Markers that are tokens are known by their ids: special ones,
    as Gemma 4's, have no text to be found by.
    """
    opened = form.is_open(str(tokenizer.decode(list(prompt[-TAIL:]), skip_special_tokens=False)))
    start, end = (tokenizer.get_added_vocab().get(marker) for marker in (form.start, form.end))
    if start is None or end is None:
        told, answer = split_thinking(_text(tokenizer, tokens), form.start, form.end, opened=opened)
        return answer.lstrip() if told else answer
    kept: list[int] = []
    thinking = thought = opened
    for token in tokens:
        if token == start and (form.again or not _text(tokenizer, kept).strip()):
            thinking = thought = True
        elif token == end and thinking:
            thinking = False
        elif not thinking:
            kept.append(token)
    return _text(tokenizer, kept).lstrip() if thought else _text(tokenizer, kept)


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
