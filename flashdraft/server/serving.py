"""Runs the application under uvicorn: sockets, signals, logs."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import uvicorn

from flashdraft.errors import ConfigError, counted
from flashdraft.llm import LLM
from flashdraft.media import MediaLimits
from flashdraft.server.app import build
from flashdraft.server.loop import EngineThread
from flashdraft.server.pair import Facts, Pair
from flashdraft.server.service import ServerOptions, Service

try:
    import resource
except ModuleNotFoundError:  # Windows has none
    resource = None  # type: ignore[assignment]

log = logging.getLogger("flashdraft.server")
# Seconds after which the event loop gives way to the engine's thread, or it to the event loop: with Python's own 5 ms a step of
# 2 ms would wait longer for the event loop than it takes.
SWITCH_INTERVAL = 0.0005
LOOPBACK = ("127.", "::1", "localhost")


class LogFormatter(logging.Formatter):
    """One line an event: time, level, message, and its fields as key=value."""

    FIELDS = ("request_id", "method", "path", "status", "seconds")

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name in self.FIELDS if (value := getattr(record, name, None)) is not None)
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        message = "".join(letter if letter.isprintable() else " " for letter in record.getMessage())
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{when} {record.levelname} {message}{fields}{trace}"


class Server(uvicorn.Server):
    """The first SIGTERM or Ctrl-C lets running requests end, for a time, and refuses others; the second ends them.

    With an engine that failed it ends by itself after that time, in which /health says so: a supervisor has to start another.
    """

    def __init__(self, service: Service, *, host: str, port: int) -> None:
        config = uvicorn.Config(
            build(service),
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
            timeout_graceful_shutdown=2,
        )
        super().__init__(config)
        self.service = service
        self.signals = 0
        self._deadline: float | None = None
        self._failed_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1

    async def on_tick(self, counter: int) -> bool:
        service, seconds = self.service, self.service.options.shutdown_seconds
        if service.loop.load_error is not None:
            return True
        if service.loop.state == "failed" and self._failed_until is None:
            self._failed_until = time.monotonic() + seconds
            log.error("the engine failed: the server ends in %g s", seconds)
        if self._failed_until is not None and time.monotonic() > self._failed_until:
            return True
        if self.signals and self._deadline is None:
            self._deadline = time.monotonic() + seconds
            service.loop.drain()
            under_way = f": {seconds:g} s for {counted(service.in_flight, 'request')} under way" if service.in_flight else ""
            log.info("shutting down%s", under_way)
        if self._deadline is not None:
            if service.in_flight == 0:
                return True
            if self.signals > 1 or time.monotonic() > self._deadline:
                service.loop.end_all()
                return True
        return bool(await super().on_tick(counter))


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening address, taken before the model is loaded. Raises ConfigError."""
    sock = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)  # at once: several sockets may be bound to an address as long as none of them listens
    except OSError as error:
        if sock is not None:
            sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror or error}): give another --host or --port"
        ) from error
    return sock


def serve(load: Callable[[], LLM], options: ServerOptions, *, host: str, port: int, log_level: str = "info") -> None:
    """Serve until told to stop, or until the engine failed: then exit code 1.

    Raises what loading raised, and ConfigError for an address that cannot be had.
    """
    raise_file_limit()
    with logging_to_stderr(log_level):
        _serve(load, options, host, port)


def raise_file_limit() -> None:
    """Let this process have more connections than the usual 1,024 files, which requests that wait would exceed."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """Our log lines on standard error, and others' errors; their warnings are of what clients do. Restored afterwards."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    loggers = [logging.getLogger(name) for name in ("flashdraft", "uvicorn.error", "asyncio")]
    before = [(one, one.handlers, one.propagate, one.level) for one in loggers]
    for logger, name in zip(loggers, (level.upper(), "ERROR", "ERROR"), strict=True):
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(name)
    try:
        yield
    finally:
        for logger, handlers, propagate, number in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(number)


def _serve(load: Callable[[], LLM], options: ServerOptions, host: str, port: int) -> None:
    sock = bound_socket(host, port)
    port = sock.getsockname()[1]
    service = make_service(load, options)
    if not host.startswith(LOOPBACK) and not options.keys:
        log.warning(
            "listening on %s without an API key: whoever reaches this machine can use it; --api-key-file sets one", host
        )
    log.info("listening on http://%s:%d, loading the model", f"[{host}]" if ":" in host else host, port)
    server, before = Server(service, host=host, port=port), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        server.run(sockets=[sock])
    finally:
        sys.setswitchinterval(before)
        sock.close()
    if service.loop.load_error is not None:
        raise service.loop.load_error
    if service.loop.state == "failed":
        sys.exit(1)


def freeze_garbage() -> None:
    """Leave what has been loaded out of every later garbage collection.

    A full collection looks at some 10^6 objects of torch and transformers, for some 0.2 to 0.4 s, and all answers wait.
    """
    gc.collect()
    gc.freeze()


def make_service(load: Callable[[], LLM], options: ServerOptions) -> Service:
    """A service whose model is loaded in the engine's thread once it starts."""

    def ready(facts: Facts) -> None:
        service.ready(facts)
        freeze_garbage()
        if loop.state != "loading":
            return  # it was told to stop meanwhile
        draft = "no draft" if facts.num_proposals is None else f"{facts.num_proposals} guesses a step"
        log.info(
            "ready: %s (%d tokens of context, %s): chat on the page at that address, or send requests to its /v1",
            ", ".join(options.names),
            facts.max_model_len,
            draft,
        )

    load_pair = partial(_load_pair, load, options.chat_template, options.media_limits)
    loop = EngineThread(load_pair, ready, stall_seconds=options.stall_seconds)
    service = Service(options, loop)
    service.measures.serve(service)
    return service


def _load_pair(load: Callable[[], LLM], chat_template: str | None, media_limits: MediaLimits) -> Pair:
    return Pair(load(), chat_template, media_limits)
