"""Parsers of answers: what is thinking, what is content, what is a call; the same however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdraft.errors import ConfigError
from flashdraft.server.parsers import reasoning, tools
from flashdraft.server.parsers.answer import AnswerParser, Formats, joined
from flashdraft.server.parsers.events import Call, Content, Event, Reasoning, ToolFormat
from flashdraft.server.parsers.gemma4 import gemma4_call
from flashdraft.server.parsers.reasoning import ReasoningFormat

NAMES = frozenset({"look", "go"})
LOOK = Call("look", '{"at": "a"}')


class Vocabulary:
    """A tokenizer with these tokens of their own; the first of them special."""

    def __init__(self, *added: str, special: int = 0, chat_template: str = "") -> None:
        self.ids = {text: 1000 + i for i, text in enumerate(added)}
        self.all_special_ids = list(self.ids.values())[:special]
        self.chat_template = chat_template

    def get_added_vocab(self) -> dict[str, int]:
        return self.ids


def parse(
    text: str | list[str],
    think: ReasoningFormat | None,
    form: ToolFormat,
    vocabulary: Vocabulary | None = None,
    *,
    opened: bool = False,
    names: frozenset[str] = NAMES,
) -> list[Event]:
    """The events of an answer that comes in pieces; in a vocabulary, markers come as their tokens."""
    vocabulary = vocabulary or Vocabulary()
    formats = Formats(vocabulary, think, form)
    parser = AnswerParser(formats, formats.markers(bool(names)), opened=opened, tool_names=names)
    events: list[Event] = []
    for piece in [text] if isinstance(text, str) else text:
        for token, part in tokens(piece, vocabulary):
            events += parser.push(token, part)
    return joined(events + parser.finish())


def tokens(text: str, vocabulary: Vocabulary) -> Iterable[tuple[int, str]]:
    while found := min(((i, m) for m in vocabulary.ids if (i := text.find(m)) >= 0), default=None):
        yield from [(7, text[: found[0]]), (vocabulary.ids[found[1]], "")]
        text = text[found[0] + len(found[1]) :]
    yield 7, text


HERMES = '<tool_call>{"name": "look", "arguments": {"at": "a"}}</tool_call>'
GEMMA = '<|tool_call>call:look{at:<|"|>a<|"|>}<tool_call|>'
CASES = [
    (reasoning.THINK, tools.HERMES, "hello", [Content("hello")]),
    (reasoning.THINK, tools.HERMES, "", []),
    (reasoning.THINK, tools.HERMES, " \n<think>\nwhy\n</think>\n\nso", [Reasoning("why"), Content("so")]),
    (reasoning.THINK, tools.HERMES, "<think>\n\n</think>\n\nso", [Content("so")]),
    (reasoning.THINK, tools.HERMES, "<think>why", [Reasoning("why")]),
    (reasoning.THINK, tools.HERMES, "so <think> so", [Content("so <think> so")]),
    (reasoning.THINK, tools.HERMES, "so </think> so", [Content("so </think> so")]),
    (
        reasoning.THINK,
        tools.HERMES,
        "<think>a <b> </thin k> c</think>d<think>e",
        [Reasoning("a <b> </thin k> c"), Content("d<think>e")],
    ),
    (reasoning.THINK, tools.HERMES, f"<think>x{HERMES}</think>{HERMES}", [Reasoning(f"x{HERMES}"), LOOK]),
    (reasoning.THINK, tools.HERMES, HERMES * 3, [LOOK] * 3),
    (reasoning.THINK, tools.HERMES, f"I look:\n\n{HERMES}\n{HERMES}\n", [Content("I look:"), LOOK, LOOK]),
    (reasoning.THINK, tools.HERMES, f"{HERMES} done", [LOOK, Content(" done")]),
    (reasoning.THINK, tools.HERMES, HERMES.removesuffix("</tool_call>"), [LOOK]),
    (reasoning.THINK, tools.HERMES, "use `<tool_call>` here", [Content("use `<tool_call>` here")]),
    (reasoning.THINK, tools.HERMES, "a </tool_call> b", [Content("a </tool_call> b")]),
    (reasoning.THINK, tools.HERMES, f"<tool_call>{HERMES}", [Content("<tool_call>"), LOOK]),
    (reasoning.THINK, tools.HERMES, '<tool_call>{"name"', [Content('<tool_call>{"name"')]),
    (reasoning.THINK, tools.HERMES, "a < b <tool", [Content("a < b <tool")]),
    (reasoning.THINK, tools.HERMES, "two\n\nlines \n", [Content("two\n\nlines \n")]),
    (reasoning.GEMMA4, tools.GEMMA4, f"<|channel>thought\nwhy\n<channel|>{GEMMA}{GEMMA}", [Reasoning("why"), LOOK, LOOK]),
    (reasoning.GEMMA4, tools.GEMMA4, "<|channel>thought\n<channel|>so", [Content("so")]),
    (reasoning.GEMMA4, tools.GEMMA4, "<|channel>thoughts<channel|>so", [Reasoning("thoughts"), Content("so")]),
    (
        reasoning.GEMMA4,
        tools.GEMMA4,
        "<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>d",
        [Reasoning("a"), Content("b"), Reasoning("c"), Content("d")],
    ),
    (reasoning.GEMMA4, tools.GEMMA4, "<|tool_call>nonsense<tool_call|>", [Content("<|tool_call>nonsense<tool_call|>")]),
    (None, tools.LLAMA3, '{"name": "look", "parameters": {"at": "a"}}', [LOOK]),
    (
        None,
        tools.LLAMA3,
        '<|python_tag|>{"name": "look", "parameters": {"at": "a"}}; {"name": "go", "parameters": {}}',
        [LOOK, Call("go", "{}")],
    ),
    (None, tools.LLAMA3, '{"name": "other", "parameters": {}}', [Content('{"name": "other", "parameters": {}}')]),
    (None, tools.JSON, '[{"name": "look", "arguments": {"at": "a"}}, {"name": "go"}]', [LOOK, Call("go", "{}")]),
    (None, tools.JSON, '```json\n{"name": "look", "arguments": "{\\"at\\": \\"a\\"}"}\n```', [LOOK]),
    (None, tools.JSON, '{"type": "function", "function": {"name": "look", "arguments": {"at": "a"}}}', [LOOK]),
    (None, tools.JSON, '{"a": "}"} b', [Content('{"a": "}"} b')]),
    (None, tools.JSON, '{"name": "look", "argu', [Content('{"name": "look", "argu')]),
    (None, tools.JSON, "```python\nx = {}\n```", [Content("```python\nx = {}\n```")]),
    (None, tools.JSON, "plain [text] {here}", [Content("plain [text] {here}")]),
]
IDS = [f"{i}-{text[:24]!r}" for i, (_, _, text, _) in enumerate(CASES)]


@pytest.mark.parametrize(("think", "form", "text", "expected"), CASES, ids=IDS)
def test_an_answer_whole_and_letter_by_letter(think, form, text, expected):
    assert parse(text, think, form) == expected
    assert parse(list(text), think, form) == expected
    for event in parse(text, think, form):
        assert not isinstance(event, Call) or isinstance(json.loads(event.arguments), dict)


@pytest.mark.parametrize(("think", "form", "text", "expected"), CASES, ids=IDS)
def test_an_answer_whose_markers_are_tokens(think, form, text, expected):
    markers = [*((think.start, think.end) if think else ()), *form.markers]
    assert parse(text, think, form, Vocabulary(*markers)) == expected


def test_a_special_token_is_never_shown():
    vocabulary = Vocabulary("<think>", "</think>", "<tool_call>", "</tool_call>", special=4)
    assert parse("so</think> <tool_call>it</tool_call> is", reasoning.THINK, tools.HERMES, vocabulary) == [Content("so it is")]


def test_a_prompt_that_opened_the_thinking():
    assert parse("\nwhy</think>so", reasoning.THINK, tools.HERMES, opened=True) == [Reasoning("why"), Content("so")]
    assert parse("why", reasoning.THINK, tools.HERMES, opened=True) == [Reasoning("why")]
    for end, is_open in (("<think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", False), ("a <think> b", False)):
        assert reasoning.THINK.is_open(end) is is_open
    assert reasoning.GEMMA4.is_open("<|channel>thought\n")


ALPHABET = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            '{"name": "look", "arguments": {"at": "<think>"}}',
            "a",
            "\n",
            " ",
            "<",
            "é",
            "{",
            "}",
            '"',
        ]
    ),
    max_size=12,
).map("".join)


@given(ALPHABET, st.data(), st.sampled_from([tools.HERMES, tools.JSON, tools.LLAMA3]), st.booleans())
def test_no_cut_changes_anything(text, data, form, opened):
    whole = parse(text, reasoning.THINK, form, opened=opened)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, reasoning.THINK, form, opened=opened) == whole


@given(ALPHABET)
def test_without_tools_and_thinking_nothing_is_lost(text):
    assert "".join(e.text for e in parse(text, None, tools.HERMES, names=frozenset()) if isinstance(e, Content)) == text


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("call:f{}", {}),
        ('call:f{a:1,b:-2.5,c:true,d:null,e:<|"|>x, {y}<|"|>}', {"a": 1, "b": -2.5, "c": True, "d": None, "e": "x, {y}"}),
        ('call:f{a:{b:[1,[2],<|"|>z<|"|>],c:{}},d:[]}', {"a": {"b": [1, [2], "z"], "c": {}}, "d": []}),
        ('call:f{"a":"b\\n",<|"|>k k<|"|>:word}', {"a": "b\n", "k k": "word"}),
        ("call:f{a:NaN}", {"a": "NaN"}),
        ('call:f{first name:<|"|>x<|"|>, b-c.d : {two  words :[1]}}', {"first name": "x", "b-c.d": {"two  words": [1]}}),
        (" call:f { a : 1 , b : [ 1 , 2 ] } ", {"a": 1, "b": [1, 2]}),
        ("call:f{a:1", None),
        ("call:f{a}", None),
        ("call:f{a:1}x", None),
        ("call:f", None),
        ("f{}", None),
        ('call:f{a:<|"|>x}', None),
        ("call:f{a:" + "[" * 500 + "]" * 500 + "}", None),
    ],
)
def test_gemma4_arguments(body, arguments):
    call = gemma4_call(body)
    assert (call and (call.name, json.loads(call.arguments))) == (arguments if arguments is None else ("f", arguments))


@pytest.mark.parametrize(
    ("template", "think", "form"),
    [
        ("{{ '<|channel>' }} <|tool_call>call:", reasoning.GEMMA4, tools.GEMMA4),
        ("<think> </think> <tool_call>", reasoning.THINK, tools.HERMES),
        ("<|python_tag|>", None, tools.LLAMA3),
        ("", None, tools.JSON),
    ],
)
def test_formats_follow_from_the_chat_template(template, think, form):
    formats = Formats.choose(Vocabulary(chat_template=template))
    assert (formats.reasoning, formats.tools) == (think, form)
    assert Formats.choose(Vocabulary(chat_template=template), "none", "hermes").reasoning is None
    assert Formats.choose(Vocabulary(chat_template=template), "qwen3", "gemma4").tools is tools.GEMMA4
    with pytest.raises(ConfigError, match="no reasoning parser"):
        Formats.choose(Vocabulary(), "nonsense")
    with pytest.raises(ConfigError, match="no tool-call parser"):
        Formats.choose(Vocabulary(), None, "nonsense")
