"""The record of a run: a JSON object a line, appended as things happen, so that a kill costs what was under way, no more."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashdraft.errors import CheckpointError
from flashdraft.train.files import saying_what_is_wrong

Identity = tuple[str, str, int, int]  # arm, prompt hash, sample, turn


def identity(record: dict[str, Any]) -> Identity:
    return record["arm"], record["prompt"], record["sample"], record["turn"]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15 and math.isfinite(value)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 10**15


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _or_none(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


def _speculation(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    a, b = value["accepted_per_step"], value["drafted_per_step"]
    return _fit(value, SPECULATION) and (a is None) == (b is None) and (a is None or len(a) == len(b))


def _counters(value: Any) -> bool:
    """As from counters.difference."""
    if not isinstance(value, dict):
        return False
    numbers = {name: found for name, found in value.items() if name not in ("engine", "per_position")}
    at = value.get("per_position", [])
    known = {"vllm": {"drafts", "accepted", "draft_tokens"}, "sglang": {"drafts", "tokens"}}[value["engine"]]
    return numbers.keys() == known and isinstance(at, list) and all(map(_number, (*at, *numbers.values())))


def _fit(record: Mapping[str, Any], fields: Mapping[str, Fits]) -> bool:
    return all(fits(record[name]) for name, fits in fields.items())


Fits = Callable[[Any], bool]
SPECULATION: dict[str, Fits] = {"steps": _count, "verify_steps": _count}
SPECULATION |= dict.fromkeys(("accepted", "drafted", "width"), _or_none(_count))
SPECULATION |= dict.fromkeys(("histogram", "accepted_per_step", "drafted_per_step"), _or_none(_counts))
ASKED: dict[str, Fits] = dict.fromkeys(("arm", "piece", "prompt", "category", "id"), _text) | {"sample": _count, "turn": _count}
ANSWER: dict[str, Fits] = dict.fromkeys(("prompt_tokens", "tokens", "thinking_tokens"), _or_none(_count))
ANSWER |= dict.fromkeys(("first", "last", "seconds", "repetition"), _number)
ANSWER |= {"finish_reason": _text, "text": _text, "speculation": _or_none(_speculation)}
PIECE: dict[str, Fits] = {"arm": _text, "piece": _text, "seconds": _number, "answers": _count, "tokens": _count}
PIECE |= {"counters": _or_none(_counters)}


def _check(record: Mapping[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError for a record without what results are made of. Other fields pass."""
    fields = PIECE if record["kind"] == "piece" else ASKED | ({"refused": _text} if "refused" in record else ANSWER)
    if not _fit(record, fields) or not all(_or_none(_count)(record.get(name)) for name in ("running", "waiting")):
        raise ValueError


class Lines:
    """A file of records, which `_keep` takes as they are read and added. Raises CheckpointError for a line that is none.

    A half line at the end, of a process that was killed while it wrote, is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        with saying_what_is_wrong(path.parent):
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._file, whole)
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                _check(record)
                self._keep(record)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise CheckpointError(f"{path}, line {number}: not a record of this program: remove that line") from error

    def add(self, record: dict[str, Any]) -> None:
        """Append one record; nothing once closed. One write, so that no other line is ever half of it."""
        line = memoryview((json.dumps(record) + "\n").encode())
        with self._lock:
            if self._file is None:
                return
            with saying_what_is_wrong(self.path.parent):
                while line:
                    line = line[os.write(self._file, line) :]
            self._keep(record)

    def close(self) -> None:
        """What threads still add is dropped."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _keep(self, record: dict[str, Any]) -> None:
        """Raises ValueError, KeyError or TypeError for what is no record."""
        raise NotImplementedError


class Log(Lines):
    """answers.jsonl of a directory. Records are of two kinds: `answer`, one a turn, and `piece`, a timed part of a round."""

    def __init__(self, directory: Path) -> None:
        self.answers: dict[Identity, dict[str, Any]] = {}
        self.pieces: list[dict[str, Any]] = []
        super().__init__(directory / "answers.jsonl")
        # What was refused is asked again: another server, or the same one started otherwise, may take it.
        self.answers = {key: record for key, record in self.answers.items() if "refused" not in record}

    def _keep(self, record: dict[str, Any]) -> None:
        if record["kind"] == "answer":
            before = self.answers.get(identity(record))
            if before is None or "refused" in before:
                self.answers[identity(record)] = record
        elif record["kind"] == "piece":
            self.pieces.append(record)
        else:
            raise ValueError
