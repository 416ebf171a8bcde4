"""What all endpoints share: the engine's loop, prompts, formats, defaults and limits."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flashdraft.engine.request import SamplingParams, Span, check_length
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.media import MediaLimits, TokensPrompt
from flashdraft.server.errors import APIError, bad
from flashdraft.server.jobs import EngineLoop, Job
from flashdraft.server.measures import Measures
from flashdraft.server.pair import Ask, Facts
from flashdraft.server.parsers.answer import Formats, Thinking
from flashdraft.server.parsers.lexer import Markers
from flashdraft.server.prompts import Prompts
from flashdraft.server.protocol import Sampling, Speculation


@dataclass(frozen=True)
class ServerOptions:
    """How to serve. `names` are those that requests may call the model; keys None or empty: no key is asked for."""

    names: tuple[str, ...] = ("flashdraft",)
    keys: tuple[str, ...] = ()
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Literal["auto", "vllm"] = "auto"
    max_body_bytes: int = 16 << 20
    max_waiting: int = 1024
    request_seconds: float = 3600.0
    shutdown_seconds: float = 30.0
    stall_seconds: float = 120.0
    log_requests: bool = False
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    engine_process: bool = False  # the engine runs in a process of its own, not in a thread of this one
    seed: int | None = None  # of requests without one: each gets another, the same ones after every start


class Service:
    """One target being served. Made before the target is loaded; `ready` is called when it is."""

    def __init__(self, options: ServerOptions, loop: EngineLoop) -> None:
        self.options, self.loop, self.measures = options, loop, Measures()
        self.started = int(time.time())
        self.in_flight = 0  # requests being answered
        self._seeds = None if options.seed is None else random.Random(options.seed)

    def ready(self, facts: Facts) -> None:
        self.facts = facts
        self.prompts = Prompts(facts, self.options.chat_template_kwargs, self.loop)
        self.formats = Formats.choose(self.prompts.tokenizer, self.options.reasoning_parser, self.options.tool_call_parser)
        by_target = self.options.generation_config == "auto"
        self.defaults = dict(facts.sampling) if by_target else {}
        self.default_max_tokens = facts.max_tokens if by_target else None

    def close(self) -> None:
        self.loop.close()
        if self.loop.facts is not None:
            self.prompts.close()

    @property
    def trouble(self) -> str | None:
        """Why no request can be served now, or None."""
        state = self.loop.state
        if state == "ready":
            return "the engine is stalled" if self.loop.stalled else None
        return {
            "loading": "the model is being loaded",
            "draining": "the server is shutting down",
            "failed": "the engine failed: the server is about to end and has to be started again",
        }.get(state, "the server has shut down")

    def admit(self, model: str | None) -> None:
        """Raises APIError where a request cannot be taken now, or asks for another model."""
        if self.trouble is not None:
            raise APIError(503, self.trouble)
        if model is not None and model not in self.options.names:
            raise APIError(404, f"there is no model {model[:200]!r} here: ask for {self.options.names[0]!r}", param="model")
        if self.loop.waiting >= self.options.max_waiting:
            raise APIError(429, f"{self.options.max_waiting} requests are waiting already: try again later")

    def check_count(self, answers: int) -> None:
        """Raises APIError for a request of more answers than may ever wait."""
        if answers > (most := self.options.max_waiting + 1):
            raise bad(
                f"the request asks for {answers} answers, and at most {most} may wait: send smaller ones, or raise max_waiting"
            )

    async def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        markers: Markers | None = None,
        speculation: Speculation | None = None,
        grammar: str | None = None,
        thinking: Thinking = "none",
        budget: int | None = None,
        media: tuple[Span, ...] = (),
    ) -> Job:
        """Start answering. Raises APIError for a request that can never be served, EngineFault without an engine."""
        self.check_count(params.n)
        if self.loop.waiting + params.n > self.options.max_waiting + 1:
            raise APIError(429, f"{self.options.max_waiting} requests are waiting already: try again later")
        if self.loop.num_proposals == 0:
            self.measures.speculation_off.labels("no draft").inc()
        elif speculation is not None and not speculation.enabled:
            self.measures.speculation_off.labels("request").inc()
        width = None if speculation is None else 0 if not speculation.enabled else speculation.max_draft_tokens

        if grammar is not None:
            params = replace(params, ignore_eos=False)  # where it ends there is nothing else to say
        form = None if thinking == "none" else self.formats.reasoning
        ask = Ask(
            prompt,
            params,
            markers=frozenset(markers.by_id) if markers is not None else frozenset(),
            max_draft_tokens=width,
            grammar=grammar,
            thinking=None if form is None else (form.start, form.end),
            opened=thinking == "opened",
            budget=None if form is None else budget,
            media=media,
        )
        try:
            check_length(len(prompt), self.facts.max_model_len)  # before it is sent to another process
            return await self.loop.submit(ask)
        except FlashdraftError as error:
            raise bad(str(error)) from error

    def media_tokens(self, prompt: TokensPrompt) -> dict[str, int]:
        """Tokens of images and of audio in a prompt, by the names of usage; nothing for text."""
        kinds = self.facts.media
        if kinds is None or not prompt.media:
            return {}
        tokens = {f"{kind}_tokens": 0 for kind in kinds.values()}
        for span in prompt.media:
            tokens[f"{kinds[prompt.ids[span.start]]}_tokens"] += span.length
        return tokens

    def params(self, body: Sampling, logprobs: int | None, max_tokens: int | None) -> SamplingParams:
        """Raises APIError for values out of range."""
        if body.seed is None and self._seeds is not None:
            body = body.model_copy(update={"seed": self._seeds.getrandbits(63)})
        try:
            return body.sampling_params(self.defaults, logprobs, max_tokens or self.default_max_tokens)
        except RequestError as error:
            raise bad(str(error), next((n for n in type(body).model_fields if str(error).startswith(n)), None)) from error

    async def grammar(self, body: Sampling) -> str | None:
        """The grammar that a request asks for by response_format or structured_outputs. Raises APIError."""
        try:
            found = _grammar_of(body)
        except RequestError as error:
            raise bad(str(error), "response_format") from error
        return None if found is None else await self.compile(*found, "response_format")

    async def compile(self, kind: str, source: Any, param: str, who: str = "") -> str:
        """A grammar. Raises APIError that blames `param`, its message behind `who`."""
        try:
            return str(await self.loop.work("compile", kind, source))
        except FlashdraftError as error:
            raise bad(f"{who}{error}", param) from error


def _grammar_of(body: Sampling) -> tuple[Any, Any] | None:
    wanted: list[tuple[Any, Any]] = []
    form, own = body.response_format, body.structured_outputs
    if form is not None and form.type == "json_object":
        wanted.append(("json", {"type": "object"}))
    elif form is not None and form.type == "json_schema":
        assert form.json_schema is not None
        wanted.append(("json", form.json_schema.schema_))
    if own is not None:
        kinds = {"json": own.json_, "regex": own.regex, "choice": own.choice, "lark": own.grammar}
        wanted += [(kind, source) for kind, source in kinds.items() if source is not None]
        wanted += [("json", {"type": "object"})] if own.json_object else []
        if own.choice == []:
            raise RequestError("structured_outputs.choice is empty: give at least one text")
    if len(wanted) > 1:
        raise RequestError("only one grammar may be given: one of response_format and the fields of structured_outputs")
    if wanted and body.min_tokens:
        raise RequestError("min_tokens and a grammar contradict each other: leave one of them out")
    return wanted[0] if wanted else None
