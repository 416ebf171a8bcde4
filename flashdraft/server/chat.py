"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from flashdraft.engine.request import SamplingParams
from flashdraft.server.errors import APIError, bad
from flashdraft.server.generation import Generation, Part
from flashdraft.server.http import DONE, event
from flashdraft.server.logprobs import chat_logprobs, prompt_logprobs
from flashdraft.server.parsers.answer import AnswerParser
from flashdraft.server.parsers.events import Call, Content, Event, Reasoning
from flashdraft.server.protocol import ChatRequest, NamedTool, Tool
from flashdraft.server.service import Service


@dataclass(frozen=True)
class Chat:
    """A chat request on its way."""

    service: Service
    body: ChatRequest
    generation: Generation
    id: str
    params: SamplingParams

    @classmethod
    async def start(cls, service: Service, body: ChatRequest, request_id: str) -> Chat:
        """Raises APIError before anything runs."""
        service.admit(body.model)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = service.params(body, logprobs, body.wanted_tokens)
        tools, forced = body.tools_in_use, body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
        grammar = await service.grammar(body)
        if forced:
            if grammar is not None:
                raise bad("a tool_choice that demands a call and a response_format contradict each other", "tool_choice")
            grammar = await service.compile("json", _calls_schema(body), "tools", "the tools' parameters: ")
        prompt = await service.prompts.chat(body.messages, tools, _switches(body))
        markers = service.formats.markers(with_tools=bool(tools))
        thinking = service.formats.thinking(prompt.ids)
        if body.thinking_token_budget is not None and service.formats.reasoning is None:
            raise bad("thinking_token_budget: this target has no thinking that could be told apart", "thinking_token_budget")
        job = await service.submit(
            prompt.ids,
            params,
            markers=markers,
            speculation=body.speculation,
            grammar=grammar,
            thinking=thinking,
            budget=body.thinking_token_budget,
            media=prompt.media,
        )
        names = frozenset(tool.function.name for tool in tools)

        def parser() -> AnswerParser:
            return AnswerParser(service.formats, markers, opened=thinking == "opened", tool_names=names, forced=forced)

        report = bool(body.speculation and body.speculation.report)
        generation = Generation(service, job, len(prompt.ids), parser, report, service.media_tokens(prompt))
        return cls(service, body, generation, f"chatcmpl-{request_id}", params)

    async def whole(self) -> dict[str, Any]:
        """The response in one piece."""
        answers: list[list[Event]] = [[] for _ in self.generation.answers]
        parts: list[list[Part]] = [[] for _ in self.generation.answers]
        async for part in self.generation.parts():
            answers[part.index] += part.events
            parts[part.index].append(part)
        choices = [self._choice(i, events, parts[i]) for i, events in enumerate(answers)]
        scores, wanted = self.generation.prompt_logprobs, self.body.prompt_logprobs
        scored = None if scores is None or wanted is None else await prompt_logprobs(self.service, scores, wanted)
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.body.model or self.service.options.names[0],
            "choices": choices,
            "usage": self.generation.usage(),
            "metrics": {"speculative_decoding": self.generation.speculative_decoding()},
            **({} if scored is None else {"prompt_logprobs": scored}),
        }

    def _choice(self, index: int, events: list[Event], parts: list[Part]) -> dict[str, Any]:
        content = "".join(e.text for e in events if isinstance(e, Content))
        calls = [e for e in events if isinstance(e, Call)]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
        reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
        if reasoning and self.body.include_reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        choice = {
            "index": index,
            "message": message,
            "finish_reason": parts[-1].finish_reason,
            "stop_reason": parts[-1].stop_reason,
            "logprobs": self._logprobs([entry for part in parts for entry in part.logprobs]),
        }
        return choice | ({"token_ids": [t for part in parts for t in part.tokens]} if self.body.return_token_ids else {})

    def _logprobs(self, entries: list[Any]) -> dict[str, Any] | None:
        return chat_logprobs(self.service, entries) if self.body.logprobs else None

    async def stream(self) -> AsyncIterator[bytes]:
        """The response as server-sent events; an error on the way is one of them."""
        options = self.body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        head = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self.body.model or self.service.options.names[0],
        }
        calls = [0] * len(self.generation.answers)
        held: list[list[Part]] = [[] for _ in calls]  # with tokens that no delta has carried yet
        try:
            for i in range(len(calls)):
                delta = {"role": "assistant", "content": ""}
                yield event({**head, "choices": [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}]})
            async for part in self.generation.parts():
                held[part.index].append(part)
                deltas = self._deltas(part, calls)
                if not deltas and part.finish_reason is None:
                    continue
                choices = self._stream_choices(part, deltas, held[part.index])
                held[part.index] = []
                for choice in choices:
                    usage = {"usage": self.generation.usage()} if continuous else {}
                    yield event({**head, "choices": [choice], **usage})
            if options is not None and options.include_usage:
                metrics = {"speculative_decoding": self.generation.speculative_decoding()}
                yield event({**head, "choices": [], "usage": self.generation.usage(), "metrics": metrics})
        except APIError as error:
            yield event(error.body())
        yield DONE

    def _deltas(self, part: Part, calls: list[int]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for e in part.events:
            if isinstance(e, Content):
                deltas.append({"content": e.text})
            elif isinstance(e, Call):
                deltas.append({"tool_calls": [{"index": calls[part.index], **_call(e)}]})
                calls[part.index] += 1
            elif self.body.include_reasoning:
                deltas.append({"reasoning": e.text, "reasoning_content": e.text})
        return deltas

    def _stream_choices(self, part: Part, deltas: list[dict[str, Any]], held: list[Part]) -> list[dict[str, Any]]:
        """One choice a delta; the first carries what belongs to tokens, the last the end."""
        choices: list[dict[str, Any]] = [
            {"index": part.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if part.finish_reason is not None:
            end = {"index": part.index, "delta": {}, "logprobs": None, "finish_reason": part.finish_reason}
            choices.append({**end, "stop_reason": part.stop_reason})
        choices[0]["logprobs"] = self._logprobs([entry for p in held for entry in p.logprobs])
        if self.body.return_token_ids:
            choices[0]["token_ids"] = [token for p in held for token in p.tokens]
        if sources := [source for p in held for source in p.sources]:
            choices[0]["speculation"] = sources
        return choices


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _switches(body: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template."""
    effort = body.reasoning_effort
    own: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return own | (body.chat_template_kwargs or {})


def _calls_schema(body: ChatRequest) -> dict[str, Any]:
    """A JSON list of calls: of one tool by name, or of any."""
    tools = body.tools or []
    if isinstance(body.tool_choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == body.tool_choice.function.name]
    one = isinstance(body.tool_choice, NamedTool) or body.parallel_tool_calls is False
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": [_call_schema(tool) for tool in tools]}}
    definitions = {k: v for tool in tools for k, v in (tool.function.parameters or {}).get("$defs", {}).items()}
    schema |= {"maxItems": 1} if one else {"maxItems": 16}
    schema["x-guidance"] = {"whitespace_flexible": True, "whitespace_pattern": " ?"}  # in one line, as templates write calls
    return schema | ({"$defs": definitions} if definitions else {})


def _call_schema(tool: Tool) -> dict[str, Any]:
    parameters = {k: v for k, v in (tool.function.parameters or {}).items() if k not in ("$defs", "$schema")}
    arguments = {"type": "object", **parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
