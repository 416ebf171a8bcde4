"""A server of our own for a local pair: another process on a free port, which ends with this one, killed or not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashdraft.client import Client
from flashdraft.errors import ConfigError

# It ends when its standard input does, and that when this process is gone.
CHILD = (
    "import os, signal, sys, threading\n"
    "threading.Thread(target=lambda: (sys.stdin.read(), os.kill(os.getpid(), signal.SIGTERM)), daemon=True).start()\n"
    "from flashdraft.cli import main\n"
    "main()\n"
)
LISTENING = re.compile(r"listening on (http://\S+?),")
POLL = 0.1  # seconds
MIB = 1 << 20
WEIGHTS = (".safetensors", ".gguf", ".bin")
# Configurations and what a tokenizer is made of.
SETTINGS = (
    "config.json",
    "generation_config",
    "adapter_config",
    "tokenizer",
    "vocab",
    "merges",
    "special_tokens",
    "added_tokens",
    "chat_template",
)


@contextlib.contextmanager
def serving(arguments: Sequence[str], log: Path) -> Iterator[Client]:
    """`flashdraft serve` with these arguments, once it is ready; what it prints goes to `log`.

    Raises ConfigError with its own message where it cannot start.
    """
    command = [sys.executable, "-c", CHILD, "serve", *arguments, "--port", "0", "--shutdown-timeout", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}  # it needs no key
    with log.open("w", encoding="utf-8") as file:
        # A session of its own: Ctrl-C is for this process, which then ends it.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        yield _ready(process, log)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path) -> Client:
    client = None
    while True:
        if process.poll() is not None:
            said = [line for line in _lines(log) if line.startswith("flashdraft: ")]
            reason = (
                said[-1].removeprefix("flashdraft: ") if said else f"its server ended with code {process.returncode}: see {log}"
            )
            raise ConfigError(reason)
        if client is None and (found := LISTENING.search("\n".join(_lines(log)))):
            client = Client(found[1])
        if client is not None and client.text("/health") is not None:
            return client
        time.sleep(POLL)


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


def files_hash(path: str) -> str | None:
    """Of a checkpoint on this machine: names, sizes and first MiB of its files; None for what is no path.

    Only files that are loaded count. Cards, reports and the revisions in sub-directories come and go beside them.
    """
    place = Path(path)
    if not place.exists():
        return None
    state = hashlib.blake2b(digest_size=16)
    for file in [place] if place.is_file() else sorted(p for p in place.iterdir() if p.is_file() and _is_loaded(p)):
        state.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as content:
            state.update(content.read(MIB))
    return state.hexdigest()


def weight_bytes(path: str) -> int | None:
    """Of the weights of a checkpoint on this machine that are loaded: one file, or those of its index; None where there are
    none."""
    place = Path(path)
    if place.is_dir():
        single, index = place / "model.safetensors", place / "model.safetensors.index.json"
        names = {single.name} if single.is_file() else set()
        if not names and index.is_file():
            names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        files = [place / name for name in names]
    else:
        files = [place]
    return sum(file.stat().st_size for file in files if file.is_file()) or None


def _is_loaded(file: Path) -> bool:
    return file.suffix in WEIGHTS or file.name.startswith(SETTINGS)
