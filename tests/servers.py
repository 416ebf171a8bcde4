"""A small OpenAI-compatible server for tests: answers are said by a function of the request's body."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Say = Callable[[dict[str, Any]], tuple[int, Any]]  # body -> HTTP status, reply: JSON, or bytes as they are


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, say: Say, models: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.say, self.models = say, models
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.others: dict[str, Say] = {}  # what POST of another path answers
        self.pages: dict[str, bytes] = {}  # what GET of a path answers, instead of the models

    def handle_error(self, *_: object) -> None:
        """A client that went away while it was answered."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path in self.server.pages:
            return self.reply(200, self.server.pages[self.path])
        self.reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path in self.server.others:
            return self.reply(*self.server.others[self.path](json.loads(content)))
        if not self.path.endswith("/completions"):
            return self.reply(404, {})
        body = json.loads(content)
        self.server.bodies.append(body)
        self.server.keys.append(self.headers.get("Authorization"))
        self.reply(*self.server.say(body))

    def reply(self, status: int, content: Any) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = content.get("headers", {}) if isinstance(content, dict) else {}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(say: Say, models: tuple[str, ...] = ("target",)) -> Iterator[Server]:
    server = Server(say, list(models))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def completion(text: str, finish: str = "stop", **choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, **choice.pop("message", {})}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish, **choice}]}
