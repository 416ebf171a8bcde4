"""Jobs and the news of them, and what the endpoints know of the engine, be it in a thread (loop.py) or in a process
(channel.py)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from flashdraft.engine.request import FinishReason, TokenLogprobs
from flashdraft.llm import Live
from flashdraft.server.pair import Ask, Facts, Work
from flashdraft.server.stats import Stats

log = logging.getLogger("flashdraft.server")
State = Literal["loading", "ready", "draining", "failed", "closed"]


class EngineFault(Exception):
    """The engine failed, and what it was working on with it."""


@dataclass(frozen=True)
class News:
    """What one answer has gained: its tokens, and the text that they made safe to show (TextStream.take_events)."""

    index: int
    events: list[tuple[int, str]]
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    steps: list[tuple[int, int]]  # of each verify step: tokens committed, proposals verified
    cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the end of the first answer


def lost(index: int, error: Exception) -> News:
    """The end of an answer by an error."""
    return News(index, [], [], [], [], 0, "error", None, error)


@dataclass(eq=False)
class Job:
    """The n answers of one prompt, read on the event loop. The engine's thread owns `live`, of a job in its process."""

    answers: int
    number: int = 0  # its name between two processes
    live: list[Live] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    open: int = field(init=False)  # answers that have not ended
    _mail: list[News] = field(default_factory=list)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.open = self.answers

    def deliver(self, news: list[News]) -> None:
        self._mail += news
        self.open -= sum(item.finish_reason is not None for item in news)
        self._ready.set()

    async def news(self) -> AsyncIterator[list[News]]:
        """What is new, each time there is something, until all answers have ended; a slow reader gets it in larger pieces."""
        while self.open or self._mail:
            await self._ready.wait()
            self._ready.clear()
            mail, self._mail = self._mail, []
            yield mail


class EngineLoop(ABC):
    """Loads a pair and steps its engine while there is work. Its methods are called on the event loop.

    `on_ready` is called with the facts of the pair, in a thread, before the first request is taken; what it returns is logged
    once one may be. What fails while the pair is loaded is `load_error`. A failure behind that ends every job with an error,
    and the state is "failed" from then on.
    """

    def __init__(self, on_ready: Callable[[Facts], str]) -> None:
        self.state: State = "loading"
        self.stats = Stats()
        self.facts: Facts | None = None
        self.load_error: BaseException | None = None
        self.loaded = threading.Event()
        self._on_ready = on_ready

    @abstractmethod
    async def start(self) -> None:
        """Begin loading."""

    @abstractmethod
    def close(self, timeout: float = 10.0) -> None:
        """End the engine, and with it whatever still runs."""

    @abstractmethod
    async def submit(self, ask: Ask) -> Job:
        """Raises RequestError for what can never be served, EngineFault where there is no engine any more."""

    @abstractmethod
    def cancel(self, job: Job) -> None:
        """End the answers of a job that are not ended. Nothing more is told of it."""

    @abstractmethod
    def end_all(self) -> None:
        """End every answer now; their readers are told that they were aborted."""

    @abstractmethod
    def flush(self) -> None:
        """Empty the prefix cache."""

    @abstractmethod
    async def work(self, name: Work, *arguments: Any) -> Any:
        """What Pair's method of that name makes. Raises what that does."""

    @property
    @abstractmethod
    def stalled(self) -> bool:
        """Whether a step takes longer than any step should."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests without a place in the engine yet."""

    @property
    @abstractmethod
    def active(self) -> int:
        """What has not ended."""

    def drain(self) -> None:
        """Take no new requests from now on; those there are go on."""
        if self.state in ("loading", "ready"):
            self.state = "draining"

    @property
    def num_proposals(self) -> int:
        return 0 if self.facts is None else self.facts.num_proposals or 0

    def _loaded(self, facts: Facts) -> None:
        said = self._on_ready(facts)
        self.facts = facts
        if self.state == "loading":  # it was not told to stop meanwhile
            self.state = "ready"
            log.info(said)

    def _not_loaded(self, error: BaseException) -> None:
        self.load_error, self.state = error, "failed"
