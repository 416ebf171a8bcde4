"""An answer without its thinking, by the markers of its target's chat template, special tokens or not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from gemma4_chat import gemma4_pair
from saved import saved_pair
from transformers import AutoTokenizer

from flashdraft.engine.request import SamplingParams
from flashdraft.terminal import LocalTalk
from flashdraft.text import TextStream
from flashdraft.thinking import GEMMA4, THINK, format_of
from flashdraft.train.conversations import Renderer

ANSWERS = {
    "none": ("", "the fox", "the fox"),
    "empty": ("", "<|channel>thought\n<channel|>the fox", "the fox"),
    "thought": ("", "<|channel>thought\nwhy?\n\nso\n<channel|>\nthe fox", "the fox"),
    "twice": ("", "<|channel>thought\nwhy\n<channel|>the<|channel>thought\nhm\n<channel|> fox", "the fox"),
    "opened": ("<|channel>thought\n", "why\n<channel|>the fox", "the fox"),
    "never ended": ("", "<|channel>thought\nwhy", ""),
    "closed before": ("<|channel>thought\n<channel|>", "the fox", "the fox"),
}


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def gemma(request, tmp_path_factory):
    return AutoTokenizer.from_pretrained(gemma4_pair(tmp_path_factory.mktemp("gemma"), special=request.param).target)


def ids(tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(("prompt", "answer", "content"), ANSWERS.values(), ids=ANSWERS)
def test_a_conversation_goes_on_without_the_thinking(gemma, prompt, answer, content):
    assert format_of(gemma) is GEMMA4
    assert Renderer(gemma, "mixed").switches
    before = ids(gemma, "<|turn>model\n" + prompt)
    assert Renderer(gemma).content(before, ids(gemma, answer + "<turn|>")) == content


def test_special_think_tokens_are_found_too_and_count_only_at_the_start(tmp_path):
    template = "{{ messages[0].content }}<think></think>"
    pair = saved_pair(tmp_path, chat_template=template, added=("<think>", "</think>"))
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    for special in (False, True):
        if special:
            tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
        assert format_of(tokenizer) is THINK
        content = Renderer(tokenizer).content
        assert content([], ids(tokenizer, "\n<think>\nwhy</think>\n\nfox</s>")) == "fox"
        assert content(ids(tokenizer, "<think>\n"), ids(tokenizer, "why</think>\n\nfox</s>")) == "fox"
        later = content([], ids(tokenizer, "fox <think>dog</s>"))
        assert later.replace("<think>", "") == "fox dog"


@pytest.mark.parametrize("name", ["none", "empty", "thought", "never ended"])
def test_a_chat_in_the_terminal_tells_it_apart(gemma, name):
    _, answer, content = ANSWERS[name]

    def chat(messages, params, stream, chat_template_kwargs):
        text = TextStream(gemma, skip_special_tokens=params.skip_special_tokens)
        for token in ids(gemma, answer):
            text.push(token)
            yield SimpleNamespace(text=text.take(), finish_reason=None, completion=None)
        text.finish()
        yield SimpleNamespace(text=text.take(), finish_reason="stop", completion=None)

    talk = LocalTalk(SimpleNamespace(tokenizer=gemma, chat=chat), SamplingParams(), {})  # type: ignore[arg-type]
    pieces = list(talk.answer([]))
    assert "".join(text for kind, text in pieces if kind == "answer").strip() == content
    assert ("why" in "".join(text for kind, text in pieces if kind == "thinking")) == ("why" in answer)
