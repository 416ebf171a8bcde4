"""Files written whole or not at all, directories for one process at a time, and what is wrong with a disk in one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flashdraft.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows: two runs into one directory are not kept apart there
    fcntl = None  # type: ignore[assignment]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of a file when the block ends; of a block that raises nothing is left."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, whole or not at all."""
    with replacing(path) as partial:
        if isinstance(content, str):
            partial.write_text(content, encoding="utf-8")
        else:
            partial.write_bytes(content)


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object that a file holds; None where it is gone or holds another thing."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def locked(directory: Path, busy: str) -> int:
    """A lock on the directory, which ends with this process. Raises ConfigError where another process is `busy` with it."""
    lock = os.open(directory, os.O_RDONLY) if fcntl else os.open(os.devnull, os.O_RDONLY)
    if fcntl:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(f"another process is {busy} {directory}: wait for it, or give another one") from None
    return lock


@contextmanager
def alone(directory: Path, busy: str) -> Iterator[None]:
    """A lock on the directory while the block runs (see `locked`); one that is made for it goes again where it stays empty."""
    made = not directory.exists()
    with saying_what_is_wrong(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = locked(directory, busy)
    try:
        yield
    finally:
        os.close(lock)
        if made:
            with suppress(OSError):
                directory.rmdir()


@contextmanager
def saying_what_is_wrong(directory: Path) -> Iterator[None]:
    """Turns a full disk, a directory that may not be written and the like into one sentence."""
    try:
        yield
    except OSError as error:
        own = isinstance(error.filename, str) and Path(error.filename) != directory
        file = f": {Path(error.filename).name}" if own else ""
        raise ConfigError(
            f"{directory} cannot be written ({error.strerror or error}{file}): mend that and give the same command again, "
            "which goes on where this one ended"
        ) from error
