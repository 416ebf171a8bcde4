"""Structured output: every answer is valid, whatever the draft proposes, and the state is what was committed."""

from __future__ import annotations

import json
import re

import pytest
import torch
from scripted import HELLO, tiny_llm

from flashdraft import SamplingParams
from flashdraft.errors import RequestError
from flashdraft.grammar import Grammars, ThinkingConstraint

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": ["x", "yy"]},
        "b": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},  # a random model would write little else
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"q": {"enum": ["1", "2"]}},
                "required": ["q"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("look", "go")
]


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"a", "b"} and value["a"] in ("x", "yy") and all(type(v) is bool for v in value["b"])


def unthinking(served) -> dict[str, float]:
    """A random model must not begin to think: it would go on for ever."""
    return {str(served.llm.tokenizer.convert_tokens_to_ids("<think>")): -100}


@pytest.mark.parametrize("seed", range(3))
def test_every_answer_is_valid_with_and_without_proposals(served, seed):
    body = {
        "response_format": FORMAT,
        "logit_bias": unthinking(served),
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": 200,
        "n": 2,
        "repetition_penalty": 1.1,
    }
    answers = [served.chat(**body, speculation={"max_draft_tokens": width}) for width in (7, 3, 0)]
    texts = [[c["message"]["content"] for c in a["choices"]] for a in answers]
    assert texts[0] == texts[1] == texts[2]
    for choice in answers[0]["choices"]:
        assert choice["finish_reason"] == "stop"
        assert is_valid(choice["message"]["content"])
    assert served.chat(**body, ignore_eos=True)["choices"][0]["finish_reason"] == "stop"  # nothing may come behind


def test_json_object_regex_choice_and_grammar(served):
    def text(**body):
        choice = served.complete(max_tokens=120, temperature=1.0, seed=1, **body)["choices"][0]
        return choice["text"], choice["finish_reason"]

    found, reason = text(structured_outputs={"regex": "[ab]{3}-[0-9]"})
    assert (bool(re.fullmatch("[ab]{3}-[0-9]", found)), reason) == (True, "stop")
    assert text(structured_outputs={"choice": ["fox", "dog"]})[0] in ("fox", "dog")
    assert re.fullmatch("(ab)+!", text(structured_outputs={"grammar": 'start: "ab"+ "!"'})[0])
    found, reason = text(response_format={"type": "json_object"})
    assert found.startswith("{")
    assert reason == "length" or isinstance(json.loads(found), dict)
    assert text(response_format={"type": "text"})[0] == text()[0]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
def test_a_demanded_call_comes_also_behind_thinking(served, choice, thinking):
    body = {
        "tools": TOOLS,
        "tool_choice": choice,
        "logit_bias": unthinking(served),
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": 4,
        "parallel_tool_calls": False,
    }
    if thinking:
        body |= {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 9}
    whole = served.chat(**body)
    message = whole["choices"][0]["message"]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert message["content"] is None
    [call] = message["tool_calls"]
    assert call["function"]["name"] in (("go",) if isinstance(choice, dict) else ("look", "go"))
    assert json.loads(call["function"]["arguments"])["q"] in ("1", "2")
    assert bool(message.get("reasoning")) is thinking
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 10
    streamed = [c for e in served.stream(**body) for c in e["choices"][0]["delta"].get("tool_calls", [])]
    assert [c["function"] for c in streamed] == [call["function"]]


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thinking_budget_is_kept_and_changes_nothing_for_a_draft(served, budget):
    body = {
        "chat_template_kwargs": {"enable_thinking": True},
        "thinking_token_budget": budget,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    answers = [served.chat(**body, speculation={"max_draft_tokens": width}) for width in (7, 0)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget + 1  # and the end marker
    assert answers[0]["choices"][0]["message"]["content"]


def test_the_same_text_with_a_grammar_comes_from_llm_with_and_without_a_draft(llm):
    grammar = Grammars(llm.tokenizer, llm.target.vocab_size, llm.eos_token_ids).compile("json", SCHEMA)
    params, texts = SamplingParams(temperature=1.0, seed=2, max_tokens=200), []
    for width in (7, 2, 0):
        constraints = []

        def make(constraints=constraints):
            constraints.append(grammar.constraint())
            return constraints[-1]

        [live] = llm.prepare(llm.render(HELLO), params, max_draft_tokens=width, constraint=make)
        live.output = llm.engine.add(live.request)
        while llm.engine.has_work:
            llm.engine.step()
        texts.append(live.output.tokens)
        replay = grammar.constraint()
        for token in live.output.tokens[:-1]:  # the last one is end-of-text
            replay.advance(token)
        assert torch.equal(replay.masks([]), constraints[0].masks([]))
        assert replay.accepting
    assert texts[0] == texts[1] == texts[2]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    llm = tiny_llm(tmp_path_factory.mktemp("grammars"))
    return llm.tokenizer, Grammars(llm.tokenizer, llm.target.vocab_size, llm.eos_token_ids), llm


def test_masks_of_a_block_are_those_of_its_prefixes(grammars):
    tokenizer, compiler, llm = grammars
    grammar = compiler.compile("json", SCHEMA)
    tokens = tokenizer.encode('{"a": "x", "b": [true]}')
    block = grammar.constraint().masks(tokens)
    assert block.shape == (len(tokens) + 1, llm.target.vocab_size)
    state = grammar.constraint()
    for row, token in enumerate(tokens):
        assert torch.equal(state.masks([])[0], block[row])
        assert block[row, token]
        state.advance(token)
    assert block[-1].nonzero().flatten().tolist() == [1]  # end-of-text alone
    wrong = tokenizer.encode('{"z')
    masks = grammar.constraint().masks([*wrong, 1, 5])
    assert masks[-1].all()  # behind what is not allowed: never used
    after = grammar.constraint()
    after.masks(wrong)
    assert torch.equal(after.masks(tokens), block)  # asking changes nothing


def test_a_grammar_begins_where_the_thinking_ends_inside_a_block(grammars):
    tokenizer, compiler, llm = grammars
    grammar, start, end = compiler.compile("json", SCHEMA), *tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    answer = tokenizer.encode('{"a"')
    options = {"grammar": None, "budget": None, "eos": llm.eos_token_ids}

    def state(opened: bool, **own):
        own = {**options, "grammar": grammar.constraint(), **own}
        return ThinkingConstraint(tokenizer, ("<think>", "</think>"), llm.target.vocab_size, opened=opened, **own)

    plain = grammar.constraint().masks(answer)
    masks = state(True).masks([20, 21, end, *answer])
    free = torch.ones(llm.target.vocab_size, dtype=torch.bool)
    free[1] = False  # no end before the answer
    assert all(torch.equal(row, free) for row in masks[:3])
    assert torch.equal(masks[3:], plain)
    either = state(False).masks([start, 20, end, *answer])
    assert torch.equal(either[4:][1:], plain[2:])
    assert either[0, start]
    assert torch.equal(either[0].index_fill(0, torch.tensor(start), False), plain[0])
    assert torch.equal(state(False).masks(answer)[1:], plain[1:])  # no thinking at all
    budget = state(True, budget=2).masks([20, 21, end, *answer])
    assert budget[2].nonzero().flatten().tolist() == [end]
    step = state(True, budget=2)
    for token in (20, 21, end, *answer):
        step.advance(token)
    assert torch.equal(step.masks([]), plain[-1:])


@pytest.mark.parametrize(
    ("kind", "source"),
    [("json", {"type": 5}), ("json", "nonsense"), ("regex", "("), ("lark", "start: nowhere")],
)
def test_what_is_no_grammar_is_refused(grammars, kind, source):
    with pytest.raises(RequestError, match="cannot be used"):
        grammars[1].compile(kind, source)


def test_a_schema_that_is_too_deep_or_recursive_does_no_harm(served):
    deep: dict = {"type": "boolean"}
    for _ in range(60):
        deep = {"type": "array", "items": deep, "minItems": 1, "maxItems": 1}
    for schema in (deep, {"$ref": "#"}, {"$ref": "http://169.254.169.254/x"}, {"$ref": "file:///etc/passwd"}):
        body = {
            "messages": HELLO,
            "max_tokens": 5,
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        }
        response = served.http.post("/v1/chat/completions", json=body)
        assert response.status_code in (200, 400), response.text
        assert "root:" not in response.text
