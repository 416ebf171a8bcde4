"""POST /v1/responses, without state: nothing is stored, so a conversation is sent whole each time."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from flashdraft.media import text_of
from flashdraft.server.blocks import Block, changes
from flashdraft.server.chat import Chat
from flashdraft.server.errors import APIError, bad, of_validation_of
from flashdraft.server.http import compact
from flashdraft.server.prompts import holds_media, parts_of
from flashdraft.server.protocol import MAX_TOOLS, ChatRequest, Many, Model, Speculation
from flashdraft.server.service import Service

STATEFUL = ("previous_response_id", "conversation", "background", "prompt")


class ResponsesRequest(Model):
    """The fields that are taken; those of STATEFUL are refused."""

    model: str | None = None
    input: str | Many[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    tools: Many[dict[str, Any]] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    speculation: Speculation | None = None
    stream: bool | None = False
    store: bool | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for name in STATEFUL:
                if data.get(name):
                    raise ValueError(f"{name} is not supported: this server keeps no state, send the whole conversation")
        return data


class Responding:
    """A responses request on its way."""

    def __init__(self, chat: Chat, body: ResponsesRequest, request_id: str) -> None:
        self.chat, self.body, self.id, self.created = chat, body, f"resp_{request_id}", int(time.time())

    @classmethod
    async def start(cls, service: Service, body: ResponsesRequest, request_id: str) -> Responding:
        return cls(await Chat.start(service, of_validation_of(ChatRequest, chat_body(body)), request_id), body, request_id)

    async def whole(self) -> dict[str, Any]:
        output = [_item(change.block, "completed") async for change in changes(self.chat.generation) if change.what == "stop"]
        return self._response(output)

    async def stream(self) -> AsyncIterator[bytes]:
        numbers = itertools.count()

        def event(kind: str, **fields: Any) -> bytes:
            data = {"type": kind, "sequence_number": next(numbers), **fields}
            return b"event: " + kind.encode() + b"\ndata: " + compact(data) + b"\n\n"

        output: list[dict[str, Any]] = []
        try:
            for kind in ("created", "in_progress"):
                yield event(f"response.{kind}", response=self._response([], "in_progress"))
            async for change in changes(self.chat.generation):
                block = change.block
                place = {"output_index": block.index, "item_id": f"{_PREFIXES[block.kind]}_{block.id}"}
                name, part = _EVENTS[block.kind]
                if change.what == "start":
                    yield event("response.output_item.added", output_index=block.index, item=_item(block, "in_progress"))
                    if part is not None:
                        yield event("response.content_part.added", **place, content_index=0, part=_part(block))
                elif change.what == "delta":
                    inside = {} if part is None else {"content_index": 0}
                    yield event(f"response.{name}.delta", **place, **inside, delta=change.text)
                else:
                    ended = {"arguments": block.text} if part is None else {"content_index": 0, "text": block.text}
                    yield event(f"response.{name}.done", **place, **ended)
                    if part is not None:
                        yield event("response.content_part.done", **place, content_index=0, part=_part(block))
                    output.append(_item(block, "completed"))
                    yield event("response.output_item.done", output_index=block.index, item=output[-1])
            response = self._response(output)
            yield event(f"response.{response['status']}", response=response)
        except APIError as error:
            failed = self._response(output, "failed") | {"error": {"code": "server_error", "message": error.message}}
            yield event("response.failed", response=failed)

    def _response(self, output: list[dict[str, Any]], status: str | None = None) -> dict[str, Any]:
        cut = self.chat.generation.answers[0].finish_reason == "length"
        usage = self.chat.generation.usage()
        done = status is None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status or ("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "model": self.body.model or self.chat.service.options.names[0],
            "instructions": self.body.instructions,
            "max_output_tokens": self.body.max_output_tokens,
            "output": output,
            "parallel_tool_calls": self.body.parallel_tool_calls is not False,
            "temperature": self.chat.params.temperature,
            "top_p": self.chat.params.top_p,
            "tool_choice": self.body.tool_choice or "auto",
            "tools": self.body.tools or [],
            "store": False,
            "metadata": self.body.metadata or {},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            }
            if done
            else None,
            "metrics": {"speculative_decoding": self.chat.generation.speculative_decoding()} if done else None,
        }


_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_EVENTS: dict[str, tuple[str, str | None]] = {
    "text": ("output_text", "output_text"),
    "reasoning": ("reasoning_text", "reasoning_text"),
    "call": ("function_call_arguments", None),
}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": []}


def _item(block: Block, status: Literal["in_progress", "completed"]) -> dict[str, Any]:
    item: dict[str, Any] = {"id": f"{_PREFIXES[block.kind]}_{block.id}", "status": status}
    parts = [_part(block)] if block.text else []
    if block.kind == "text":
        return {**item, "type": "message", "role": "assistant", "content": parts}
    if block.kind == "reasoning":
        return {**item, "type": "reasoning", "summary": [], "content": parts}
    return {**item, "type": "function_call", "call_id": f"call_{block.id}", "name": block.name, "arguments": block.text}


def chat_body(body: ResponsesRequest) -> dict[str, Any]:
    """The same request for chat completions. Raises APIError."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for i, item in enumerate(body.input):
            _add_item(messages, item, f"input.{i}")
    effort = (body.reasoning or {}).get("effort")
    names = ("model", "temperature", "top_p", "top_k", "seed", "parallel_tool_calls", "chat_template_kwargs")
    given = {name: getattr(body, name) for name in names}
    given |= {"messages": messages, "max_tokens": body.max_output_tokens, "reasoning_effort": effort}
    given["speculation"] = None if body.speculation is None else body.speculation.model_dump()
    if body.tools:
        given["tools"] = [_tool(tool, i) for i, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    given["tool_choice"] = choice if body.tools else None
    form = (body.text or {}).get("format") or {}
    if form.get("type") == "json_schema":
        given["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": form.get("name"), "schema": form.get("schema")},
        }
    elif form.get("type") not in (None, "text"):
        given["response_format"] = {"type": form["type"]}
    return {name: value for name, value in given.items() if value is not None}


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None  # thinking, text and calls are one answer
    if kind == "message":
        own = {"role": item.get("role"), "content": parts_of(item.get("content"), f"{place}.content")}
        if last is not None and own["role"] == "assistant" and last.keys() == {"role", "reasoning_content"}:
            last |= own
        else:
            messages.append(own)
    elif kind == "reasoning":
        parts = [part for part in (item.get("content") or item.get("summary") or []) if isinstance(part, dict)]
        if text := "".join(str(part.get("text") or "") for part in parts):
            messages.append({"role": "assistant", "reasoning_content": text})
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "type": "function"}
        call["function"] = {"name": item.get("name"), "arguments": item.get("arguments")}
        if last is None:
            messages.append(last := {"role": "assistant", "content": None})
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        content = parts_of(output, f"{place}.output") if isinstance(output, str) or _is_parts(output) else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    else:
        raise bad(f"{place}: items of type {kind!r} are not supported", place)


def _is_parts(output: Any) -> bool:
    """Whether the output of a call is a list of parts, and no other JSON."""
    return isinstance(output, list) and all(
        isinstance(part, dict) and (text_of(part) is not None or holds_media([part])) for part in output
    )


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad(f"tools.{index}: only tools of type function are supported", "tools")
    return {
        "type": "function",
        "function": {k: tool[k] for k in ("name", "description", "parameters") if tool.get(k) is not None},
    }
