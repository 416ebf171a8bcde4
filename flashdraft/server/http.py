"""Plumbing of requests and responses: bodies within bounds, streams, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from flashdraft.server.errors import APIError, of_validation
from flashdraft.server.service import ServerOptions

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
DONE = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class ClientGone(Exception):
    """The client has closed its connection: nobody is left to answer."""


async def read_body(request: Request, model: type[M], options: ServerOptions) -> M:
    """The request's JSON as a model. Raises APIError for what is none, too large or too slow, and ClientGone."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise APIError(415, "send JSON, with Content-Type: application/json")  # a form of a foreign page cannot
    body, limit, seconds = bytearray(), options.max_body_bytes, options.request_seconds
    if int(request.headers.get("content-length", 0)) > limit:
        raise too_large(limit)
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large(limit)
    except TimeoutError as error:
        raise APIError(408, f"the request did not arrive within {seconds:g} s") from error
    except ClientDisconnect as error:
        raise ClientGone from error
    try:
        return model.model_validate_json(bytes(body))
    except ValidationError as error:
        raise of_validation(error) from error


def too_large(limit: int) -> APIError:
    return APIError(413, f"the request is larger than {limit} bytes")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's own X-Request-Id, if it is a plain word, else a fresh one."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when the client goes away. Raises ClientGone."""
    return await _first(request.receive, work)


async def _first(receive: Any, work: Coroutine[Any, Any, T]) -> T:
    """Work in this task, watched by another: fewer turns of a busy event loop than two tasks and a wait for the first."""
    own, is_gone = asyncio.current_task(), False
    assert own is not None

    async def watch() -> None:
        nonlocal is_gone
        await _gone(receive)
        is_gone = True
        own.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not is_gone or own.uncancel():
            raise
        raise ClientGone from None
    finally:
        watcher.cancel()


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + compact(data) + b"\n\n"


def compact(data: Any) -> bytes:
    return _JSON.encode(data).encode()


class EventStream(Response):
    """Server-sent events; when the client goes away the iterator is closed at once, whatever it waits for.

    So it is when the client reads nothing for `seconds`.
    """

    def __init__(self, events: AsyncIterator[bytes], seconds: float) -> None:
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._events, self._seconds = events, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with contextlib.suppress(ClientGone):
            await _first(receive, self._stream(send))

    async def _stream(self, send: Any) -> None:
        try:
            async for data in self._events:
                async with asyncio.timeout(self._seconds):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError as error:
            raise ClientGone from error
        finally:
            close: Awaitable[None] = self._events.aclose()  # type: ignore[attr-defined]
            await close
        await send({"type": "http.response.body", "body": b"", "more_body": False})
