"""Prompt files, and how prompts and answers are compared: by hash, and by how much an answer repeats itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft.errors import CheckpointError

NGRAM = 8
LOOP = 0.3  # answers that repeat more of their 8-grams than this inflate acceptance
CHANGED = "has changed while it was read: start again when it is whole"
KINDS = "`turns`, `messages`, `conversations` or `prompt`"


@dataclass(frozen=True)
class Prompt:
    """One conversation of a prompt file: the user's turns, in order, and the system prompt before them, if any."""

    id: str
    category: str
    turns: tuple[str, ...]
    system: str = ""
    lang: str = ""  # as the row names it; "" where it names none

    @property
    def opening(self) -> list[dict[str, str]]:
        """The messages before the first turn."""
        return [{"role": "system", "content": self.system}] if self.system else []

    @property
    def hash(self) -> int:
        """Of the system prompt and all turns: which conversation this is. Of a single turn it is first_hash."""
        return prompt_hash("\0".join((self.system, *self.turns))) if self.system or len(self.turns) > 1 else self.first_hash

    @property
    def first_hash(self) -> int:
        """Of the first turn alone: what a draft that learned from any answer of this conversation was trained on."""
        return prompt_hash(self.turns[0])

    def is_among(self, known: Collection[int]) -> bool:
        """Whether a draft was trained on this prompt, `known` being the first_hash of every conversation it learned from: it
        is the same one, begins alike under another system prompt, or asks later what another one began with.
        """
        asked = [*self.turns, f"{self.system}\n{self.turns[0]}"]  # the last is what drafts of flashdraft 0.1 brought along
        return any(prompt_hash(text) in known for text in asked)

    def to_row(self) -> dict[str, Any]:
        """The row of a prompt file that reads as this prompt."""
        row: dict[str, Any] = {"id": self.id, "category": self.category}
        row |= {"lang": self.lang} if self.lang else {}
        if not self.system:
            return row | {"turns": list(self.turns)}
        return row | {"messages": [*self.opening, *({"role": "user", "content": turn} for turn in self.turns)]}


def read_prompts(path: Path | str) -> list[Prompt]:
    """Prompts of a JSONL file: rows {"turns": [...]}, {"messages": [...]}, {"conversations": [...]} or {"prompt": "..."}, with
    optional id, category and lang.

    Of messages the system prompt and the user's turns are kept: the answers are to be the target's own.
    Raises CheckpointError that names the first bad line.
    """
    return [prompt for _, prompt in scan_prompts(path)]


def scan_prompts(path: Path | str) -> Iterator[tuple[int, Prompt]]:
    """The prompts of a file one by one, each with the byte its line begins at (see prompts_at). Raises as read_prompts does."""
    offset, found = 0, False
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if prompt := _prompt_of_line(path, number, line):
                    found = True
                    yield offset, prompt
                offset += len(line)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the prompts ({error.strerror or error})") from error
    if not found:
        raise CheckpointError(f"{path} holds no prompts: one JSON object a line, with {KINDS}")


def prompts_at(path: Path | str, offsets: Sequence[int]) -> list[Prompt]:
    """The prompts whose lines begin at these bytes of a file. Raises CheckpointError if it is not the file it was."""
    prompts = []
    try:
        with Path(path).open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                prompt = _prompt_of_line(path, f"at byte {offset}", file.readline())
                if prompt is None:
                    raise CheckpointError(f"{path} {CHANGED}")
                prompts.append(prompt)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the prompts ({error.strerror or error})") from error
    return prompts


def prompt_of_row(row: Any, default_id: str = "") -> Prompt:
    """The prompt of one row of a prompt file or a data set. Raises ValueError that says what is wrong with it."""
    if not isinstance(row, Mapping):
        raise ValueError(f"not a JSON object with {KINDS}")
    system = ""
    if row.get("turns") is not None:
        turns = row["turns"]
        if not isinstance(turns, list | tuple):
            raise ValueError("`turns` must be a list of non-empty strings")
    elif (messages := _messages(row)) is not None:
        asked = [(m.get("role", m.get("from")), m.get("content", m.get("value"))) for m in messages]
        said = [(str(role), _text(content)) for role, content in asked if role in ("user", "human", "system")]
        turns = [text for role, text in said if role in ("user", "human")]
        system = "\n".join(text for role, text in said if role == "system" and text.strip())
        if not turns:
            raise ValueError("its messages hold no turn of the user")
    elif row.get("prompt") is not None:
        turns = [row["prompt"]]
    else:
        raise ValueError(f"not a JSON object with {KINDS}")
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError("a turn of the user must be a non-empty string")
    category, lang, name = (_label(row, key) for key in ("category", "lang", "id"))
    prompt = Prompt(name or str(default_id), category, tuple(turns), system, lang)
    try:
        "".join((system, *turns, category, lang, name)).encode()
    except UnicodeEncodeError:
        raise ValueError("its text holds half a character (a lone surrogate), which no UTF-8 can hold") from None
    return prompt


def _label(row: Mapping[str, Any], key: str) -> str:
    """The category, language or id of a row: text, or a number."""
    value = row.get(key)
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError(f"`{key}` must be text")
    return "" if value is None else str(value)


def _messages(row: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The list of messages that a row holds under one of its usual names."""
    for name in ("messages", "conversations", "prompt"):
        value = row.get(name)
        if value is None or (name == "prompt" and isinstance(value, str)):
            continue
        if not isinstance(value, list | tuple) or not all(isinstance(m, Mapping) for m in value):
            kinds = "text, or a list" if name == "prompt" else "a list"
            raise ValueError(f"`{name}` must be {kinds} of messages with role and content")
        return list(value)
    return None


def _text(content: Any) -> str:
    """The text of a message: a string, or a list of parts as in the OpenAI API; "" for none."""
    parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": "" if content is None else content}]
    shown = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    texts = [text for text in shown if isinstance(text, str)]
    if len(texts) < len(parts):
        raise ValueError("the content of a message must be a non-empty string, or parts of type text")
    return "".join(texts)


def _prompt_of_line(path: Path | str, number: int | str, line: bytes) -> Prompt | None:
    """The prompt of a line; None for a blank one."""
    line = line.removeprefix(b"\xef\xbb\xbf")
    if not line.strip():
        return None
    where = f"line {number}" if isinstance(number, int) else number
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        kind = "not UTF-8" if isinstance(error, UnicodeDecodeError) else f"not a JSON object with {KINDS}"
        raise CheckpointError(f"{path}, {where}: {kind}") from error
    try:
        return prompt_of_row(row, str(number))
    except ValueError as error:
        raise CheckpointError(f"{path}, {where}: {error}") from error


def round_robin(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """The first `limit` prompts, one of each category at a time."""
    queues: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.category, []).append(prompt)
    rows = [queue[i] for i in range(max(map(len, queues.values()))) for queue in queues.values() if i < len(queue)]
    return rows[:limit]


def normalise(text: str) -> str:
    """Case and white space aside, the same text."""
    return " ".join(text.lower().split())


def prompt_hash(text: str) -> int:
    """Eight bytes of blake2b over the normalised text: how prompts are compared everywhere."""
    return int.from_bytes(hashlib.blake2b(normalise(text).encode(), digest_size=8).digest(), "little")


def repetition(tokens: Sequence[int]) -> float:
    """The share of repeated 8-grams: 1 - distinct / all; 0 for fewer than 8 tokens."""
    count = len(tokens) - NGRAM + 1
    if count < 1:
        return 0.0
    return 1.0 - len(set(zip(*(tokens[i : i + count] for i in range(NGRAM)), strict=True))) / count
