"""POST /v1/messages: Anthropic's form of a chat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from flashdraft.server.blocks import Block, Change, changes
from flashdraft.server.chat import Chat
from flashdraft.server.errors import APIError, bad, of_validation_of
from flashdraft.server.http import compact
from flashdraft.server.prompts import parts_of
from flashdraft.server.protocol import MAX_TOOLS, ChatRequest, Many, Model, Speculation
from flashdraft.server.service import Service

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesRequest(Model):
    model: str | None = None
    max_tokens: int = Field(ge=1)
    messages: Many[dict[str, Any]] = Field(min_length=1)
    system: str | Many[dict[str, Any]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Many[str] | None = None
    tools: Many[dict[str, Any]] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    speculation: Speculation | None = None
    stream: bool | None = False


class Message:
    """A messages request on its way."""

    def __init__(self, chat: Chat, request_id: str) -> None:
        self.chat, self.id = chat, f"msg_{request_id}"

    @classmethod
    async def start(cls, service: Service, body: MessagesRequest, request_id: str) -> Message:
        return cls(await Chat.start(service, of_validation_of(ChatRequest, chat_body(body)), request_id), request_id)

    async def whole(self) -> dict[str, Any]:
        content = [_content(change.block) async for change in changes(self.chat.generation) if change.what == "stop"]
        return {**self._message(content), **self._end(), "usage": self._usage()}

    async def stream(self) -> AsyncIterator[bytes]:
        def event(kind: str, **fields: Any) -> bytes:
            return b"event: " + kind.encode() + b"\ndata: " + compact({"type": kind, **fields}) + b"\n\n"

        try:
            yield event("message_start", message={**self._message([]), "usage": self._usage()})
            async for change in changes(self.chat.generation):
                index = change.block.index
                if change.what == "start":
                    yield event("content_block_start", index=index, content_block=_content(change.block))
                elif change.what == "delta":
                    yield event("content_block_delta", index=index, delta=_delta(change))
                else:
                    yield event("content_block_stop", index=index)
            yield event("message_delta", delta=self._end(), usage=self._usage())
            yield event("message_stop")
        except APIError as error:
            yield event("error", error={"type": "api_error", "message": error.message})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        model = self.chat.body.model or self.chat.service.options.names[0]
        message = {"id": self.id, "type": "message", "role": "assistant", "model": model, "content": content}
        return {**message, "stop_reason": None, "stop_sequence": None}

    def _end(self) -> dict[str, Any]:
        answer = self.chat.generation.answers[0]
        if isinstance(answer.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        return {"stop_reason": STOP_REASONS.get(answer.finish_reason or "stop", "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        usage = self.chat.generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        fresh = usage["prompt_tokens"] - cached
        return {"input_tokens": fresh, "cache_read_input_tokens": cached, "output_tokens": usage["completion_tokens"]}


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": json.loads(block.text or "{}")}


def _delta(change: Change) -> dict[str, Any]:
    if change.block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": change.text}
    if change.block.kind == "text":
        return {"type": "text_delta", "text": change.text}
    return {"type": "input_json_delta", "partial_json": change.text}


def chat_body(body: MessagesRequest) -> dict[str, Any]:
    """The same request for chat completions. Raises APIError."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": parts_of(_as_parts(body.system), "system")})
    for i, message in enumerate(body.messages):
        _add_message(messages, message, f"messages.{i}")
    given: dict[str, Any] = {name: getattr(body, name) for name in ("model", "max_tokens", "temperature", "top_p", "top_k")}
    given |= {"messages": messages, "stop": body.stop_sequences, "chat_template_kwargs": body.chat_template_kwargs}
    given["speculation"] = None if body.speculation is None else body.speculation.model_dump()
    if body.tools:
        given["tools"] = [
            {
                "type": "function",
                "function": {"name": t.get("name"), "description": t.get("description"), "parameters": t.get("input_schema")},
            }
            for t in body.tools
        ]
        given |= _choice(body.tool_choice or {})
    thinking = body.thinking or {}
    if thinking.get("type") in ("enabled", "disabled"):
        given["chat_template_kwargs"] = {"enable_thinking": thinking["type"] == "enabled", **(body.chat_template_kwargs or {})}
        given["thinking_token_budget"] = thinking.get("budget_tokens")
    return {name: value for name, value in given.items() if value is not None}


def _as_parts(content: Any) -> Any:
    """Content with Anthropic's blocks of images as OpenAI's parts."""
    if not isinstance(content, list):
        return content
    return [_image_url(part) if isinstance(part, dict) and part.get("type") == "image" else part for part in content]


def _image_url(block: dict[str, Any]) -> dict[str, Any]:
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    url = source.get("url")
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    parallel = None if choice.get("disable_parallel_tool_use") is None else not choice["disable_parallel_tool_use"]
    if choice.get("type") == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}, "parallel_tool_calls": parallel}
    if choice.get("type", "auto") not in CHOICES:
        raise bad("tool_choice.type must be auto, any, tool or none", "tool_choice")
    return {"tool_choice": CHOICES[choice.get("type", "auto")], "parallel_tool_calls": parallel}


def _add_message(messages: list[dict[str, Any]], message: dict[str, Any], place: str) -> None:
    """One of Anthropic's messages is several of OpenAI's where it holds results of tools."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        messages.append({"role": role, "content": parts_of(content, f"{place}.content")})
        return
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            result = parts_of(_as_parts(block.get("content")), f"{place}.content.{i}.content")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(block)
    if texts or calls:
        own = {"role": role, "content": parts_of(_as_parts(texts), f"{place}.content")}
        own |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
        messages.append({**own, "tool_calls": calls} if calls else own)
