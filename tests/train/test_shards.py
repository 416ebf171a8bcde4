"""Shards of answers that hold what they should not are named, with the row; what earlier ones lack is made up for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from answers import write_answers

from flashdraft.errors import CheckpointError
from flashdraft.train.data import load_records
from flashdraft.train.identity import check_tokenizer
from flashdraft.train.shards import next_shard, place_of, read_shard, rows_holding, write_shard

PAIRS = [([1, 2], [3, 4, 5]), ([6], [7, 8]), ([9, 9], [1, 2])]
IDS = pa.list_(pa.int64())
BAD: dict[str, tuple[str, Any, str]] = {
    "negative ids": ("prompt_ids", pa.array([[1], [2, -3], [4]], IDS), r"row 1 .*`prompt_ids` holds -3, which"),
    "ids beyond int32": ("output_ids", pa.array([[1], [], [2, 2**40]], IDS), r"row 2 .*`output_ids` holds 1,099,511,627,776"),
    "unsigned ids beyond int32": ("output_ids", pa.array([[2**32 - 1], [], []], pa.list_(pa.uint32())), "row 0 .*holds 4,294"),
    "a null answer": ("output_ids", pa.array([[1, 2], [], None], IDS), "row 2 .*`output_ids` is null"),
    "a null in an answer": ("output_ids", pa.array([[1, 2], [3, None], []], IDS), "row 1 .*`output_ids` holds a null"),
    "ids as text": ("output_ids", pa.array(["1 2", "3", "4"]), "column `output_ids` is string and not list<int32>"),
    "ids as floats": ("output_ids", pa.array([[1.0], [2.0], []]), "column `output_ids` is list<.*double> and not"),
    "ids that are all null": ("output_ids", pa.nulls(3), "column `output_ids` is null and not"),
    "thinking as text": ("thinking", pa.array(["on", "off", "on"]), "column `thinking` is string and not bool"),
    "a null thinking": ("thinking", pa.array([True, None, False]), "row 1 .*`thinking` is null"),
    "categories as numbers": ("category", pa.array([1, 2, 3]), "column `category` is int64 and not string"),
    "a negative hash": ("prompt_hash", pa.array([1, 2, -3]), "row 2 .*`prompt_hash` holds -3"),
    "no hash": ("prompt_hash", None, "has no column `prompt_hash`"),
    "no answers": ("output_ids", None, "has no column `output_ids`"),
}


def change(path: Path, name: str, column: Any) -> None:
    table = pq.read_table(path)
    place = table.column_names.index(name)
    pq.write_table(table.remove_column(place) if column is None else table.set_column(place, name, column), path)


@pytest.mark.parametrize("name", BAD)
def test_a_shard_that_holds_what_it_should_not_is_named(tmp_path: Path, name: str) -> None:
    write_answers(tmp_path, PAIRS[::-1])
    write_answers(tmp_path, PAIRS, shard=1)
    column, values, message = BAD[name]
    change(tmp_path / "answers-00001.parquet", column, values)
    with pytest.raises(CheckpointError, match=rf"answers-00001\.parquet.*{message}.*remove it, or make it again") as raised:
        load_records(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.uint16()), pa.list_(pa.int32(), 2)])
def test_ids_of_other_integer_types_are_read_where_they_fit(tmp_path: Path, kind: Any) -> None:
    write_answers(tmp_path, PAIRS)
    change(tmp_path / "answers-00000.parquet", "output_ids", pa.array([[3, 4], [7, 8], [1, 2]], kind))
    change(tmp_path / "answers-00000.parquet", "category", pa.array(["a", "b", "a"]).dictionary_encode())
    records = load_records(tmp_path)
    assert records.record(0).tolist() == [1, 2, 3, 4]
    assert (records.tokens.dtype, records.categories) == (np.int32, ["a", "b", "a"])


def test_a_copy_of_a_shard_is_refused_and_another_of_the_same_prompts_is_not(tmp_path: Path) -> None:
    write_answers(tmp_path, PAIRS)
    write_answers(tmp_path, [(prompt, [*answer, 5]) for prompt, answer in PAIRS])
    write_answers(tmp_path, PAIRS, shard=1)
    shutil.copy(tmp_path / "answers-00001.parquet", tmp_path / "answers-copy.parquet")
    with pytest.raises(
        CheckpointError, match=r"answers-copy\.parquet holds the same answers as answers-00001\.parquet: remove"
    ):
        load_records(tmp_path)
    (tmp_path / "answers-copy.parquet").unlink()
    assert len(load_records(tmp_path)) == 6


def test_shards_without_any_answer_are_said_so(tmp_path: Path) -> None:
    write_shard(tmp_path, [])
    write_shard(tmp_path, [])
    with pytest.raises(CheckpointError, match="hold no answers: run"):
        load_records(tmp_path)


@pytest.mark.parametrize(
    "metadata", ["[]", "3", '{"tokenizer_hash": 5}', '{"tokenizer_hash": ["a"]}', "{", "\xff", "[" * 99_999]
)
def test_metadata_of_another_kind_is_named_with_its_shard(tmp_path: Path, metadata: str) -> None:
    write_answers(tmp_path, PAIRS)
    path = tmp_path / "answers-00000.parquet"
    table = pq.read_table(path).replace_schema_metadata({"flashdraft": metadata.encode("latin-1")})
    pq.write_table(table, path)
    with pytest.raises(CheckpointError, match=r"answers-00000\.parquet: its metadata"):
        check_tokenizer(tmp_path, "0" * 32)


def test_shards_of_earlier_versions_are_read_and_not_added_to(tmp_path: Path) -> None:
    write_answers(tmp_path, PAIRS)  # without sample, turn, first_hash, turn_hash
    path = tmp_path / "answers-00000.parquet"
    table = read_shard(path, ["turn", "first_hash", "turn_hash", "prompt_hash"])
    assert table["turn"].to_pylist() == [0, 0, 0]
    assert table["first_hash"].equals(table["prompt_hash"])
    assert table["turn_hash"].equals(table["prompt_hash"])
    with pytest.raises(CheckpointError, match=r"no column `first_hash`: it is of an earlier version.*give another directory"):
        read_shard(path, ["first_hash"], whole=True)


def test_a_token_is_found_where_it_stands(tmp_path: Path) -> None:
    write_answers(tmp_path, [([1], [2])])
    write_answers(tmp_path, PAIRS, shard=1)
    assert rows_holding(tmp_path / "answers-00001.parquet", 9) == [2]
    assert rows_holding(tmp_path / "answers-00001.parquet", 1) == [0, 2]
    assert place_of(tmp_path, 9) == f"{tmp_path / 'answers-00001.parquet'}, row 2 (from 0),"
    assert place_of(tmp_path, 77) == str(tmp_path)


def test_a_shard_is_numbered_after_those_with_a_number(tmp_path: Path) -> None:
    (tmp_path / "answers-copy.parquet").touch()
    assert next_shard(tmp_path).name == "answers-00000.parquet"
    (tmp_path / "answers-00007.parquet").touch()
    assert next_shard(tmp_path).name == "answers-00008.parquet"


def test_what_a_shard_says_of_itself_is_json(tmp_path: Path) -> None:
    path = write_shard(tmp_path, [], {"tokenizer_hash": "x"})
    assert json.loads(pq.read_schema(path).metadata[b"flashdraft"]) == {"tokenizer_hash": "x"}
