"""What an answer is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from flashdraft.server.parsers.lexer import Piece


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Call:
    """A tool call that is whole; its arguments are a JSON object."""

    name: str
    arguments: str


Event = Reasoning | Content | Call


class ToolParser(Protocol):
    """Finds tool calls in the answer proper."""

    def push(self, piece: Piece) -> list[Content | Call]: ...

    def finish(self) -> list[Content | Call]:
        """The answer has ended: what was held back."""


@dataclass(frozen=True)
class ToolFormat:
    """A way to write tool calls: its markers, and a parser for one answer, given the names of the tools there are."""

    name: str
    markers: tuple[str, ...]
    parser: Callable[[frozenset[str]], ToolParser]
