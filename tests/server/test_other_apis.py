"""The Responses and the Messages API: the same answers in other words."""

from __future__ import annotations

import json

import pytest

ANSWER = '<think>\nwhy</think>\n\nI look.\n<tool_call>{"name": "look", "arguments": {"at": "a"}}</tool_call></s>'
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.mark.parametrize("accepted", [0, 3, 7])
def test_responses_by_the_openai_client(says, say, accepted):
    say(ANSWER, accepted)
    options = {"model": "tiny", "input": "the quick", "tools": [TOOL], "instructions": "be brief", "temperature": 0}
    whole = says.openai.responses.create(**options)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output[0].content[0].text == "why"
    assert whole.output_text == "I look."
    assert (whole.output[2].name, json.loads(whole.output[2].arguments)) == ("look", {"at": "a"})
    assert (whole.status, whole.usage.output_tokens) == ("completed", len(says.runner.script))
    events = list(says.openai.responses.create(**options, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "I look."
    strip = {"id", "call_id"}
    streamed, direct = ([i.model_dump(exclude=strip) for i in r.output] for r in (events[-1].response, whole))
    assert streamed == direct


def test_a_response_cut_short_and_a_conversation_sent_back(says, say):
    say("the quick brown fox")
    cut = says.openai.responses.create(model="tiny", input="a", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": "b"}'},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
    ]
    assert says.post("/v1/responses", {"input": items, "max_output_tokens": 2})["status"] == "incomplete"
    for body in (
        {"input": "a", "previous_response_id": "r"},
        {"input": [{"type": "item_reference"}]},
        {"input": "a", "tools": [{"type": "web_search"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {},
    ):
        assert says.error("/v1/responses", body)


@pytest.mark.parametrize("accepted", [0, 3, 7])
def test_messages(says, say, accepted):
    say(ANSWER, accepted)
    body = {
        "model": "tiny",
        "max_tokens": 200,
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": "the quick"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"at": "b"}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "seen"}, {"type": "text", "text": "fox"}],
            },
        ],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    }
    whole = says.post("/v1/messages", body)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][0]["thinking"] == "why"
    assert whole["content"][2]["input"] == {"at": "a"}
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens"] == len(says.runner.script)
    with says.http.stream("POST", "/v1/messages", json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [line.removeprefix("event: ") for line in lines if line.startswith("event: ")] == [e["type"] for e in events]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(d["text"] for d in deltas if d["type"] == "text_delta") == "I look."
    assert json.loads("".join(d["partial_json"] for d in deltas if d["type"] == "input_json_delta")) == {"at": "a"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_messages_say_why_they_end(says, say):
    body = {"max_tokens": 200, "messages": [{"role": "user", "content": "a"}]}
    say("the quick</s>")
    assert says.post("/v1/messages", body)["stop_reason"] == "end_turn"
    assert says.post("/v1/messages", {**body, "max_tokens": 1})["stop_reason"] == "max_tokens"
    stopped = says.post("/v1/messages", {**body, "stop_sequences": ["quick"]})
    assert (stopped["stop_reason"], stopped["stop_sequence"], stopped["content"][0]["text"]) == (
        "stop_sequence",
        "quick",
        "the ",
    )
    for wrong in ({"max_tokens": 0}, {"messages": []}, {"tools": [{"name": "f"}], "tool_choice": {"type": "x"}}, {"system": 5}):
        assert says.error("/v1/messages", {**body, **wrong})
