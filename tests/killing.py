"""Processes that end in the middle of their work: forks of one that has imported everything and computed nothing.

A fork of pytest itself would wait for ever for torch's threads, of which a fork has none (where OMP_NUM_THREADS is above 1).
The first process takes seconds to start, for the imports, each other one milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from flashdraft.cli import main
from flashdraft.train.records import Store

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "flashdraft.fit.run", "pyarrow.parquet"])


def start(work: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """work(*arguments), a function of a module, in a process of its own, which SIGINT interrupts as Ctrl-C does."""
    process = FORKS.Process(target=_work, args=(work, *arguments))
    process.start()
    return process


def run_until(events: int, number: int, directory: Path, work: Callable[..., Any], *arguments: Any) -> int:
    """The exit code of a process that sends itself a signal when it has touched files of `directory` so often.

    Counted are files opened, renamed and removed, and answers kept: all that a restart could find half done.
    """
    process = start(_counting, events, number, str(directory), work, arguments)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def command(arguments: list[str]) -> None:
    """Work for `start`: the command line."""
    sys.argv = ["flashdraft", *arguments]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    main()


def _work(work: Callable[..., Any], *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        work(*arguments)
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    except KeyboardInterrupt:
        os._exit(130)


def _counting(events: int, number: int, directory: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    left, main_thread, add = events, threading.get_ident(), Store.add

    def touched(event: str, details: tuple[Any, ...]) -> None:
        nonlocal left
        ours = event in ("open", "os.rename", "os.remove") and str(details[0]).startswith(directory)
        if threading.get_ident() == main_thread and (ours or event == "answer"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), number)

    sys.addaudithook(touched)
    Store.add = lambda *args: (sys.audit("answer"), add(*args))[1]  # type: ignore[method-assign]
    work(*arguments)
