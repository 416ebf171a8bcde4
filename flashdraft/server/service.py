"""What all endpoints share: the engine's loop, prompts, formats, defaults and limits."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from flashdraft.engine.request import Constraint, SamplingParams, Span
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.grammar import Grammar, Grammars, ThinkingConstraint
from flashdraft.llm import LLM
from flashdraft.media import MediaLimits, TokensPrompt
from flashdraft.server.errors import APIError, bad
from flashdraft.server.loop import EngineLoop, Job
from flashdraft.server.measures import Measures
from flashdraft.server.parsers.answer import Formats, Thinking
from flashdraft.server.parsers.lexer import Markers
from flashdraft.server.prompts import Prompts
from flashdraft.server.protocol import Sampling, Speculation

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


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
    seed: int | None = None  # of requests without one: each gets another, the same ones after every start


class Service:
    """One target being served. Made before the target is loaded; `ready` is called when it is."""

    def __init__(self, options: ServerOptions, loop: EngineLoop) -> None:
        self.options, self.loop, self.measures = options, loop, Measures()
        self.started = int(time.time())
        self.in_flight = 0  # requests being answered
        self._seeds = None if options.seed is None else random.Random(options.seed)

    def ready(self, llm: LLM) -> None:
        if self.options.chat_template is not None:
            llm.tokenizer.chat_template = self.options.chat_template
        llm.media_limits = self.options.media_limits
        self.llm, self.engine = llm, llm.engine
        self.prompts = Prompts(llm, self.options.chat_template_kwargs)
        self.formats = Formats.choose(self.prompts.tokenizer, self.options.reasoning_parser, self.options.tool_call_parser)
        self.grammars = Grammars(self.prompts.tokenizer, llm.target.vocab_size, llm.eos_token_ids)
        self.defaults: dict[str, Any] = {}
        self.default_max_tokens: int | None = None
        if self.options.generation_config == "auto":
            self.defaults, self.default_max_tokens = generation_defaults(llm)

    def close(self) -> None:
        self.loop.close()
        if self.loop.llm is not None:
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

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        markers: Markers | None = None,
        speculation: Speculation | None = None,
        grammar: Grammar | None = None,
        thinking: Thinking = "none",
        budget: int | None = None,
        media: tuple[Span, ...] = (),
    ) -> Job:
        """Start answering. Raises APIError for a request that can never be served."""
        self.check_count(params.n)
        if self.loop.waiting + params.n > self.options.max_waiting + 1:
            raise APIError(429, f"{self.options.max_waiting} requests are waiting already: try again later")
        if self.loop.num_proposals == 0:
            self.measures.speculation_off.labels("no draft").inc()
        elif speculation is not None and not speculation.enabled:
            self.measures.speculation_off.labels("request").inc()
        width = None if speculation is None else 0 if not speculation.enabled else speculation.max_draft_tokens

        def constraint() -> Constraint:
            inner, form = None if grammar is None else grammar.constraint(), self.formats.reasoning
            if thinking == "none" or form is None:
                assert inner is not None
                return inner
            return ThinkingConstraint(
                self.prompts.tokenizer,
                (form.start, form.end),
                self.llm.target.vocab_size,
                opened=thinking == "opened",
                grammar=inner,
                budget=budget,
                eos=self.llm.eos_token_ids,
            )

        if grammar is not None:
            params = replace(params, ignore_eos=False)  # where it ends there is nothing else to say
        needs = grammar is not None or (thinking != "none" and budget is not None)
        try:
            self.engine.scheduler.check_length(len(prompt))  # before its tokens are looked at one by one
            live = self.llm.prepare(
                prompt,
                params,
                markers=frozenset(markers.by_id) if markers is not None else frozenset(),
                max_draft_tokens=width,
                constraint=constraint if needs else None,
                media=media,
            )
            for one in live:
                self.engine.check(one.request)
        except FlashdraftError as error:
            raise bad(str(error)) from error
        job = Job(live)
        self.loop.submit(job)
        return job

    def media_tokens(self, prompt: TokensPrompt) -> dict[str, int]:
        """Tokens of images and of audio in a prompt, by the names of usage; nothing for text."""
        media = self.llm.target.media
        if media is None or not prompt.media:
            return {}
        kinds = {mark.placeholder: kind for kind, mark in media.marks.items()}
        tokens = {f"{kind}_tokens": 0 for kind in media.marks}
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

    async def grammar(self, body: Sampling) -> Grammar | None:
        """The grammar that a request asks for by response_format or structured_outputs. Raises APIError."""
        if body.response_format is None and body.structured_outputs is None:
            return None
        return cast(Grammar | None, await self.prompts.run(self._compiled, body))

    def _compiled(self, body: Sampling) -> Grammar | None:
        try:
            found = _grammar_of(body)
            return None if found is None else self.grammars.compile(*found)
        except FlashdraftError as error:
            raise bad(str(error), "response_format") from error


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
