"""The endpoints, asked by the `openai` client and by plain HTTP: what comes back is what LLM answers."""

from __future__ import annotations

import json
import re

import pytest
from scripted import HELLO

from flashdraft import SamplingParams, __version__


def test_the_openai_client_gets_what_llm_answers_streamed_or_not(served, llm):
    expected = llm.chat(HELLO, SamplingParams(temperature=0, max_tokens=24))[0]
    options = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 24}
    whole = served.openai.chat.completions.create(**options)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert whole.usage.completion_tokens == len(expected.outputs[0].token_ids)
    chunks = list(served.openai.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == expected.text
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == expected.outputs[0].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    served.wait_idle()


def test_completions_take_texts_and_ids_alone_or_many(served, llm):
    ids = llm.tokenizer.encode("the quick")
    text = llm.generate("the quick", SamplingParams(temperature=0, max_tokens=12))[0].text
    for prompt, count in (("the quick", 1), (ids, 1), (["the quick", "the quick"], 2), ([ids, ids, ids], 3)):
        answer = served.openai.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=12)
        assert [c.text for c in answer.choices] == [text] * count
        assert [c.index for c in answer.choices] == list(range(count))
        assert answer.usage.prompt_tokens == len(ids) * count
    echoed = served.openai.completions.create(model="tiny", prompt="the quick", temperature=0, max_tokens=12, echo=True)
    assert echoed.choices[0].text == "the quick" + text
    assert len(served.complete(ignore_eos=True, return_token_ids=True)["choices"][0]["token_ids"]) == 16  # OpenAI's default


def test_streamed_completions_add_up(served):
    options = {"prompt": ["the quick", "lazy dog"], "max_tokens": 10, "n": 2, "seed": 5, "temperature": 1.0, "logprobs": 1}
    whole = served.post("/v1/completions", {**options, "ignore_eos": True})
    parts = served.stream("/v1/completions", **options, ignore_eos=True, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        own = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        for field in ("tokens", "token_logprobs", "text_offset"):
            joined = [item for c in own for item in c["logprobs"][field]]
            assert (
                joined == pytest.approx(choice["logprobs"][field]) if field == "token_logprobs" else choice["logprobs"][field]
            )
    assert parts[-1]["usage"] == whole["usage"] | {"prompt_tokens_details": parts[-1]["usage"]["prompt_tokens_details"]}
    assert whole["usage"]["completion_tokens"] == 40


def test_seeds_and_choices(served):
    def texts(**body):
        return [c["message"]["content"] for c in served.chat(temperature=1.0, max_tokens=12, **body)["choices"]]

    assert texts(seed=3) == texts(seed=3)
    assert len(set(texts(seed=3, n=3))) == 3
    assert texts(seed=3, n=3)[:1] == texts(seed=3)
    assert len({texts()[0] for _ in range(8)}) == 8  # unseeded ones differ


def test_the_same_seed_gives_the_same_text_alone_and_among_sixteen(served):
    body = {"model": "tiny", "prompt": "the quick", "temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    alone = served.post("/v1/completions", {**body, "seed": 11})["choices"][0]["text"]
    together = served.post("/v1/completions", {**body, "prompt": ["the quick"] * 16, "seed": 11})
    assert {choice["text"] for choice in together["choices"]} == {alone}


def test_logprobs_of_chat_agree_with_the_text(served):
    choice = served.chat(max_tokens=12, logprobs=True, top_logprobs=3, ignore_eos=True, return_token_ids=True)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["token_ids"]) == 12
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in entries)  # greedy
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    text = bytes(byte for entry in entries for byte in entry["bytes"]).decode("utf-8", "replace")
    shown = [t for t in choice["token_ids"] if t not in served.llm.tokenizer.all_special_ids]
    assert len(shown) < 12 or text == choice["message"]["content"]


def test_speculation_can_be_turned_off_and_narrowed_and_changes_no_text(served):
    bodies = ({}, {"enabled": False}, {"max_draft_tokens": 2})
    answers = [served.chat(max_tokens=24, ignore_eos=True, speculation=s) for s in bodies]
    assert len({a["choices"][0]["message"]["content"] for a in answers}) == 1
    drafted = [set(a["metrics"]["speculative_decoding"]["per_step_drafted"]) for a in answers]
    assert max(drafted[0]) == 7
    assert drafted[1] == {0}
    assert max(drafted[2]) == 2
    assert answers[1]["metrics"]["speculative_decoding"]["mean_acceptance_length"] is None


def test_each_token_says_whether_it_was_accepted(served):
    chunks = served.stream(max_tokens=24, ignore_eos=True, speculation={"report": True}, stream_options={"include_usage": True})
    sources = [source for c in chunks[:-1] for source in c["choices"][0].get("speculation", [])]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert "".join(piece for piece, _ in sources) == text
    assert (
        sum(accepted for _, accepted in sources) <= chunks[-1]["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    )


def test_what_is_committed_adds_up(served):
    answer = served.chat(max_tokens=30, ignore_eos=True)
    own, usage = answer["metrics"]["speculative_decoding"], answer["usage"]
    steps = list(zip(own["per_step_accepted"], own["per_step_drafted"], strict=True))
    assert sum(accepted + 1 for accepted, _ in steps) + 1 == usage["completion_tokens"]
    assert own["num_spec_steps"] == sum(drafted > 0 for _, drafted in steps) == sum(own["acceptance_histogram"])
    assert own["num_spec_tokens"] == 7


def test_the_same_prompt_twice_is_found_in_the_cache(served):
    body = {"messages": [{"role": "user", "content": "jumps over the lazy dog " * 3}], "max_tokens": 30, "ignore_eos": True}
    first, second = served.chat(**body), served.chat(**body)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first["metrics"] == second["metrics"]
    assert served.post("/flush_cache", {}) == {"success": True}
    assert served.chat(**body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_continuous_usage(served):
    chunks = served.stream(
        max_tokens=9, ignore_eos=True, stream_options={"continuous_usage_stats": True, "include_usage": True}
    )
    counts = [c["usage"]["completion_tokens"] for c in chunks if c.get("usage")]
    assert counts == sorted(counts)
    assert counts[-1] == 9


def test_models_version_health(served):
    models = served.openai.models.list().data
    assert [m.id for m in models] == ["tiny"]
    assert models[0].max_model_len == 256
    assert served.http.get("/v1/models/tiny").json()["id"] == "tiny"
    assert served.http.get("/v1/models/other").status_code == 404
    assert served.http.get("/version").json() == {"version": __version__}
    assert served.http.get("/health").status_code == 200


def test_tokenize_and_detokenize(served, llm):
    ids = llm.tokenizer.encode("the quick dog")
    answer = served.post("/tokenize", {"prompt": "the quick dog", "return_token_strs": True})
    assert answer["tokens"] == ids
    assert (answer["count"], answer["max_model_len"], len(answer["token_strs"])) == (len(ids), 256, len(ids))
    assert served.post("/tokenize", {"messages": HELLO})["tokens"] == llm.render(HELLO)
    assert served.post("/detokenize", {"tokens": ids})["prompt"] == "the quick dog"
    assert "not an id" in served.error("/detokenize", {"tokens": [10**6]})


def test_request_ids_are_the_clients_where_they_are_plain_words(served):
    for given, taken in (("abc-1.2_3", True), ("a b", False), ("x" * 200, False), (None, False)):
        response = served.http.get("/version", headers={} if given is None else {"X-Request-Id": given})
        assert (response.headers["x-request-id"] == given) is taken
    answer = served.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1}, headers={"X-Request-Id": "me"})
    assert answer.json()["id"] == "chatcmpl-me"


def test_the_openapi_description_resolves(served):
    described = served.http.get("/openapi.json").json()
    names = set(described["components"]["schemas"])
    assert {"ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"} <= names
    assert {ref for ref in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(described))} <= names
    assert "$defs" not in json.dumps(described)
