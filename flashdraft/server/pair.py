"""The pair where its weights are, and what travels between it and the endpoints, which may be in another process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from flashdraft.engine.request import Constraint, SamplingParams, Span, check_length
from flashdraft.errors import RequestError
from flashdraft.grammar import Grammars, ThinkingConstraint
from flashdraft.llm import LLM, Live
from flashdraft.media import MediaLimits, TokensPrompt

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
Work = Literal["prompt", "compile"]


@dataclass(frozen=True)
class Facts:
    """What the endpoints know of a pair; none of it holds weights."""

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    num_proposals: int | None  # None: there is no draft
    media: Mapping[int, str] | None  # the kind that each placeholder token stands for; None: it takes text alone
    sampling: Mapping[str, Any]  # defaults, and the longest answer, by the target's generation_config
    max_tokens: int | None


@dataclass(frozen=True)
class Ask:
    """The n answers that are wanted to one prompt. `grammar`: a compiled one; `thinking`: its markers, if there may be some."""

    prompt: list[int]
    params: SamplingParams
    markers: frozenset[int] = frozenset()
    max_draft_tokens: int | None = None
    grammar: str | None = None
    thinking: tuple[str, str] | None = None
    opened: bool = False  # the prompt has begun the thinking
    budget: int | None = None  # tokens of thinking
    media: tuple[Span, ...] = ()


class Pair:
    """An LLM as the server uses it. `work` names what takes long, and is done in threads of its own."""

    def __init__(self, llm: LLM, chat_template: str | None, media_limits: MediaLimits) -> None:
        if chat_template is not None:
            llm.tokenizer.chat_template = chat_template
        self.llm = llm
        self._grammars = Grammars(llm.tokenizer, llm.target.vocab_size, llm.eos_token_ids)
        self._media_llm = llm if llm.target.media is None else LLM.from_parts(copy.deepcopy(llm.tokenizer), llm.engine)
        self._media_llm.media_limits = media_limits
        self._pools = {name: ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("prompt", "compile")}

    @property
    def facts(self) -> Facts:
        target, engine = self.llm.target, self.llm.engine
        sampling, max_tokens = generation_defaults(self.llm)
        media = None if target.media is None else {mark.placeholder: kind for kind, mark in target.media.marks.items()}
        return Facts(
            tokenizer=self.llm.tokenizer,
            vocab_size=target.vocab_size,
            eos_token_ids=self.llm.eos_token_ids,
            max_model_len=engine.max_model_len,
            num_proposals=None if engine.draft is None else engine.scheduler.num_proposals,
            media=media,
            sampling=sampling,
            max_tokens=max_tokens,
        )

    def prepare(self, ask: Ask) -> list[Live]:
        """The requests of the answers. Raises RequestError for what can never be served."""
        check_length(len(ask.prompt), self.llm.engine.max_model_len)  # before its tokens are looked at one by one
        live = self.llm.prepare(
            ask.prompt,
            ask.params,
            markers=ask.markers,
            max_draft_tokens=ask.max_draft_tokens,
            constraint=(lambda: self._constraint(ask)) if ask.grammar is not None or ask.budget is not None else None,
            media=ask.media,
        )
        for one in live:
            self.llm.engine.check(one.request)
        return live

    def _constraint(self, ask: Ask) -> Constraint:
        grammar = None if ask.grammar is None else self._grammars.of(ask.grammar).constraint()
        if ask.thinking is None:
            assert grammar is not None
            return grammar
        return ThinkingConstraint(
            self.llm.tokenizer,
            ask.thinking,
            self.llm.target.vocab_size,
            opened=ask.opened,
            grammar=grammar,
            budget=ask.budget,
            eos=self.llm.eos_token_ids,
        )

    def work(self, name: Work, *arguments: Any) -> Future[Any]:
        """The method of that name, in its thread."""
        return self._pools[name].submit(getattr(self, name), *arguments)

    def prompt(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> TokensPrompt:
        """A conversation with media, which the target encodes: large images take seconds."""
        return self._media_llm.prompt(messages, kwargs)

    def compile(self, kind: Literal["json", "regex", "lark", "choice"], source: Any) -> str:
        """A grammar. Raises RequestError."""
        return self._grammars.compile(kind, source).compiled

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def generation_defaults(llm: LLM) -> tuple[dict[str, Any], int | None]:
    """Sampling defaults, and the longest answer, by the target's generation_config."""
    config = getattr(llm.target.model, "generation_config", None)
    given = config.to_diff_dict() if config is not None else {}
    found = {name: given[name] for name in SAMPLING_DEFAULTS if isinstance(given.get(name), int | float)}
    if given.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        SamplingParams(**found)
    except RequestError:
        return {}, None
    longest = given.get("max_new_tokens")
    return found, longest if isinstance(longest, int) and longest > 0 else None
