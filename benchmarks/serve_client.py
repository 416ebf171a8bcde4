"""Servers to measure, each in a process of its own, and a client that costs little."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil


@dataclass
class Reply:
    """What one streamed request gave. `left`: the client closed the connection on purpose."""

    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    left: bool = False
    acceptance: dict[str, Any] = field(default_factory=dict)


async def ask(port: int, body: dict[str, Any], leave_after: int | None = None) -> Reply:
    """One streamed chat completion over a plain socket, which costs less than a client library; `leave_after` n chunks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    reply = Reply()
    try:
        writer.write(request(body))
        seen = 0
        async for event in events(reader):
            seen += 1
            if leave_after is not None and seen > leave_after:
                reply.left = True
                return reply
            read_event(event, reply)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return reply


async def drink(port: int, body: dict[str, Any]) -> bool:
    """The same, of which nothing is looked at but whether it came to its end: so the client takes little of the cores."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(request(body))
        end = b""
        while data := await reader.read(1 << 16):
            end = (end + data)[-2000:]
        return b'"finish_reason":"' in end and b"[DONE]" in end
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    status = await reader.readline()
    if b" 200 " not in status:
        body = (await reader.read()).rpartition(b"\r\n")[2]
        yield {"error": {"message": f"{status.decode().strip()} {body.decode(errors='replace')}"}}
        return
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def read_event(event: dict[str, Any], reply: Reply) -> None:
    if "error" in event:
        reply.error = event["error"]["message"]
    for choice in event.get("choices", []):
        reply.text += choice["delta"].get("content") or ""
        reply.finish_reason = choice["finish_reason"] or reply.finish_reason
    if event.get("usage"):
        reply.tokens = event["usage"]["completion_tokens"]
        reply.acceptance = event.get("metrics", {}).get("speculative_decoding", {})


@contextlib.contextmanager
def server(command: list[str]) -> Iterator[tuple[int, psutil.Process]]:
    """A server, by the arguments of Python: its port and process."""
    process = subprocess.Popen([sys.executable, *command, "--port", "0"], stderr=subprocess.PIPE, text=True)
    port = 0
    try:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if found := re.search(r"listening on http://[^ ]*:(\d+)", line):
                port = int(found[1])
            if " ready: " in line:
                break
        else:
            sys.exit("the server did not start")
        # The rest of the log must be read, or the server would wait for it.
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield port, psutil.Process(process.pid)
        process.terminate()
        if process.wait(60) != 0:
            sys.exit(f"the server ended with code {process.returncode}")
        drain.wait(10)
    finally:
        process.kill()


def family(process: psutil.Process) -> list[psutil.Process]:
    """The server's processes: its own, and the engine's if that has one."""
    return [process, *(child for child in process.children() if "spawn_main" in " ".join(child.cmdline()))]


def cpu_seconds(process: psutil.Process) -> list[float]:
    """CPU time that each of the server's processes has taken."""
    return [sum(one.cpu_times()[:2]) for one in family(process)]


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}
