"""Prompt files: every usual layout of a row, and a bad row is named with its file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashdraft.errors import CheckpointError
from flashdraft.prompts import Prompt, prompt_hash, prompt_of_row, prompts_at, read_prompts, repetition, scan_prompts


def message(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


SYSTEM, USER, ASSISTANT = message("system", "be brief"), message("user", "hello"), message("assistant", "hi")


@pytest.mark.parametrize(
    ("row", "turns", "system"),
    [
        ({"turns": ["hello", "again"]}, ("hello", "again"), ""),
        ({"messages": [SYSTEM, USER, ASSISTANT, message("user", "again")]}, ("hello", "again"), "be brief"),
        ({"messages": [message("system", ""), USER]}, ("hello",), ""),
        ({"messages": [message("user", [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}])]}, ("hello",), ""),
        ({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}, ("hello",), ""),
        (
            {"conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "hello"}]},
            ("hello",),
            "be brief",
        ),
        ({"prompt": "hello"}, ("hello",), ""),
        ({"prompt": [SYSTEM, USER]}, ("hello",), "be brief"),
        ({"prompt": "unused", "messages": [USER]}, ("hello",), ""),
    ],
)
def test_rows_of_every_layout_are_read(row: dict[str, object], turns: tuple[str, ...], system: str) -> None:
    assert prompt_of_row({**row, "id": 7, "category": "c", "lang": "fr"}) == Prompt("7", "c", turns, system, "fr")
    assert prompt_of_row(row, "3") == Prompt("3", "", turns, system)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "not a JSON object"),
        ('["a list"]', "not a JSON object"),
        ("3", "not a JSON object"),
        ('{"text": "hello"}', "not a JSON object with `turns`"),
        ('{"turns": "hello"}', "`turns` must be a list"),
        ('{"turns": []}', "non-empty string"),
        ('{"turns": ["hello", " "]}', "non-empty string"),
        ('{"turns": ["hello", 3]}', "non-empty string"),
        ('{"prompt": ""}', "non-empty string"),
        ('{"prompt": 3}', "`prompt` must be text, or a list of messages"),
        ('{"prompt": true}', "`prompt` must be text, or a list of messages"),
        ('{"messages": "hello"}', "must be a list of messages"),
        ('{"messages": [{"role": "assistant", "content": "hi"}]}', "no turn of the user"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "non-empty string"),
        *[(f'{{"prompt": "x", "{name}": "\\ud800"}}', "half a character") for name in ("prompt", "category", "lang", "id")],
        ('{"turns": ["x", "\\udfff"]}', "half a character"),
        ('{"messages": [{"role": "system", "content": "\\ud800"}, {"role": "user", "content": "x"}]}', "half a character"),
        ('{"prompt": "x", "category": ["a"]}', "`category` must be text"),
        ('{"prompt": "x", "lang": {}}', "`lang` must be text"),
        ('{"messages": [{"role": "system", "content": 3}, {"role": "user", "content": "x"}]}', "content of a message"),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}', "content of a message"),
        ("[" * 100_000, "not a JSON object"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(CheckpointError, match=f"prompts.jsonl, line 3: .*{message}") as raised:
        read_prompts(path)
    assert "\n" not in str(raised.value)


def test_bytes_that_are_no_utf8_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xe9t\xe9"}\n')
    with pytest.raises(CheckpointError, match="line 2: not UTF-8"):
        read_prompts(path)


@pytest.mark.parametrize("content", ["", "\n\n", "  \n"])
def test_an_empty_file_says_what_it_should_hold(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(CheckpointError, match="holds no prompts: one JSON object a line"):
        read_prompts(path)


def test_a_file_that_is_none_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read the prompts .*directory"):
        read_prompts(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot read the prompts .*No such file"):
        read_prompts(tmp_path / "gone.jsonl")


def test_prompts_are_read_again_where_their_lines_begin(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = ["plain", "\u00e9t\u00e9 \u2028 \u4f60\u597d", "last"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_text("\ufeff" + "\r\n\n".join(lines), encoding="utf-8", newline="")
    found = list(scan_prompts(path))
    assert [prompt.turns for _, prompt in found] == [(text,) for text in texts]
    again = prompts_at(path, [offset for offset, _ in found[::-1]])
    assert [prompt.turns for prompt in again] == [(text,) for text in texts[::-1]]


def test_a_prompt_is_written_as_a_row_that_reads_as_itself() -> None:
    for prompt in (Prompt("1", "c", ("a", "b")), Prompt("1", "c", ("a",), "be brief", "fr")):
        assert prompt_of_row(prompt.to_row()) == prompt


def test_prompt_hash_ignores_case_and_white_space() -> None:
    assert prompt_hash("Write  a\nPoem ") == prompt_hash("write a poem") != prompt_hash("write a poem.")
    assert prompt_hash("write a poem") == 9926215631658692565


def test_conversations_that_differ_in_any_turn_are_different_prompts() -> None:
    prompts = [Prompt("", "", turns) for turns in (("a",), ("a", "b"), ("a", "c"), ("a", "b", "c"), ("a b",), ("a\nb",))]
    assert len({prompt.hash for prompt in prompts}) == 5, "white space alone makes no other prompt"
    assert len({prompt.first_hash for prompt in prompts}) == 2


def test_a_prompt_is_known_by_its_first_turn_whatever_stands_around_it() -> None:
    known = {Prompt("", "", ("Hello",), "be brief").first_hash}
    for turns, system in (
        (("hello",), ""),
        (("HELLO",), "be long"),
        (("hello", "more"), ""),
        (("first", "hello "), "be brief"),
    ):
        assert Prompt("", "", turns, system).is_among(known)
    assert not Prompt("", "", ("other", "more"), "hello").is_among(known)
    early = {prompt_hash("be brief\nhello")}  # as drafts of flashdraft 0.1 name it
    assert Prompt("", "", ("hello",), "be brief").is_among(early)
    assert not Prompt("", "", ("hello",)).is_among(early)


def test_the_same_question_under_another_system_prompt_is_another_prompt() -> None:
    plain, brief, long = (Prompt("", "", ("hello",), system) for system in ("", "be brief", "be long"))
    assert plain.hash == prompt_hash("hello")
    assert len({plain.hash, brief.hash, long.hash}) == 3


def test_repetition_counts_repeated_8_grams() -> None:
    assert repetition(range(100)) == 0.0
    assert repetition([1, 2, 3]) == 0.0
    assert repetition([1, 2, 3, 4] * 10) == pytest.approx(1 - 4 / 33)
