"""The engine's process: it loads a pair, steps its engine in a thread, and talks with the process of the endpoints.

Messages are pickled behind their length, over a socket that only these two processes have. The endpoints' end never blocks:
what it has to write waits in its own memory, and it always goes on reading. So may this one, whose writes wait while the
socket is full.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from flashdraft.errors import ConfigError, FlashdraftError
from flashdraft.server.jobs import EngineFault, Job, News, State
from flashdraft.server.logs import logging_to_stderr
from flashdraft.server.loop import EngineThread
from flashdraft.server.pair import Ask, Facts, Pair, Work

log = logging.getLogger("flashdraft.server")
E = TypeVar("E", bound=BaseException)
LENGTH = struct.Struct("!Q")
# Seconds after which a thread gives way to another that waits: with Python's own 5 ms a step of 2 ms would wait longer for the
# event loop, or for what comes in, than it takes.
SWITCH_INTERVAL = 0.0005
# A terminal sends Ctrl-C to both processes, systemd SIGTERM: the other process decides what they mean, and says so.
SIGNALS = (signal.SIGINT, signal.SIGTERM)
BEAT = 1.0  # seconds without a word from here, at most: silence means that this process hangs


class Told(NamedTuple):
    """What this process says beside how it is. Kind and payload: "ready", facts, pickled; "not loaded", the error; "done" or
    "failed", what the call of that number gave or raised; "news", pairs of a job's number and its news, and the stats; "beat".
    """

    kind: str
    number: int
    payload: Any
    state: State
    waiting: int
    stalled: bool


def framed(message: Any) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


class Frames:
    """Cuts what comes over a socket into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def push(self, data: bytes) -> Iterator[Any]:
        self._data += data
        while len(self._data) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            message = bytes(memoryview(self._data)[LENGTH.size : end])
            del self._data[:end]
            yield pickle.loads(message)


def sendable(error: E) -> E | RuntimeError:
    """An error as the other process can read it, with its traceback as a note unless it is one that a user can mend."""
    if not isinstance(error, FlashdraftError | EngineFault):
        error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does with its arguments
        can_travel = False
    else:
        can_travel = type(error).__module__ != "__mp_main__"  # the script's name here alone
    return error if can_travel else RuntimeError("".join(traceback.format_exception_only(error)).strip())


def freeze_garbage() -> None:
    """Leave what has been loaded out of every later garbage collection.

    A full collection looks at some 10^6 objects of torch and transformers, for some 0.2 to 0.4 s, and all answers wait.
    """
    gc.collect()
    gc.freeze()


class Host(EngineThread):
    """The engine in a thread here, its news told to the other process."""

    def __init__(self, sock: socket.socket, load: Callable[[], Pair], stall_seconds: float) -> None:
        super().__init__(load, stall_seconds=stall_seconds)
        self._sock, self._writing = sock, threading.Lock()
        self._jobs: dict[int, Job] = {}

    def serve(self) -> None:
        """Until the other process closes its end, or is no more."""
        self._thread.start()
        frames = Frames()
        while True:
            if not select.select([self._sock], [], [], BEAT)[0]:
                self._say("beat")
                continue
            try:
                data = self._sock.recv(1 << 20)
            except ConnectionError:  # it was killed with news unread
                return
            if not data:
                return
            for name, number, *arguments in frames.push(data):
                getattr(self, f"_on_{name}")(number, *arguments)

    def _on_submit(self, number: int, ask: Ask) -> None:
        assert self.pair is not None
        try:
            job = Job(ask.params.n, number, self.pair.prepare(ask))
        except Exception as error:
            self._say("failed", number, sendable(error))
            return
        self._jobs[number] = job
        self._post("add", job)
        self._say("done", number)

    def _on_cancel(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is not None:
            self.cancel(job)

    def _on_work(self, number: int, name: Work, arguments: tuple[Any, ...]) -> None:
        def done(future: Future[Any]) -> None:
            try:
                self._say("done", number, future.result())
            except Exception as error:
                self._say("failed", number, sendable(error))

        assert self.pair is not None
        self.pair.work(name, *arguments).add_done_callback(done)

    def _on_end_all(self, number: int) -> None:
        self.end_all()

    def _on_flush(self, number: int) -> None:
        self.flush()

    # What the engine's thread has to tell.

    def _loaded(self, facts: Facts) -> None:
        try:  # by itself: reading it takes seconds for a large vocabulary, and is done beside the event loop
            pickled = pickle.dumps(facts)
        except Exception as error:
            raise ConfigError(f"the target's tokenizer cannot be pickled ({error}): give --no-engine-process") from error
        freeze_garbage()
        self.state = "ready"
        self._say("ready", 0, pickled)

    def _not_loaded(self, error: BaseException) -> None:
        super()._not_loaded(error)
        self._say("not loaded", 0, sendable(error))

    def _send(self, news: list[tuple[Job, News]]) -> None:
        told = []
        for job, item in news:
            if item.finish_reason is not None:
                job.open -= 1
                if not job.open:
                    self._jobs.pop(job.number, None)
            told.append((job.number, item if item.error is None else replace(item, error=sendable(item.error))))
        self._say("news", 0, (told, self.stats))

    def _say(self, kind: str, number: int = 0, payload: Any = None) -> None:
        data = framed(Told(kind, number, payload, self.state, self.waiting, self.stalled))
        try:
            with self._writing:
                self._sock.sendall(data)
        except OSError:  # the other process is no more
            os._exit(1)


def _load(pickled: bytes) -> Pair:
    try:
        load: Callable[[], Pair] = pickle.loads(pickled)
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"the engine's process does not find what loads the pair ({error}): define it in a module, or in the script's file"
        ) from error
    return load()


def run(sock: socket.socket, load: bytes, stall_seconds: float, log_level: str | None) -> None:
    """The main function of the process. `load`: what loads the pair, pickled."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL)
    code = 0
    with contextlib.nullcontext() if log_level is None else logging_to_stderr(log_level):
        try:
            Host(sock, partial(_load, load), stall_seconds).serve()
        except Exception:
            log.exception("the engine's process failed")
            code = 1
    os._exit(code)  # at once, whatever the other threads do: the system takes back the GPU's memory
