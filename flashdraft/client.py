"""A client of OpenAI-compatible servers: chat completions, with retries, for many threads at once. Standard library only."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from textwrap import shorten
from typing import Any

from flashdraft.errors import ConfigError, FlashdraftError

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}
LONGEST_PAUSE = 60.0  # seconds between two tries, whatever the server asks for


class ServerError(FlashdraftError):
    """A server that refuses a request, or does not answer in spite of retries. `status` None: no answer at all.

    retry_after: seconds that the server asks to be left alone for.
    """

    def __init__(self, message: str, status: int | None = None, detail: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.detail, self.retry_after = status, detail, retry_after


class ReplyError(ServerError):
    """An answer that came whole and is no chat completion; the next one may be."""


@dataclass(frozen=True)
class ChatReply:
    """One chat completion. The ids are there where the server was asked for them and gives them (vLLM: return_token_ids)."""

    text: str
    finish_reason: str
    reasoning: str = ""  # thinking that the server took out of the text
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Client:
    """Requests to one server. url: its address, with or without /v1. timeout: seconds for one answer. A request that fails
    for a reason that may pass is sent again up to `retries` times, after `pause`, twice that, four times that ... seconds.

    Raises ConfigError for what is no address, and for a key that cannot be sent.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 600.0, retries: int = 5, pause: float = 1.0
    ) -> None:
        self.base = _base(url)
        self._timeout, self.retries, self.pause = timeout, retries, pause
        self._headers = {"Content-Type": "application/json", "User-Agent": "flashdraft"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):  # said here, as the error of a header shows the key
                raise ConfigError("the API key holds a line break or other characters that no key has: copy it again")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._closed = threading.Event()

    def models(self) -> list[str]:
        """Names of the models that the server offers. Raises ServerError."""
        return list(self.roots())

    def roots(self, retries: int | None = None) -> dict[str, str]:
        """What the server says it loaded (vLLM, SGLang, ours: `root`), else "", by name of a model. Raises ServerError."""
        found = self._request("models", None, retries)
        try:
            return {_of_type(model["id"], str, "id"): _of_type(model.get("root"), str, "root", "") for model in found["data"]}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(
                f"{self.base}/models does not answer as an OpenAI-compatible server: check the address"
            ) from error

    def chat(self, body: Mapping[str, Any], retries: int | None = None) -> ChatReply:
        """A chat completion, of which the first choice counts. Raises ServerError, ReplyError for one of another form.

        retries: instead of the client's own.
        """
        reply = self._request("chat/completions", body, retries)
        try:
            choice = reply["choices"][0]
            message = choice["message"]
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            return ChatReply(
                text=_of_type(message.get("content"), str, "content", ""),
                finish_reason=_of_type(choice.get("finish_reason"), str, "finish_reason", ""),
                reasoning=_of_type(reasoning, str, "reasoning", ""),
                prompt_token_ids=_ids(reply, "prompt_token_ids"),
                token_ids=_ids(choice, "token_ids"),
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ReplyError(f"{self.base} sent a chat completion without choices: {_short(reply, 120)}") from error
        except ValueError as error:
            raise ReplyError(f"{self.base} sent a chat completion with {error}: {_short(reply, 120)}") from error

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed chat completion; asked for once. Raises ServerError, also for an error among the events."""
        data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        try:
            request = urllib.request.Request(f"{self.base}/chat/completions", data, self._headers)
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                for line in response:
                    if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                        event = _parsed(line[6:])
                        if not isinstance(event, dict) or "error" in event:
                            raise ServerError(f"{self.base} could not go on: {_short(_detail(event), 200)}")
                        yield event
        except urllib.error.HTTPError as error:
            raise self._refused(error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._silent(error) from error

    def text(self, path: str) -> str | None:
        """What a path beside /v1 holds, such as /metrics; None where the server has no such path, or does not answer."""
        return self._beside(path, None)

    def flush_cache(self) -> bool:
        """Empty the prefix cache, where the server can (ours and SGLang: /flush_cache; vLLM: /reset_prefix_cache)."""
        return any(self._beside(path, b"") is not None for path in ("/flush_cache", "/reset_prefix_cache"))

    def ask_beside(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The JSON object that a path beside /v1, such as /tokenize, answers; None where there is none, or it will not."""
        found = self._beside(path, json.dumps(body).encode())
        try:
            parsed = _parsed(found.encode()) if found else None
        except ValueError:
            return None
        return parsed if isinstance(parsed, dict) else None

    def _beside(self, path: str, data: bytes | None) -> str | None:
        try:
            request = urllib.request.Request(f"{self.base.removesuffix('/v1')}{path}", data, self._headers)
            with urllib.request.urlopen(request, timeout=min(self._timeout, 30.0)) as response:
                found: bytes = response.read()
                return found.decode(errors="replace")
        except (OSError, http.client.HTTPException, ValueError):  # of a status such as 404, too
            return None

    def close(self) -> None:
        """Ends waiting between retries: pending calls raise ServerError."""
        self._closed.set()

    def _request(self, path: str, body: Mapping[str, Any] | None, retries: int | None = None) -> Any:
        data, retries = None if body is None else json.dumps(body).encode(), self.retries if retries is None else retries
        for attempt in range(retries + 1):
            wait = min(self.pause * 2**attempt * random.uniform(0.75, 1.25), LONGEST_PAUSE)
            try:
                request = urllib.request.Request(f"{self.base}/{path}", data, self._headers)
                with urllib.request.urlopen(request, timeout=self._timeout) as response:
                    return _parsed(response.read())
            except urllib.error.HTTPError as error:
                failure = self._refused(error)
                if error.code not in RETRIED:
                    raise failure from error
                wait = max(wait, failure.retry_after)
            except (OSError, http.client.HTTPException, ValueError) as error:
                failure = self._silent(error)
            if self._closed.is_set() or attempt == retries or self._closed.wait(wait):
                break
        tries = f", asked {attempt + 1} times" if attempt else ""
        said = f"{failure}{tries}: check that the server runs and the address is right"
        raise ServerError(said, failure.status, failure.detail, failure.retry_after)

    def _silent(self, error: Exception) -> ServerError:
        reason = getattr(error, "reason", None) or error
        return ServerError(f"{self.base} does not answer ({_short(str(reason) or type(reason).__name__, 120)})")

    def _refused(self, error: urllib.error.HTTPError) -> ServerError:
        try:
            detail = _detail(_parsed(error.read()))
        except (OSError, ValueError, http.client.HTTPException):
            detail = str(error.reason)
        return ServerError(
            f"{self.base} refuses the request ({error.code}: {_short(detail, 200)})", error.code, detail, _retry_after(error)
        )


def _detail(found: Any) -> str:
    """The message of an error body."""
    inner = found.get("error", found) if isinstance(found, dict) else found
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)


def _parsed(body: bytes) -> Any:
    """JSON, or ValueError."""
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("its answer is nested too deeply") from None
    except ValueError:
        raise ValueError(f"its answer is not JSON: {_short(body[:200].decode(errors='replace'), 80) or 'nothing'}") from None


def _of_type(value: Any, kind: type, name: str, missing: Any = None) -> Any:
    """A value of JSON, `missing` for null. Raises ValueError for one of another type, and for text that is no Unicode."""
    value = missing if value is None else value
    if type(value) is not kind or (isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value)):
        raise ValueError(f"a `{name}` that cannot be one")
    return value


def _ids(holder: Mapping[str, Any], name: str) -> list[int] | None:
    ids = holder.get(name)
    if ids is not None and (type(ids) is not list or any(type(token) is not int for token in ids)):
        raise ValueError(f"`{name}` that are no list of whole numbers")
    return ids


def _short(value: Any, width: int) -> str:
    """What a server said, fit for one line of a terminal."""
    return shorten("".join(letter if letter.isprintable() else " " for letter in str(value)[:2000]), width)


def _base(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of a port that is no number, and of brackets
        good = False
    if not good or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{url!r} is not the address of a server: give one such as http://localhost:8000/v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def _retry_after(error: urllib.error.HTTPError) -> float:
    """Seconds, at most LONGEST_PAUSE, from a header of seconds or a date; 0 where it is neither."""
    said = error.headers.get("Retry-After", "0")
    try:
        seconds = float(said)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(said).timestamp() - time.time()
        except (ValueError, OverflowError):
            seconds = 0.0
    return min(max(0.0, seconds), LONGEST_PAUSE)  # 0 for "nan", too
