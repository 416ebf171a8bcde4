"""Conversations and texts to token ids; in a thread of its own where that may take long and would hold up other requests."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase

from flashdraft.errors import ConfigError, FlashdraftError
from flashdraft.media import KINDS, NOT_SERVED, TokensPrompt, text_of
from flashdraft.server.errors import bad
from flashdraft.server.jobs import EngineLoop
from flashdraft.server.pair import Facts
from flashdraft.server.protocol import Tool
from flashdraft.template import render

log = logging.getLogger("flashdraft.server")
RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
MAX_SAID = 32  # names come from clients
ROLES = {"developer": "system"}
SHORT = 4000  # characters: some 0.5 ms of work, while the way to the thread and back takes 35 ms beside 64 streams


class Prompts:
    """Renders prompts with copies of the target's tokenizer, one for each thread: they share no state. Those with media are
    the pair's to render, as it encodes them.
    """

    def __init__(self, facts: Facts, defaults: Mapping[str, Any], loop: EngineLoop) -> None:
        self.tokenizer, self._here = copy.deepcopy(facts.tokenizer), copy.deepcopy(facts.tokenizer)
        self._with_media, self._max_model_len, self._loop = facts.media is not None, facts.max_model_len, loop
        # No text longer than this fits. Twice, as normalizing and chat templates may leave some of it out.
        self._most_chars = 2 * self._max_model_len * max(map(len, self.tokenizer.get_vocab()))
        self._defaults = dict(defaults)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._ignored: set[str] = set()  # switches that the template does not know, told once

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], switches: Mapping[str, Any] | None
    ) -> TokensPrompt:
        """A conversation as a prompt. `switches` are variables of the chat template. Raises APIError."""
        if reserved := RESERVED & set(switches or {}):
            raise bad(f"chat_template_kwargs may not hold {sorted(reserved)[0]}", "chat_template_kwargs")
        wanted = {**self._defaults, **(switches or {})}
        self._say_ignored(wanted)
        kwargs = dict(wanted)
        if tools:
            kwargs["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        if len(messages) > self._max_model_len:
            raise bad(f"{len(messages)} messages do not fit into a context of {self._max_model_len} tokens", "messages")
        clean = [message_of(message, i, self._with_media) for i, message in enumerate(messages)]
        texts = [message["content"] for message in clean]
        has_media = not all(isinstance(text, str) for text in texts)
        chars = sum(len(text) if isinstance(text, str) else sum(len(part.get("text", "")) for part in text) for text in texts)
        self._check_length(chars, "messages")
        if chars <= SHORT and not tools and not has_media and all(message.keys() <= {"role", "content"} for message in clean):
            with _refusals():
                return TokensPrompt(render(self._here, clean, kwargs))
        if has_media:
            with _refusals():
                found: TokensPrompt = await self._loop.work("prompt", clean, kwargs)
                return found
        return TokensPrompt(await self.run(render, self.tokenizer, clean, kwargs))

    async def text(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        self._check_length(len(prompt), "prompt")

        def encode() -> list[int]:
            return list(self.tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"])

        found: list[int] = await self.run(encode)
        return found

    async def run(self, function: Any, *arguments: Any) -> Any:
        """A function that uses the tokenizer, in the thread for that."""
        with _refusals():
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, chars: int, name: str) -> None:
        """Refuse what cannot fit before it is tokenized, at some 2 s a megabyte, while other prompts wait."""
        if chars > self._most_chars:
            raise bad(
                f"the prompt has {chars} characters, which do not fit into a context of {self._max_model_len} "
                "tokens: shorten the prompt or raise max_model_len",
                name,
            )

    def _say_ignored(self, switches: Mapping[str, Any]) -> None:
        template = str(getattr(self.tokenizer, "chat_template", ""))
        for name in switches:
            if name not in template and name not in self._ignored and len(self._ignored) < MAX_SAID:
                self._ignored.add(name)
                log.warning(
                    "chat_template_kwargs: this target's chat template does not know %s: it changes nothing", name[:100]
                )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except FlashdraftError as error:
        raise bad(str(error), "messages" if isinstance(error, ConfigError) else None) from error


def message_of(message: Mapping[str, Any], index: int, with_media: bool = False) -> dict[str, Any]:
    """A message as templates expect it: text for content (with_media: or parts, where there are media among them), objects for
    the arguments of calls. Raises APIError.
    """
    place = f"messages.{index}"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad(f"{place}.role must be a text such as user", f"{place}.role")
    read = parts_of if with_media else content_of
    out = {**message, "role": ROLES.get(role, role), "content": read(message.get("content"), f"{place}.content")}
    thought = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(thought, str):
        out["reasoning_content"] = thought
    if message.get("tool_calls"):
        out["tool_calls"] = _calls_of(message["tool_calls"], f"{place}.tool_calls")
    return {name: value for name, value in out.items() if value is not None}


def holds_media(content: Any) -> bool:
    return isinstance(content, list) and any(_is_media(part) for part in content)


def _is_media(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in (*KINDS, *NOT_SERVED)


def parts_of(content: Any, place: str) -> str | list[dict[str, Any]]:
    """Text, as content_of; the parts one by one, those of media as they are, where there are such. Raises APIError."""
    if not holds_media(content):
        return content_of(content, place)
    return [
        dict(part) if _is_media(part) else {"type": "text", "text": _text_in(part, i, place)} for i, part in enumerate(content)
    ]


def content_of(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{place} must be a text or a list of parts", place)
    return "\n".join(_text_in(part, i, place) for i, part in enumerate(content))


def _text_in(part: Any, index: int, place: str) -> str:
    if (text := text_of(part)) is not None:
        return text
    if _is_media(part):
        raise bad(f"{place}.{index}: this target takes text only, and this is a part of type {part['type']}", place)
    raise bad(f"{place}.{index} must be a part such as {{'type': 'text', 'text': 'Hello'}}", place)


def _calls_of(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad(f"{place} must be a list", place)
    out = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad(f"{place}.{i} must be a call such as {{'type': 'function', 'function': {{'name': ...}}}}", place)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise bad(f"{place}.{i}.function.arguments is not valid JSON", place) from error
        out.append({**call, "function": {**function, "arguments": arguments}})
    return out
