"""Prompt files, and how prompts and answers are compared: by hash, and by how much an answer repeats itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashdraft.errors import CheckpointError

NGRAM = 8


@dataclass(frozen=True)
class Prompt:
    """One conversation of a prompt file: the user's turns, in order, and the system prompt before them, if any."""

    id: str
    category: str
    turns: tuple[str, ...]
    system: str = ""

    @property
    def opening(self) -> list[dict[str, str]]:
        """The messages before the first turn."""
        return [{"role": "system", "content": self.system}] if self.system else []

    @property
    def hash(self) -> int:
        return prompt_hash(self.turns[0])


def read_prompts(path: Path | str) -> list[Prompt]:
    """Prompts of a JSONL file: rows {"turns": [...]}, {"messages": [...]} or {"prompt": "..."}, with optional id and category.

    Of messages the system prompt and the user's turns are kept: the answers are to be the target's own.
    Raises CheckpointError that names the first bad line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # not splitlines: a prompt may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot read the prompts ({error})") from error
    prompts = [_read_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise CheckpointError(f"{path} holds no prompts: one JSON object a line, with `turns`, `messages` or `prompt`")
    return prompts


def _read_prompt(path: Path | str, number: int, line: str) -> Prompt:
    try:
        row, system = json.loads(line), ""
        if "turns" in row:
            turns = row["turns"]
        elif "messages" in row:
            turns = [m["content"] for m in row["messages"] if m["role"] == "user"]
            system = "\n".join(m["content"] for m in row["messages"] if m["role"] == "system")
        else:
            turns = [row["prompt"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}, line {number}: not a JSON object with `turns`, `messages` or `prompt`") from error
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise CheckpointError(f"{path}, line {number}: `turns` must be a list of non-empty strings")
    return Prompt(str(row.get("id", number)), str(row.get("category", "")), tuple(turns), system)


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
