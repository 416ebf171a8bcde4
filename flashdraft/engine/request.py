"""A request to the engine, its sampling parameters, its hooks into the world of text, and what comes back."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from torch import Tensor

from flashdraft.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How the target's tokens are chosen. Names and meanings are those of vLLM's SamplingParams.

    temperature 0 is greedy. `seed` None draws a fresh 64-bit seed for each request. `logprobs` n returns the chosen token's
    log-probability and the n likeliest, from the raw logits; `prompt_logprobs` n the same, and the rank, of every prompt token
    but the first. Raises RequestError for values out of range, NaN included.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None  # None: up to the end of the context
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        set_(self, "stop", stop)
        set_(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        set_(self, "logit_bias", dict(self.logit_bias or {}))
        if self.top_k == -1:
            set_(self, "top_k", 0)
        for name, low, high in _RANGES:
            _check_number(name, getattr(self, name), low, high)
        for name, low_int in (("top_k", 0), ("n", 1), ("min_tokens", 0)):
            _check_int(name, getattr(self, name), low_int)
        if self.top_p == 0.0:
            raise RequestError("top_p must be greater than 0 and at most 1, got 0")
        if self.repetition_penalty == 0.0:
            raise RequestError("repetition_penalty must be greater than 0, got 0")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(f"min_tokens {self.min_tokens} must not be greater than max_tokens {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None:
                _check_int(name, wanted, 0)
                if wanted > MAX_LOGPROBS:
                    raise RequestError(f"{name} must be at most {MAX_LOGPROBS}, got {wanted}")
        if self.seed is not None:
            _check_int("seed", self.seed, None)
            if not -(2**63) <= self.seed < 2**64:
                raise RequestError(f"seed must fit in 64 bits, got {self.seed}")
        if not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop must be non-empty strings, got {self.stop!r}")
        for token, bias in self.logit_bias.items():
            _check_int("a logit_bias key", token, 0)
            _check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        for token in self.stop_token_ids:
            _check_int("a stop_token_id", token, 0)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @cached_property  # here, where nothing changes: a request may be served again with other parameters
    def is_for_host(self) -> bool:
        """Whether choices depend on more than logits, temperature, top-k, top-p, min-p and noise."""
        return self.penalised or bool(self.logit_bias) or self.logprobs is not None

    def resolved_seed(self) -> int:
        """The seed as an unsigned 64-bit number; a fresh one where none was given."""
        return secrets.randbits(64) if self.seed is None else self.seed % 2**64


_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
)


def _tuple(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} must be a list, got {value!r}")
    return tuple(value)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")


def _check_int(name: str, value: object, low: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        bound = "" if low is None else f" of at least {low}"
        raise RequestError(f"{name} must be an integer{bound}, got {value!r}")


class Constraint(Protocol):
    """A grammar, as the engine sees it (implemented by grammar.py)."""

    def masks(self, proposals: list[int]) -> Tensor:
        """Allowed tokens, bool [len(proposals) + 1, V]: row i after proposals[:i]."""

    def advance(self, token: int) -> None:
        """Consume one committed token."""


@dataclass(frozen=True)
class Span:
    """Media inside a prompt: `length` placeholder positions from `start`, with the target's embeddings [length, H].

    key: names its content in the prefix cache. whole: it is computed in one step, as its positions see all of it.
    """

    start: int
    length: int
    key: str
    embeddings: Tensor
    whole: bool = False


@dataclass
class Request:
    """One sequence to continue.

    `on_token(id)` is called once for each committed token but a stop id that ends the request, in order, with no token
    missing or repeated, and returns a finish reason to end the request at that token (stop strings, grammar end) or None.
    `stop_ids` end it with "stop".
    `choice` distinguishes the n answers of one prompt in the sampling noise.
    """

    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    on_token: Callable[[int], FinishReason | None] | None = None
    choice: int = 0
    seed: int | None = None  # None: that of `params`, or a fresh one
    max_draft_tokens: int | None = None  # None: the engine's; 0: no speculation
    constraint: Constraint | None = None
    media: tuple[Span, ...] = ()
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def is_for_host(self) -> bool:
        """Whether its choices depend on more than logits, temperature, top-k, top-p, min-p and noise."""
        return self.params.is_for_host or self.constraint is not None


def check_length(length: int, max_model_len: int) -> None:
    """Raises RequestError for a prompt of so many tokens that is none, or too long for the context."""
    if length == 0:
        raise RequestError("the prompt is empty: give at least one token")
    if length >= max_model_len:
        raise RequestError(
            f"the prompt has {length} tokens and the context holds {max_model_len}, the answer included: "
            "shorten the prompt or raise max_model_len"
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities, from the raw logits, at one position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), likeliest first
    rank: int | None = None  # of the token, 1 for the likeliest; of prompt tokens alone


@dataclass
class Output:
    """What a request has produced so far; `tokens` grows by commits and is final once finish_reason is set.

    committed_per_step holds, for each verify step, how many tokens it committed; drafted_per_step how many proposals it
    verified (0 for a step without a draft). The first token comes from prefill, so sum(committed_per_step) + 1 == len(tokens).
    prompt_logprobs, where asked for, has an entry for every prompt token once the first token is there, None for the first.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None  # what ended it with "error": a hook that raised, or logits without a choice
    stop_token: int | None = None  # the stop id that ended it, if one did (it is the last of `tokens`)
    committed_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)
    discarded: int = 0  # tokens chosen behind the one that ended the request
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_logprobs = None if self.request.params.prompt_logprobs is None else [None]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def acceptance_length(self) -> float | None:
        """Mean committed tokens over the steps that drafted; None if there were none."""
        drafted = [c for c, d in zip(self.committed_per_step, self.drafted_per_step, strict=True) if d]
        return sum(drafted) / len(drafted) if drafted else None
