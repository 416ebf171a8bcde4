"""The record of a run: a JSON object a line, appended as things happen, so that a kill costs what was under way, no more."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from flashdraft.errors import CheckpointError
from flashdraft.train.files import saying_what_is_wrong

Identity = tuple[str, str, int, int]  # arm, prompt hash, sample, turn


def identity(record: dict[str, Any]) -> Identity:
    return record["arm"], record["prompt"], record["sample"], record["turn"]


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
                self._keep(json.loads(line))
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
