"""A server in this process, and a target that says what the test wants, in blocks of the test's size."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
from saved import saved_pair

from flashdraft.engine.request import TokenLogprobs
from flashdraft.engine.scheduler import Batch, Choice, Flight, Result
from flashdraft.engine.sequence import Sequence
from flashdraft.llm import LLM
from flashdraft.server.channel import EngineProcess
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
    saved_pair(folder, chat_template=TEMPLATE, added=THINKING)
    llm = load_tiny(folder, **limits)
    llm.folder = folder  # type: ignore[attr-defined]
    return llm


def load_tiny(folder: Path, control: Path | None = None, **limits: Any) -> LLM:
    """The pair in a folder, in whichever process. `control`: its runner is one whose settings are in that file."""
    limits = {"max_model_len": 256, "adaptive_width": False, **limits}
    llm = LLM(folder / "target", folder / "draft", dtype="float32", device="cpu", **limits)
    llm.engine.pool.poison()
    if control is not None:
        llm.engine.runner = ControlledRunner(llm.tokenizer.eos_token_id, control)  # type: ignore[assignment]
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


class Hold:
    """An event of another process."""

    def __init__(self, change: Callable[[bool], None]) -> None:
        self.set, self.clear = lambda: change(False), lambda: change(True)


class Control:
    """The settings of a ControlledRunner, set from this process."""

    def __init__(self, path: Path) -> None:
        self.__dict__["_set"] = {"script": [], "accepted": 7, "seconds": 0.0, "fault": None, "held": False}
        self.__dict__["_path"] = path
        self.__dict__["hold"] = Hold(lambda held: setattr(self, "held", held))
        self.held = False

    def __getattr__(self, name: str) -> Any:
        return self._set[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._set[name] = str(value) if isinstance(value, Exception) else value
        other = self._path.with_suffix(".new")
        other.write_text(json.dumps(self._set))
        other.replace(self._path)


class ControlledRunner(ScriptedRunner):
    """One in another process: each step reads its settings from a file."""

    def __init__(self, eos: int, path: Path) -> None:
        super().__init__(eos)
        self._path = path

    def launch(self, batch: Batch) -> Flight:
        self._read()
        while self.held:
            time.sleep(0.005)
            self._read()
        return super().launch(batch)

    def _read(self) -> None:
        found = json.loads(self._path.read_text())
        self.script, self.accepted, self.seconds = found["script"] or [self.eos], found["accepted"], found["seconds"]
        self.fault, self.held = found["fault"] and RuntimeError(found["fault"]), found["held"]


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
        loop = self.service.loop
        if isinstance(loop, EngineProcess):
            until(lambda: not loop.active and not loop.waiting and not loop.stats.running, seconds)
            until(lambda: loop.stats.pages_free == loop.stats.pages, seconds)
            return
        until(lambda: not loop.active and not self.llm.engine.has_work, seconds)
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
            assert service.loop.facts is not None, service.loop.load_error
            until(lambda: service.loop.state == "ready")
        until(lambda: server.started)
        pair = getattr(service.loop, "pair", None)
        client = Client(server, f"http://127.0.0.1:{port}", pair.llm if pair else None)
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
def hosted(llm: LLM, control: Path | None = None, **options: Any) -> Iterator[Client]:
    """A server of that tiny pair whose engine has a process of its own. `control`: its target says `client.runner.script`."""
    runner = None if control is None else Control(control)
    with serving(partial(load_tiny, llm.folder, control), engine_process=True, **options) as client:  # type: ignore[attr-defined]
        client.llm, client.runner = llm, runner  # type: ignore[attr-defined]
        try:
            yield client
        finally:
            if runner is not None:
                runner.hold.set()


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
