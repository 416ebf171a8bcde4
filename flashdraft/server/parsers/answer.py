"""An answer taken apart: thinking, content and tool calls; and which formats a target writes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

from flashdraft.errors import ConfigError
from flashdraft.server.parsers import reasoning, tools
from flashdraft.server.parsers.events import Call, Content, Event, Reasoning, ToolFormat
from flashdraft.server.parsers.lexer import Lexer, Markers, Piece
from flashdraft.server.parsers.reasoning import ReasoningParser
from flashdraft.text import HELD
from flashdraft.thinking import TAIL, ReasoningFormat, format_of

Thinking = Literal["none", "possible", "opened"]


@dataclass(frozen=True)
class Formats:
    """What a target writes. Markers are found once, for all answers."""

    tokenizer: Any
    reasoning: ReasoningFormat | None
    tools: ToolFormat
    _markers: dict[bool, Markers] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def choose(cls, tokenizer: Any, reasoning_parser: str | None = None, tool_parser: str | None = None) -> Formats:
        """The formats of these names, or those that the chat template speaks of. Raises ConfigError for unknown names."""
        template = str(getattr(tokenizer, "chat_template", None) or "")
        return cls(tokenizer, _reasoning(reasoning_parser, tokenizer), _tools(tool_parser, template))

    def markers(self, with_tools: bool) -> Markers:
        if with_tools not in self._markers:
            own = () if self.reasoning is None else (self.reasoning.start, self.reasoning.end)
            texts = (*own, *(self.tools.markers if with_tools else ()))
            self._markers[with_tools] = Markers.of(self.tokenizer, texts)
        return self._markers[with_tools]

    def thinking(self, prompt: list[int]) -> Thinking:
        """Whether the prompt's end has begun the thinking, or the answer may."""
        form = self.reasoning
        if form is None:
            return "none"
        tail = str(self.tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False))
        if form.is_open(tail):
            return "opened"
        is_token = form.start in self.tokenizer.get_added_vocab()
        return "possible" if is_token and not tail.rstrip().endswith(form.end) else "none"


def _reasoning(name: str | None, tokenizer: Any) -> ReasoningFormat | None:
    if name == "none":
        return None
    if name is not None:
        if name not in reasoning.FORMATS:
            raise ConfigError(f"there is no reasoning parser {name!r}: give none, {', '.join(reasoning.FORMATS)}")
        return reasoning.FORMATS[name]
    return format_of(tokenizer)


def _tools(name: str | None, template: str) -> ToolFormat:
    if name is not None:
        if name not in tools.FORMATS:
            raise ConfigError(f"there is no tool-call parser {name!r}: give one of {', '.join(tools.FORMATS)}")
        return tools.FORMATS[name]
    found = (form for form in (tools.GEMMA4, tools.HERMES, tools.LLAMA3) if form.markers[0] in template)
    return next(found, tools.JSON)


class AnswerParser:
    """One answer's tokens, with the text that each made safe to show, to events."""

    def __init__(
        self,
        formats: Formats,
        markers: Markers,
        *,
        opened: bool = False,
        tool_names: frozenset[str] = frozenset(),
        forced: bool = False,  # a grammar made the answer a list of calls, in JSON
    ) -> None:
        self.reasoning_tokens = 0
        self._lexer = Lexer(markers)
        self._reasoning = ReasoningParser(formats.reasoning, opened=opened)
        form = tools.JSON if forced else formats.tools
        self._tools = form.parser(tool_names) if tool_names else tools.NoTools()

    def push(self, token: int, text: str) -> list[Event]:
        before = self._reasoning.thinking
        events = self._sorted(self._lexer.push(token, text))
        self.reasoning_tokens += token >= 0 and (before or self._reasoning.thinking)
        return events

    def push_all(self, news: list[tuple[int, str]]) -> list[Event]:
        """The same for many tokens: those between markers at once, unless markers are found in text."""
        if self._lexer.reads_text:
            return [event for token, text in news for event in self.push(token, text)]
        events: list[Event] = []
        for is_marker, group in itertools.groupby(news, lambda item: item[0] in self._lexer.marker_ids):
            run = list(group)
            if is_marker:
                events += [event for token, text in run for event in self.push(token, text)]
                continue
            events += self.push(HELD, "".join(text for _, text in run))
            self.reasoning_tokens += self._reasoning.thinking and sum(token >= 0 for token, _ in run)
        return events

    def finish(self) -> list[Event]:
        events = self._sorted(self._lexer.finish())
        for _, piece in self._reasoning.finish():
            events += self._tools.push(piece)
        return joined([*events, *self._tools.finish()])

    def _sorted(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            for thinking, part in self._reasoning.push(piece):
                events += [Reasoning(part.plain.text)] if thinking else self._tools.push(part)
        return events


def joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind made one, empty ones left out."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Call):
            out.append(event)
        elif isinstance(event, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + event.text)
        elif event.text:
            out.append(event)
    return out
