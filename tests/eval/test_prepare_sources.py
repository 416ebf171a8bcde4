"""SPEED-Bench rows rebuilt from small fakes in the layout of each of their sources."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from preparing import PAGES, Letters, rebuild

from flashdraft.errors import CheckpointError
from flashdraft.eval import sources
from flashdraft.eval.prepare_rows import HLE, LIVECODEBENCH, PLACEHOLDER, ROLES
from flashdraft.eval.prepare_text import PADDING, fitted
from flashdraft.eval.sources import Sources, Table, file_address

BAMBOO = "https://raw.githubusercontent.com/RUCAIBox/BAMBOO/main/reportsumm.jsonl"
ADALEVAL = "https://huggingface.co/datasets/AdaLEval/{}/resolve/main/{}.json"
MTBENCH = "https://raw.githubusercontent.com/mtbench101/mt-bench-101/main/data.jsonl"
ROLEBENCH = "https://huggingface.co/datasets/ZenMoore/RoleBench/tree/abc/rolebench-eng"
COSER = "https://huggingface.co/datasets/Neph0s/CoSER/tree/abc"


def own(text: str = "") -> str:
    return f"{PLACEHOLDER}\n\n{text}" if text else PLACEHOLDER


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


CHARACTERS = {
    "book": "Tides",
    "scenario": "A storm.",
    "major_characters": ["Ada", "Bo"],
    "character_profiles": {"Ada": "A pilot.", "Bo": "A cook.", "Cy": None, "Di": "A child."},
    "key_characters": [{"name": "Ada", "motivation": "To land."}, {"name": "Bo", "motivation": "To eat."}],
}
OPENINGS = {
    "Ada": "You are Ada from Tides.|A pilot.|A storm.|Bo: A cook.\n\nDi: A child.|To land.",
    "Bo": "You are Bo from Tides.|A cook.|A storm.|Ada: A pilot.\n\nDi: A child.|To eat.",
}
DRAWN = str(np.random.default_rng(12347).choice(["Ada", "Bo"]))

# source -> (source, src_id, turns, hub tables, files, turns wanted)
QUALITATIVE: dict[str, tuple[str, str, list[str], dict[Any, Any], dict[str, bytes], list[str]]] = {
    "cnn_dailymail": (
        "abisee/cnn_dailymail",
        "b2",
        [own("Summarise:\n{article}")],
        {("abisee/cnn_dailymail", "3.0.0"): [{"id": "a1", "article": "No"}, {"id": "b2", "article": "Rain {today}"}]},
        {},
        ["Summarise:\nRain {today}"],
    ),
    "hle": (
        "cais/hle",
        "h2",
        [own()],
        {("cais/hle", None): [{"id": "h1", "question": "No"}, {"id": "h2", "question": "Why?"}]},
        {},
        ["Why?"],
    ),
    "livecodebench": (
        "https://huggingface.co/datasets/livecodebench/code_generation_lite",
        "q7",
        [own("{question}\n```\n{starter_code}\n```")],
        {},
        {
            f"{LIVECODEBENCH}test.jsonl": lines({"question_id": "q1", "question_content": "No", "starter_code": ""}),
            f"{LIVECODEBENCH}test2.jsonl": lines(
                {"question_id": "q7", "question_content": "Add.", "starter_code": "def add", "private_test_cases": "x" * 99}
            ),
        },
        ["Add.\n```\ndef add\n```"],
    ),
    "code_contests": (
        "deepmind/code_contests",
        "1575_A. Sort",
        [own("Solve: {question}")],
        {("deepmind/code_contests", None): [{"name": "1575_A. Sort", "description": "Sort it."}]},
        {},
        ["Solve: Sort it."],
    ),
    "mt-bench-101": (
        MTBENCH,
        "mtbench101_1",
        [own(), own()],
        {},
        {MTBENCH: lines({"history": [{"user": "No", "bot": ""}]}, {"history": [{"user": "One", "bot": "1"}, {"user": "Two"}]})},
        ["One", "Two"],
    ),
    "opus-100": (
        "Helsinki-NLP/opus-100",
        "opus-100_de-en_1",
        [own("Translate {question[de]} | {question}")],
        {("Helsinki-NLP/opus-100", "de-en"): [{"translation": {}}, {"translation": {"de": "Haus", "en": "house"}}]},
        {},
        ["Translate Haus | {'de': 'Haus', 'en': 'house'}"],
    ),
    "ChatRAG-Bench": (
        "nvidia/ChatRAG-Bench",
        "chatrag_1",
        [own(), own()],
        {
            ("nvidia/ChatRAG-Bench", "hybridial"): [{"messages": [], "ctxs": []}],
            ("nvidia/ChatRAG-Bench", "sqa"): [
                {
                    "messages": [
                        {"role": "user", "content": "Who?"},
                        {"role": "assistant", "content": "She."},
                        {"role": "user", "content": "When?"},
                    ],
                    "ctxs": [{"text": "First."}, {"text": "Second."}],
                }
            ],
        },
        {},
        ["Please give a full and complete answer. First.\n\nSecond. Who?", "When?"],
    ),
    "MMLU-Pro": (
        "TIGER-Lab/MMLU-Pro",
        "MMLU-Pro_(1, 2)",
        [own(), own()],
        {
            ("TIGER-Lab/MMLU-Pro", None): [
                {"question": "No", "options": []},
                {"question": "2 + 2?", "options": ["3", "4"]},
                {"question": "3 + 3?", "options": ["6"]},
            ]
        },
        {},
        [
            "The following are multiple choice questions about math.\n\nQuestion: 2 + 2?\n\nOptions: (A) 3\n(B) 4\n\n",
            "Question: 3 + 3?\n\nOptions: (A) 6\n\n",
        ],
    ),
    "RoleBench": (
        ROLEBENCH,
        "rolebench_instruction-generalization_2_0_1",
        [own("Be {role_name}: {role_description_and_catchphrases}"), own()],
        {},
        {
            f"{file_address(ROLEBENCH)}/instruction-generalization/role_specific/test.jsonl": lines(
                {"role": "Jack", "question": "Jack, who are you?"},
                {"role": "Jack", "question": "No"},
                {"role": "Jack", "question": "Where from?"},
            ),
            ROLES: json.dumps({"Jack": "A sailor.", "Ann": "No"}, indent=1).encode(),
        },
        ["Be Jack: A sailor.\nWhere from?", "who are you?"],
    ),
    "CoSER": (
        COSER,
        "coser_1",
        [own()],
        {},
        {f"{file_address(COSER)}/test/test_set.json": json.dumps([{}, CHARACTERS], indent=1).encode()},
        [OPENINGS[DRAWN]],
    ),
}


@pytest.mark.parametrize("name", QUALITATIVE)
def test_a_row_is_rebuilt_from_the_layout_of_its_source(name: str) -> None:
    source, src_id, turns, hub, files, wanted = QUALITATIVE[name]
    row = {"source": source, "src_id": src_id, "turns": turns, "sub_category": "math"}
    assert rebuild([row], "qualitative", hub, files) == [wanted]


def test_livecodebench_is_read_no_further_than_its_row() -> None:
    source, src_id, turns, _, files, _ = QUALITATIVE["livecodebench"]
    asked: list[str] = []
    rebuild([{"source": source, "src_id": src_id, "turns": turns}], "qualitative", {}, files, asked)
    assert asked == [f"{LIVECODEBENCH}test.jsonl", f"{LIVECODEBENCH}test2.jsonl"]


def throughput(source: str, src_id: str, rows: list[Any], configuration: str = "throughput_1k") -> str:
    row = {"source": source, "src_id": src_id, "turns": [own()]}
    files = {source: lines(*rows)} if "://" in source else {}
    [[turn]] = rebuild([row], configuration, {}, files)
    return turn


def test_bamboo_joins_numbered_contents_and_fills_up() -> None:
    turn = throughput(BAMBOO, "reportsumm_2_0", [{"content": "Hello."}, {"content": "No"}, {"content": "Bye."}])
    wanted = (
        "\nI want you to act as a long dialogue completer.\nSTART CONTENT 1\n\nBye.\n\nEND CONTENT\n\nSTART CONTENT 2\n\nHello."
    )
    assert turn.startswith(f"{wanted}\n\nEND CONTENT\nAnswer now please.\nAnswer now")
    assert len(turn) == 1000


def test_textsort_has_its_instruction_replaced_and_is_cut() -> None:
    prompt = "\n    You are an AI assistant. Your job is to sort: [4, 1, 3, 2].\nPart 1: " + "x" * 3000
    source = ADALEVAL.format("textsort", "16k")
    turn = throughput(source, "textsort_1", [{"prompt": "No"}, {"prompt": prompt}], "throughput_2k")
    assert turn.startswith("\nYou are an AI assistant. Your job is to sort multiple sections.\nPart 1: xxx")
    assert len(turn) == 2000


@pytest.mark.parametrize(
    ("answers", "best", "shown"),
    [
        (["one", "two", "three"], "A2", ["one", "two", "three"]),
        (["one", "x" * 2000, "three"], "A1", ["one"]),  # the next one is too long
        (["one", "x" * 2000, "three"], "A3", ["threeone"]),  # as the original joins them
    ],
)
def test_stackselect_shows_what_fits_shuffled(answers: list[str], best: str, shown: list[str]) -> None:
    source = ADALEVAL.format("stackselect", "16k")
    turn = throughput(source, "77", [{"question_id": 77, "question": "How?", "all_answers": answers, "answer": best}])
    random.Random(42).shuffle(shown)
    listed = "".join(f"A{number}:\n\n{text}\n\n" for number, text in enumerate(shown, 1))
    opening = (
        "\nYou are an AI assistant. Your job is to find out the most helpful answer.\nThe question is given below.\nHow?\n\n"
    )
    closing = "Now the answers are over.\nYou must give me the best.\nFor every other answer say why.\n"
    assert turn.startswith(f"{opening}Possible answers are given below.\n{listed}{closing}{PADDING}")
    assert len(turn) == 1000


def test_hle_examples_are_of_the_other_half_drawn_by_one_generator() -> None:
    rows = [
        {"id": str(i), "question": f"q{i}?", "rationale": f"r{i}.", "category": "Math", "image": "x" if i == 3 else ""}
        for i in range(9)
    ]
    order = np.random.default_rng(42).permutation(9).tolist()
    asked, examples = order[:5], [i for i in order[5:] if i != 3]
    generator = np.random.default_rng(42)
    wanted = []
    for i in asked[:2]:
        text = "Please answer the question below.Math:\n\n"
        while len(text) + len(f"q{i}?") < 1000:
            drawn = examples[generator.choice(len(examples), size=1, replace=False)[0]]
            text += f"Question: q{drawn}?\n\nAnswer: r{drawn}.\n\n"
        wanted.append([text[: 1000 - len(f"q{i}?") + 1] + f"q{i}?"])
    placeholders = [{"source": "cais/hle", "src_id": str(i), "turns": [own()]} for i in asked[:2]]
    assert rebuild(placeholders, "throughput_1k", {("cais/hle", None): rows}, {}) == wanted


BROKEN: list[tuple[dict[str, Any], str, dict[Any, Any], dict[str, bytes], str]] = [
    ({"source": "some/where", "src_id": "1"}, "qualitative", {}, {}, "its source is not known"),
    ({"source": "cais/hle", "src_id": "h"}, "qualitative", {}, {}, "cais/hle, split 'test': cannot be loaded .*log in"),
    (
        {"source": "cais/hle", "src_id": "h"},
        "qualitative",
        {("cais/hle", None): [{"id": "x", "question": ""}]},
        {},
        "no id is 'h'",
    ),
    (
        {"source": "cais/hle", "src_id": "h"},
        "qualitative",
        {("cais/hle", None): [{"id": "h"}]},
        {},
        "another layout than is known .there is no 'question'",
    ),
    ({"source": MTBENCH, "src_id": "mt_9"}, "qualitative", {}, {MTBENCH: lines({"history": []})}, "another layout.*index"),
    ({"source": MTBENCH, "src_id": "mt_0"}, "qualitative", {}, {MTBENCH: b'{"history": ['}, "data.jsonl, line 1: not a JSON"),
    ({"source": MTBENCH, "src_id": "mt_0"}, "qualitative", {}, {MTBENCH: b"[1]\n"}, "a row is not an object, but list"),
    ({"source": MTBENCH, "src_id": "mt_0"}, "qualitative", {}, {}, "data.jsonl cannot be read .404.: check the network"),
    ({"source": MTBENCH, "src_id": None}, "qualitative", {}, {MTBENCH: lines({"history": []})}, "another layout"),
    ({"source": BAMBOO, "src_id": "b_0"}, "qualitative", {}, {BAMBOO: lines({"content": "x"})}, "qualitative says no length"),
    ({"source": "Helsinki-NLP/opus-100", "src_id": "7"}, "qualitative", {}, {}, "another layout"),
]


@pytest.mark.parametrize(("row", "configuration", "hub", "files", "said"), BROKEN)
def test_what_cannot_be_rebuilt_says_why(
    row: dict[str, Any], configuration: str, hub: dict[Any, Any], files: dict[str, bytes], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        rebuild([{"turns": [own("{article}")], **row}], configuration, hub, files)


def test_prompts_are_not_taken_from_a_page_that_lacks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    source, src_id, turns, hub, _, _ = QUALITATIVE["ChatRAG-Bench"]
    row = {"source": source, "src_id": src_id, "turns": turns}
    for page, said in (
        (b"<html>", "is not the file that holds the prompts"),
        (b"x = 1", "holds 0 prompts that begin with 'Please"),
    ):
        with pytest.raises(CheckpointError, match=said):
            rebuild([row], "qualitative", hub, dict.fromkeys(PAGES, page))


@pytest.mark.parametrize(("text", "wanted"), [("abc", "abc"), ("abcd", "abc"), ("a", "aAn")])
def test_texts_are_cut_and_filled_up_to_a_length(text: str, wanted: str) -> None:
    assert fitted(text, 3, Letters()) == wanted


def test_a_table_is_read_once_also_where_it_fails() -> None:
    asked: list[str] = []

    def fetch(address: str) -> Iterator[bytes]:
        asked.append(address)
        yield b'{"a": 1, "b": 2}\n\n'
        if "bad" in address:
            raise OSError("gone")

    tables = Sources(fetch=fetch)
    assert [tables.rows(Table("https://x/good.jsonl", ("a",))) for _ in "12"] == [[{"a": 1}]] * 2
    for _ in "12":
        with pytest.raises(CheckpointError, match="gone"):
            tables.rows(Table("https://x/bad.jsonl"))
    assert asked == ["https://x/good.jsonl", "https://x/bad.jsonl"]


def test_hub_tables_are_read_by_their_columns_and_at_their_revision() -> None:
    asked: list[Any] = []

    class Rows(list[Any]):
        def select_columns(self, names: list[str]) -> list[Any]:
            return [{name: row[name] for name in names} for row in self]

    def load(name: str, configuration: str | None, **how: Any) -> Any:
        asked.append((name, configuration, how))
        return Rows([{column: column for column in (*HLE.columns, "picture")}])

    assert Sources(load).rows(HLE) == [{column: column for column in HLE.columns}]
    assert asked == [("cais/hle", None, {"split": "test", "revision": HLE.revision, "streaming": True})]


def test_json_lines_under_the_name_of_json_are_read() -> None:
    fetch: Callable[[str], Any] = lambda address: [b'{"a": 1}\n', b'{"a": 2}\n']  # noqa: E731
    assert Sources(fetch=fetch).rows(Table("https://x/rows.json")) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("address", ["file:///etc/hostname", "ftp://x/y"])
def test_an_address_of_this_machine_is_never_opened(address: str) -> None:
    with pytest.raises(ValueError, match="not a web address"):
        list(sources.fetch_lines(address))
