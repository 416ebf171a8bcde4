"""The engine in a process of its own (host.py), as the endpoints see it: so neither waits for the other's Python."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import pickle
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from flashdraft.errors import ConfigError, FlashdraftError
from flashdraft.server.host import SIGNALS, Frames, Told, framed, run
from flashdraft.server.jobs import EngineFault, EngineLoop, Job, lost
from flashdraft.server.pair import Ask, Facts, Pair, Work

log = logging.getLogger("flashdraft.server")


class EngineProcess(EngineLoop):
    """Its process is spawned, so that a GPU is initialised there and nowhere else; `load` is pickled for it.

    It ends when this one does, however that ends: its socket is closed then. If it ends first, the state is "failed".
    """

    def __init__(
        self, load: Callable[[], Pair], on_ready: Callable[[Facts], str], *, stall_seconds: float, log_level: str | None
    ) -> None:
        super().__init__(on_ready)
        if not hasattr(signal, "pthread_sigmask"):
            raise ConfigError("an engine in a process of its own needs a system with POSIX signals: use --no-engine-process")
        self._load, self._stall_seconds, self._log_level = load, stall_seconds, log_level
        self._process: BaseProcess | None = None
        self._socket: socket.socket | None = None
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._coming = 0  # answers asked for that the process has not spoken of yet
        self._waiting, self._stalled, self._heard = 0, False, time.monotonic()
        self._transport: asyncio.Transport | None = None

    async def start(self) -> None:
        try:
            load = pickle.dumps(self._load)
        except Exception as error:
            self._not_loaded(_cannot_travel(error))
            return
        self._socket, theirs = socket.socketpair()
        arguments = theirs, load, self._stall_seconds, self._log_level
        process = multiprocessing.get_context("spawn").Process(target=run, name="engine", args=arguments)
        resource_tracker.ensure_running()  # which would unblock the signals if the process's start began it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # of this thread, from which the process has it
        try:
            process.start()
        except Exception as error:  # no memory left for it, or a script that starts it while it is imported
            self._not_loaded(error)
            self._socket.close()
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._process = process
        made = asyncio.get_running_loop().create_unix_connection(lambda: _Reader(self), sock=self._socket)
        self._transport, _ = await made

    def close(self, timeout: float = 10.0) -> None:
        self.state = self.state if self.state == "failed" else "closed"
        if self._process is not None and self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # which ends the process, unless it is still loading
            self._end_process(0.0 if self.facts is None else timeout)
        if self._transport is not None:
            self._transport.abort()

    def _end_process(self, timeout: float) -> int | None:
        """How it ended; None if it had to be killed here."""
        assert self._process is not None
        self._process.join(timeout)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        return code

    async def submit(self, ask: Ask) -> Job:
        job = Job(ask.params.n, next(self._numbers))
        self._jobs[job.number] = job
        self._coming += job.answers
        try:
            await self._call("submit", job.number, ask)
        except BaseException:  # the client's going away is one
            self.cancel(job)
            raise
        finally:
            self._coming -= job.answers
        return job

    def cancel(self, job: Job) -> None:
        if job.open and self._jobs.pop(job.number, None) is not None:
            self._write("cancel", job.number)

    def end_all(self) -> None:
        """Waits for no word of the process, which may hang."""
        self._write("end_all", 0)
        self._lose("the server is shutting down")

    def flush(self) -> None:
        self._write("flush", 0)

    async def work(self, name: Work, *arguments: Any) -> Any:
        return await self._call("work", next(self._numbers), name, arguments)

    @property
    def stalled(self) -> bool:
        return self._stalled or time.monotonic() - self._heard > self._stall_seconds

    @property
    def waiting(self) -> int:
        return self._waiting + self._coming

    @property
    def active(self) -> int:
        return len(self._jobs)

    async def _call(self, name: str, number: int, *arguments: Any) -> Any:
        if self.state in ("failed", "closed"):
            raise EngineFault("the engine failed")
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._write(name, number, *arguments)
            return await future
        finally:
            self._calls.pop(number, None)

    def _write(self, *message: Any) -> None:
        """Never waits: what the socket does not take yet stays in the transport's memory, which max_waiting bounds."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(message))

    # What the process tells; on the event loop.

    def take(self, told: Told) -> None:
        self._heard, self._waiting, self._stalled = time.monotonic(), told.waiting, told.stalled
        if told.state == "failed":
            self.state = "failed"
        if told.kind == "news":
            news, self.stats = told.payload
            for number, item in news:
                job = self._jobs.get(number)
                if job is not None:  # it has not been cancelled meanwhile
                    job.deliver([item])
                    if not job.open:
                        del self._jobs[number]
        elif told.kind in ("done", "failed"):
            future = self._calls.get(told.number)
            if future is not None and not future.done():
                if told.kind == "done":
                    future.set_result(told.payload)
                else:
                    future.set_exception(told.payload)
        elif told.kind == "ready":
            asyncio.get_running_loop().run_in_executor(None, self._become_ready, told.payload)
        elif told.kind == "not loaded":
            self._not_loaded(told.payload)

    def _become_ready(self, facts: bytes) -> None:
        try:
            self._loaded(pickle.loads(facts))
        except Exception as error:
            self._not_loaded(error)
        self.loaded.set()

    def _not_loaded(self, error: BaseException) -> None:
        super()._not_loaded(error)
        self.loaded.set()

    def gone(self) -> None:
        """The process has ended."""
        if self.state == "closed" or self.load_error is not None:
            return
        how = _how_it_ended(self._end_process(10.0 if self.facts is None else 1.0))  # the interpreter's end takes seconds
        if self.facts is None:
            self._not_loaded(FlashdraftError(f"the engine's process {how} while it loaded the model"))
            return
        log.error("the engine's process %s: no request is served any more", how)
        self.state = "failed"
        self._lose("the engine failed")

    def _lose(self, why: str) -> None:
        """End whatever waits for the process."""
        fault = EngineFault(why)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(fault)
        for job in self._jobs.values():
            job.deliver([lost(0, fault)])  # one is enough to end it
        self._jobs.clear()


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + " (as the system does where memory runs out)" * (name == "SIGKILL")


def _cannot_travel(error: Exception) -> ConfigError:
    return ConfigError(f"what loads the pair cannot be pickled for the engine's process ({error}): give a function of a module")


class _Reader(asyncio.Protocol):
    """The event loop's end of the socket."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine, self._frames = engine, Frames()

    def data_received(self, data: bytes) -> None:
        for told in self._frames.push(data):
            self._engine.take(told)

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.gone()
