"""Thinking and tools as Gemma 4 writes them: what its chat template renders is read, and rendered again the same."""

from __future__ import annotations

import json

import jinja2
import pytest
from gemma4_chat import TEMPLATE, gemma4_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Client, scripted

from flashdraft.llm import LLM
from flashdraft.server.parsers.gemma4 import gemma4_call
from flashdraft.server.prompts import message_of

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"the {name}", "parameters": PARAMETERS}}
    for name in ("weather", "news.search-all")
]
SYSTEM = {"role": "system", "content": "be brief"}
ASKED = {"role": "user", "content": "the quick brown fox?"}


def call(name="weather", **arguments):
    return {"type": "function", "id": f"call-{name}", "function": {"name": name, "arguments": json.dumps(arguments)}}


ODD = dict(
    city='Zürich {"a": [1]}, <b>: "x"\n東京 \\ ',
    days=-3,
    rate=1.5e-07,
    none=None,
    yes=True,
    parts=["a", 2, {"deep": [[], {}, False]}],
    **{"first name": "None", "Ünïcode": "1", "empty": ""},
)
REPLIES = {
    "text": {"content": "the lazy dog"},
    "a call": {"tool_calls": [call(city="Paris", days=2)]},
    "a call without arguments": {"tool_calls": [call()]},
    "every kind of value": {"tool_calls": [call(**ODD)]},
    "parallel calls": {"tool_calls": [call(city="Paris"), call("news.search-all", city="Rome"), call(city="Oslo")]},
    "text and a call": {"content": "I look.", "tool_calls": [call(city="Paris")]},
    "thought and a call": {"reasoning": "which city?\n\nParis", "tool_calls": [call(city="Paris")]},
    "thought, text and calls": {"reasoning": "why", "content": "so", "tool_calls": [call(city="a"), call(city="b")]},
}


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def gemma(request, tmp_path_factory):
    """A server of a tiny target with Gemma 4's tokens, special ones or not."""
    pair = gemma4_pair(tmp_path_factory.mktemp("gemma"), special=request.param)
    llm = LLM(pair.target, pair.draft, dtype="float32", device="cpu", max_model_len=2048)
    with scripted(llm) as client:
        yield client
        client.wait_idle()


def rendered(client: Client, messages, thinking: bool, tools=TOOLS, generate=True) -> str:
    text = client.llm.tokenizer.apply_chat_template(
        [message_of(message, i) for i, message in enumerate(messages)],
        tokenize=False,
        add_generation_prompt=generate,
        tools=tools,
        enable_thinking=thinking,
    )
    assert isinstance(text, str)
    return text


def written(client: Client, history, reply, thinking: bool) -> list[int]:
    """The tokens that the template has for a reply behind a history, and the one that ends it."""
    before = rendered(client, history, thinking, generate=False)
    text = rendered(client, [*history, reply], thinking, generate=False).removeprefix(before)
    text = text.removeprefix("<|turn>model\n").removesuffix("<turn|>\n")
    end = "<|tool_response>" if reply.get("tool_calls") else "<turn|>"
    return list(client.llm.tokenizer(text + end, add_special_tokens=False)["input_ids"])


def streamed(client: Client, **body) -> dict:
    """The message that the deltas of a stream add up to, and its end."""
    message: dict = {"content": None, "tool_calls": [], "reasoning": ""}
    for event in client.stream(**body):
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] = (message["content"] or "") + delta["content"] if delta.get("content") else message["content"]
            message["reasoning"] += delta.get("reasoning", "")
            message["tool_calls"] += delta.get("tool_calls", [])
            message["finish_reason"] = choice["finish_reason"]
    return message


def plain(message) -> dict:
    """A message without ids, its arguments as values."""
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or []]
    return {"content": message.get("content") or "", "reasoning": message.get("reasoning") or "", "calls": calls}


@pytest.mark.parametrize("accepted", [0, 2, 7])
@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "not"])
@pytest.mark.parametrize("kind", REPLIES)
def test_what_the_template_renders_is_read_and_rendered_again(gemma, kind, thinking, accepted):
    reply = {"role": "assistant", **REPLIES[kind]}
    if not thinking:
        reply.pop("reasoning", None)
    history = [SYSTEM, ASKED]
    gemma.runner.script, gemma.runner.accepted = written(gemma, history, reply, thinking), accepted
    body = dict(messages=history, tools=TOOLS, chat_template_kwargs={"enable_thinking": thinking}, max_tokens=400)
    answer = gemma.chat(**body)
    [choice] = answer["choices"]
    assert plain(choice["message"]) == plain(reply)
    assert choice["finish_reason"] == ("tool_calls" if "tool_calls" in reply else "stop")
    assert answer["usage"]["completion_tokens"] == len(gemma.runner.script)
    assert (answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0) == ("reasoning" in reply)
    deltas = streamed(gemma, **body)
    assert plain(deltas) == plain(reply)
    assert deltas["finish_reason"] == choice["finish_reason"]

    results = [
        [{"role": "tool", "tool_call_id": c["id"], "content": f"20 {i}"} for i, c in enumerate(m.get("tool_calls") or [])]
        for m in (reply, choice["message"])
    ]
    told = results[0] or [{"role": "user", "content": "and?"}]
    again = rendered(gemma, [*history, choice["message"], *(results[1] or told)], thinking)
    assert again == rendered(gemma, [*history, reply, *told], thinking)


def test_an_agent_goes_on_in_its_turn_and_its_prompt_is_found_in_the_prefix_cache(gemma):
    switch = {"chat_template_kwargs": {"enable_thinking": True}}
    history, gemma.runner.accepted, so_far = [SYSTEM, ASKED], 5, [0]
    gemma.post("/flush_cache", {})
    for kind in ("thought and a call", "thought, text and calls", "parallel calls", "text"):
        before = gemma.post("/tokenize", {"messages": history, "tools": TOOLS, **switch})["tokens"]
        gemma.runner.script = written(gemma, history, {"role": "assistant", **REPLIES[kind]}, True)
        answer = gemma.chat(messages=history, tools=TOOLS, return_token_ids=True, max_tokens=400, **switch)
        [choice] = answer["choices"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(so_far) - 1) // 16 * 16
        history = [*history, choice["message"]]
        for c in choice["message"].get("tool_calls", []):
            history.append({"role": "tool", "tool_call_id": c["id"], "content": "sun"})
        after = gemma.post("/tokenize", {"messages": history, "tools": TOOLS, **switch})["tokens"]
        so_far = [*before, *gemma.runner.script]
        assert after[: len(so_far)] == so_far  # the token that ended the answer begins the first result
    text = gemma.llm.tokenizer.decode(before)
    assert text.count("<|turn>model\n") == 1
    assert text.count("<|channel>thought\n") == 2
    assert text.count("<|tool_response>response:news.search-all{") == 1
    assert text.endswith("<tool_response|>")


def test_thinking_of_earlier_turns_is_left_out_once_the_user_has_spoken(gemma):
    reply = {"role": "assistant", **REPLIES["thought and a call"]}
    result = {"role": "tool", "tool_call_id": "call-weather", "content": "sun"}
    done = [ASKED, reply, result, {"role": "assistant", "content": "sunny"}, {"role": "user", "content": "and now?"}]
    text = rendered(gemma, done, True)
    assert "which city" not in text
    assert text.endswith("<|turn>user\nand now?<turn|>\n<|turn>model\n")
    assert rendered(gemma, done, False).endswith("<|turn>model\n<|channel>thought\n<channel|>")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_who_switches_thinking_on(gemma, fields, thinks):
    gemma.runner.script = list(gemma.llm.tokenizer("hm", add_special_tokens=False)["input_ids"])
    wanted = rendered(gemma, [ASKED], thinks, tools=None)
    assert gemma.chat(messages=[ASKED], **fields)["usage"]["prompt_tokens"] == len(
        gemma.llm.tokenizer(wanted, add_special_tokens=False)["input_ids"]
    )


def prompt_of(client: Client, path: str, body: dict) -> str:
    """The prompt that a request made."""
    seen: list[list[int]] = []
    launch = client.runner.launch

    def noting(batch):
        seen.extend(chunk.sequence.request.prompt for chunk in batch.prefill)
        return launch(batch)

    client.runner.launch = noting
    try:
        client.post(path, body)
    finally:
        del client.runner.launch
    return str(client.llm.tokenizer.decode(seen[0]))


def test_the_other_apis_hand_thinking_calls_and_results_back_as_chat_does(gemma):
    gemma.runner.script = list(gemma.llm.tokenizer("hm", add_special_tokens=False)["input_ids"])
    result = {"role": "tool", "tool_call_id": "call-weather", "content": "sun"}
    reply = {"role": "assistant", "reasoning": "why", "content": "so", "tool_calls": [call(city="Paris")]}
    wanted = rendered(gemma, [SYSTEM, ASKED, reply, result], True)
    assert "<|channel>thought\nwhy\n<channel|>so<|tool_call>" in wanted
    switch = {"chat_template_kwargs": {"enable_thinking": True}, "temperature": 0}
    items = [
        ASKED,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "call-weather", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "call-weather", "output": "sun"},
    ]
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": items, "instructions": "be brief", "tools": tools, **switch}
    assert prompt_of(gemma, "/v1/responses", body) == wanted
    blocks = [
        {"type": "thinking", "thinking": "why", "signature": ""},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "call-weather", "name": "weather", "input": {"city": "Paris"}},
    ]
    told = [{"type": "tool_result", "tool_use_id": "call-weather", "content": "sun"}]
    messages = [ASKED, {"role": "assistant", "content": blocks}, {"role": "user", "content": told}]
    tools = [
        {"name": (f := tool["function"])["name"], "description": f["description"], "input_schema": PARAMETERS} for tool in TOOLS
    ]
    body = {"max_tokens": 9, "system": "be brief", "messages": messages, "tools": tools, **switch}
    assert prompt_of(gemma, "/v1/messages", body) == wanted


LETTERS = st.characters(exclude_characters=':{}[],"', exclude_categories=["C", "Z"], include_characters=" ")
NAMES = st.text(LETTERS, min_size=1, max_size=8).map(str.strip)
TEXTS = st.text(max_size=12).filter(lambda text: '<|"|>' not in text)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES.filter(bool), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.dictionaries(NAMES.filter(lambda name: name and '<|"|>' not in name), VALUES, max_size=4))
def test_any_arguments_that_the_template_writes_are_read_as_they_were(arguments):
    template = jinja2.Environment().from_string(TEMPLATE)
    reply = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    text = template.render(messages=[reply], bos_token="").removeprefix("<|turn>model\n<|tool_call>")
    found = gemma4_call(text.removesuffix("<tool_call|>"))
    assert found is not None
    assert json.loads(found.arguments) == arguments
