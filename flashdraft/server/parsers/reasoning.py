"""Thinking told apart from the answer."""

from __future__ import annotations

from typing import Literal

from flashdraft.server.parsers.lexer import Piece
from flashdraft.thinking import GEMMA4, THINK, ReasoningFormat

FORMATS = {
    **dict.fromkeys(("think", "qwen3", "deepseek_r1", "deepseek_v3", "glm45", "nemotron_v3"), THINK),
    "gemma4": GEMMA4,
}


class ReasoningParser:
    """Pieces of an answer to pieces of thinking and of the answer proper.

    Line breaks around the thinking belong to neither. Where thinking may come only once, it counts only at the very start
    (after white space), or from the start if the prompt `opened` it; a marker anywhere else is plain text.
    """

    def __init__(self, form: ReasoningFormat | None, *, opened: bool = False) -> None:
        self._form = form
        self._state: Literal["before", "label", "thinking", "after", "answer"] = "before"
        self._held = ""  # white space before anything; or the label so far; or line breaks that may end the thinking
        if form is None:
            self._state = "answer"
        elif opened:
            self._state = "label"

    @property
    def thinking(self) -> bool:
        return self._state in ("label", "thinking")

    def push(self, piece: Piece) -> list[tuple[bool, Piece]]:
        """(is thinking, piece), none of them empty."""
        if self._form is None:
            return [(False, piece)]
        if self.thinking:
            return self._think(piece)
        begins = piece.is_marker and piece.text == self._form.start
        if begins and (self._state == "before" or self._form.again):
            self._state, self._held = "label", ""
            return []
        if self._state == "before":
            self._held += "" if piece.is_marker else piece.text
            if not piece.is_marker and not self._held.strip():
                return []
            held, self._held, self._state = self._held, "", "answer"
            return [(False, piece if piece.is_marker else Piece(held))]
        if self._state == "after" and not piece.is_marker:
            text = piece.text.lstrip("\n")
            if not text:
                return []
            piece = Piece(text)
        if not (piece.is_marker and piece.text == self._form.end):
            self._state = "answer"
        elif not piece.shown:
            return []  # an end without a start
        return [(False, piece)]

    def finish(self) -> list[tuple[bool, Piece]]:
        held, self._held = self._held, ""
        return [(False, Piece(held))] if held and self._state == "before" else []

    def _think(self, piece: Piece) -> list[tuple[bool, Piece]]:
        assert self._form is not None
        if piece.is_marker and piece.text == self._form.end:
            self._state, self._held = "after", ""
            return []
        text = self._held + piece.plain.text
        if self._state == "label":
            text = text.lstrip("\n")
            label = self._form.label
            if (len(text) < len(label) and label.startswith(text)) or not text:
                self._held = text
                return []
            self._state, text = "thinking", text.removeprefix(label)
        told = text.rstrip("\n")
        self._held = text[len(told) :]
        return [(True, Piece(told))] if told else []
