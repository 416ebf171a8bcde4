"""The runs of a benchmark: each load on each kind of prompt, in rounds that the arms take in turns."""

from __future__ import annotations

import math
import random
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft.client import ServerError
from flashdraft.errors import ConfigError
from flashdraft.eval import counters
from flashdraft.eval.bench_prompts import Question, Workload, Writer, of_suite, written
from flashdraft.eval.metrics import Record, answered
from flashdraft.eval.records import Lines
from flashdraft.eval.reply import Reply, ask
from flashdraft.eval.run import REFUSALS, Arm, Served, fields, in_parallel

FULL = 429  # the status of a server that takes no more requests now
GROWTH = 1.05  # of throughput from one concurrency to its double: below it a sweep ends
MOST = 1024  # requests at once
MOST_REQUESTS = 1_000_000  # of a round
WARM_TOKENS = 16
LOOK, LOOKS = 0.25, 20  # seconds between two readings of how many requests run and wait; readings of a piece


@dataclass(frozen=True)
class Settings:
    """What is asked of a server. requests: of a round, at each load; None: by concurrency. seconds: instead of requests.

    by_rate: loads are requests a second, which come at random (Poisson); else requests at once, each answer followed by the
    next request.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    rounds: int = 3
    requests: int | None = None
    seconds: float | None = None
    by_rate: bool = False

    def count(self, load: float) -> int:
        """Requests of a round; of a time no more than this."""
        if self.by_rate:
            return max(8, math.ceil(load * self.seconds)) if self.seconds else self.requests or 32
        return self.requests or max(1, math.ceil(8 / load), 2) * int(load)


@dataclass(frozen=True)
class Cell:
    """One load on one kind of prompt."""

    workload: Workload
    load: float


class BenchLog(Lines):
    """requests.jsonl of a directory. Records are of two kinds: `request`, and `piece`, one arm's round of a cell once whole."""

    def __init__(self, directory: Path) -> None:
        self.pieces: dict[tuple[str, float, str, int], Record] = {}
        self._requests: dict[str, list[Record]] = defaultdict(list)
        super().__init__(directory / "requests.jsonl")

    def has(self, cell: Cell, arm: Arm, round_: int) -> bool:
        return (cell.workload.name, cell.load, arm.name, round_) in self.pieces

    def of(self, cell: Cell, arm: Arm, rounds: int) -> tuple[list[Record], list[Record]]:
        """Pieces, and the requests in them. What an interrupted piece left had another load, and counts for nothing."""
        keys = ((cell.workload.name, cell.load, arm.name, round_) for round_ in range(rounds))
        pieces = [self.pieces[key] for key in keys if key in self.pieces]
        return pieces, [record for piece in pieces for record in self._requests[piece["piece"]]]

    def _keep(self, record: Record) -> None:
        if record["kind"] == "request":
            self._requests[record["piece"]].append(record)
        elif record["kind"] == "piece":
            self.pieces.setdefault((record["workload"], record["load"], record["arm"], record["round"]), record)
        else:
            raise ValueError


def throughput(log: BenchLog, cell: Cell, arm: Arm, rounds: int) -> float | None:
    """Output tokens/s of all requests together."""
    pieces, _ = log.of(cell, arm, rounds)
    seconds = sum(piece["seconds"] for piece in pieces)
    return sum(piece["tokens"] for piece in pieces) / seconds if seconds else None


def at_once(log: BenchLog, cell: Cell, arm: Arm, rounds: int) -> int | None:
    """How many requests the server ran at once where that was fewer than there were, all the time; else None."""
    seen = [piece["running"] for piece in log.of(cell, arm, rounds)[0] if piece["running"] is not None]
    waited = [piece["waiting"] for piece in log.of(cell, arm, rounds)[0] if piece["waiting"] is not None]
    return max(seen) if seen and max(seen) < cell.load and min(waited) > 0 else None


class Full(ConfigError):
    """A server that refuses more requests at once."""


class Bench:
    """Measures cells; what the log holds whole is not asked again. report: called with every request's record.

    Raises ServerError when a server is gone, Full when it takes no more at once, ConfigError when it refuses what it is asked.
    What came before is in the log.
    """

    def __init__(self, log: BenchLog, settings: Settings, report: Callable[[Record], None]) -> None:
        self.log, self.settings, self.report = log, settings, report
        self._writers: dict[str, Writer] = {}

    def left(self, cell: Cell, arms: Iterable[Arm]) -> list[tuple[int, Arm]]:
        """Rounds that are still to be run, and by whom; another arm begins each time."""
        order, s = list(arms), self.settings
        turns = ((round_, order[(round_ + i) % len(order)]) for round_ in range(s.rounds) for i in range(len(order)))
        return [(round_, arm) for round_, arm in turns if not self.log.has(cell, arm, round_)]

    def run(self, cell: Cell, arms: Sequence[tuple[Arm, Served]]) -> None:
        left, served = self.left(cell, [arm for arm, _ in arms]), dict(arms)
        pace = [self._warm(cell, arm, served[arm]) for arm, _ in arms if any(arm == other for _, other in left)]
        questions: dict[int, list[Question]] = {}
        for round_, arm in left:
            if round_ not in questions:  # the same for all arms
                questions = {round_: self._questions(cell, served[arm], round_, min(pace))}
            self._piece(cell, arm, served[arm], round_, questions[round_])

    def _questions(self, cell: Cell, served: Served, round_: int, pace: float) -> list[Question]:
        """pace: seconds that an answer takes at least, by which a round of so many seconds knows how many it may need."""
        s, load = self.settings, cell.load
        count = s.count(load)
        if s.seconds and not s.by_rate:
            count = math.ceil(1.25 * load * s.seconds / pace) + int(load)
        count = min(count, MOST_REQUESTS)
        if cell.workload.suite is not None:
            return of_suite(cell.workload.suite, round_ * count, count)
        return self._written(cell, served, f"{load:g}/{round_}", count)

    def _written(self, cell: Cell, served: Served, name: str, count: int) -> list[Question]:
        assert cell.workload.tokens is not None
        base = served.client.base
        if base not in self._writers:
            self._writers[base] = Writer(served, self.settings.seed)
        return written(self._writers[base], cell.workload.tokens, name, count)

    def _warm(self, cell: Cell, arm: Arm, served: Served) -> float:
        """Short answers, as many at once as will be. Returns the seconds that the fastest whole answer would take."""
        count = 1 if self.settings.by_rate else int(cell.load)
        tokens = min(WARM_TOKENS, self.settings.max_tokens)
        if cell.workload.suite is not None:
            questions = of_suite(cell.workload.suite, 0, count)
        else:
            questions = self._written(cell, served, f"warm/{cell.load:g}", count)
        bodies = [{**self._body(served, arm, question, cell), "max_tokens": tokens} for question in questions]

        def work(body: dict[str, Any]) -> Iterator[float]:
            reply = self._ask(cell, served, body)
            if not isinstance(reply, str):
                assert reply.first is not None and reply.last is not None
                yield reply.first + (reply.last - reply.first) / max(1, (reply.tokens or 1) - 1) * (
                    self.settings.max_tokens - 1
                )

        return max(min(in_parallel(bodies, work, count), default=1.0), 0.001)

    def _piece(self, cell: Cell, arm: Arm, served: Served, round_: int, questions: Sequence[Question]) -> None:
        s, piece = self.settings, secrets.token_hex(8)
        key = {"piece": piece, "arm": arm.name, "workload": cell.workload.name, "load": cell.load, "round": round_}

        def work(question: Question) -> Iterator[Record]:
            reply = self._ask(cell, served, self._body(served, arm, question, cell))
            record = {"kind": "request", **key, "id": question.id, "category": question.category}
            # As `metrics` tells conversations apart: equal numbers of a round were asked the same.
            record |= {"prompt": str(question.number), "sample": round_, "turn": 0}
            record |= {"refused": reply} if isinstance(reply, str) else fields(reply)
            self.log.add(record)
            yield record

        flushed = served.client.flush_cache()
        before = counters.read(served.client.text("/metrics"))
        found: list[Record] = []
        with _looking(served) as looked:
            begun = time.perf_counter()
            threads = len(questions) if s.by_rate else int(cell.load)
            for record in in_parallel(self._paced(questions, cell.load, round_), work, min(threads, MOST)):
                found.append(record)
                self.report(record)
            seconds = time.perf_counter() - begun
        if not answered(found):
            raise ConfigError(f"{served.client.base} refused every prompt of {cell.workload.name}: {found[0]['refused']}")
        counted = counters.difference(before, counters.read(served.client.text("/metrics")))
        enough = looked if len(looked) > 1 else []
        self.log.add(
            {"kind": "piece", **key, "answers": len(answered(found))}
            | {"tokens": sum(record["tokens"] or 0 for record in answered(found)), "seconds": round(seconds, 6)}
            | {"flushed": flushed, "counters": counted}
            | {"running": max((running for running, _ in enough), default=None)}
            | {"waiting": min((waiting for _, waiting in enough), default=None)}
        )

    def _paced(self, questions: Sequence[Question], load: float, round_: int) -> Iterator[Question]:
        """Questions as they come: one after the other, or, by rate, at random times, which are the same for all arms."""
        s, begun, at = self.settings, time.perf_counter(), 0.0
        draw = random.Random(f"{s.seed}/{load}/{round_}")
        for question in questions:
            if s.by_rate:
                time.sleep(max(0.0, begun + at - time.perf_counter()))
                at += draw.expovariate(load)
            if s.seconds and time.perf_counter() - begun >= s.seconds:
                return
            yield question

    def _body(self, served: Served, arm: Arm, question: Question, cell: Cell) -> dict[str, Any]:
        s = self.settings
        body: dict[str, Any] = {"model": served.model, "messages": question.messages, "max_tokens": s.max_tokens}
        body |= {"temperature": s.temperature, "seed": (question.number + 1_000_003 * s.seed) % 2**31}
        if cell.workload.suite is None:
            body["ignore_eos"] = True
        if served.switches:
            body["speculation"] = {"enabled": arm.kind != "none"}
        return body

    def _ask(self, cell: Cell, served: Served, body: dict[str, Any]) -> Reply | str:
        """The answer; of a prompt of a suite that the server refuses its reason. Nothing is tried twice: that would hide it."""
        try:
            return ask(served.client, body)
        except ServerError as error:
            if error.status == FULL:
                raise Full(
                    f"{served.client.base} takes no more requests at load {cell.load:g} ({error.detail[:200] or FULL}): "
                    "measure smaller loads, or raise the server's limit"
                ) from error
            if error.status not in REFUSALS:
                raise
            detail = (error.detail[:300] or str(error)).encode(errors="replace").decode()
            if cell.workload.suite is None:
                raise ConfigError(f"{served.client.base} refuses prompts of {cell.workload.name}: {detail}") from error
            return detail


@contextmanager
def _looking(served: Served) -> Iterator[list[tuple[int, int]]]:
    """Requests that run and that wait, as the server's metrics say from time to time until the block ends."""
    found: list[tuple[int, int]] = []
    ended = threading.Event()

    def look() -> None:
        for _ in range(LOOKS):
            if ended.wait(LOOK) or (now := counters.queued(served.client.text("/metrics"))) is None:
                return
            found.append(now)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
