"""Requests that cannot be served are refused with 400 and a message that names what is wrong; nothing runs for them."""

from __future__ import annotations

import json
import socket
import time

import pytest
from scripted import HELLO, serving

from flashdraft.llm import LLM
from flashdraft.server import prompts

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _nothing_runs(served):
    before = served.metric("vllm:generation_tokens_total")
    yield
    served.wait_idle()
    assert served.metric("vllm:generation_tokens_total") == before


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, NAN, INF, 1e9, "1", True, [], {}]),
        ("top_p", [0, -1, 1.5, NAN, "x"]),
        ("top_k", [-2, 1.5, "3", True]),
        ("min_p", [-0.1, 2, NAN]),
        ("presence_penalty", [3, -3, NAN]),
        ("frequency_penalty", [2.1, "0"]),
        ("repetition_penalty", [0, -1, NAN, INF]),
        ("logit_bias", [{"x": 1}, {"5": 200}, {"5": NAN}, {"-1": 1}, {"999999": 1}, [1], {"5": "1"}, {"1" * 5000: 1}]),
        ("seed", [2**64, -(2**63) - 1, 1.5, "7", 10**400]),
        ("n", [0, -1, 129, 1.5, 10**12]),
        ("max_tokens", [0, -5, 1.5, "7", True]),
        ("prompt_logprobs", [-1, 21, 1.5, "1", True]),
        ("min_tokens", [-1, 10**6, "1"]),
        ("stop", ["", [""], 5, [5], ["a"] * 65, "a" * 1001, ["a" * 1001]]),
        ("stop_token_ids", [[-1], ["1"], 5, [1] * 5000]),
        ("stream", ["yes", 1]),
        ("stream_options", [{"include_usage": True}, 5]),
        ("model", ["other", 5]),
        (
            "response_format",
            [{"type": "xml"}, "json", {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}],
        ),
        ("structured_outputs", [{"choice": []}, {"regex": "("}, {"grammar": "nonsense"}, {"regex": "a", "choice": ["b"]}]),
        ("speculation", [5, {"max_draft_tokens": -1}, {"enabled": "no"}]),
        ("guided_json", [{}, "{}"]),
        ("use_beam_search", [True]),
        ("best_of", [3]),
        ("ignore_eos", ["no", 1]),
    ],
)
def test_a_wrong_value_is_refused_by_name_on_both_endpoints(served, field, values):
    for value in values:
        body = json.dumps({"max_tokens": 4, "messages": HELLO, "prompt": "a", field: value})
        for path in (CHAT, TEXT):
            message = served.error(path, body, 404 if field == "model" and value == "other" else 400)
            assert field.rstrip("s") in message or field in (
                "n",
                "guided_json",
                "response_format",
                "structured_outputs",
                "model",
            ), message


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{}]},
        {"messages": [{"role": 5, "content": "a"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        {"messages": [{"role": "user", "content": [5]}]},
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        {"messages": HELLO, "top_logprobs": 2},
        {"messages": HELLO, "logprobs": True, "top_logprobs": 21},
        {"messages": HELLO, "tool_choice": "required"},
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]},
        {
            "messages": HELLO,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        {"messages": HELLO, "chat_template_kwargs": {"tokenize": False}},
        {"messages": HELLO, "chat_template_kwargs": {"messages": []}},
        {"messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"messages": HELLO, "chat_template": "{% for i in range(10**12) %}{% endfor %}"},
        {"messages": HELLO, "modalities": ["audio"]},
        {"messages": HELLO, "functions": [{"name": "f"}]},
        {"messages": HELLO, "max_completion_tokens": 0},
        {"messages": HELLO, "prompt_logprobs": 1, "stream": True},
        {"messages": HELLO, "min_tokens": 3, "response_format": {"type": "json_object"}},
    ],
    ids=repr,
)
def test_chat_refuses(served, body):
    assert served.error(CHAT, body)


@pytest.mark.parametrize(
    "prompt", [None, 5, [], [[]], [None], ["a", 5], [1.5], [-1], [10**9], [True], "", [""], ["a", []], {"a": 1}]
)
def test_completions_refuse_prompts_that_are_none(served, prompt):
    assert served.error(TEXT, {"prompt": prompt, "max_tokens": 2})


@pytest.mark.parametrize(
    ("body", "blamed"),
    [
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"echo": False, "max_tokens": 0, "logprobs": 1}, "echo"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ],
    ids=repr,
)
def test_completions_refuse(served, body, blamed):
    assert blamed in served.error(TEXT, {"prompt": "a", **body})


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nonsense",
        b"[]",
        b"5",
        b'{"messages": ',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"messages": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e999}',
    ],
    ids=lambda raw: repr(raw[:30]),
)
def test_what_is_no_request_is_refused(served, raw):
    assert served.error(CHAT, raw)
    assert served.error(TEXT, raw)


@pytest.mark.parametrize(
    ("field", "item"),
    [
        ("messages", "5"),
        ("messages", '{"role": "user"}'),
        ("prompt", '5, "a"'),
        ("prompt", "true"),
        ("prompt", '["a"]'),
        ("prompt", '"a"'),
        ("prompt", "5"),
        ("tools", "{}"),
        ("stop", "5"),
        ("stop_token_ids", '"a"'),
        ("stop_token_ids", "1"),
    ],
)
def test_millions_of_wrong_items_are_refused_at_the_first(served, field, item):
    """pydantic would describe each of them: half a minute in which nothing else is served, and gigabytes."""
    path = CHAT if field in ("messages", "tools") else TEXT
    start = "{" if field in ("messages", "prompt") else '{"prompt": "a", "messages": [{"role": "user", "content": "a"}], '
    body = f'{start}"{field}": [{", ".join([item] * (4_000_000 // len(item)))}]}}'
    began = time.process_time()
    assert field in served.error(path, body) or field == "prompt"
    assert time.process_time() - began < 4


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(served, monkeypatch):
    monkeypatch.setattr(prompts, "render", None)
    assert "do not fit" in served.error(CHAT, {"messages": [{"role": "user", "content": "a " * 1_000_000}]})
    assert "do not fit" in served.error(TEXT, {"prompt": "a " * 1_000_000})


def test_more_answers_than_may_wait_are_refused_for_good(served):
    assert "2560 answers" in served.error(TEXT, {"prompt": ["a"] * 20, "n": 128})


def test_a_prompt_longer_than_the_context_is_told_both_numbers(served):
    for count in (256, 257, 5000):
        message = served.error(TEXT, {"prompt": [10] * count})
        assert "256" in message
        assert str(count) in message


def test_a_body_that_is_announced_too_large_is_not_waited_for(served):
    for length in (10**9, 10**18):
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as sock:
            sock.settimeout(5)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
            sock.sendall(head.encode())
            assert b" 413 " in sock.recv(1000)


def test_unknown_paths_methods_and_types(served):
    assert served.http.head("/health").status_code == 200
    assert served.http.get("/v1/nothing").status_code == 404
    assert served.http.get(CHAT).status_code == 405
    assert served.http.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    for path in (
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/../../etc/passwd",
    ):
        response = served.http.get(path)
        assert response.status_code == 404, path
        assert "import" not in response.text


def test_bodies_and_keys(llm):
    options = {"max_body_bytes": 1000, "keys": ("secret-1", "secret-2")}
    with serving(lambda: LLM.from_parts(llm.tokenizer, llm.engine), **options) as client:
        body = {"messages": HELLO, "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret-1"}, {"X-Api-Key": b"\xe9"}):
            for path in (CHAT, "/tokenize", "/flush_cache", "/v1/models"):
                response = client.http.request("GET" if "models" in path else "POST", path, json=body, headers=headers)
                assert response.status_code == 401
                assert "secret" not in response.text
        for headers in ({"Authorization": "Bearer secret-1"}, {"Authorization": "bearer secret-2"}, {"X-Api-Key": "secret-1"}):
            assert client.http.post(CHAT, json=body, headers=headers).status_code == 200
            big = {**body, "messages": [{"role": "user", "content": "a" * 1000}]}
            assert client.http.post(CHAT, json=big, headers=headers).status_code == 413
        for path in ("/health", "/version", "/metrics", "/"):
            assert client.http.get(path).status_code == 200
