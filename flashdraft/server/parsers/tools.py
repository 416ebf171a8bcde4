"""Tool calls in an answer: the formats that models write them in."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from flashdraft.server.parsers.events import Call, Content, ToolFormat, ToolParser
from flashdraft.server.parsers.gemma4 import gemma4_call
from flashdraft.server.parsers.lexer import Piece


def call_of(value: Any) -> Call | None:
    """A JSON object as a call, if it is one: {"name": ..., "arguments" or "parameters": an object, or one as a string}."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = loads(arguments)
    if not isinstance(value.get("name"), str) or not value["name"] or not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def loads(text: str) -> Any:
    """JSON, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class ObjectScan:
    """The text of one JSON object, a character at a time."""

    def __init__(self) -> None:
        self._chars: list[str] = []
        self._depth, self._in_string, self._escaped = 0, False, False

    @property
    def text(self) -> str:
        return "".join(self._chars)

    def push(self, char: str) -> bool:
        """Whether the object ends with this character."""
        self._chars.append(char)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            else:
                self._in_string = char != '"'
            return False
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return self._depth == 0


class TaggedCalls:
    """Calls between two markers. What turns out to be no call is plain text, as soon as that is clear."""

    def __init__(self, start: str, end: str, opening: str, parse: Callable[[str], Call | None]) -> None:
        self._start, self._end, self._opening, self._parse = start, end, opening, parse
        self._body: str | None = None  # since the start marker
        self._start_shown = ""
        self._space = ""  # white space that may stand before a call, or between two
        self._calls = 0

    def push(self, piece: Piece) -> list[Content | Call]:
        if piece.is_marker and piece.text == self._start:
            events = self._give_up()
            self._body, self._start_shown = "", piece.shown
            return events
        if self._body is None:
            return self._plain(piece.plain.text)
        if piece.is_marker and piece.text == self._end:
            call = self._parse(self._body)
            if call is None:
                return self._give_up() + self._plain(piece.shown)
            self._body, self._space, self._calls = None, "", self._calls + 1
            return [call]
        self._body += piece.text if piece.is_marker else piece.plain.text
        begun = self._body.lstrip()
        return [] if begun.startswith(self._opening[: len(begun)]) else self._give_up()

    def finish(self) -> list[Content | Call]:
        call = self._parse(self._body) if self._body else None  # a model may leave out the last marker
        if call is not None:
            self._body, self._space = None, ""
            return [call]
        events = self._give_up()
        if self._space and not self._calls:
            events.append(Content(self._space))
        self._space = ""
        return events

    def _plain(self, text: str) -> list[Content | Call]:
        text = self._space + text
        told = text.rstrip()
        self._space = text[len(told) :]
        return [Content(told)] if told else []

    def _give_up(self) -> list[Content | Call]:
        if self._body is None:
            return []
        body, self._body = self._body, None
        return self._plain(self._start_shown + body)


SEPARATORS = frozenset(" \t\r\n,;[]`")


class JsonCalls:
    """Calls that are the whole answer: JSON objects one behind the other, in a list, or in a code fence, as models write them
    without markers. Anything else is plain text; so are objects that name no tool there is.
    """

    def __init__(self, names: frozenset[str], markers: tuple[str, ...] = ()) -> None:
        self._names, self._markers = names, markers
        self._state: Literal["start", "object", "between", "text"] = "start"
        self._held: list[str] = []  # characters since the last call
        self._object = ObjectScan()

    def push(self, piece: Piece) -> list[Content | Call]:
        if piece.is_marker and piece.text in self._markers and self._state in ("start", "between"):
            return []
        events: list[Content | Call] = []
        text = piece.plain.text
        for i, char in enumerate(text):
            if self._state == "text":
                return [*events, Content(text[i:])]
            events += self._step(char)
        return events

    def finish(self) -> list[Content | Call]:
        if self._state == "between":  # separators
            return []
        held, self._held = "".join(self._held), []
        return [Content(held)] if held else []

    def _step(self, char: str) -> list[Content | Call]:
        self._held.append(char)
        if self._state == "object":
            if self._object.push(char):
                call = call_of(loads(self._object.text))
                if call is not None and call.name in self._names:
                    self._state, self._held = "between", []
                    return [call]
                return self._is_text()
        elif char == "{":
            self._state, self._object = "object", ObjectScan()
            self._object.push(char)
        elif char not in SEPARATORS and not (self._state == "start" and _is_fence("".join(self._held))):
            return self._is_text()
        return []

    def _is_text(self) -> list[Content | Call]:
        held, self._held, self._state = "".join(self._held), [], "text"
        return [Content(held)]


def _is_fence(text: str) -> bool:
    begun = text.lstrip()
    return any(fence.startswith(begun) for fence in ("```json\n", "```json", "```"))


class NoTools:
    """An answer without tools."""

    def push(self, piece: Piece) -> list[Content | Call]:
        text = piece.plain.text
        return [Content(text)] if text else []

    def finish(self) -> list[Content | Call]:
        return []


def _hermes(names: frozenset[str]) -> ToolParser:
    return TaggedCalls("<tool_call>", "</tool_call>", "{", lambda body: call_of(loads(body)))


def _gemma4(names: frozenset[str]) -> ToolParser:
    return TaggedCalls("<|tool_call>", "<tool_call|>", "call:", gemma4_call)


HERMES = ToolFormat("hermes", ("<tool_call>", "</tool_call>"), _hermes)
GEMMA4 = ToolFormat("gemma4", ("<|tool_call>", "<tool_call|>", '<|"|>'), _gemma4)
LLAMA3 = ToolFormat("llama3_json", ("<|python_tag|>",), lambda names: JsonCalls(names, ("<|python_tag|>",)))
JSON = ToolFormat("json", (), JsonCalls)
FORMATS = {**dict.fromkeys(("hermes", "qwen"), HERMES), "gemma4": GEMMA4, "llama3_json": LLAMA3, "json": JSON}
