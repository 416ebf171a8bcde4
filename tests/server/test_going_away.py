"""Clients that go away, queues that are full, engines that fail, servers that are told to stop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
from scripted import HELLO, ScriptedRunner, scripted, serving, until

from flashdraft.errors import ConfigError
from flashdraft.llm import LLM
from flashdraft.server import jobs
from flashdraft.server.http import EventStream
from flashdraft.server.serving import bound_socket

LONG = [20] * 250


@pytest.fixture
def slow(llm):
    """A server whose target talks without end, 10 ms a step."""
    with scripted(llm) as client:
        client.runner.script, client.runner.accepted, client.runner.seconds = LONG, 0, 0.01
        yield client


@pytest.fixture(params=["thread", "process"])
def either(llm, request):
    """The same, its engine in a thread or in a process; `aborts` and `steps` count from here on."""
    name = {"thread": "slow", "process": "hosted_says"}[request.param]
    client = request.getfixturevalue(name)
    client.runner.script, client.runner.accepted, client.runner.seconds = LONG, 0, 0.01
    client.wait_idle()
    client.before = client.service.loop.stats.steps, _aborts(client)
    yield client
    client.runner.seconds = 0.0


def aborts(client) -> float:
    return _aborts(client) - client.before[1]


def steps(client) -> int:
    return client.service.loop.stats.steps - client.before[0]


def _aborts(client) -> float:
    lines = client.http.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith('vllm:request_success_total{finished_reason="abort"}')
    )


def test_leaving_in_mid_stream_frees_the_pages(either):
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": ["the", "fox"], "max_tokens": 200}),
    ):
        with either.http.stream("POST", path, json={**body, "stream": True, "n": 2}) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            assert either.service.loop.active
        so_far = steps(either)
        either.wait_idle()
        assert steps(either) - so_far <= 12  # the time it took to notice
    assert aborts(either) == 6


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_the_first_token_and_in_a_call_that_is_not_streamed(either, stream):
    either.runner.hold.clear()
    body = b'{"messages": [{"role": "user", "content": "a"}], "stream": %s}' % (b"true" if stream else b"false")
    sock = socket.create_connection(("127.0.0.1", int(either.url.rpartition(":")[2])))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    sock.sendall(head % len(body) + body)
    until(lambda: either.service.loop.active == 1)
    sock.close()
    time.sleep(0.1)
    either.runner.hold.set()
    either.wait_idle()
    assert aborts(either) == 1
    assert steps(either) <= 3


@pytest.mark.parametrize("part", [0, 10, 43])
def test_leaving_while_the_request_is_sent_is_nobodys_error(either, caplog, part):
    sock = socket.create_connection(("127.0.0.1", int(either.url.rpartition(":")[2])))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 44\r\n\r\n"
    sock.sendall(head + b'{"messages": [{"role": "user", "content": "a"}]}'[:part])
    until(lambda: either.service.in_flight == 1)
    sock.close()
    until(lambda: either.service.in_flight == 0)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]
    assert steps(either) == 0


def test_a_request_that_arrives_too_slowly_is_refused(llm):
    with scripted(llm, request_seconds=0.2) as client:

        def drip():
            for _ in range(100):
                yield b" "
                time.sleep(0.05)

        response = client.http.post("/tokenize", content=drip(), headers={"Content-Type": "application/json"})
        assert response.status_code == 408


def test_a_client_that_reads_nothing_is_left():
    ended = []

    async def endless():
        try:
            while True:
                yield b"data"
        finally:
            ended.append(True)

    async def nothing_comes():
        await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # as a full socket does

    asyncio.run(asyncio.wait_for(EventStream(endless(), 0.05)({}, nothing_comes, send), 10))
    assert ended


def test_leaving_during_a_long_prefill(llm):
    with scripted(llm) as client:
        engine = client.llm.engine
        limit, engine.scheduler.max_num_batched_tokens = engine.scheduler.max_num_batched_tokens, 16
        client.runner.script, client.runner.seconds = LONG, 0.05
        try:
            with client.http.stream("POST", "/v1/completions", json={"prompt": [5] * 250, "max_tokens": 5, "stream": True}):
                until(lambda: client.service.loop.stats.steps > 2)
            client.wait_idle()
            assert client.service.loop.stats.steps < 14  # 16 chunks
            assert client.metric("vllm:generation_tokens_total") == 0
        finally:
            engine.scheduler.max_num_batched_tokens = limit


def test_normal_ends_abort_nothing(either):
    either.runner.seconds = 0
    for body in ({"max_tokens": 5}, {"max_tokens": 5, "n": 3}, {"stop": "!"}, {"max_tokens": 1}):
        either.chat(**body)
        either.stream(**body)
    either.wait_idle()
    assert aborts(either) == 0


def test_a_full_queue_refuses_and_goes_on(llm):
    with scripted(llm, max_waiting=2) as client:
        client.runner.hold.clear()
        client.runner.script = LONG
        places = client.llm.engine.scheduler.max_num_seqs
        results: list[int] = []

        def ask() -> None:
            body = {"messages": HELLO, "max_tokens": 3}
            results.append(client.http.post("/v1/chat/completions", json=body).status_code)

        threads = [threading.Thread(target=ask) for _ in range(places + 12)]
        for thread in threads:
            thread.start()
            time.sleep(0.005)
        until(lambda: 429 in results)
        client.runner.hold.set()
        for thread in threads:
            thread.join()
        assert set(results) == {200, 429}
        assert client.chat(max_tokens=1)
        client.wait_idle()


def test_a_request_that_takes_too_long_is_ended(llm):
    with scripted(llm, request_seconds=0.2) as client:
        client.runner.script, client.runner.seconds, client.runner.accepted = LONG, 0.01, 0
        assert "longer than" in client.error("/v1/chat/completions", {"messages": HELLO}, 504)
        assert client.stream()[-1]["error"]["code"] == 504
        client.wait_idle()


def test_a_fault_of_the_engine_ends_every_request_and_turns_health(llm):
    engine = LLM.from_parts(llm.tokenizer, llm.without_draft().engine)
    with serving(lambda: engine, shutdown_seconds=1.5) as client:
        runner = ScriptedRunner(1)
        runner.script, runner.seconds = LONG, 0.01
        engine.engine.runner = runner  # type: ignore[assignment]
        results = {}

        def stream() -> None:
            results["stream"] = client.stream(n=2)

        def whole() -> None:
            results["whole"] = client.error("/v1/chat/completions", {"messages": HELLO}, 500)

        threads = [threading.Thread(target=one) for one in (stream, whole)]
        for thread in threads:
            thread.start()
        until(lambda: client.service.loop.stats.generated > 10)
        runner.fault = RuntimeError("/secret/path broke")
        for thread in threads:
            thread.join(10)
        assert results["whole"] == "the engine failed"
        assert results["stream"][-1]["error"] == {
            "message": "the engine failed",
            "type": "server_error",
            "param": None,
            "code": 500,
        }
        assert client.http.get("/health").status_code == 503
        assert "engine failed" in client.error("/v1/completions", {"prompt": "a"}, 503)
        client.ended.wait(10)
        assert client.ended.is_set()


def test_what_fails_before_its_first_step_is_told(llm, monkeypatch):
    """Whatever it is, and whether it is one answer of several: no client may wait for ever."""
    with serving(lambda: LLM.from_parts(llm.tokenizer, llm.without_draft().engine)) as client:
        add, calls = client.llm.engine.add, []

        def broken(request):
            calls.append(request)
            if len(calls) == 2:
                raise RuntimeError("unforeseen")
            return add(request)

        monkeypatch.setattr(client.llm.engine, "add", broken)
        assert client.error("/v1/completions", {"prompt": "a", "n": 3}, 500) == "the engine failed"


def test_a_stalled_step_turns_health(llm):
    with scripted(llm, stall_seconds=0.2) as client:
        client.service.loop._stall_seconds = 0.2
        client.runner.hold.clear()
        thread = threading.Thread(target=lambda: client.chat(max_tokens=2))
        thread.start()
        until(lambda: client.http.get("/health").status_code == 503)
        client.runner.hold.set()
        thread.join()
        assert client.http.get("/health").status_code == 200


def test_health_is_503_while_loading(llm):
    go = threading.Event()

    def load() -> LLM:
        go.wait(10)
        return LLM.from_parts(llm.tokenizer, llm.engine)

    with serving(load, ready=False) as client:
        assert client.http.get("/health").status_code == 503
        for path in ("/v1/models", "/metrics", "/"):
            assert client.http.get(path).status_code == (503 if "models" in path else 200)
        assert "being loaded" in client.error("/v1/chat/completions", {"messages": HELLO}, 503)
        go.set()
        until(lambda: client.http.get("/health").status_code == 200)


def test_ready_is_said_once_requests_are_taken(llm, monkeypatch):
    """Who waits for that line sends one at once."""
    states, client_of, go = [], [], threading.Event()

    def info(line: str, *rest: object) -> None:
        if line.startswith("ready:"):
            states.append(client_of[0].service.loop.state)

    monkeypatch.setattr(jobs.log, "info", info)

    def load() -> LLM:
        go.wait(10)
        return LLM.from_parts(llm.tokenizer, llm.engine)

    with serving(load, ready=False) as client:
        client_of.append(client)
        go.set()
        until(lambda: bool(states))
    assert states == ["ready"]


def test_what_cannot_be_loaded_ends_the_server():
    def load() -> LLM:
        raise ConfigError("no such target")

    with serving(load, ready=False) as client:
        until(client.service.loop.loaded.is_set)
    assert isinstance(client.service.loop.load_error, ConfigError)


def test_the_first_signal_lets_requests_end_and_refuses_others(slow):
    result = {}
    thread = threading.Thread(target=lambda: result.update(answer=slow.stream(max_tokens=60)))
    thread.start()
    until(lambda: slow.service.loop.stats.generated > 3)
    slow.server.handle_exit(15, None)
    until(lambda: slow.http.get("/health").status_code == 503)
    assert "shutting down" in slow.error("/v1/chat/completions", {"messages": HELLO}, 503)
    thread.join()
    assert result["answer"][-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("second", [True, False])
def test_a_second_signal_or_the_time_limit_ends_requests(llm, second):
    with scripted(llm, shutdown_seconds=30.0 if second else 0.3) as client:
        client.runner.script, client.runner.seconds, client.runner.accepted = LONG, 0.02, 0
        result = {}
        thread = threading.Thread(target=lambda: result.update(answer=client.stream()))
        thread.start()
        until(lambda: client.service.loop.stats.generated > 3)
        client.server.handle_exit(15, None)
        if second:
            time.sleep(0.2)
            client.server.handle_exit(15, None)
        thread.join(5)
        assert not thread.is_alive()
        assert result["answer"][-1]["error"]["message"] == "the server is shutting down"


def test_an_address_in_use_is_one_sentence(served):
    with pytest.raises(ConfigError, match="cannot listen on"):
        bound_socket("127.0.0.1", int(served.url.rpartition(":")[2]))
    with bound_socket("127.0.0.1", 0) as loading, pytest.raises(ConfigError, match="cannot listen on"):
        bound_socket("127.0.0.1", loading.getsockname()[1])
    with pytest.raises(ConfigError, match="cannot listen on"):
        bound_socket("no.such.host.invalid", 0)
