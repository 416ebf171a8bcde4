"""Masks for structured output, by llguidance: at every position of a block, and only once the thinking has ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from flashdraft.engine.request import Constraint
from flashdraft.errors import ConfigError, RequestError

# Models that loop on white space would do so for ever inside JSON.
JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\n]{0,20}"}
TAIL = 16  # tokens in which the text of an end marker is looked for
MAX_GRAMMAR_CHARS = 200_000


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar, for as many answers as there are."""

    compiled: str
    tokenizer: Any
    vocab_size: int
    eos: frozenset[int]

    def constraint(self) -> GrammarConstraint:
        return GrammarConstraint(self)


class Grammars:
    """Compiles grammars for one tokenizer, whose tables are made (some 0.1 to 1 s) when the first one comes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos: frozenset[int]) -> None:
        self._source: Any = tokenizer
        self._vocab_size, self._eos = vocab_size, eos

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConfigError("structured output needs llguidance: run `pip install 'flashdraft[serve]'`") from error
        try:
            return from_tokenizer(self._source, n_vocab=self._vocab_size, eos_token=sorted(self._eos))
        except ValueError as error:
            raise RequestError("structured output needs a fast tokenizer, which this target does not have") from error

    def compile(self, kind: Literal["json", "regex", "lark", "choice"], source: Any) -> Grammar:
        """source: a JSON schema, a regular expression, a grammar in llguidance's Lark, or a list of texts.

        Raises RequestError for what is none, or is too complex.
        """
        tokenizer = self._tokenizer
        from llguidance import LLMatcher

        try:
            if kind == "json":
                text = source if isinstance(source, str) else json.dumps(source)
                compiled = LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
            elif kind == "regex":
                compiled = LLMatcher.grammar_from_regex(source)
            elif kind == "choice":
                compiled = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in source))
            else:
                compiled = LLMatcher.grammar_from_lark(source)
            if len(compiled) > MAX_GRAMMAR_CHARS:
                raise ValueError(f"it is longer than {MAX_GRAMMAR_CHARS} characters")
            matcher = LLMatcher(tokenizer, compiled, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some are too complex only once they are used
            if matcher.is_error():
                raise ValueError(matcher.get_error().strip().splitlines()[0])
        except (ValueError, RecursionError, TypeError) as error:
            raise RequestError(f"this {_NAMES[kind]} cannot be used: {str(error)[:300]}") from error
        return self.of(compiled)

    def of(self, compiled: str) -> Grammar:
        """A grammar that was compiled before."""
        return Grammar(compiled, self._tokenizer, self._vocab_size, self._eos)


_NAMES = {"json": "JSON schema", "regex": "regular expression", "lark": "grammar", "choice": "list of choices"}


class GrammarConstraint:
    """The state of one answer in its grammar (engine.request.Constraint)."""

    def __init__(self, grammar: Grammar) -> None:
        from llguidance import LLMatcher

        self._grammar = grammar
        self._matcher = LLMatcher(grammar.tokenizer, grammar.compiled, log_level=0)

    def masks(self, proposals: Sequence[int]) -> Tensor:
        """Allowed tokens, bool [len(proposals) + 1, V]. Rows behind a proposal that is not allowed are never used: all True."""
        masks = np.ones((len(proposals) + 1, self._grammar.vocab_size), dtype=bool)
        consumed = 0
        for row in range(len(proposals) + 1):
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            masks[row] = np.unpackbits(bits, bitorder="little", count=self._grammar.vocab_size)
            if self._matcher.is_error():  # it became too complex: nothing to choose ends this request with an error
                masks[:] = False
                return torch.from_numpy(masks)
            if row == len(proposals):
                break
            token = proposals[row]
            if not masks[row, token] or token in self._grammar.eos or not self._matcher.consume_token(token):
                break
            consumed += 1
        if consumed:
            self._matcher.rollback(consumed)
        return torch.from_numpy(masks)

    def advance(self, token: int) -> None:
        if token not in self._grammar.eos and not self._matcher.consume_token(token):
            raise RequestError(f"the grammar came to an end it cannot leave: {self._matcher.get_error()[:200]}")

    @property
    def accepting(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())


class ThinkingConstraint:
    """Free thinking up to its end marker, at most `budget` tokens of it, and then a grammar, if there is one.

    `opened`: the thinking has begun; otherwise it does if the answer's first token is the start marker, which has to be one
    token. The end marker may be a text, which is then written as the tokenizer does when the budget forces it. While a grammar
    is to come the answer may not end inside the thinking.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        markers: tuple[str, str],
        vocab_size: int,
        *,
        opened: bool,
        grammar: Constraint | None,
        budget: int | None,
        eos: frozenset[int],
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._grammar, self._budget = grammar, budget
        self._banned = sorted(t for t in eos if t < vocab_size) if grammar is not None else []
        start, self._end = markers
        self._start: int = tokenizer.encode(start, add_special_tokens=False)[0]
        self._end_tokens: list[int] = tokenizer.encode(self._end, add_special_tokens=False)
        self._state = _Thinking("thinking" if opened else "before")

    def masks(self, proposals: list[int]) -> Tensor:
        masks = torch.ones((len(proposals) + 1, self._vocab_size), dtype=torch.bool)
        state = self._state
        for row in range(len(proposals) + 1):
            if state.phase == "thinking":
                self._mask_thinking(masks[row], state)
            elif self._grammar is not None:
                rest = self._grammar.masks(proposals[row:])
                if state.phase == "ended":
                    masks[row:] = rest
                    return masks
                masks[row] = rest[0]
                masks[row, self._start] = True
                if row < len(proposals) and proposals[row] != self._start:
                    masks[row + 1 :] = rest[1:]
                    return masks
            if row < len(proposals):
                state = self._after(state, proposals[row])
        return masks

    def advance(self, token: int) -> None:
        before, self._state = self._state.phase, self._after(self._state, token)
        if before != "thinking" and self._state.phase == "ended" and self._grammar is not None:
            self._grammar.advance(token)

    def _mask_thinking(self, mask: Tensor, state: _Thinking) -> None:
        if self._budget is None or state.spent < self._budget:
            mask[self._banned] = False
        else:  # the end marker must come now
            mask[:] = False
            mask[self._end_tokens[min(state.spent - self._budget, len(self._end_tokens) - 1)]] = True

    def _after(self, state: _Thinking, token: int) -> _Thinking:
        if state.phase == "before":
            return _Thinking("thinking" if token == self._start else "ended")
        if state.phase == "ended":
            return state
        tail = (*state.tail, token)[-TAIL:]
        if len(self._end_tokens) == 1:
            ended = token == self._end_tokens[0]
        else:
            ended = self._end in str(self._tokenizer.decode(list(tail), skip_special_tokens=False))
        return _Thinking("ended" if ended else "thinking", state.spent + 1, tail)


@dataclass(frozen=True)
class _Thinking:
    phase: Literal["before", "thinking", "ended"]
    spent: int = 0  # tokens
    tail: tuple[int, ...] = ()
