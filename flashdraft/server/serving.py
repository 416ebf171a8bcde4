"""Runs the application under uvicorn: sockets, signals, logs."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import torch
import uvicorn

from flashdraft.errors import ConfigError, counted
from flashdraft.llm import LLM
from flashdraft.media import MediaLimits
from flashdraft.server.app import build
from flashdraft.server.channel import EngineProcess
from flashdraft.server.host import SWITCH_INTERVAL, freeze_garbage
from flashdraft.server.jobs import EngineLoop
from flashdraft.server.logs import logging_to_stderr
from flashdraft.server.loop import EngineThread
from flashdraft.server.pair import Facts, Pair
from flashdraft.server.service import ServerOptions, Service

try:
    import resource
except ModuleNotFoundError:  # Windows has none
    resource = None  # type: ignore[assignment]

log = logging.getLogger("flashdraft.server")
LOOPBACK = ("127.", "::1", "localhost")


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
    open_standard_files()
    with logging_to_stderr(log_level):
        _serve(load, options, host, port, log_level)


def open_standard_files() -> None:
    """The null device in place of closed standard input, output or errors, whose numbers sockets would have: uvloop aborts the
    program where it closes one of these.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


def raise_file_limit() -> None:
    """Let this process have more connections than the usual 1,024 files, which requests that wait would exceed."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _serve(load: Callable[[], LLM], options: ServerOptions, host: str, port: int, log_level: str) -> None:
    sock = bound_socket(host, port)
    port = sock.getsockname()[1]
    service = make_service(load, options, log_level)
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
        service.loop.close()
    if service.loop.load_error is not None:
        raise service.loop.load_error
    if service.loop.state == "failed":
        sys.exit(1)


def make_service(load: Callable[[], LLM], options: ServerOptions, log_level: str | None = None) -> Service:
    """A service whose model is loaded in the engine's thread or process once it starts; there `load` must be picklable, and
    `log_level` is that of its log lines.
    """

    def ready(facts: Facts) -> str:
        service.ready(facts)
        freeze_garbage()
        draft = "no draft" if facts.num_proposals is None else f"{facts.num_proposals} guesses a step"
        return (
            f"ready: {', '.join(options.names)} ({facts.max_model_len} tokens of context, {draft}): "
            "chat on the page at that address, or send requests to its /v1"
        )

    load_pair, stall = partial(_load_pair, load, options.chat_template, options.media_limits), options.stall_seconds
    loop: EngineLoop
    if options.engine_process:
        loop = EngineProcess(load_pair, ready, stall_seconds=stall, log_level=log_level)
    else:
        loop = EngineThread(load_pair, ready, stall_seconds=stall)
    service = Service(options, loop)
    service.measures.serve(service)
    return service


def on_gpu(device: str | None) -> bool:
    """Whether a pair is loaded on a GPU. Makes no CUDA context in this process."""
    try:
        return torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    except RuntimeError:  # no device at all, which loading says
        return False


def _load_pair(load: Callable[[], LLM], chat_template: str | None, media_limits: MediaLimits) -> Pair:
    return Pair(load(), chat_template, media_limits)
