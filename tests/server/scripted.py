"""A server in this process, and a target that says what the test wants, in blocks of the test's size."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from saved import saved_pair

from flashdraft.engine.request import TokenLogprobs
from flashdraft.engine.scheduler import Batch, Choice, Flight, Result
from flashdraft.engine.sequence import Sequence
from flashdraft.llm import LLM
from flashdraft.server.service import ServerOptions
from flashdraft.server.serving import Server, bound_socket, make_service

TEMPLATE = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t['function']['name'] }} {% endfor %}write <tool_call></s>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}{{ c['function']['arguments'] | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
THINKING = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HELLO = [{"role": "user", "content": "the quick brown fox"}]


def tiny_llm(folder: Path, **limits: Any) -> LLM:
    pair = saved_pair(folder, chat_template=TEMPLATE, added=THINKING)
    llm = LLM(
        pair.target, pair.draft, dtype="float32", device="cpu", **{"max_model_len": 256, "adaptive_width": False, **limits}
    )
    llm.engine.pool.poison()
    return llm


class ScriptedRunner:
    """Stands for the model: every answer is `script`, then end-of-text; `accepted` proposals are right in each step."""

    asynchronous = False

    def __init__(self, eos: int) -> None:
        self.eos, self.script, self.accepted = eos, [eos], 7
        self.seconds = 0.0  # a step
        self.fault: Exception | None = None
        self.hold = threading.Event()  # cleared: steps wait
        self.hold.set()

    def launch(self, batch: Batch) -> Flight:
        self.hold.wait(20)
        time.sleep(self.seconds)
        if self.fault is not None:
            raise self.fault
        choices = [self._choice(row.sequence, min(row.width, self.accepted) + 1, row.width) for row in batch.verify]
        first = [self._choice(chunk.sequence, 1, 0, from_prefill=True) for chunk in batch.prefill if chunk.last]
        return Flight(batch, Result(list(batch.prefill), choices + first))

    def collect(self, flight: Flight) -> Result:
        assert flight.result is not None
        return flight.result

    def waits_for_host(self, sequences: Any) -> bool:
        return False

    def _choice(self, sequence: Sequence, count: int, drafted: int, from_prefill: bool = False) -> Choice:
        said = len(sequence.output.tokens)
        tokens = [self.script[i] if i < len(self.script) else self.eos for i in range(said, said + count)]
        logprobs = [TokenLogprobs(token, -0.5, ((token, -0.5),)) for token in tokens]
        wanted = sequence.request.params.logprobs is not None
        return Choice(sequence, tokens, drafted, logprobs if wanted else None, from_prefill)


class Client:
    """A running server, and ways to ask it."""

    def __init__(self, server: Server, url: str, llm: LLM) -> None:
        self.server, self.service, self.url, self.llm = server, server.service, url, llm
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False)
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)
        )
        self.ended = threading.Event()  # the server has stopped

    def chat(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/chat/completions", {"messages": HELLO, "temperature": 0, **body})

    def complete(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/completions", {"prompt": "the quick", "temperature": 0, **body})

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def error(self, path: str, body: Any, status: int = 400) -> str:
        """The message of a refusal."""
        content = body if isinstance(body, bytes | str) else None
        response = self.http.post(
            path, content=content, json=None if content is not None else body, headers={"Content-Type": "application/json"}
        )
        assert response.status_code == status, (response.status_code, response.text)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return str(response.json()["error"]["message"])

    def stream(self, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
        start = {"messages": HELLO} if "chat" in path else {"prompt": "the quick"}
        with self.http.stream("POST", path, json={**start, "temperature": 0, "stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            return list(events(response))

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))

    def wait_idle(self, seconds: float = 10) -> None:
        """Until nothing runs; then every page is free."""
        until(lambda: not self.service.loop.active and not self.llm.engine.has_work, seconds)
        self.llm.engine.check_idle()

    def close(self) -> None:
        self.http.close()
        self.openai.close()


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:

    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@contextmanager
def serving(load: Callable[[], LLM], ready: bool = True, **options: Any) -> Iterator[Client]:
    service = make_service(load, ServerOptions(**{"names": ("tiny",), "shutdown_seconds": 5.0, **options}))
    sock = bound_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]
    server = Server(service, host="127.0.0.1", port=port)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (server.run(sockets=[sock]), ended.set()))
    thread.start()
    client = None
    try:
        if ready:
            until(service.loop.loaded.is_set, 60)
            assert service.loop.llm is not None, service.loop.load_error
            until(lambda: service.loop.state == "ready")
        until(lambda: server.started)
        client = Client(server, f"http://127.0.0.1:{port}", service.loop.llm)  # type: ignore[arg-type]
        client.ended = ended
        yield client
    finally:
        server.signals = 2
        thread.join(20)
        sock.close()
        if client is not None:
            client.close()
        assert not thread.is_alive()


@contextmanager
def scripted(llm: LLM, **options: Any) -> Iterator[Client]:
    """A server whose target says `client.say`."""
    runner, real = ScriptedRunner(llm.tokenizer.eos_token_id), llm.engine.runner
    llm.engine.runner = runner  # type: ignore[assignment]
    try:
        with serving(lambda: llm, **options) as client:
            client.runner = runner  # type: ignore[attr-defined]
            yield client
    finally:
        runner.hold.set()
        llm.engine.runner = real
        llm.engine.pool.flush()
