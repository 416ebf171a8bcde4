"""From prompts to what the target is asked: rendering by its chat template, the thinking switch, and what each answer draws."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from flashdraft.errors import ConfigError
from flashdraft.prompts import Prompt
from flashdraft.thinking import THINK, format_of, without_thinking

Thinking = Literal["on", "off", "mixed"]
Message = dict[str, str]
PROBE = ({"role": "user", "content": "What is 2 + 2?"},)


@dataclass(frozen=True)
class Conversation:
    """One prompt, its how manieth sample, and the target's answers so far: content, without thinking."""

    prompt: Prompt
    sample: int
    temperature: float
    thinking: bool | None  # None: the template is not told
    answers: tuple[str, ...] = ()

    @property
    def turn(self) -> int:
        return len(self.answers)

    @property
    def messages(self) -> list[Message]:
        """All messages up to the turn that is to be answered."""
        messages = list(self.prompt.opening)
        for turn, answer in zip(self.prompt.turns, self.answers, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": self.prompt.turns[self.turn]}]

    @property
    def template(self) -> dict[str, Any]:
        """chat_template_kwargs."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}

    @property
    def is_last(self) -> bool:
        """Whether no turn comes after the one that is to be answered."""
        return self.turn + 1 == len(self.prompt.turns)


class Renderer:
    """Prompt ids by the target's chat template, and an answer's content for the turns after it.

    `switches` says whether the template knows enable_thinking; where it does not, `thinking` has no effect. Raises ConfigError
    for a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: Thinking | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("this target's tokenizer has no chat template, which prompts need: add one to its files")
        self.tokenizer = tokenizer
        self._format = format_of(tokenizer) or THINK
        default, on, off = (self.render(PROBE, kwargs) for kwargs in ({}, _switch(True), _switch(False)))
        self.switches = on != off
        self.by_default = self.switches and default == on  # whether the target thinks when its template is not told
        self._thinking = thinking if self.switches else None

    def thinking_of(self, prompt_hash: int, sample: int) -> bool | None:
        """Whether an answer is to be thought about; every other one for "mixed". None: the template is not told."""
        if self._thinking is None:
            return None
        return self._thinking == "on" or (self._thinking == "mixed" and (prompt_hash ^ sample) & 1 == 1)

    def render(self, messages: Sequence[Mapping[str, str]], template: Mapping[str, Any]) -> str:
        text = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=True, **template
        )
        assert isinstance(text, str)
        return text

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered texts."""
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def content(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """What of an answer its conversation goes on with: without its stop token and its thinking, as a chat does."""
        return without_thinking(self.tokenizer, self._format, prompt, tokens[:-1])


def _switch(on: bool) -> dict[str, bool]:
    return {"enable_thinking": on}


def draw(prompt_hash: int, sample: int, what: str, seed: int = 0) -> int:
    """64 random bits that belong to an answer: the same whenever and in whatever company it is made."""
    name = f"{prompt_hash} {sample} {what} {seed}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
