"""What `flashdraft synthesize` shows: a bar on a terminal, a plain line every 30 s elsewhere, and what became of it all."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from flashdraft.errors import counted
from flashdraft.train.synthesize import Progress

PLAIN_SECONDS = 30.0
RATE_SECONDS = 60.0  # tokens/s and time left look back so far
DROPPED = "answers dropped: "

err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


class Meter:
    """Tokens and conversations per second, of the last minute."""

    def __init__(self, progress: Progress) -> None:
        self.begun = time.monotonic()
        self._seen = deque([(self.begun, progress.tokens, progress.done)])

    def update(self, progress: Progress) -> tuple[float, float | None]:
        """Tokens/s, and seconds left if that can be said."""
        now = time.monotonic()
        if now - self._seen[-1][0] > 1.0:
            self._seen.append((now, progress.tokens, progress.done))
        while len(self._seen) > 1 and self._seen[1][0] < now - RATE_SECONDS:
            self._seen.popleft()
        then, tokens, done = self._seen[0]
        seconds = max(now - then, 1e-3)
        rate = (progress.done - done) / seconds
        return (progress.tokens - tokens) / seconds, (progress.total - progress.done) / rate if rate else None


class Display:
    """Serves as `report` of synthesize. seconds: no answer begins after so long. status: more figures, "" for none."""

    def __init__(self, console: Console = err, seconds: float | None = None, status: Callable[[], str] | None = None) -> None:
        self._status = status or str
        self.console, self._ends = console, math.inf if seconds is None else time.monotonic() + seconds
        self.progress: Progress | None = None
        self._meter: Meter | None = None
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._shown = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._meter is None:
            self._meter, self.progress = Meter(progress), progress
            if progress.done:
                self.console.print(f"{progress.done:,} of {counted(progress.total, 'conversation')} there already: going on")
            if self.console.is_terminal:
                self._start(progress)
            self._shown = now
            return
        rate, left = self._meter.update(progress)
        if self._ends < math.inf:
            left = max(0.0, min(self._ends - now, math.inf if left is None else left))
        if self._bar is not None:
            shown = "\n".join(filter(None, [figures(progress, rate, left), *self._status().split("; ")]))
            self._bar.update(self._task, completed=progress.done, figures=shown)
        elif now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            self.console.print(f"{progress.done:,}/{progress.total:,} {figures(progress, rate, left)}", markup=False)
            if status := self._status():
                self.console.print(f"  {status}", markup=False)

    def _start(self, progress: Progress) -> None:
        columns = (TextColumn("{task.completed:,}/{task.total:,}"), BarColumn(), TextColumn("{task.fields[figures]}"))
        self._bar = Bar(*columns, console=self.console, transient=True)
        self._task = self._bar.add_task("", total=progress.total, completed=progress.done, figures="no answer yet")
        self._bar.start()

    @property
    def rate(self) -> tuple[float, float]:
        """Tokens/s of the whole run, and its seconds."""
        if self._meter is None or self.progress is None:
            return 0.0, 0.0
        seconds = time.monotonic() - self._meter.begun
        return self.progress.tokens / max(seconds, 1e-3), seconds

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def figures(progress: Progress, rate: float, left: float | None) -> str:
    kept, dropped = progress.counts["answers kept"], sum(dropped_of(progress.counts).values())
    parts = [counted(kept, "answer"), *([f"{dropped:,} left out"] if dropped else []), f"{rate:,.0f} tokens/s"]
    return ", ".join([*parts, *([f"{timedelta(seconds=round(left))} left"] if left is not None else [])])


def dropped_of(counts: Counter[str]) -> dict[str, int]:
    """How many answers were left out, by reason."""
    return {name.removeprefix(DROPPED): count for name, count in counts.items() if name.startswith(DROPPED)}


@contextmanager
def displaying(directory: Path, seconds: float | None = None, status: Callable[[], str] | None = None) -> Iterator[Display]:
    """A display; where the run is stopped, what there is and how it goes on."""
    display = Display(seconds=seconds, status=status)
    try:
        yield display
    except (KeyboardInterrupt, SystemExit):
        display.close()
        if display.progress is not None:
            kept = display.progress.counts["answers kept"]
            display.console.print(f"\nstopped: {counted(kept, 'answer')} in {escape(str(directory))}; the same command goes on")
        raise
    finally:
        display.close()


def show_summary(counts: Counter[str], display: Display, directory: Path, target: Sequence[str]) -> None:
    """Standard output: what became of prompts and answers, how fast it went, and what comes next."""
    out = Console(highlight=False, emoji=False, soft_wrap=True, file=sys.stdout)
    rate, seconds = display.rate
    out.print(
        f"{counted(counts['answers kept'], 'answer')}, {counted(counts['answer tokens kept'], 'token')} in {directory}",
        style="bold",
        markup=False,
    )
    prompts = {name.removeprefix("prompts "): n for name, n in counts.items() if name.startswith("prompts ") and n}
    for what, whole, parts in (
        ("prompts", counts["prompts"], prompts),
        ("answers", counts["answers kept"], dropped_of(counts)),
    ):
        named = "; ".join(f"{n:,} {name}" for name, n in sorted(parts.items(), key=lambda item: (-item[1], item[0])))
        out.print(f"{what}: {whole:,}{f'; left out: {named}' if named else ''}", markup=False)
    if display.progress is not None and display.progress.tokens:
        out.print(f"{rate:,.1f} tokens/s over {timedelta(seconds=round(seconds))}", markup=False)
    if counts["answers kept"]:
        words = shlex.join(["flashdraft", "train", *target, "--data", str(directory), "--output", "DRAFT"])
        out.print(f"next: {words}", style="dim", markup=False)
