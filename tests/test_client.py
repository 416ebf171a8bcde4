"""The client of OpenAI-compatible servers: what it sends, what it reads, when it tries again and when it gives up."""

from __future__ import annotations

import threading
import time

import pytest
from servers import completion, serving

from flashdraft.client import ChatReply, Client, ReplyError, ServerError
from flashdraft.errors import ConfigError


def test_a_chat_completion_is_read_with_the_ids_that_a_server_gives() -> None:
    reply = completion("fox", token_ids=[5, 1]) | {"prompt_token_ids": [3, 4]}
    with serving(lambda body: (200, reply)) as server:
        got = Client(server.url, api_key="secret").chat({"model": "target", "messages": []})
    assert got == ChatReply("fox", "stop", prompt_token_ids=[3, 4], token_ids=[5, 1])
    assert server.bodies == [{"model": "target", "messages": []}]
    assert server.keys == ["Bearer secret"]


def test_thinking_that_the_server_took_out_is_kept_apart() -> None:
    reply = completion("fox", "length", message={"reasoning_content": "so"})
    with serving(lambda body: (200, reply)) as server:
        assert Client(server.url).chat({}) == ChatReply("fox", "length", reasoning="so")


def test_models_are_listed() -> None:
    with serving(lambda body: (200, {}), models=("a", "b")) as server:
        assert Client(f"{server.url}/v1/").models() == ["a", "b"]


def test_what_may_pass_is_tried_again() -> None:
    replies = iter([(503, {}), (429, {"headers": {"Retry-After": "0.01"}}), (200, completion("fox"))])
    with serving(lambda body: next(replies)) as server:
        assert Client(server.url, pause=0.01).chat({}).text == "fox"
    assert len(server.bodies) == 3


def test_what_will_not_pass_is_said_at_once() -> None:
    refusal = {"error": {"message": "max_tokens is too large"}}
    pattern = r"refuses the request \(400: max_tokens is too large\)"
    with serving(lambda body: (400, refusal)) as server, pytest.raises(ServerError, match=pattern) as raised:
        Client(server.url, pause=0.01).chat({})
    assert raised.value.status == 400
    assert len(server.bodies) == 1


def test_retries_end() -> None:
    pattern = r"500: .*out of order.*asked 3 times"
    with serving(lambda body: (500, {"detail": "out of order"})) as server, pytest.raises(ServerError, match=pattern) as raised:
        Client(server.url, retries=2, pause=0.01).chat({})
    assert raised.value.status == 500


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with serving(lambda body: (200, {})) as server:
        url = server.url
    with pytest.raises(ServerError, match=r"does not answer .*refused.*check that the server runs") as raised:
        Client(url, retries=1, pause=0.01).models()
    assert raised.value.status is None
    assert "\n" not in str(raised.value)


def test_a_server_that_is_too_slow_is_tried_again() -> None:
    calls = iter([0.5, 0.0])

    def slow(body: object) -> tuple[int, dict[str, object]]:
        time.sleep(next(calls))
        return 200, completion("fox")

    with serving(slow) as server:
        assert Client(server.url, timeout=0.2, pause=0.01).chat({}).text == "fox"


def test_something_else_than_an_openai_server_is_said_so() -> None:
    reply = {"hello": "there"}
    with serving(lambda body: (200, reply)) as server, pytest.raises(ServerError, match="without choices"):
        Client(server.url).chat({})


@pytest.mark.parametrize(
    "reply",
    [
        *[None, 3, [], "text", {"choices": None}, {"choices": []}, {"choices": {}}, {"choices": [None]}, {"choices": [{}]}],
        *[completion("fox", message={"content": content}) for content in (3, ["fox"], {"text": "fox"}, True, "\ud800")],
        *[completion("fox", token_ids=ids) for ids in (3, "5", {}, [1.0], [None], [True], [[1]], ["1"])],
        *[completion("fox") | {"prompt_token_ids": ids} for ids in (0, "5", [1.5])],
        completion("fox", finish_reason=3),
        completion("fox", message={"reasoning": 3}),
    ],
)
def test_a_reply_of_another_form_is_one_sentence_and_not_asked_again(reply: object) -> None:
    with serving(lambda body: (200, reply)) as server, pytest.raises(ReplyError, match="sent a chat completion with") as raised:
        Client(server.url, pause=0.01).chat({})
    assert len(server.bodies) == 1
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (200, b"<html>\x1b[2J hello</html>", r"its answer is not JSON: <html> \[2J hello</html>"),
        (200, b"", "its answer is not JSON: nothing"),
        (200, b"\xff\xfe\x00", "its answer is not JSON"),
        (200, b"[" * 100_000, "nested too deeply"),
        (200, {"headers": {"Content-Length": "9999"}}, "IncompleteRead"),
        (500, b"[" * 100_000, "500: Internal Server Error"),
        (503, {"headers": {"Retry-After": "nan"}}, "503"),
    ],
)
def test_what_is_no_answer_at_all_is_tried_again_and_then_said(status: int, reply: object, message: str) -> None:
    with serving(lambda body: (status, reply)) as server, pytest.raises(ServerError, match=message) as raised:
        Client(server.url, retries=1, pause=0.01).chat({})
    assert len(server.bodies) == 2
    assert str(raised.value).isprintable()


def test_a_key_that_cannot_be_sent_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="the API key holds a line break") as raised:
        Client("localhost:1", api_key="secret\n")
    assert "secret" not in str(raised.value)


def test_closing_ends_the_wait_for_the_next_try() -> None:
    with serving(lambda body: (503, {})) as server:
        client = Client(server.url, pause=30)
        threading.Timer(0.1, client.close).start()
        begun = time.monotonic()
        with pytest.raises(ServerError):
            client.chat({})
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("https://host/api/v3/chat/completions", "https://host/api/v3"),
        ("http://host/v1/chat/completions", "http://host/v1"),
    ],
)
def test_addresses_are_taken_with_and_without_their_path(url: str, base: str) -> None:
    assert Client(url).base == base


@pytest.mark.parametrize(
    "url", ["", "ftp://host", "http://", "http://[::1", "http://host:port", "http://ho st", "http://h/\u00e9"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not the address of a server"):
        Client(url)
