"""The engine in a thread of its own: jobs come in, news of their answers goes out to the event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from flashdraft.engine.engine import Engine
from flashdraft.engine.request import Output
from flashdraft.errors import FlashdraftError
from flashdraft.llm import Live
from flashdraft.server.jobs import EngineFault, EngineLoop, Job, News, lost
from flashdraft.server.pair import Ask, Facts, Pair, Work

log = logging.getLogger("flashdraft.server")
# How often a stream is told its news, in seconds: each telling costs the event loop some 0.1 ms, which the engine would wait
# for. They are spread over the steps, oldest first: all of 64 streams at once would hold up the event loop, and with it new
# requests, for 10 ms.
INTERVAL, INTERVAL_PER_STREAM = 0.01, 0.0008


@dataclass(eq=False)
class _Progress:
    """How much of an answer has been told."""

    job: Job
    live: Live
    tokens: int = 0
    steps: int = 0

    def take(self) -> News:
        live, output = self.live, self.live.output
        if output.finished:
            live.stream.finish()
        tokens, start = output.tokens[self.tokens :], self.tokens
        steps = list(zip(output.committed_per_step[self.steps :], output.drafted_per_step[self.steps :], strict=True))
        self.tokens, self.steps = self.tokens + len(tokens), self.steps + len(steps)
        params = live.request.params
        stop_token = output.stop_token if output.stop_token in params.stop_token_ids else None
        return News(
            index=live.request.choice,
            events=live.stream.take_events(),
            tokens=tokens,
            logprobs=output.logprobs[start : start + len(tokens)],
            steps=steps,
            cached_tokens=output.cached_tokens,
            finish_reason=output.finish_reason,
            stop_reason=live.stream.stop_string or stop_token,
            error=output.error,
            prompt_logprobs=output.prompt_logprobs if output.finished else None,
        )


class EngineThread(EngineLoop):
    """The engine in a thread of this process."""

    def __init__(
        self, load: Callable[[], Pair], on_ready: Callable[[Facts], str] = lambda facts: "", *, stall_seconds: float = 120.0
    ) -> None:
        super().__init__(on_ready)
        self.pair: Pair | None = None
        self._load, self._stall_seconds = load, stall_seconds
        self._inbox: deque[tuple[Literal["add", "cancel", "call"], Job | Callable[[Engine], None]]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()  # of the inbox and the fault: nothing comes in behind a fault
        self._fault: Exception | None = None
        self._closing = False
        self._progress: dict[str, _Progress] = {}  # by request id
        self._dirty: dict[_Progress, None] = {}  # what has untold news, in the order in which it got them
        self._may_tell, self._told_at = 0.0, 0.0  # news that may be told, and at which time that was
        self._step_began: float | None = None
        self._events: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> None:
        self._events = asyncio.get_running_loop()
        self._thread.start()

    def close(self, timeout: float = 10.0) -> None:
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self.pair is not None:
            self.pair.close()

    async def submit(self, ask: Ask) -> Job:
        assert self.pair is not None
        job = Job(ask.params.n, live=self.pair.prepare(ask))
        self._post("add", job)
        return job

    def cancel(self, job: Job) -> None:
        if job.open:
            self._post("cancel", job)

    def end_all(self) -> None:
        def end(engine: Engine) -> None:
            for progress in list(self._progress.values()):
                engine.abort(progress.live.request.id)
                self._dirty.pop(progress, None)
                self._send([(progress.job, self._news_of(progress))])

        self._post("call", end)

    def flush(self) -> None:
        self._post("call", lambda engine: engine.pool.flush())

    async def work(self, name: Work, *arguments: Any) -> Any:
        assert self.pair is not None
        return await asyncio.wrap_future(self.pair.work(name, *arguments))

    def _post(self, kind: Literal["add", "cancel", "call"], what: Job | Callable[[Engine], None]) -> None:
        with self._lock:
            if self._fault is None:
                self._inbox.append((kind, what))
                self._wake.set()
            elif kind == "add" and isinstance(what, Job):
                self._send([(what, lost(live.request.choice, self._fault)) for live in what.live])

    @property
    def stalled(self) -> bool:
        began = self._step_began
        return began is not None and time.monotonic() - began > self._stall_seconds

    @property
    def waiting(self) -> int:
        return self.stats.waiting + sum(kind == "add" for kind, _ in list(self._inbox))

    @property
    def active(self) -> int:
        return len(self._progress) + len(self._inbox)

    def _run(self) -> None:
        try:
            self.pair = self._load()
            self._loaded(self.pair.facts)
        except BaseException as error:
            self._not_loaded(error)
            return
        finally:
            self.loaded.set()
        try:
            self._serve(self.pair.llm.engine)
        except Exception as error:
            log.exception("the engine failed: no request is served any more")
            self._fail(error)

    def _serve(self, engine: Engine) -> None:
        settled = True
        while not self._closing:
            self._take_inbox(engine)
            if not engine.has_work:
                if not settled:  # the step that was launched before its last request ended
                    engine.settle()
                    settled = True
                self.stats.observe_engine(engine)
                self._send([])
                self._wake.wait()
                self._wake.clear()
                continue
            settled = False
            self._step_began = time.monotonic()
            changed = engine.step()
            now = time.monotonic()
            self.stats.step(now - self._step_began)
            self._step_began = None
            self.stats.observe_engine(engine)
            self._tell(changed, now)
        self.state = "closed"

    def _take_inbox(self, engine: Engine) -> None:
        while self._inbox:
            kind, what = self._inbox[0]  # it stays there until it is done: what fails on the way is told
            if not isinstance(what, Job):
                what(engine)
            elif kind == "add":
                for live in what.live:
                    try:
                        live.output = engine.add(live.request)
                    except FlashdraftError as error:
                        self._send([(what, lost(live.request.choice, error))])
                    else:
                        self._progress[live.request.id] = _Progress(what, live)
            else:
                for live in what.live:
                    progress = self._progress.pop(live.request.id, None)
                    if progress is not None:
                        engine.abort(live.request.id)
                        self._dirty.pop(progress, None)
                        self.stats.take(progress.take())
            self._inbox.popleft()

    def _tell(self, changed: list[Output], now: float) -> None:
        telling = []  # first tokens and ends are told at once, the rest when it is time
        for output in changed:
            progress = self._progress.get(output.request.id)
            if progress is None:
                continue
            if output.finished or not progress.tokens:
                telling.append(progress)
                self._dirty.pop(progress, None)
            else:
                self._dirty[progress] = None
        streams = len(self._progress)
        earned = (now - self._told_at) * streams / (INTERVAL + INTERVAL_PER_STREAM * streams)
        self._may_tell, self._told_at = min(self._may_tell + earned, streams), now
        due = list(itertools.islice(self._dirty, int(self._may_tell)))
        for progress in due:
            del self._dirty[progress]
        self._may_tell -= len(due)
        if telling or due:
            self._send([(progress.job, self._news_of(progress)) for progress in (*telling, *due)])

    def _news_of(self, progress: _Progress) -> News:
        news = progress.take()
        self.stats.take(news)
        if news.finish_reason is not None:
            self.stats.discarded += progress.live.output.discarded
            self.stats.preemptions += progress.live.output.preemptions
            del self._progress[progress.live.request.id]
        return news

    def _send(self, news: list[tuple[Job, News]]) -> None:
        """To the event loop; nothing at all is told when the engine has become idle."""
        assert self._events is not None
        if news and not self._events.is_closed():
            self._events.call_soon_threadsafe(_deliver, news)

    def _fail(self, error: Exception) -> None:
        fault = error if isinstance(error, FlashdraftError) else EngineFault("the engine failed")
        with self._lock:
            self._fault, self.state, self._step_began = fault, "failed", None
        for kind, what in self._inbox:
            if kind == "add" and isinstance(what, Job):
                self._progress |= {live.request.id: _Progress(what, live) for live in what.live}
        self._inbox.clear()
        self._send([(progress.job, lost(progress.live.request.choice, fault)) for progress in self._progress.values()])
        self._progress.clear()


def _deliver(news: list[tuple[Job, News]]) -> None:
    for job, item in news:
        job.deliver([item])
