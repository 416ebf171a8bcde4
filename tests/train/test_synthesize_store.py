"""A directory of answers that somebody, or something, has changed: one sentence that names the file, and nothing lost."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from synthesizing import SHORT, rows_of, some_prompts, tiny_llm

from flashdraft.errors import CheckpointError, ConfigError, FlashdraftError
from flashdraft.llm import LLM
from flashdraft.prompts import Prompt
from flashdraft.train.corpus import Corpus
from flashdraft.train.records import Store
from flashdraft.train.synthesize import synthesize

PROMPTS = some_prompts(6, turns=2)
ANSWER = {
    "prompt_ids": [1, 2], "output_ids": [3, 4], "thinking": False, "category": "", "lang": "en", "finish": "stop",
    "temperature": 0.5, "first_hash": 7, "turn_hash": 7, "prompt_hash": 7, "sample": 0, "turn": 0,
}  # fmt: skip
DROP = {"prompt_hash": 9, "sample": 0, "turn": 0, "reason": "repetition", "tokens": 3}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("pair"), draft=False)


@pytest.mark.parametrize("content", [b"[]", b"3", b'"x"', b"null", b"{", b"\xff\xfe", b"[" * 99_999, b""])
def test_a_header_of_another_kind_is_named(tmp_path: Path, content: bytes) -> None:
    Store(tmp_path, {"target": "x"}).close()
    (tmp_path / "synthesis.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"synthesis\.json is not what a run wrote there, a JSON object: repair it") as raised:
        Store(tmp_path, {"target": "x"})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("change", [{"target": 3}, {"sampling": []}, {"sampling": {"seed": [1]}}, {"tokenizer_hash": None}])
def test_a_header_with_values_of_another_kind_is_compared(tmp_path: Path, change: dict[str, object]) -> None:
    header = {"target": "x", "tokenizer_hash": "0", "sampling": {"seed": 0}}
    Store(tmp_path, header).close()
    (tmp_path / "synthesis.json").write_text(json.dumps({**header, **change}))
    with pytest.raises(ConfigError, match="holds answers"):
        Store(tmp_path, header)


@pytest.mark.parametrize("name", ["journal.jsonl", "dropped.jsonl"])
@pytest.mark.parametrize(
    "bad",
    [
        *[b"[]", b"3", b"null", b"{}", b"", b"\xff", b"\x00\x00", b"[" * 99_999, b'{"prompt_hash": 1, "sam'],
        *[{"prompt_hash": value} for value in (-1, 2**64, "7", 1.5, None, True, [])],
        *[{"sample": 2**31}, {"turn": "0"}],
    ],
)
def test_a_line_of_another_kind_is_named_and_the_lines_behind_it_stay(tmp_path: Path, name: str, bad: object) -> None:
    good = ANSWER if name == "journal.jsonl" else DROP
    line = bad if isinstance(bad, bytes) else json.dumps({**good, **bad}).encode()  # type: ignore[dict-item]
    lines = [json.dumps(good).encode(), line, json.dumps({**good, "prompt_hash": 8}).encode(), b'{"prompt_ha']
    (tmp_path / name).write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError, match=rf"{name}, line 2, is no record of this version: remove that line") as raised:
        Store(tmp_path, {})
    assert "\n" not in str(raised.value)
    assert (tmp_path / name).read_bytes() == b"\n".join(lines)
    (tmp_path / name).write_bytes(b"\n".join([lines[0], *lines[2:]]))
    store = Store(tmp_path, {})
    assert sum(store.counts[what] for what in ("answers kept", "answers dropped: repetition")) == 2
    store.close()


@pytest.mark.parametrize(
    "change", [{"output_ids": [1, -2]}, {"output_ids": [2**31]}, {"prompt_ids": "1"}, {"output_ids": [1.0]}, {"thinking": 1},
               {"category": None}, {"temperature": "0.5"}, {"finish": 3}, {"first_hash": -1}],
)  # fmt: skip
def test_a_field_of_another_kind_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / "journal.jsonl").write_text(json.dumps({**ANSWER, **change}) + "\n")
    with pytest.raises(ConfigError, match=r"journal\.jsonl, line 1, is no record"):
        Store(tmp_path, {})


def test_a_copy_of_a_shard_is_refused_and_nothing_is_counted_twice(llm: LLM, tmp_path: Path) -> None:
    synthesize(llm, PROMPTS[:3], tmp_path, SHORT)
    synthesize(llm, PROMPTS, tmp_path, SHORT)
    kept = rows_of(tmp_path)
    for copy in ("answers-00009.parquet", "answers-old.parquet"):
        shutil.copy(tmp_path / "answers-00001.parquet", tmp_path / copy)
        with pytest.raises(CheckpointError, match=rf"{copy} holds answers that are in answers-00001\.parquet too: remove one"):
            synthesize(llm, PROMPTS, tmp_path, SHORT)
        (tmp_path / copy).unlink()
    synthesize(llm, PROMPTS, tmp_path, SHORT)
    assert rows_of(tmp_path) == kept


@pytest.mark.parametrize("name", ["journal.jsonl", "dropped.jsonl", "synthesis.json", "answers-00000.parquet"])
def test_a_folder_in_the_place_of_a_file_is_one_sentence(llm: LLM, tmp_path: Path, name: str) -> None:
    Store(tmp_path, {}).close()
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    said = r"answers-00000\.parquet cannot be read|synthesis\.json is not what a run wrote|cannot be written"
    with pytest.raises(FlashdraftError, match=said) as raised:
        Store(tmp_path, {})
    assert "\n" not in str(raised.value)


def test_conversations_that_differ_in_the_second_turn_are_both_answered(llm: LLM, tmp_path: Path) -> None:
    prompts = [Prompt("", "", ("the fox", second)) for second in ("and", "again")]
    counts = synthesize(llm, [*prompts, prompts[0]], tmp_path, replace(SHORT, max_tokens=40))
    rows = rows_of(tmp_path).values()
    assert (counts["prompts"], counts["prompts duplicate"]) == (2, 1)
    assert len({row["prompt_hash"] for row in rows}) == 2
    assert {row["first_hash"] for row in rows} == {prompts[0].first_hash}
    assert all(row["turn_hash"] == row["first_hash"] for row in rows if row["turn"] == 0)


def test_a_prompt_of_seventy_thousand_turns_is_answered_as_far_as_it_fits(llm: LLM, tmp_path: Path) -> None:
    path, begun = tmp_path / "prompts.jsonl", time.perf_counter()
    path.write_text("".join(json.dumps({"turns": [f"fox {i}"] * 70_000}) + "\n" for i in range(3)))
    corpus = Corpus.of_files([path])
    assert corpus.turns.tolist() == [70_000] * 3
    for _ in range(2):
        counts = synthesize(llm, corpus, tmp_path / "out", SHORT)
    assert 3 <= counts["answers kept"] < 100
    assert time.perf_counter() - begun < 20


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    corpus = Corpus.of_files([path])
    path.write_text('{"prompt": "one"}\n{"prompt": "six"}\n')
    with pytest.raises(CheckpointError, match=r"prompts\.jsonl has changed while it was read"):
        corpus.read(corpus.order)


@pytest.mark.parametrize("turn", [0, 1])
def test_answers_that_somebody_removed_are_made_again_and_no_other_is(llm: LLM, tmp_path: Path, turn: int) -> None:
    prompts, config = some_prompts(12, turns=3), replace(SHORT, samples=2)
    synthesize(llm, prompts, tmp_path, config)
    whole, (path,) = rows_of(tmp_path), tmp_path.glob("answers-*.parquet")
    assert max(key[2] for key in whole) == 2
    table = pq.read_table(path)
    pq.write_table(table.filter(pc.not_equal(table["turn"], turn)), path)
    left = rows_of(tmp_path)
    for _ in range(3):
        synthesize(llm, prompts, tmp_path, config)
    rows = rows_of(tmp_path)
    assert len(left) < len(whole)
    assert left.items() <= rows.items()
    assert rows.keys() == whole.keys()
