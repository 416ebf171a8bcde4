"""What a fit has done and spent, kept in work/fit.json while it goes: a killed one goes on with what is left of its budget."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.train.files import locked, read_object, saying_what_is_wrong, write_whole

NAME = "fit.json"
BEGUN = "begun"  # found when the first answer is asked for: from then on the settings are fixed
BEAT_SECONDS = 2.0  # what a killed process may have spent without its being counted


class Ledger:
    """Seconds spent by stage, and what finished stages found. `settings` name what a fit is of.

    Raises ConfigError, with what differs, for a directory whose fit was begun with other settings, and where another process
    is at work in it.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self.path, self._lock, self._writing = directory / NAME, -1, threading.Lock()
        self.seconds: dict[str, float] = {}
        self._count: Callable[[], None] = lambda: None  # brings `seconds` up to now
        self.found: dict[str, Any] = {}
        self.settings = json.loads(json.dumps(settings))
        with saying_what_is_wrong(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = locked(directory, "at work in")
        try:
            self._read()
            self.write()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        if not self.path.exists():
            return
        content = read_object(self.path) or {}
        settings, self.seconds, self.found = (content.get(name, 0) for name in ("settings", "seconds", "found"))
        if not all(isinstance(part, dict) for part in (settings, self.seconds, self.found)):
            raise CheckpointError(f"{self.path} is not what a fit wrote: remove it to begin anew")
        if BEGUN not in self.found:
            return
        if changed := [name for name in self.settings if settings.get(name) != self.settings[name]]:
            raise ConfigError(
                f"{self.path.parent.parent} was begun with other {' and '.join(changed)}: give the same, or another --output"
            )

    @property
    def spent(self) -> float:
        self._count()
        return sum(self.seconds.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the seconds inside it, on disk too."""
        before, start, done = self.seconds.get(name, 0.0), time.monotonic(), threading.Event()

        def count() -> None:
            self.seconds[name] = before + time.monotonic() - start

        def beat() -> None:
            while not done.wait(BEAT_SECONDS):
                count()
                with suppress(OSError):  # of a full disk; the main thread will say so
                    self._write()

        thread, self._count = threading.Thread(target=beat, daemon=True), count
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            count()
            self._count = lambda: None
            self.write()

    def finish(self, stage: str, found: Mapping[str, Any]) -> None:
        """A stage is over: the next start passes over it."""
        self.found[stage] = dict(found)
        self.write()

    def forget(self) -> None:
        """Nothing was begun, so nothing is spent."""
        self.seconds, self.found = {}, {}
        self.write()

    def write(self) -> None:
        with saying_what_is_wrong(self.path.parent):
            self._write()

    def _write(self) -> None:
        with self._writing:
            content = {"settings": self.settings, "seconds": self.seconds, "found": self.found}
            write_whole(self.path, json.dumps(content, indent=1))

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1
