"""Gemma 4's tool calls: call:name{key:value,...}, strings between `<|"|>`, keys bare, no escapes."""

from __future__ import annotations

import json
import re
from typing import Any

from flashdraft.server.parsers.events import Call

QUOTE = '<|"|>'
_CALL = re.compile(r"\s*call:\s*([A-Za-z0-9_.:-]+?)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:{}\[\],](?:[^:{}\[\],]*[^\s:{}\[\],])?)\s*:")
_BARE = re.compile(r"[^,{}\[\]]+")
DEEPEST = 64


def gemma4_call(body: str) -> Call | None:
    """The call that the text between the markers is, or None."""
    found = _CALL.match(body)
    if found is None:
        return None
    try:
        value, end = _value(body, found.end(), 0)
    except (ValueError, IndexError):
        return None
    if not isinstance(value, dict) or body[end:].strip():
        return None
    return Call(found[1], json.dumps(value, ensure_ascii=False))


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at a position, and where it ends. Raises ValueError or IndexError for what is none."""
    at = _skip(text, at)
    if depth > DEEPEST:
        raise ValueError("nested too deeply")
    if text.startswith(QUOTE, at):
        end = text.index(QUOTE, at + len(QUOTE))
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text[at] == '"':  # some answers quote as JSON does
        return json.JSONDecoder().raw_decode(text, at)
    if text[at] in "{[":
        return _container(text, at, depth)
    bare = _BARE.match(text, at)
    if bare is None:
        raise ValueError("no value")
    return _scalar(bare[0].strip()), bare.end()


def _container(text: str, at: int, depth: int) -> tuple[Any, int]:
    is_object, close = text[at] == "{", "}" if text[at] == "{" else "]"
    items: list[Any] = []
    at = _skip(text, at + 1)
    while text[at] != close:
        key = ""
        if is_object:
            key, at = _key(text, at)
        value, at = _value(text, at, depth + 1)
        items.append((key, value) if is_object else value)
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
        elif text[at] != close:
            raise ValueError("no separator")
    return dict(items) if is_object else items, at + 1


def _key(text: str, at: int) -> tuple[str, int]:
    if text.startswith((QUOTE, '"'), at):
        key, at = _value(text, at, 0)
        at = _skip(text, at)
        if text[at] != ":":
            raise ValueError("no key")
        return str(key), at + 1
    found = _KEY.match(text, at)
    if found is None:
        raise ValueError("no key")
    return found[1], found.end()


def _scalar(text: str) -> Any:
    if text in ("None", "null"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if value == value and value not in (float("inf"), float("-inf")) else text  # NaN is no JSON


def _skip(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at
