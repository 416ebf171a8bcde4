"""One streamed answer: its text, its times, and what the server says of its speculation."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashdraft.client import Client, ServerError
from flashdraft.prompts import repetition

MOST = 10**9  # tokens or steps of one answer: what a server counts above it is no count
MOST_PROPOSALS = 1 << 16  # of one step


@dataclass(frozen=True)
class Speculation:
    """What a server says of one answer. Counts are over verify steps that drafted; accepted is without the target's own token.

    accepted_per_step and drafted_per_step: every verify step in order, where the server gives them; a step that drafted
    nothing has 0 in both. histogram: steps by accepted proposals. verify_steps: those that drafted nothing, too.
    """

    steps: int
    verify_steps: int
    accepted: int | None = None
    drafted: int | None = None
    width: int | None = None  # proposals that a step may verify
    histogram: list[int] | None = None
    accepted_per_step: list[int] | None = None
    drafted_per_step: list[int] | None = None


@dataclass
class Reply:
    """An answer as it was received; times in seconds since the request was sent."""

    content: list[str] = field(default_factory=list)  # in pieces, as they came
    reasoning: list[str] = field(default_factory=list)
    finish_reason: str = ""
    first: float | None = None  # the first token
    last: float | None = None
    seconds: float = 0.0
    prompt_tokens: int | None = None
    tokens: int | None = None  # of the answer, thinking included
    thinking_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    speculation: Speculation | None = None

    @property
    def text(self) -> str:
        return "".join(self.content)

    @property
    def repetition(self) -> float:
        """Of 8-grams of tokens; of words and signs where the server gives no ids."""
        words = re.findall(r"\w+|\S", "".join([*self.reasoning, *self.content])) if not self.token_ids else ()
        return repetition(self.token_ids or [hash(word) for word in words])

    def take(self, event: Mapping[str, Any], at: float) -> None:
        """One event of the stream. Raises ServerError for one that is none of a chat completion."""
        try:
            self._take(event, at)
        except (AttributeError, TypeError, KeyError, IndexError, ValueError, OverflowError) as error:
            raise ServerError(f"the server sent an event that is none of a chat completion: {str(event)[:120]}") from error

    def _take(self, event: Mapping[str, Any], at: float) -> None:
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = _text(delta.get("content"))
            reasoning = _text(delta.get("reasoning_content") or delta.get("reasoning"))
            ids = choice.get("token_ids") or ()
            self.content.append(text)
            self.reasoning.append(reasoning)
            self.token_ids += [int(token) for token in ids]
            self.finish_reason = _text(choice.get("finish_reason")) or self.finish_reason
            if text or reasoning or ids or delta.get("tool_calls"):
                self.first = at if self.first is None else self.first
                self.last = at
            self._note(choice.get("meta_info"), sglang)
        if usage := event.get("usage"):
            self.prompt_tokens, self.tokens = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
            details = usage.get("completion_tokens_details") or {}
            self.thinking_tokens = _count(details.get("reasoning_tokens", usage.get("reasoning_tokens")))
        self._note((event.get("metrics") or {}).get("speculative_decoding"), vllm)
        self._note(event.get("meta_info"), sglang)

    def _note(self, found: Any, read: Any) -> None:
        if found:
            self.speculation = read(found) or self.speculation


def ask(client: Client, body: Mapping[str, Any]) -> Reply:
    """Stream one answer. Raises ServerError, also where the stream ends before the answer does."""
    reply, begun = Reply(), time.perf_counter()
    for event in client.stream(body):
        reply.take(event, time.perf_counter() - begun)
    reply.seconds = time.perf_counter() - begun
    if not reply.finish_reason:
        raise ServerError(f"{client.base} ended an answer half way")
    if reply.tokens is None and reply.token_ids:
        reply.tokens = len(reply.token_ids)
    reply.speculation = within(reply.speculation, reply.tokens)
    if reply.first is None:  # an end-of-text alone, which has no text
        reply.first = reply.last = reply.seconds
    return reply


def vllm(found: Mapping[str, Any]) -> Speculation | None:
    """`metrics.speculative_decoding`, of this server and of vLLM with --per-request-spec-decode-metrics."""
    accepted, drafted = found.get("per_step_accepted"), found.get("per_step_drafted")
    if accepted is not None and drafted is not None:
        return from_steps([int(n) for n in accepted], [int(n) for n in drafted], _count(found.get("num_spec_tokens")))
    if found.get("num_spec_steps") is None or found.get("num_accepted_draft_tokens") is None:
        return None
    steps = _whole(found["num_spec_steps"])
    return Speculation(
        steps,
        steps,
        accepted=_whole(found["num_accepted_draft_tokens"]),
        drafted=_count(found.get("num_draft_tokens")),
        width=_count(found.get("num_spec_tokens")),
        histogram=_histogram(found.get("acceptance_histogram")),
    )


def from_steps(accepted: list[int], drafted: list[int], width: int | None) -> Speculation:
    """Of every verify step. Raises ValueError for lists of two lengths, and for counts that cannot be."""
    if any(not 0 <= a <= d for a, d in zip(accepted, drafted, strict=True)) or max([width or 0, *drafted]) > MOST_PROPOSALS:
        raise ValueError
    kept = [(a, d) for a, d in zip(accepted, drafted, strict=True) if d]
    histogram = [0] * (max([width or 0, *(a for a, _ in kept)]) + 1)
    for a, _ in kept:
        histogram[a] += 1
    return Speculation(
        steps=len(kept),
        verify_steps=len(accepted),
        accepted=sum(a for a, _ in kept),
        drafted=sum(d for _, d in kept),
        width=width,
        histogram=histogram,
        accepted_per_step=accepted,
        drafted_per_step=drafted,
    )


def within(found: Speculation | None, tokens: int | None) -> Speculation | None:
    """Steps in order, of which the last is cut as the answer of so many tokens is: vLLM counts it whole. Others as they are."""
    if found is None or not found.accepted_per_step or found.drafted_per_step is None or tokens is None:
        return found
    *before, last = found.accepted_per_step
    beyond = 1 + len(found.accepted_per_step) + sum(found.accepted_per_step) - tokens  # the first token comes without a step
    if not 0 < beyond <= last:
        return found
    return from_steps([*before, last - beyond], found.drafted_per_step, found.width)


def sglang(found: Mapping[str, Any]) -> Speculation | None:
    """`meta_info` of SGLang, where it is returned. Releases differ in what they call accepted proposals."""
    if not found.get("spec_verify_ct"):
        return None
    steps = _whole(found["spec_verify_ct"])
    accepted = next((_whole(found[k]) for k in ("spec_num_correct_drafts", "spec_accept_token_num") if k in found), None)
    drafted = next((_whole(found[k]) for k in ("spec_num_proposed_drafts", "spec_draft_token_num") if k in found), None)
    histogram = _histogram(found.get("spec_correct_drafts_histogram") or found.get("spec_accept_histogram"))
    return Speculation(steps, steps, accepted=accepted, drafted=drafted, histogram=histogram)


def _histogram(found: Any) -> list[int] | None:
    if found and len(found) > MOST_PROPOSALS:
        raise ValueError
    return [_whole(n) for n in found] if found else None


def _whole(value: Any) -> int:
    """A count, also as 3.0 or "3"."""
    count = int(value)
    if not 0 <= count <= MOST:
        raise ValueError
    return count


def _text(value: Any) -> str:
    """A string, "" for null; ValueError for anything else."""
    if value is not None and not isinstance(value, str):
        raise ValueError
    return value or ""


def _count(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value <= MOST):
        raise ValueError
    return value
