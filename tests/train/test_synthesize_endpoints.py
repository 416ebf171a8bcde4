"""Answers by several servers of one model: each at its own pace, and none lost or made twice when one fails or comes back."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from killing import command, start
from saved import saved_pair
from servers import Handler, Server, completion, serving
from synthesizing import SHORT, rows_of, some_prompts, tiny_llm
from transformers import PreTrainedTokenizerBase

from flashdraft.client import Client, ServerError
from flashdraft.errors import ConfigError
from flashdraft.train.endpoint import EndpointSource
from flashdraft.train.fleet import Pace
from flashdraft.train.jobs import Job
from flashdraft.train.synthesize import synthesize

GOOD = (200, completion("the dog"))
DEAD = "http://127.0.0.1:9"  # no one listens at the discard port


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return tiny_llm(tmp_path_factory.mktemp("pair"), draft=False).tokenizer


def source(
    urls: list[str], tokenizer: PreTrainedTokenizerBase, said: list[str] | None = None, **options: Any
) -> EndpointSource:
    clients = [Client(url, retries=3, pause=0.02, timeout=5) for url in urls]
    say = (said if said is not None else []).append
    return EndpointSource(clients, tokenizer, **{"concurrency": 4, "say": say, **options})


def asked(*servers: Server) -> Counter[str]:
    """How often each prompt was asked, over all servers."""
    return Counter(body["messages"][-1]["content"] for server in servers for body in server.bodies)


def all_answered(directory: Path, count: int) -> bool:
    return len(rows_of(directory)) == count  # which fails for one that is there twice


def test_a_slow_server_is_given_less(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    def slowly(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.1)
        return GOOD

    with serving(lambda body: GOOD) as fast, serving(slowly) as slow:
        synthesize(source([fast.url, slow.url], tokenizer), some_prompts(60), tmp_path, SHORT)
    assert all_answered(tmp_path, 60)
    assert set(asked(fast, slow).values()) == {1}
    assert 4 <= len(slow.bodies) < 20


@pytest.mark.parametrize("when", ["seconds", "date", "nothing"])
def test_a_server_that_says_too_many_is_left_alone_for_a_while(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, when: str
) -> None:
    refusals, times = itertools.count(), list[float]()

    def say(body: dict[str, Any]) -> tuple[int, Any]:
        times.append(time.monotonic())
        if next(refusals):
            return GOOD
        headers = {"seconds": {"Retry-After": "0.5"}, "date": {"Retry-After": formatdate(time.time() + 3, usegmt=True)}}
        # The date is cut to seconds.
        return 429, {"error": {"message": "slow down"}, "headers": headers.get(when, {})}

    with serving(say) as server:
        synthesize(source([server.url], tokenizer, concurrency=1), some_prompts(3), tmp_path, SHORT)
    assert all_answered(tmp_path, 3)
    least, most = {"seconds": (0.5, 1.5), "date": (1.5, 4.0), "nothing": (0.01, 0.5)}[when]
    assert least <= times[1] - times[0] <= most


class Breaking(Handler):
    """Ends the connection in the middle of an answer."""

    def reply(self, status: int, content: Any) -> None:
        if self.command == "POST" and self.server.say.broken:  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
            return
        if self.command == "GET" and self.server.say.broken:  # type: ignore[attr-defined]
            self.close_connection = True
            return
        super().reply(status, content)


class Breakable:
    """Good answers, until it breaks after `after` of them; mended after `mended` questions after its health."""

    def __init__(self, after: int) -> None:
        self.after, self.count, self.broken = after, 0, False

    def __call__(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.count += 1
        self.broken = self.broken or self.count > self.after
        return GOOD


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Breakable]]:
    say = Breakable(6)
    with serving(say) as server:
        server.RequestHandlerClass = Breaking
        yield server, say


def test_a_server_that_dies_in_the_middle_of_answers_loses_none(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, breaking: tuple[Server, Breakable]
) -> None:
    said: list[str] = []
    with serving(lambda body: GOOD) as good:
        synthesize(source([good.url, breaking[0].url], tokenizer, said), some_prompts(60), tmp_path, SHORT)
        assert all_answered(tmp_path, 60)
        assert len(good.bodies) == 60 - 6, "what the dead one had answered is not asked again"
    assert len(said) == 1
    assert said[0].startswith(f"{breaking[0].url}/v1 does not answer")


def test_a_server_is_taken_back_when_it_answers_again(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, breaking: tuple[Server, Breakable]
) -> None:
    said: list[str] = []
    broken, breakable = breaking

    def say(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.01)
        if breakable.broken and breakable.after < 10**6:
            breakable.after, breakable.broken = 10**6, False  # mended
        return GOOD

    with serving(say) as good:
        synthesize(source([good.url, broken.url], tokenizer, said, concurrency=2), some_prompts(80), tmp_path, SHORT)
        assert all_answered(tmp_path, 80)
        assert len(good.bodies) < 70
    assert said[-1] == f"{broken.url}/v1 answers again"


def test_when_all_die_the_run_ends_and_the_same_one_goes_on(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    def dying(after: int) -> Callable[[dict[str, Any]], tuple[int, Any]]:
        good = iter([GOOD] * after)
        return lambda body: next(good, (503, {}))

    failure = pytest.raises(ServerError, match=r"none of the 2 servers answers any more; the last: .*503")
    with serving(dying(5)) as one, serving(dying(7)) as other, failure:
        synthesize(source([one.url, other.url], tokenizer), some_prompts(40), tmp_path, SHORT)
    assert all_answered(tmp_path, 12)
    with serving(lambda body: GOOD) as one, serving(lambda body: GOOD) as other:
        synthesize(source([one.url, other.url], tokenizer), some_prompts(40), tmp_path, SHORT)
        assert sum(asked(one, other).values()) == 28
    assert all_answered(tmp_path, 40)


def test_one_that_is_not_there_at_the_start_does_not_hold_the_others_up(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    said: list[str] = []
    with serving(lambda body: GOOD) as good:
        synthesize(source([DEAD, good.url], tokenizer, said), some_prompts(9), tmp_path, SHORT)
    assert all_answered(tmp_path, 9)
    assert said == [f"{DEAD}/v1 does not answer: the others begin, and it joins when it does"]
    with pytest.raises(ServerError, match="does not answer"):
        source([DEAD, DEAD.replace("9", "1", 1)], tokenizer)


def test_all_must_serve_the_same_model(tokenizer: PreTrainedTokenizerBase) -> None:
    def models(root: str) -> bytes:
        return f'{{"data": [{{"id": "target", "root": "{root}"}}]}}'.encode()

    with ExitStack() as stack:
        one, other, named = (
            stack.enter_context(serving(lambda body: GOOD, models=names)) for names in (("target",), ("else",), ("target",))
        )
        with pytest.raises(ConfigError, match=rf"{other.url}/v1 serves else and not target, which {one.url}/v1 serves"):
            source([one.url, other.url], tokenizer)
        with pytest.raises(ConfigError, match=f"{other.url}/v1 serves else and not target: give only"):
            source([other.url, one.url], tokenizer, model="target")
        with pytest.raises(ConfigError, match="named twice"):
            source([one.url, one.url + "/v1"], tokenizer)
        one.pages["/v1/models"], named.pages["/v1/models"] = models("Qwen/Qwen3-8B"), models("/data/Qwen3-8B-tuned")
        with pytest.raises(ConfigError, match=r"has loaded /data/Qwen3-8B-tuned and .* Qwen/Qwen3-8B: give only"):
            source([one.url, named.url], tokenizer)
        named.pages["/v1/models"] = models("/data/Qwen3-8B")
        assert source([one.url, named.url], tokenizer).model == "target"


def test_one_that_comes_back_with_another_model_is_left_out(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, breaking: tuple[Server, Breakable]
) -> None:
    said: list[str] = []
    broken, breakable = breaking

    def say(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.01)
        if breakable.broken:
            broken.models, breakable.after, breakable.broken = ["else"], 10**6, False
        return GOOD

    with serving(say) as good:
        served = source([good.url, broken.url], tokenizer, said, concurrency=2)
        synthesize(served, some_prompts(60), tmp_path, SHORT)
    assert all_answered(tmp_path, 60)
    assert said[-1].startswith(f"left out: {broken.url}/v1 serves else and not target")
    assert served.status().endswith("left out")


def test_one_prompt_that_a_server_fails_over_does_not_end_the_run(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    prompts = some_prompts(200)
    poison = prompts[3].turns[0]

    def say(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.004)
        return (500, {}) if body["messages"][-1]["content"] == poison else GOOD

    with serving(say) as server:
        counts = synthesize(source([server.url], tokenizer, concurrency=2), prompts, tmp_path, SHORT)
    assert counts["answers dropped: the server failed over it"] == 1
    assert all_answered(tmp_path, 199)


def test_the_answers_of_a_server_that_gives_none_of_use_are_held_back(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    empty = (200, completion(""))
    failure = pytest.raises(ConfigError, match=r"none of the first 20 answers of .* can be used \(empty\)")
    with serving(lambda body: GOOD) as good, serving(lambda body: empty) as mute, failure:
        synthesize(source([good.url, mute.url], tokenizer), some_prompts(90), tmp_path, SHORT)
    assert (tmp_path / "dropped.jsonl").read_bytes() == b""
    assert len(rows_of(tmp_path)) > 0


def feed(pace: Pace, rate: Callable[[int], float], answers: int) -> None:
    """Answers of 100 tokens each by a server that makes rate(requests at once) tokens a second."""
    now = 0.0
    for _ in range(answers):
        now += 100 / rate(pace.limit)
        pace.answered(100, True, now)


def test_the_pace_grows_to_where_it_gains_nothing_more() -> None:
    pace = Pace(512)
    assert pace.limit == 8
    feed(pace, lambda n: 50.0 * min(n, 100), 4000)
    assert pace.limit == 128
    feed(pace := Pace(48), lambda n: 50.0 * n, 4000)
    assert pace.limit == 48
    feed(pace := Pace(512), lambda n: 100.0, 100)
    assert pace.limit == 8


def test_the_pace_halves_at_a_refusal_and_then_grows_slowly() -> None:
    pace = Pace(64)
    feed(pace, lambda n: 50.0 * n, 2000)
    assert pace.limit == 64
    pace.refused()
    assert pace.limit == 32
    feed(pace, lambda n: 50.0 * n, 2 * 32)
    assert pace.limit == 36
    for _ in range(9):
        pace.refused()
    assert pace.limit == 1


def test_without_enough_to_do_nothing_is_learned() -> None:
    pace = Pace(64)
    for i in range(1000):
        pace.answered(100, False, float(i))
    assert pace.limit == 8


def test_many_at_once_are_refused_and_still_all_answered(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """A server that takes three requests at once, asked for up to 16."""
    lock, busy, most = threading.Lock(), [0], [0]

    def say(body: dict[str, Any]) -> tuple[int, Any]:
        with lock:
            if busy[0] >= 3:
                return 429, {}
            busy[0] += 1
            most[0] = max(busy)
        time.sleep(0.01)
        with lock:
            busy[0] -= 1
        return GOOD

    with serving(say) as server:
        served = source([server.url], tokenizer, concurrency=16)
        synthesize(served, some_prompts(60), tmp_path, SHORT)
    assert all_answered(tmp_path, 60)
    assert served.fleet.servers[0].pace.limit <= 8
    assert max(asked(server).values()) > 1


@pytest.mark.slow
def test_killed_with_two_servers_it_goes_on_and_asks_only_what_is_left(tmp_path: Path) -> None:
    pair, prompts = saved_pair(tmp_path / "pair"), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{p.turns[0]}"}}\n' for p in some_prompts(60)))

    def say(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.02)
        return GOOD

    with serving(say) as one, serving(say) as other:
        words = ["synthesize", str(pair.target), "--prompts", str(prompts), "--output", str(tmp_path / "out")]
        words += ["--endpoint", one.url, "--endpoint", other.url, "--concurrency", "2"]
        first = start(command, words)
        while len(one.bodies) + len(other.bodies) < 20:
            assert first.is_alive(), "it must not end before it is killed"
            time.sleep(0.005)
        first.kill()
        first.join()
        assert first.exitcode == -signal.SIGKILL
        second = start(command, words)
        second.join()
        assert second.exitcode == 0
        times = asked(one, other)
    assert all_answered(tmp_path / "out", 60)
    assert set(times) == {p.turns[0] for p in some_prompts(60)}
    assert sum(times.values()) <= 60 + 5, "only what was under way is asked again"
    assert len(one.bodies) > 10
    assert len(other.bodies) > 10


def test_jobs_of_a_fleet_are_answered_with_the_model_that_all_have(tokenizer: PreTrainedTokenizerBase) -> None:
    with serving(lambda body: GOOD, models=("a", "b")) as one, serving(lambda body: GOOD, models=("b",)) as other:
        served = source([one.url, other.url], tokenizer, model="b")
        answers = list(served.run(deque(Job([1], messages=[{"role": "user", "content": str(i)}]) for i in range(8))))
        assert len(answers) == 8
        assert {body["model"] for body in (*one.bodies, *other.bodies)} == {"b"}
        assert "tokens/s, 0 at once; " in served.status()
