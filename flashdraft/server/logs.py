"""Log lines."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator


class LogFormatter(logging.Formatter):
    """One line an event: time, level, message, and its fields as key=value."""

    FIELDS = ("request_id", "method", "path", "status", "seconds")

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name in self.FIELDS if (value := getattr(record, name, None)) is not None)
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        message = "".join(letter if letter.isprintable() else " " for letter in record.getMessage())
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{when} {record.levelname} {message}{fields}{trace}"


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
