"""Tokens and their text to pieces: plain text, and the markers that divide an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """Plain text, or a marker. `shown` is what a marker is worth as plain text: nothing for a special token."""

    text: str
    is_marker: bool = False
    shown: str = ""

    @property
    def plain(self) -> Piece:
        """The same, where it divides nothing."""
        return Piece(self.shown) if self.is_marker else self


@dataclass(frozen=True)
class Markers:
    """The markers of an answer: those that are one token of the vocabulary are known by its id, the rest by their text."""

    by_id: Mapping[int, Piece]
    by_text: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Any, texts: Iterable[str]) -> Markers:
        added, special = tokenizer.get_added_vocab(), set(tokenizer.all_special_ids)
        by_id, by_text = {}, []
        for text in dict.fromkeys(texts):
            if text in added:
                by_id[added[text]] = Piece(text, True, "" if added[text] in special else text)
            else:
                by_text.append(text)
        return cls(by_id, tuple(by_text))


class Lexer:
    """Cuts an answer at its markers. A marker that is a token is never found in text that only spells it."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._held = ""  # may be the start of a marker
        self.marker_ids, self.reads_text = markers.by_id.keys(), bool(markers.by_text)

    def push(self, token: int, text: str) -> list[Piece]:
        marker = self._markers.by_id.get(token)
        if marker is not None:
            return [*self.finish(), marker]
        return self._cut(self._held + text) if self._markers.by_text else [Piece(text)] if text else []

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        return [Piece(held)] if held else []

    def _cut(self, text: str) -> list[Piece]:
        pieces = []
        while found := min(((i, m) for m in self._markers.by_text if (i := text.find(m)) >= 0), default=None):
            place, marker = found
            pieces += [Piece(text[:place]), Piece(marker, True, marker)]
            text = text[place + len(marker) :]
        keep = max(_overlap(text, marker) for marker in self._markers.by_text)
        self._held = text[len(text) - keep :]
        pieces.append(Piece(text[: len(text) - keep]))
        return [piece for piece in pieces if piece.text]


def _overlap(text: str, marker: str) -> int:
    """Length of the longest start of the marker, not all of it, that the text ends with."""
    return next(n for n in range(min(len(text), len(marker) - 1), -1, -1) if text.endswith(marker[:n]))
