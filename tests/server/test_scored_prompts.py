"""Log-probabilities of prompts in vLLM's field, and of echoed ones in OpenAI's form, are what LLM finds."""

from __future__ import annotations

import asyncio

import pytest
from scripted import HELLO

from flashdraft import SamplingParams
from flashdraft.server.logprobs import echoed_logprobs, token_text

TEXT, PROMPT = "/v1/completions", "the quick brown fox jumps over the lazy dog"


def scored(llm, prompt, likeliest=3):
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=likeliest))[0].prompt_logprobs


def expected_form(served, scores, likeliest):
    found = [None]
    for entry in scores[1:]:
        own = [(entry.token, entry.logprob, entry.rank)]
        own += [(t, log, i + 1) for i, (t, log) in enumerate(entry.top[:likeliest]) if t != entry.token]
        found.append({str(t): (log, rank, token_text(served.service, t)) for t, log, rank in own})
    return found


def by_text(served, top):
    """Of tokens with one text, such as parts of characters, the likeliest."""
    return {token_text(served.service, t): log for t, log in reversed(top)}


def check_form(served, told, scores, likeliest):
    expected = expected_form(served, scores, likeliest)
    assert len(told) == len(expected)
    assert told[0] is expected[0] is None
    for own, want in zip(told[1:], expected[1:], strict=True):
        assert own.keys() == want.keys()
        for token, (logprob, rank, text) in want.items():
            assert own[token] == {"logprob": pytest.approx(logprob, abs=1e-4), "rank": rank, "decoded_token": text}


def test_completions_have_them_by_choice(served, llm):
    ids = llm.tokenizer.encode("lazy dog")
    body = {"temperature": 1.0, "seed": 3, "max_tokens": 6, "n": 2, "return_token_ids": True}
    plain = served.post(TEXT, {"prompt": [PROMPT, "lazy dog"], **body})
    whole = served.post(TEXT, {"prompt": [PROMPT, "lazy dog"], **body, "prompt_logprobs": 3})
    for i, choice in enumerate(whole["choices"]):
        check_form(served, choice["prompt_logprobs"], scored(llm, PROMPT if i < 2 else ids), 3)
        assert choice["token_ids"] == plain["choices"][i]["token_ids"]
        assert "prompt_logprobs" not in plain["choices"][i]
        assert choice["logprobs"] is None
    assert whole["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    one = served.post(TEXT, {"prompt": [5], "max_tokens": 1, "prompt_logprobs": 0})
    assert one["choices"][0]["prompt_logprobs"] == [None]
    served.wait_idle()


def test_chat_has_them_at_the_top(served, llm):
    prompt = llm.chat(HELLO, SamplingParams(temperature=0, max_tokens=1))[0].prompt_token_ids
    plain = served.chat(max_tokens=8, n=2)
    whole = served.chat(max_tokens=8, n=2, prompt_logprobs=1)
    check_form(served, whole["prompt_logprobs"], scored(llm, prompt), 1)
    assert [c["message"]["content"] for c in whole["choices"]] == [c["message"]["content"] for c in plain["choices"]]
    assert "prompt_logprobs" not in plain


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("by_ids", [False, True])
def test_an_echo_with_logprobs_begins_with_the_prompts(served, llm, max_tokens, by_ids):
    ids = llm.tokenizer.encode(PROMPT)
    body = {"prompt": [ids if by_ids else PROMPT] * 2, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    plain = served.post(TEXT, {**body, "max_tokens": 5, "logprobs": 2})
    whole = served.post(TEXT, {**body, "max_tokens": max_tokens, "logprobs": 2, "echo": True})
    scores = scored(llm, PROMPT)
    for choice, alone in zip(whole["choices"], plain["choices"], strict=True):
        told = choice["logprobs"]
        count = len(ids)
        assert {len(own) for own in told.values()} == {count + max_tokens}
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert told["token_logprobs"][1:count] == pytest.approx([entry.logprob for entry in scores[1:]], abs=1e-4)
        assert told["tokens"][:count] == [token_text(served.service, token) for token in ids]
        for top, entry in zip(told["top_logprobs"][1:count], scores[1:], strict=True):
            assert top == pytest.approx(by_text(served, entry.top[:2]), abs=1e-4)
        assert choice["text"] == PROMPT + (alone["text"] if max_tokens else "")
        assert choice["finish_reason"] == "length"
        assert choice["token_ids"] == alone["token_ids"][:max_tokens]
        if max_tokens:
            assert told["tokens"][count:] == alone["logprobs"]["tokens"]
            assert told["token_logprobs"][count:] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-4)
        for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
            assert choice["text"].startswith(token, offset)
        assert "prompt_logprobs" not in choice
    usage = whole["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (2 * max_tokens, 2 * (len(ids) + max_tokens))


def test_both_forms_each_with_as_many_as_it_asks_for(served, llm):
    whole = served.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, prompt_logprobs=3)["choices"][0]
    check_form(served, whole["prompt_logprobs"], scored(llm, PROMPT), 3)
    tops = [entry.top for entry in scored(llm, PROMPT)[1:]]
    assert whole["logprobs"]["top_logprobs"][1:] == [pytest.approx(by_text(served, top[:1]), abs=1e-4) for top in tops]
    swapped = served.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=3, prompt_logprobs=0)["choices"][0]
    check_form(served, swapped["prompt_logprobs"], scored(llm, PROMPT), 0)
    assert swapped["logprobs"]["top_logprobs"][1:] == [pytest.approx(by_text(served, top), abs=1e-4) for top in tops]
    assert any(len(by_text(served, top)) < 3 for top in tops)


def test_an_echo_alone_may_ask_for_no_token_streamed_too(served):
    whole = served.complete(prompt=PROMPT, max_tokens=0, echo=True)
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (PROMPT, "length")
    assert whole["usage"]["completion_tokens"] == 0
    chunks = served.stream(TEXT, prompt=PROMPT, max_tokens=0, echo=True, stream_options={"include_usage": True})
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == PROMPT
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 0


def test_a_token_that_begins_every_prompt_takes_no_place_in_the_text_it_is_not_in(served, llm):
    ids = [llm.tokenizer.eos_token_id, *llm.tokenizer.encode("lazy dog")]
    mark, scores = llm.tokenizer.decode(ids[:1]), scored(llm, ids)
    told = served.complete(prompt=ids, max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert told["text"] == mark + "lazy dog"
    assert told["logprobs"]["text_offset"][:2] == [0, len(mark)]
    assert told["logprobs"]["top_logprobs"] == [None] + [{}] * (len(ids) - 1)
    added = asyncio.run(echoed_logprobs(served.service, "lazy dog", ids, scores, 0))  # by the tokenizer, to a text
    assert added["text_offset"][:2] == [0, 0]
    assert "".join(added["tokens"][1:]) == "lazy dog"
    assert [told["logprobs"]["text_offset"][i] - len(mark) for i in range(1, len(ids))] == added["text_offset"][1:]


def test_long_prompts_are_whole_through_several_steps(served, llm):
    ids = [(7 * i) % 60 + 5 for i in range(230)]
    whole = served.post(TEXT, {"prompt": [ids, ids[:200]], "max_tokens": 2, "prompt_logprobs": 1})
    for choice, prompt in zip(whole["choices"], (ids, ids[:200]), strict=True):
        check_form(served, choice["prompt_logprobs"], scored(llm, prompt), 1)
    served.wait_idle()
