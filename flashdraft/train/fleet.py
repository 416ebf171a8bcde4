"""Servers of one model: how many requests each is sent at once, who takes over where one dies, when it is taken back."""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from flashdraft.client import LONGEST_PAUSE, RETRIED, ChatReply, Client, ReplyError, ServerError
from flashdraft.errors import ConfigError
from flashdraft.train.jobs import Job, Jobs

OVERLOADED = {429, 503}  # says nothing of the request: it is sent again as often as need be
FIRST = 8  # requests at once to a server that was not measured yet
GAIN = 0.1  # of the share that requests at once grow by, tokens/s must grow by at least so much
HOLD = 32  # measurements until more requests at once are tried again where they gained nothing
RATE_SECONDS = 60.0  # tokens/s that are shown look back so far

Ask = Callable[["Server", Job], ChatReply]


class Pace:
    """How many requests a server is sent at once, at most `ceiling`: more while tokens/s grow, fewer where it refuses some.

    Twice as many after each measurement, back where that gained nothing; after a refusal half as many, then slowly more. A
    measurement is of as many answers as there are requests at once, after as many that go by to fill the server.
    """

    def __init__(self, ceiling: int) -> None:
        self.ceiling, self.limit = ceiling, min(FIRST, ceiling)
        self._before: tuple[int, float] | None = None  # fewer requests at once, and their tokens/s
        self._slowly, self._hold = False, 0
        self._restart()

    def answered(self, tokens: int, full: bool, now: float) -> None:
        """full: there were as many requests under way as may be, so that the server's speed was seen."""
        if not full:
            return self._restart()
        self._answers += 1
        if self._answers == self.limit:
            self._since = now
        elif self._answers > self.limit:
            self._tokens += tokens
        if self._answers == 2 * self.limit:
            self._decide(self._tokens / max(now - self._since, 1e-6))

    def _decide(self, rate: float) -> None:
        self._restart()
        if self._before is not None:
            fewer, was = self._before
            self._before = None
            if rate < was * (1 + GAIN * (self.limit / fewer - 1)):
                self.limit, self._hold = fewer, HOLD
                return
        if self._hold:
            self._hold -= 1
        elif self.limit < self.ceiling:
            self._before = self.limit, rate
            more = self.limit + max(1, self.limit // 8) if self._slowly else 2 * self.limit
            self.limit = min(more, self.ceiling)

    def refused(self) -> None:
        self.limit, self._slowly, self._before = max(1, self.limit // 2), True, None
        self._restart()

    def _restart(self) -> None:
        self._answers, self._tokens, self._since = 0, 0, math.inf


@dataclass(eq=False)
class Server:
    """One server, and how it does. Times are those of time.monotonic."""

    client: Client
    pace: Pace
    live: int = 0  # requests under way
    failures: int = 0  # since its last answer, counted once a pause
    rests_until: float = 0.0  # no request, and no question after its health, before
    failed_at: float = -math.inf
    down: bool = False  # until it is asked whether it is there, and says so
    asked: bool = False  # this question is under way
    excluded: bool = False  # came back with another model
    answers: int = 0
    tokens: int = 0
    gives_ids: bool = True  # until it refuses to be asked for token ids
    recent: deque[tuple[float, int]] = field(default_factory=deque)  # of the last minute: when, tokens until then

    @property
    def name(self) -> str:
        return self.client.base

    @property
    def given_up(self) -> bool:
        return self.excluded or self.failures > self.client.retries

    def has_room(self, now: float) -> bool:
        return not (self.down or self.excluded) and self.live < self.pace.limit and now >= self.rests_until

    def is_to_be_asked(self, now: float) -> bool:
        return self.down and not (self.asked or self.excluded) and now >= self.rests_until

    def answered(self, tokens: int, full: bool) -> None:
        now = time.monotonic()
        self.failures, self.answers, self.tokens = 0, self.answers + 1, self.tokens + tokens
        self.recent.append((now, self.tokens))
        self.pace.answered(tokens, full, now)

    def failed(self, error: ServerError, sent: float) -> bool:
        """After a request (sent at that time) that may do later; whether the server is lost now."""
        if error.status not in (None, *OVERLOADED) and not self.failures:
            self.failures = 1  # it may be the request: the next one shows
            return False
        now = time.monotonic()
        silent, first = error.status is None, sent >= self.failed_at
        lost = silent and not self.down
        self.down = self.down or silent
        if first:
            self.failures, self.failed_at = self.failures + 1, now
            if silent:
                self.pace = Pace(self.pace.ceiling)
            else:
                self.pace.refused()
        if first or error.retry_after:
            doubled = self.client.pause * 2.0 ** min(self.failures - 1, 16) * random.uniform(0.75, 1.25)
            pause = max(min(doubled, LONGEST_PAUSE) if first else 0.0, error.retry_after)
            self.rests_until = max(self.rests_until, now + pause)
        return lost

    def rate(self) -> float:
        """Tokens/s of the last minute."""
        now = time.monotonic()
        while self.recent and self.recent[0][0] < now - RATE_SECONDS:  # of a server that stands still all go
            self.recent.popleft()
        begun, before = self.recent[0] if self.recent else (now, self.tokens)
        return (self.tokens - before) / max(now - begun, 1.0)


class Reply(NamedTuple):
    """What a server said to a job. full: as many requests were under way there as may be."""

    server: Server
    job: Job
    said: ChatReply | ServerError
    full: bool


class _Task(NamedTuple):
    server: Server
    job: Job | None  # None: is it there, and of which model?
    sent: float


class Fleet:
    """Sends jobs to servers, and a job whose server fails to another: each is answered once, whoever answers.

    model: its name on all of them, None for the only one that each serves. `say` is told of servers that are lost, or back.
    Raises ConfigError where they serve different models, ServerError where none answers.
    """

    def __init__(self, clients: Sequence[Client], model: str | None, concurrency: int, say: Callable[[str], None]) -> None:
        self.servers = [Server(client, Pace(concurrency)) for client in clients]
        self.say = say
        names = [server.name for server in self.servers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"{twice[0]} is named twice: give each --endpoint once, and more --concurrency for more at once")
        self.model, self._root = self._agree(model)
        self._last: ServerError | None = None

    def _agree(self, model: str | None) -> tuple[str, tuple[str, str]]:
        """The model's name, and a server with what it says is behind that name."""
        if model is not None and len(self.servers) == 1:
            return model, ("", "")  # a server that lists its models otherwise, or not at all, is taken at its word
        known, error = ("", ""), None
        for server in self.servers:
            try:
                roots = server.client.roots(retries=None if len(self.servers) == 1 else 0)
            except ServerError as failure:
                error = failure
                server.failed(failure, time.monotonic())
                server.down = True
                continue
            model = _named(server.name, roots, model, known[0])
            known = known if known[1] else (server.name, roots[model])
            _same_root(server.name, roots[model], known)
        if model is None or all(server.down for server in self.servers):
            assert error is not None
            raise error
        for server in self.servers:
            if server.down:
                self.say(f"{server.name} does not answer: the others begin, and it joins when it does")
        return model, known

    def run(self, jobs: Jobs, ask: Ask) -> Iterator[Reply]:
        """Replies as they come, until `jobs` is empty; the caller may add jobs in between."""
        self._todo: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Task, object]] = queue.SimpleQueue()
        self._threads = 0
        again: list[tuple[float, Job]] = []  # of servers that failed: not before when
        attempts: dict[int, tuple[int, int]] = {}  # by id of a job: servers failed over it so often, after so many answers
        try:
            while True:
                now = time.monotonic()
                self._send(jobs, again, ask, now)
                live = sum(server.live for server in self.servers)
                if not live and not again and not jobs:
                    return
                if not live and all(server.given_up for server in self.servers):
                    raise self._nobody()
                try:
                    task, said = self._done.get(timeout=self._wait(now, again))
                except queue.Empty:
                    continue
                reply = self._received(task, said, attempts)
                if reply is not None:
                    yield reply
                elif task.job is not None:
                    count, _ = attempts.get(id(task.job), (0, 0))
                    pause = task.server.client.pause * 2.0 ** min(count - 1, 16) if count else 0.0
                    again.append((time.monotonic() + min(pause, LONGEST_PAUSE), task.job))
        finally:
            for _ in range(self._threads):
                self._todo.put(None)

    def _send(self, jobs: Jobs, again: list[tuple[float, Job]], ask: Ask, now: float) -> None:
        for server in self.servers:
            if server.is_to_be_asked(now):
                server.asked = True
                self._start(_Task(server, None, now), ask)
        while free := [server for server in self.servers if server.has_room(now)]:
            due = next((i for i, (when, _) in enumerate(again) if when <= now), None)
            if due is None and not jobs:
                return
            server = min(free, key=lambda server: server.live / server.pace.limit)
            server.live += 1
            self._start(_Task(server, jobs.popleft() if due is None else again.pop(due)[1], now), ask)

    def _start(self, task: _Task, ask: Ask) -> None:
        if self._threads < sum(server.live + server.asked for server in self.servers):
            self._threads += 1
            # A daemon: a program that ends does not wait for the servers.
            threading.Thread(target=self._work, args=(ask,), daemon=True).start()
        self._todo.put(task)

    def _work(self, ask: Ask) -> None:
        todo, done = self._todo, self._done
        while (task := todo.get()) is not None:
            try:
                done.put((task, self._look(task.server) if task.job is None else ask(task.server, task.job)))
            except Exception as error:  # looked at, or raised again, by _received
                done.put((task, error))

    def _look(self, server: Server) -> dict[str, str] | None:
        """The models of a server that was lost; None where it is there and does not list them. Raises ServerError."""
        try:
            return server.client.roots(retries=0)
        except ServerError as error:
            if error.status in (None, *RETRIED) or server.client.text("/health") is None:
                raise
            return None

    def _wait(self, now: float, again: list[tuple[float, Job]]) -> float | None:
        """Seconds until something may be sent, or a server asked; None where only answers are awaited."""
        ends = [s.rests_until - now for s in self.servers if not (s.excluded or s.asked) and s.rests_until > now]
        ends += [when - now for when, _ in again if when > now]
        return max(min(ends), 0.001) if ends else None

    def _received(self, task: _Task, said: object, attempts: dict[int, tuple[int, int]]) -> Reply | None:
        """The reply to a job; None where there is none yet."""
        server, job = task.server, task.job
        if job is None:
            self._looked(server, said, task.sent)
            return None
        full = server.live >= server.pace.limit
        server.live -= 1
        if isinstance(said, ServerError) and not isinstance(said, ReplyError) and said.status in (None, *RETRIED):
            if said.status not in (None, *OVERLOADED):
                answers = sum(server.answers for server in self.servers)
                count, before = attempts.get(id(job), (0, answers))
                if count >= server.client.retries and answers > before:
                    return Reply(server, job, said, full)  # others were answered meanwhile: it is the job
                attempts[id(job)] = count + 1, before
            self._last = said
            if server.failed(said, task.sent) and len(self.servers) > 1:
                self.say(f"{said}; its requests go to the others")
            return None
        attempts.pop(id(job), None)
        if isinstance(said, ServerError) and said.status in (None, 400, 413, 422):
            return Reply(server, job, said, full)
        if isinstance(said, Exception):
            raise said
        assert isinstance(said, ChatReply)
        return Reply(server, job, said, full)

    def _looked(self, server: Server, said: object, sent: float) -> None:
        server.asked = False
        if isinstance(said, ServerError):
            self._last = said
            server.failed(said, sent)
            return
        if isinstance(said, Exception):
            raise said
        assert said is None or isinstance(said, dict)
        try:
            if said is not None and len(self.servers) > 1:
                root = said[_named(server.name, said, self.model, self._root[0])]
                self._root = self._root if self._root[1] else (server.name, root)
                _same_root(server.name, root, self._root)
        except ConfigError as error:
            server.excluded = True
            self.say(f"left out: {error}")
            return
        server.down = False
        if len(self.servers) > 1:
            self.say(f"{server.name} answers again")

    def _nobody(self) -> ServerError:
        last = self._last or ServerError("no server answers")
        if len(self.servers) == 1:
            asked = f", asked {self.servers[0].failures} times" if self.servers[0].failures > 1 else ""
            head, _, tail = str(last).partition(": check that")
            return ServerError(f"{head}{asked}: check that{tail}" if tail else str(last), last.status, last.detail)
        return ServerError(f"none of the {len(self.servers)} servers answers any more; the last: {last}", last.status)

    def status(self) -> str:
        """Tokens/s of each server, for people."""
        states = [
            "left out" if s.excluded else "down" if s.down else f"{s.rate():,.0f} tokens/s, {s.live:,} at once"
            for s in self.servers
        ]
        return "; ".join(f"{_short(server.name)} {state}" for server, state in zip(self.servers, states, strict=True))


def _short(name: str) -> str:
    return name.partition("://")[2].removesuffix("/v1")


def _named(server: str, roots: dict[str, str], model: str | None, other: str) -> str:
    """The model's name on a server: `model`, or its only one. Raises ConfigError where it has another, or several."""
    shown = f"{', '.join(list(roots)[:5])}{', ...' if len(roots) > 5 else ''}" if roots else "none"
    if model is None:
        if len(roots) != 1:
            raise ConfigError(f"{server} serves {len(roots)} models ({shown}): name the target among them with --model")
        return next(iter(roots))
    if model not in roots:
        like = f", which {other} serves" if other else ""
        raise ConfigError(f"{server} serves {shown} and not {model}{like}: give only servers of the same target")
    return model


def _same_root(server: str, root: str, known: tuple[str, str]) -> None:
    """Raises ConfigError where two servers say that they loaded different models. Of paths the last parts are compared."""
    other, theirs = known
    if root and theirs and PurePosixPath(root).name != PurePosixPath(theirs).name:
        raise ConfigError(f"{server} has loaded {root} and {other} {theirs}: give only servers of the same target")


__all__ = ["Fleet", "Pace", "Reply", "Server"]
