"""The engine in a process of its own: either of the two processes may die, hang, or be slow to read."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import torch
from saved import saved_pair
from scripted import HELLO, hosted, serving, until

from flashdraft.errors import ConfigError, FlashdraftError
from flashdraft.server import serving as server_of
from flashdraft.server.channel import EngineProcess
from flashdraft.server.host import Frames, framed, sendable
from flashdraft.server.jobs import EngineFault

ROOT = Path(__file__).parents[2]
LONG = [20] * 250


def refuse() -> None:
    raise ConfigError("no such target: give max_model_len")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def divide_by(number: int) -> float:
    return 1 / number


class Echo:
    """Stands for a pair that does nothing but give back what it is given."""

    def __init__(self) -> None:
        nothing = SimpleNamespace(running=[], waiting=[], available_units=0, num_units=0)
        self.facts = SimpleNamespace(num_proposals=None)
        self.llm = SimpleNamespace(engine=SimpleNamespace(has_work=False, scheduler=nothing, pool=nothing))

    def work(self, name, *arguments):
        done: Future = Future()
        threading.Timer(0.01, done.set_result, arguments).start()
        return done


class Deaf(Echo):
    """Ends its connection when it is asked, and hangs."""

    def work(self, name, *arguments):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                socket.socket(fileno=int(number)).close()
        time.sleep(60)


class Unsendable(Echo):
    def __init__(self) -> None:
        super().__init__()
        self.facts.tokenizer = lambda text: []


def with_echo(test, pair=Echo):
    """Run a coroutine with a process of an Echo."""

    async def run():
        engine = EngineProcess(pair, lambda facts: "", stall_seconds=60, log_level=None)
        await engine.start()
        try:
            while engine.facts is None:
                await asyncio.sleep(0.01)
            return await test(engine)
        finally:
            engine.close()

    return asyncio.run(run())


def test_more_than_the_socket_holds_goes_both_ways_at_once():
    async def test(engine):
        everything = [os.urandom(20_000_000), torch.arange(1_000_000, dtype=torch.bfloat16), list(range(300_000))]
        calls = [asyncio.ensure_future(engine.work("prompt", one)) for one in everything * 3]
        for _ in range(10):  # an event loop with something else to do: neither side may wait for the other
            await asyncio.sleep(0.001)
            time.sleep(0.2)
        found = await asyncio.wait_for(asyncio.gather(*calls), 60)
        for given, got in zip(everything * 3, found, strict=True):
            assert torch.equal(given, got) if isinstance(given, torch.Tensor) else given == got
        assert not engine._calls

    with_echo(test)


def test_frames_are_cut_wherever_they_come_apart():
    data = b"".join(map(framed, ("a", [1] * 1000, b"", None)))
    for size in (1, 7, 8, 9, 1000, len(data)):
        frames = Frames()
        found = [message for i in range(0, len(data), size) for message in frames.push(data[i : i + size])]
        assert found == ["a", [1] * 1000, b"", None]


class Odd(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} of {b}")


def test_errors_travel_with_their_traceback_or_what_they_say():
    for error in (ConfigError("x"), OSError(2, "No such file", "name")):
        assert (type(sendable(error)), str(sendable(error))) == (type(error), str(error))
    with pytest.raises(ZeroDivisionError) as caught:
        divide_by(0)
    assert "in divide_by" in sendable(caught.value).__notes__[0]
    assert not hasattr(sendable(ConfigError("x")), "__notes__")
    assert "1 of 2" in str(sendable(Odd(1, 2)))
    own = type("Own", (Exception,), {"__module__": "__mp_main__"})  # of the script that started both
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__mp_main__", SimpleNamespace(Own=own))
        sent = sendable(own("x"))
        assert type(sent) is RuntimeError
        assert "Own: x" in str(sent)


def test_a_process_that_hangs_is_waited_for_and_one_that_dies_is_not(llm, tmp_path):
    with hosted(llm, tmp_path / "control", stall_seconds=4, shutdown_seconds=1.5) as client:
        loop, process = client.service.loop, psutil.Process(client.service.loop._process.pid)
        client.runner.script, client.runner.seconds, client.runner.accepted = LONG, 0.01, 0

        process.suspend()  # nothing of it holds up this process
        assert client.http.get("/v1/models").status_code == 200
        body = b'{"messages": [{"role": "user", "content": "a"}]}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(client.url.rpartition(":")[2]))) as sock:
            sock.sendall(head % len(body) + body)
            until(lambda: loop.active == 1)
            assert loop.waiting == 1
        until(lambda: loop.active == 0)  # it left before the process had heard of it
        assert loop.waiting == 0
        until(lambda: client.http.get("/health").status_code == 503)
        process.resume()
        until(lambda: client.http.get("/health").status_code == 200)
        client.wait_idle()
        until(lambda: loop.stats.finished["abort"] == 1)

        results = {}

        def stream() -> None:
            results["stream"] = client.stream(n=2)

        def whole() -> None:
            results["whole"] = client.error("/v1/chat/completions", {"messages": HELLO}, 500)

        def grammar() -> None:
            body = {"messages": HELLO, "response_format": {"type": "json_object"}}
            results["grammar"] = client.error("/v1/chat/completions", body, 500)

        threads = [threading.Thread(target=one) for one in (stream, whole, grammar)]
        for thread in threads[:2]:
            thread.start()
        until(lambda: loop.stats.running == 3 and loop.stats.generated > 10)
        process.suspend()
        threads[2].start()
        until(lambda: bool(loop._calls))
        process.kill()
        began = time.monotonic()
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - began < 3
        said = {results["whole"], results["stream"][-1]["error"]["message"], results["grammar"]}
        assert said == {"the engine failed"}
        assert client.http.get("/health").status_code == 503
        assert "engine failed" in client.error("/v1/completions", {"prompt": "a"}, 503)
        assert not loop._jobs
        assert not loop._calls
        assert client.ended.wait(10)
        assert loop.state == "failed"


def test_a_step_that_fails_there_fails_here(llm, tmp_path):
    with hosted(llm, tmp_path / "control", shutdown_seconds=1.0) as client:
        client.runner.script, client.runner.seconds, client.runner.accepted = LONG, 0.01, 0
        results = []
        thread = threading.Thread(target=lambda: results.append(client.stream(n=2)))
        thread.start()
        until(lambda: client.service.loop.stats.generated > 10)
        client.runner.fault = RuntimeError("/secret/path broke")
        thread.join(10)
        assert results[0][-1]["error"]["message"] == "the engine failed"
        assert client.http.get("/health").status_code == 503
        assert client.ended.wait(10)
        assert client.service.loop.state == "failed"


def test_requests_of_a_process_that_hangs_end_in_time(llm, tmp_path):
    with hosted(llm, tmp_path / "control", request_seconds=2) as client:
        process = psutil.Process(client.service.loop._process.pid)
        process.suspend()
        for body in ({"prompt": "a"}, {"prompt": "a", "structured_outputs": {"regex": "a"}}):
            assert client.error("/v1/completions", body, 504) == "the request took longer than 2 s"
        assert (client.service.loop._jobs, client.service.loop._calls) == ({}, {})
        process.resume()
        client.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True], ids=["at work", "a step hangs"])
def test_a_second_signal_ends_requests(llm, tmp_path, held):
    with hosted(llm, tmp_path / "control") as client:
        client.runner.script, client.runner.seconds, client.runner.accepted = LONG, 0.02, 0
        results = []
        thread = threading.Thread(target=lambda: results.append(client.stream()))
        thread.start()
        until(lambda: client.service.loop.stats.generated > 3)
        client.server.handle_exit(15, None)
        until(lambda: client.http.get("/health").status_code == 503)
        client.runner.held = held
        client.server.handle_exit(15, None)
        thread.join(5)
        assert results[0][-1]["error"]["message"] == "the server is shutting down"


@pytest.mark.parametrize(
    ("load", "said"), [(refuse, "no such target: give max_model_len"), (die, r"killed by SIGKILL \(.*\) while it loaded")]
)
def test_what_fails_while_loading_ends_the_server_with_its_error(load, said):
    with serving(load, ready=False, engine_process=True) as client:
        assert client.ended.wait(30)
    with pytest.raises(FlashdraftError, match=said):
        raise client.service.loop.load_error


def test_what_cannot_be_sent_to_the_process_is_a_load_error(monkeypatch):
    def only_here() -> None:  # as a function of a notebook, or of `python -c`
        raise AssertionError

    only_here.__qualname__ = "only_here"
    monkeypatch.setitem(globals(), "only_here", only_here)
    for load, said in (
        (lambda: None, "cannot be pickled .*: give a function"),
        (only_here, "does not find .*only_here.*: define"),
    ):
        with serving(load, ready=False, engine_process=True) as client:
            assert client.ended.wait(30)
        with pytest.raises(ConfigError, match=said):
            raise client.service.loop.load_error


def test_a_tokenizer_that_cannot_be_sent_is_a_load_error():
    async def run():
        engine = EngineProcess(Unsendable, lambda facts: "", stall_seconds=60, log_level=None)
        await engine.start()
        while not engine.loaded.is_set():
            await asyncio.sleep(0.01)
        engine.close()
        return engine.load_error

    with pytest.raises(ConfigError, match=r"tokenizer cannot be pickled .*: give --no-engine-process"):
        raise asyncio.run(run())


def test_a_connection_that_ends_without_the_process_is_told_so(caplog):
    async def test(engine):
        with pytest.raises(EngineFault, match="the engine failed"):
            await asyncio.wait_for(engine.work("prompt"), 20)
        assert engine.state == "failed"

    with_echo(test, Deaf)
    assert "the engine's process closed its connection: no request" in caplog.text


def test_closed_standard_files_are_opened():
    before = os.dup(0)
    try:
        os.close(0)  # which a socket would have next
        server_of.open_standard_files()
        assert os.path.samestat(os.fstat(0), os.stat(os.devnull))
        assert os.get_inheritable(0)
    finally:
        os.dup2(before, 0)
        os.close(before)


def test_where_the_engine_runs_unless_told(monkeypatch):
    assert [server_of.on_gpu(name) for name in ("cuda", "cuda:1", "cpu", "nonsense")] == [True, True, False, False]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert server_of.on_gpu(None)


@pytest.mark.slow
def test_starts_and_ends_leave_nothing_behind():
    async def test(engine):
        await engine.work("prompt", b"x" * 1_000_000)

    files, before = [], set(psutil.Process().children())  # those of other tests' servers
    for _ in range(4):
        with_echo(test)
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
        new = set(psutil.Process().children()) - before
        assert not [one for one in new if "spawn_main" in " ".join(one.cmdline())]
    assert len(set(files[1:])) == 1


@contextlib.contextmanager
def command(tmp_path, *options):
    """`flashdraft serve` in a process group of its own: (process, its engine's process, address, what it said before)."""
    pair = saved_pair(tmp_path)
    line = [sys.executable, "-m", "flashdraft", "serve", str(pair.target), "--draft", str(pair.draft), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [*line, "--device", "cpu", "--engine-process", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(_kill_all, process.pid)
        assert process.stderr is not None
        stack.enter_context(process.stderr)
        said = []
        for one in process.stderr:
            said.append(one)
            if " ready: " in one:
                break
        url = re.search(r"listening on (http://\S+),", "".join(said))
        assert url is not None, said
        [child] = [one for one in psutil.Process(process.pid).children() if "spawn_main" in " ".join(one.cmdline())]
        yield process, child, url[1]


def _kill_all(group):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


LONG_ANSWER = {"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True}


def answer(url, tokens=3):
    body = {"prompt": "the", "max_tokens": tokens, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_lets_requests_end(tmp_path, number):
    """As Ctrl-C on a terminal and systemd's SIGTERM are."""
    with command(tmp_path) as (process, child, url):
        results = []
        thread = threading.Thread(target=lambda: results.append(answer(url, 300)))
        thread.start()
        until(lambda: "num_requests_running 1.0" in httpx.get(f"{url}/metrics", trust_env=False).text)
        os.killpg(process.pid, number)
        thread.join(60)
        rest = process.stderr.read()
        assert results[0].json()["usage"]["completion_tokens"] == 300
        assert (process.wait(20), "Traceback" in rest) == (0, False), rest
        assert not child.is_running()


@pytest.mark.slow
def test_the_engine_ends_with_the_server_that_is_killed(tmp_path):
    with command(tmp_path) as (process, child, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG_ANSWER, trust_env=False, timeout=60) as response:
            next(response.iter_lines())  # in mid-stream
            process.kill()
            process.wait(10)
        psutil.wait_procs([child], timeout=5)
        assert not child.is_running()


@pytest.mark.slow
def test_the_server_ends_with_code_1_after_its_engine_is_killed(tmp_path):
    with command(tmp_path, "--shutdown-timeout", "1") as (process, child, url):
        assert answer(url).status_code == 200
        child.kill()
        rest = process.stderr.read()
        assert process.wait(20) == 1
        assert "the engine's process was killed by SIGKILL" in rest
        assert "Traceback" not in rest
