"""What the engine's thread counts: plain numbers, read when someone asks for /metrics."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashdraft.engine.engine import Engine

if TYPE_CHECKING:
    from flashdraft.server.jobs import News

log = logging.getLogger("flashdraft.server")
LOW_AL, LOW_AL_STEPS = 1.3, 500


@dataclass
class Stats:
    """Counters since the start. Only committed tokens count: accepted = committed - 1 of every step that drafted."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)  # by position
    widths: Counter[int] = field(default_factory=Counter)  # proposals verified, 0 for none
    committed: int = 0  # in verify steps
    generated: int = 0  # committed tokens, the first of each answer too
    discarded: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    step_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    pages_free: int = 0
    pages: int = 0
    _recent_steps: int = 0  # that drafted, since acceptance was last looked at
    _recent_tokens: int = 0  # committed by them
    _warned: bool = False

    def take(self, news: News) -> None:
        """Count what an answer has gained."""
        self.generated += len(news.tokens)
        for committed, drafted in news.steps:
            self.committed += committed
            self.widths[drafted] += 1
            if drafted:
                self._drafted(committed, drafted)
        if news.finish_reason is not None:
            self.finished[news.finish_reason] += 1

    def _drafted(self, committed: int, drafted: int) -> None:
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted += committed - 1
        for position in range(committed - 1):
            self.accepted_at[position] += 1
        self._recent_steps += 1
        self._recent_tokens += committed
        if self._recent_steps == LOW_AL_STEPS:
            length = self._recent_tokens / LOW_AL_STEPS
            self._recent_steps = self._recent_tokens = 0
            if length < LOW_AL and not self._warned:
                self._warned = True
                log.warning(
                    "acceptance length %.2f over the last %d steps: the draft hardly helps here; `flashdraft doctor` says why",
                    length,
                    LOW_AL_STEPS,
                )

    def step(self, seconds: float) -> None:
        self.steps += 1
        self.step_seconds += seconds

    def observe_engine(self, engine: Engine) -> None:
        self.running, self.waiting = len(engine.scheduler.running), len(engine.scheduler.waiting)
        self.pages_free, self.pages = engine.pool.available_units, engine.pool.num_units
