"""Suites: small fakes in the layout of each source, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluating import write_rows

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.eval.suites import PLACEHOLDER, load_suite

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
    with pytest.raises(CheckpointError, match=r"row 2 holds a placeholder.*prepare\.py \| python3 - --config qualitative"):
        load_suite("speed-bench", load=hub(rows))


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
    with pytest.raises(ConfigError, match="no suite 'mt_bench': give mini, mt-bench, speed-bench"):
        load_suite("mt_bench")


def test_a_limit_takes_the_categories_in_turn_and_leaves_the_digest(tmp_path: Path) -> None:
    suite = load_suite(str(write_rows(tmp_path / "s.jsonl")))
    assert [p.id for p in suite.limited(3).prompts] == ["a", "c", "b"]
    assert suite.limited(3).digest == suite.digest
