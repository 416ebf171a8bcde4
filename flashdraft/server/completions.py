"""POST /v1/completions: texts and token ids to be continued."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from flashdraft.server.errors import APIError
from flashdraft.server.generation import Generation, Part
from flashdraft.server.http import DONE, event
from flashdraft.server.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from flashdraft.server.parsers.answer import AnswerParser, Formats
from flashdraft.server.parsers.events import Content
from flashdraft.server.parsers.lexer import Markers
from flashdraft.server.parsers.tools import JSON
from flashdraft.server.protocol import CompletionRequest
from flashdraft.server.service import Service

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 256


class Completions:
    """A completions request on its way: one generation a prompt, choices numbered through."""

    def __init__(self, service: Service, body: CompletionRequest, request_id: str) -> None:
        self.service, self.body, self.id = service, body, f"cmpl-{request_id}"
        self.generations: list[Generation] = []
        self._echo: list[str] = []
        self._prompts: list[list[int]] = []

    @classmethod
    async def start(cls, service: Service, body: CompletionRequest, request_id: str) -> Completions:
        """Raises APIError before anything runs."""
        service.admit(body.model)
        if len(body.prompts) > MAX_PROMPTS:
            raise APIError(400, f"prompt may hold at most {MAX_PROMPTS} prompts", param="prompt")
        self = cls(service, body, request_id)
        service.check_count(len(body.prompts) * (body.n or 1))
        # The engine always chooses a token: where none is wanted, it is left out of what is told.
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        params = service.params(body, body.logprobs, max_tokens)
        grammar = await service.grammar(body)
        prompts = [
            await service.prompts.text(prompt, body.add_special_tokens) if isinstance(prompt, str) else prompt
            for prompt in body.prompts
        ]
        formats = Formats(service.prompts.tokenizer, None, JSON)
        markers = Markers({}, ())
        jobs = []
        try:
            for prompt in prompts:
                jobs.append(await service.submit(prompt, params, speculation=body.speculation, grammar=grammar))
        except BaseException:  # the client's going away is one
            for job in jobs:
                service.loop.cancel(job)
            raise
        report = bool(body.speculation and body.speculation.report)
        for prompt, job in zip(prompts, jobs, strict=True):
            self.generations.append(Generation(service, job, len(prompt), lambda: AnswerParser(formats, markers), report))
        self._prompts = prompts
        if body.echo:
            texts = [p if isinstance(p, str) else service.prompts.tokenizer.decode(p) for p in body.prompts]
            self._echo = [str(text) for text in texts]
        return self

    @property
    def _per_prompt(self) -> int:
        return self.body.n or 1

    async def whole(self) -> dict[str, Any]:
        parts: dict[int, list[Part]] = {i: [] for i in range(len(self.generations) * self._per_prompt)}
        async for index, part in self._parts():
            parts[index].append(part)
        scores = [await self._scores(i) for i in range(len(self.generations))]
        choices = [self._choice(index, own, 0)[0] for index, own in parts.items()]
        for choice in choices:
            _add_scores(choice, scores[choice["index"] // self._per_prompt])
        return {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.body.model or self.service.options.names[0],
            "choices": choices,
            "usage": self._usage(),
            "metrics": {"speculative_decoding": self.generations[0].speculative_decoding()},
        }

    async def stream(self) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.body.model or self.service.options.names[0],
        }
        offsets = [0] * len(self.generations) * self._per_prompt
        held: dict[int, list[Part]] = {i: [] for i in range(len(offsets))}
        first = set(held)
        try:
            async for index, part in self._parts():
                held[index].append(part)
                if not part.events and part.finish_reason is None:
                    continue
                choice, offsets[index] = self._choice(index, held[index], offsets[index], echo=index in first)
                held[index] = []
                first.discard(index)
                usage = {"usage": self._usage()} if options is not None and options.continuous_usage_stats else {}
                yield event({**head, "choices": [choice], **usage})
            if options is not None and options.include_usage:
                metrics = {"speculative_decoding": self.generations[0].speculative_decoding()}
                yield event({**head, "choices": [], "usage": self._usage(), "metrics": metrics})
        except APIError as error:
            yield event(error.body())
        yield DONE

    async def _parts(self) -> AsyncIterator[tuple[int, Part]]:
        """Parts of all prompts as they come, by choice. Leaving early ends them all."""
        if len(self.generations) == 1:
            async for part in self.generations[0].parts():
                yield part.index, part
            return
        queue: asyncio.Queue[tuple[int, Part] | BaseException | None] = asyncio.Queue()

        async def read(number: int, generation: Generation) -> None:
            try:
                async for part in generation.parts():
                    queue.put_nowait((number * self._per_prompt + part.index, part))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.ensure_future(read(i, generation)) for i, generation in enumerate(self.generations)]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _choice(self, index: int, parts: list[Part], offset: int, echo: bool = True) -> tuple[dict[str, Any], int]:
        if self.body.max_tokens == 0:
            parts = [_nothing_of(part) for part in parts]
        text = "".join(e.text for part in parts for e in part.events if isinstance(e, Content))
        if self._echo and echo:
            text = self._echo[index // self._per_prompt] + text
        logprobs = None
        if self.body.logprobs is not None:
            entries = [entry for part in parts for entry in part.logprobs]
            offset += len(self._echo[index // self._per_prompt]) if self._echo and echo else 0
            logprobs, offset = completion_logprobs(self.service, entries, offset)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": parts[-1].finish_reason,
            "stop_reason": parts[-1].stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = [token for part in parts for token in part.tokens]
        if sources := [source for part in parts for source in part.sources]:
            choice["speculation"] = sources
        return choice, offset

    async def _scores(self, prompt: int) -> dict[str, Any]:
        """What choices say of their prompt, by field."""
        body, scores = self.body, self.generations[prompt].prompt_logprobs
        told: dict[str, Any] = {}
        if scores is not None and body.echo and body.logprobs is not None:
            echo, ids = self._echo[prompt], self._prompts[prompt]
            told["logprobs"] = await echoed_logprobs(self.service, echo, ids, scores, body.logprobs)
        if scores is not None and body.prompt_logprobs is not None:
            told["prompt_logprobs"] = await prompt_logprobs(self.service, scores, body.prompt_logprobs)
        return told

    def _usage(self) -> dict[str, Any]:
        usages = [generation.usage() for generation in self.generations]
        total = {name: sum(u[name] for u in usages) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        if self.body.max_tokens == 0:
            total |= {"completion_tokens": 0, "total_tokens": total["prompt_tokens"]}
        cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
        return {**total, "prompt_tokens_details": {"cached_tokens": cached}}


def _add_scores(choice: dict[str, Any], scores: dict[str, Any]) -> None:
    """Put what is said of the prompt before what is said of the answer."""
    if "logprobs" in scores:
        choice["logprobs"] = {name: [*own, *choice["logprobs"][name]] for name, own in scores["logprobs"].items()}
    if "prompt_logprobs" in scores:
        choice["prompt_logprobs"] = scores["prompt_logprobs"]


def _nothing_of(part: Part) -> Part:
    """A part of an answer that is not wanted: only when it ends."""
    end = None if part.finish_reason is None else "length"
    return replace(part, events=[], tokens=[], logprobs=[], sources=[], finish_reason=end, stop_reason=None)
