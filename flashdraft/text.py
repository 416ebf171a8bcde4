"""Tokens to text, one token at a time: detokenizing, stop strings, and thinking told apart from the answer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerFast

from flashdraft.engine.request import FinishReason

BROKEN = "\ufffd"  # what decoders write for bytes that are no character, or not yet
GENERATION = 8  # tokens: text is decoded in a window of one to two of these
MAX_WINDOW = 64  # tokens, where the text offers no good place to cut the window


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any: ...

    def convert_tokens_to_ids(self, tokens: list[str]) -> Any: ...


class Detokenizer:
    """The text of a growing list of tokens, a constant amount of work a token.

    The text of a token depends on its neighbours: SentencePiece tokenizers drop the space of the first token they decode, and
    a character may be spread over several tokens. So the last few tokens are decoded together, and what the window's text has
    gained is new. Text is given out once later tokens cannot change it: a sign for broken bytes waits for the next token.
    `prompt_ids` makes the text go on from a prompt; without it the first token's leading space is dropped, as decode() does.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._backend = _backend(tokenizer)
        self._byte_of = _byte_tokens(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window = list(prompt_ids[-GENERATION:])
        self._seen = self._decode(self._window)  # the part of the window's text that was given out
        self._clean = self._mark = len(self._window)  # tokens given out whole; start of the window's newer generation
        self._in_bytes = False
        for token in self._window:
            self._byte_text(token)

    def push(self, token: int) -> str:
        """The text that this token settles, often that of the token itself, sometimes none."""
        before = self._byte_text(token)
        if self._in_bytes:
            self._window = [*self._window, token][-MAX_WINDOW:]
            return before
        return before + self._window_text(token)

    def finish(self) -> str:
        """The text held back: signs for bytes that no token completed."""
        rest = self._utf8.decode(b"", True) if self._in_bytes else self._grown()[len(self._seen) :]
        self._window, self._seen, self._clean, self._mark, self._in_bytes = [], "", 0, 0, False
        return rest

    def _byte_text(self, token: int) -> str:
        """The characters completed by a byte token, or broken off by any other.

        A byte-fallback decoder turns a whole run of byte tokens into broken signs while the last character is not complete,
        so their text never comes from the window.
        """
        byte = self._byte_of.get(token)
        if byte is not None:
            self._in_bytes = True
            return self._utf8.decode(bytes([byte]))
        if not self._in_bytes or self._is_skipped(token):
            return ""
        self._in_bytes = False
        self._seen = self._decode(self._window)
        self._clean = self._mark = len(self._window)
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        return text

    def _is_skipped(self, token: int) -> bool:
        """Whether it has no text even behind other text, as special tokens: decode() joins the bytes on both of its sides."""
        letter = next(t for t, byte in self._byte_of.items() if byte == ord("A"))
        return self._decode([letter, token]) == "A"

    def _window_text(self, token: int) -> str:
        self._window.append(token)
        text = self._grown()
        # Decoders write one sign for an unfinished character; with byte tokens every other token ends with a whole one.
        held = not self._byte_of and text.endswith(BROKEN) and len(text) > len(self._seen)
        stable = text[:-1] if held else text
        new = stable[len(self._seen) :]
        if text and text == self._seen and not text.endswith(BROKEN):
            self._window.pop()  # a token without text, as special tokens are: no use as context
            return ""
        self._seen = stable
        if not held:
            self._clean = len(self._window)
            if self._clean - self._mark >= GENERATION:
                self._slide(text)
        elif len(self._window) > MAX_WINDOW:  # no token has ended with a whole character for long
            self._window = self._window[-GENERATION:]
            self._clean = self._mark = 0
            self._seen = self._decode(self._window)[:-1]
        return new

    def _grown(self) -> str:
        """The window's text, which begins with what was seen of it."""
        text = self._decode(self._window)
        if text.startswith(self._seen):
            return text
        whole = self._seen.rstrip(BROKEN)
        if whole != self._seen and text.startswith(whole):  # a character that the prompt began is whole now
            self._seen = whole
            return text
        # A decoder that changes text it has given out: decode the tokens since then by themselves.
        self._window = self._window[self._clean :]
        self._seen, self._clean, self._mark = "", 0, 0
        return self._decode(self._window)

    def _slide(self, text: str) -> None:
        """Drop the window's older generation, if the newer one decodes by itself to the end of the text."""
        newer = self._window[self._mark :]
        alone = self._decode(newer)
        if (alone and text.endswith(alone)) or len(self._window) > MAX_WINDOW:
            self._window, self._seen = newer, alone
            self._clean = self._mark = len(newer)

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        skip = self._skip_special_tokens
        if self._backend is not None:
            return str(self._backend.decode(tokens, skip_special_tokens=skip))
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def _backend(tokenizer: Tokenizer) -> Any:
    """The Rust tokenizer, if decode() does nothing but call it: the way there takes 5 of 8 us, for every token. Else None."""
    own: Any = type(tokenizer)
    plain: Any = PreTrainedTokenizerFast
    passes_on = isinstance(tokenizer, plain) and own.decode is plain.decode and own._decode is plain._decode
    return getattr(tokenizer, "_tokenizer", None) if passes_on else None


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """The byte of each byte-fallback token, <0x00> to <0xFF>; empty for tokenizers that have none."""
    (letter,) = tokenizer.convert_tokens_to_ids(["<0x41>"])
    if letter is None or tokenizer.decode([letter], skip_special_tokens=False, clean_up_tokenization_spaces=False) != "A":
        return {}
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    return {token: byte for byte, token in enumerate(ids)}


class StopStrings:
    """Finds the first end of any stop string in text that comes by the character (Knuth, Morris and Pratt)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _failures(stop)) for stop in stops]
        self.forget()

    def forget(self) -> None:
        """Let no stop string begin in the text so far."""
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with

    @property
    def begun(self) -> int:
        """Length of the longest start of a stop string that the text ends with."""
        return max(self._matched, default=0)

    def push(self, char: str) -> str | None:
        """The longest stop string that ends at this character, if any does."""
        found = None
        for i, (stop, failures) in enumerate(self._stops):
            n = self._matched[i]
            while n and stop[n] != char:
                n = failures[n - 1]
            n += stop[n] == char
            if n == len(stop):
                found = stop if found is None or n > len(found) else found
                n = failures[n - 1]
            self._matched[i] = n
        return found


@lru_cache(maxsize=256)  # n answers have the same
def _failures(stop: str) -> tuple[int, ...]:
    """For each start of the string, the length of the longest shorter one that it ends with."""
    failures, n = [0], 0
    for char in stop[1:]:
        while n and stop[n] != char:
            n = failures[n - 1]
        n += stop[n] == char
        failures.append(n)
    return tuple(failures)


HELD = -1  # stands for the token of text that was held back: how much of it is a matter of no single token


class TextStream:
    """The text of one answer, from its committed tokens; `push` serves as Request.on_token.

    A stop string ends the answer where its first occurrence ends, also across tokens, and is cut off unless
    `include_stop_str_in_output`; one that ends within the first `min_tokens` tokens does not count. The text of a token in
    `stop_ids` is left out likewise. `markers` are tokens that divide the answer (the end of thinking): they have no text,
    and nothing before them is held back behind them. How tokens are cut into steps, and when `take` is called, changes nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        stop_ids: AbstractSet[int] = frozenset(),
        min_tokens: int = 0,
        markers: AbstractSet[int] = frozenset(),
    ) -> None:
        self.stop_string: str | None = None  # the one that ended the answer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)
        self._stops, self._has_stops = StopStrings(stop), bool(stop)
        self._include_stop = include_stop_str_in_output
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._markers = markers
        self._tokens = 0
        self._events: list[tuple[int, str]] = []  # a token, or HELD, and the text it made safe to show, perhaps none
        self._taken = 0  # of the events
        self._open = ""  # may turn out to be the start of a stop string
        self._ended = False

    @property
    def text(self) -> str:
        """All text that is safe to show; after `finish`, or once a stop string was found, the whole answer."""
        return "".join(text for _, text in self._events)

    def push(self, token: int) -> FinishReason | None:
        """Add a committed token. Returns "stop" if the answer ends with it; tokens after that one change nothing."""
        if self._ended:
            return "stop"
        self._tokens += 1
        if token in self._stop_ids and not self._include_stop:
            self._end()
            return "stop"
        if token in self._markers and token not in self._stop_ids:
            self._settle()
            self._events.append((token, ""))
            return "stop" if self._ended else None
        self._add(token, self._detokenizer.push(token))
        if token in self._stop_ids and not self._ended:
            self._end()
        return "stop" if self._ended else None

    def take(self) -> str:
        """The text since the last call that no later token can change or cut off."""
        return "".join(text for _, text in self.take_events())

    def take_events(self) -> list[tuple[int, str]]:
        """The same, token by token: each token but a stop id that ended the answer, and HELD for what none of them settled."""
        new = self._events[self._taken :]
        self._taken = len(self._events)
        return new

    def finish(self) -> None:
        """End the answer: what was held back is safe to show now."""
        if not self._ended:
            self._end()

    def _add(self, token: int, new: str) -> None:
        text = self._open + new
        if not self._has_stops:
            self._events.append((token, text))
            return
        for i, char in enumerate(new, start=len(self._open) + 1):
            found = self._stops.push(char)
            if found and self._tokens > self._min_tokens:
                self.stop_string, self._open, self._ended = found, "", True
                self._events.append((token, text[:i] if self._include_stop else text[: i - len(found)]))
                return
        safe = len(text) - self._stops.begun
        self._open = text[safe:]
        self._events.append((token, text[:safe]))

    def _settle(self) -> None:
        """Nothing that comes later changes the text so far."""
        self._add(HELD, self._detokenizer.finish())
        if self._open:
            self._events.append((HELD, self._open))
        self._open = ""
        self._stops.forget()

    def _end(self) -> None:
        self._settle()
        self._ended = True


Kind = Literal["thinking", "answer"]


class ThinkSplit:
    """Tells thinking from the answer in text that comes in pieces; markers may be cut anywhere and are left out.

    Thinking counts only at the very start (after white space), or from the start if the prompt `opened` it; a marker later in
    the answer is plain text.
    """

    def __init__(self, start: str = "<think>", end: str = "</think>", *, opened: bool = False) -> None:
        self._start, self._end = start, end
        self._state: Literal["before", "thinking", "answer"] = "thinking" if opened else "before"
        self._held = ""

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """The settled pieces, in order, none of them empty."""
        events: list[tuple[Kind, str]] = []
        text, self._held = self._held + text, ""
        if self._state == "before":
            begun = text.lstrip()
            if begun.startswith(self._start):
                self._state, text = "thinking", begun[len(self._start) :]
            elif self._start.startswith(begun):
                self._held = text
                return events
            else:
                self._state = "answer"
        if self._state == "thinking":
            thinking, marker, rest = text.partition(self._end)
            if marker:
                self._state = "answer"
            else:
                keep = next(n for n in range(len(self._end) - 1, -1, -1) if text.endswith(self._end[:n]))
                thinking, self._held = text[: len(text) - keep], text[len(text) - keep :]
            events.append(("thinking", thinking))
            text = rest
        events.append(("answer", text))
        return [event for event in events if event[1]]

    def finish(self) -> list[tuple[Kind, str]]:
        """What was held back in case it began a marker."""
        held, self._held = self._held, ""
        kind: Kind = "thinking" if self._state == "thinking" else "answer"
        return [(kind, held)] if held else []


def split_thinking(text: str, start: str = "<think>", end: str = "</think>", *, opened: bool = False) -> tuple[str, str]:
    """The thinking and the answer of a whole text, without the markers."""
    split = ThinkSplit(start, end, opened=opened)
    events = split.push(text) + split.finish()
    return "".join(t for kind, t in events if kind == "thinking"), "".join(t for kind, t in events if kind == "answer")
