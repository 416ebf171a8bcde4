"""The answers to one prompt as they come: events, logprobs and counts, for the endpoints to put into their own words."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashdraft.engine.request import TokenLogprobs
from flashdraft.errors import FlashdraftError
from flashdraft.server.errors import APIError
from flashdraft.server.jobs import EngineFault, Job, News
from flashdraft.server.parsers.answer import AnswerParser, joined
from flashdraft.server.parsers.events import Call, Event
from flashdraft.server.service import Service


@dataclass(frozen=True)
class Part:
    """What one answer has gained. `sources`: each token's text, and whether the draft had proposed it."""

    index: int
    events: list[Event]
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    sources: list[tuple[str, bool]]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Answer:
    """One of n answers so far."""

    parser: AnswerParser
    tokens: int = 0
    calls: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def part(self, news: News, report: bool) -> Part:
        events = self.parser.push_all(news.events)
        if news.finish_reason is not None:
            events += self.parser.finish()
        events = joined(events)
        self.calls += sum(isinstance(event, Call) for event in events)
        sources = self._sources(news) if report else []
        self.tokens += len(news.tokens)
        self.steps += news.steps
        self.finish_reason, self.stop_reason = news.finish_reason, news.stop_reason
        if news.finish_reason == "stop" and self.calls:
            self.finish_reason = "tool_calls"
        return Part(news.index, events, news.tokens, news.logprobs, sources, self.finish_reason, news.stop_reason)

    def _sources(self, news: News) -> list[tuple[str, bool]]:
        accepted = [] if self.tokens else [False]  # the first token comes from the prompt
        for committed, _ in news.steps:
            accepted += [True] * (committed - 1) + [False]
        out, place = [], 0
        for token, text in news.events:
            out.append((text, accepted[place] if token >= 0 and place < len(accepted) else False))
            place += token >= 0
        return [item for item in out if item[0]]


class Generation:
    """Reads a job to its end; leaving `parts` early, or an error, ends the job. Raises APIError."""

    def __init__(
        self,
        service: Service,
        job: Job,
        prompt_tokens: int,
        parser: Callable[[], AnswerParser],
        report: bool = False,
        media_tokens: Mapping[str, int] | None = None,  # of those of the prompt
    ) -> None:
        self.prompt_tokens, self.cached_tokens = prompt_tokens, 0
        self.answers = [Answer(parser()) for _ in range(job.answers)]
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None  # where asked for, once the answers have ended
        self.first_token: float | None = None  # seconds
        self._service, self._job, self._report = service, job, report
        self._media_tokens = dict(media_tokens or {})

    async def parts(self) -> AsyncIterator[Part]:
        job, service, batches = self._job, self._service, self._job.news()
        until = asyncio.get_running_loop().time() + service.options.request_seconds
        try:
            while True:
                async with asyncio.timeout_at(until):  # never around a yield: it would cancel whatever the reader waits for
                    batch = await anext(batches, None)
                if batch is None:
                    break
                for news in batch:
                    self._raise(news)
                    if self.first_token is None and news.tokens:
                        self.first_token = time.monotonic() - job.arrived
                        service.measures.first_token.observe(self.first_token)
                    self.cached_tokens = max(self.cached_tokens, news.cached_tokens)
                    self.prompt_logprobs = news.prompt_logprobs or self.prompt_logprobs
                    yield self.answers[news.index].part(news, self._report)
            self._measure()
        except TimeoutError as error:
            raise APIError(504, f"the request took longer than {service.options.request_seconds:g} s") from error
        finally:
            service.loop.cancel(job)

    def _raise(self, news: News) -> None:
        if news.error is None and news.finish_reason != "abort":
            return
        if isinstance(news.error, FlashdraftError):
            raise APIError(400, str(news.error))
        message = str(news.error) if isinstance(news.error, EngineFault) else "the request failed"
        raise APIError(500, message if news.error is not None else "the server is shutting down")

    def _measure(self) -> None:
        measures, seconds = self._service.measures, time.monotonic() - self._job.arrived
        measures.latency.observe(seconds)
        measures.prompt.observe(self.prompt_tokens)
        measures.prompt_tokens.inc(self.prompt_tokens)
        measures.cache_queries.inc(self.prompt_tokens)
        measures.cache_hits.inc(self.cached_tokens)
        for answer in self.answers:
            measures.answer.observe(answer.tokens)
            if answer.tokens > 1 and self.first_token is not None:
                measures.per_token.observe((seconds - self.first_token) / (answer.tokens - 1))

    def usage(self) -> dict[str, Any]:
        completion = sum(answer.tokens for answer in self.answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, **self._media_tokens},
            "completion_tokens_details": {"reasoning_tokens": sum(answer.parser.reasoning_tokens for answer in self.answers)},
        }

    def speculative_decoding(self) -> dict[str, Any]:
        """Acceptance over all answers; only committed tokens count."""
        steps = [step for answer in self.answers for step in answer.steps]
        drafting = [(committed, drafted) for committed, drafted in steps if drafted]
        accepted, drafted = sum(c - 1 for c, _ in drafting), sum(d for _, d in drafting)
        histogram, width = Counter(c - 1 for c, _ in drafting), self._service.loop.num_proposals
        return {
            "mean_acceptance_length": (accepted + len(drafting)) / len(drafting) if drafting else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_histogram": [histogram[n] for n in range(width + 1)],
            "num_spec_steps": len(drafting),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": width,
            "per_step_accepted": [c - 1 for c, _ in steps],
            "per_step_drafted": [d for _, d in steps],
        }
