"""Stopped anywhere, by anything, and started again: no answer is lost, none is doubled, and all are those of one run."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from killing import run_until
from saved import Pair, saved_pair
from synthesizing import SHORT, load_pair, rows_of, some_prompts, tiny_llm

from flashdraft.errors import ConfigError
from flashdraft.llm import LLM
from flashdraft.targets.load import load_target
from flashdraft.train import records
from flashdraft.train.identity import headers, target_hash
from flashdraft.train.records import Key, Store
from flashdraft.train.sources import Generator, Lengths, load_source
from flashdraft.train.synthesize import Progress, synthesize

PROMPTS = some_prompts(12, turns=3)
CONFIG = replace(SHORT, samples=2, greedy_share=0.2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def llm(pair: Path) -> LLM:
    return tiny_llm(pair)


@pytest.fixture(scope="module")
def uninterrupted(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    synthesize(llm, PROMPTS, folder, CONFIG)
    assert len(rows_of(folder)) > 24
    assert max(key[2] for key in rows_of(folder)) == 2, "some conversations reach their third turn"
    return folder


def dropped(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "dropped.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["prompt_hash"], line["sample"], line["turn"]))


def assert_same(directory: Path, whole: Path) -> None:
    assert rows_of(directory) == rows_of(whole)
    assert dropped(directory) == dropped(whole)
    assert (directory / "journal.jsonl").read_bytes() == b""
    counts = [json.loads((folder / "synthesis.json").read_text())["counts"] for folder in (directory, whole)]
    assert counts[0] == counts[1]


def answer(pair: Path, directory: Path) -> None:
    records.SHARD_ROWS = 3  # so that kills fall between a shard and its journal
    synthesize(load_pair(Pair(pair / "target", pair / "draft")), PROMPTS, directory, CONFIG)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_killed_many_times_gives_the_answers_of_one_that_was_not(
    llm: LLM, pair: Path, uninterrupted: Path, tmp_path: Path, seed: int
) -> None:
    draws, kills, code = random.Random(seed), 0, -1
    while code:
        number = draws.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT])
        code = run_until(draws.randrange(1, 16) if kills < 12 else 0, number, tmp_path, answer, pair, tmp_path)
        assert code in (0, -signal.SIGKILL, 130)
        kills += code != 0
    assert kills >= 3
    assert_same(tmp_path, uninterrupted)


STEPS = ["write", "ftruncate", "replace", "fsync", "write_table"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("ending", ["killed", "interrupted"])
def test_a_run_that_ends_at_any_system_call_is_taken_up(
    llm: LLM, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, ending: str
) -> None:
    """Right before, or right after, the n-th call of each kind that touches the directory. What is killed does nothing more;
    what is interrupted, as by Ctrl-C, still ends in good order."""
    monkeypatch.setattr(records, "SHARD_ROWS", 9)
    for number in range(4):
        with monkeypatch.context() as patch:
            end_at(patch, step, number // 2 if step != "write" else 7 * number, number % 2 == 1, ending == "killed")
            with pytest.raises(Ended):
                synthesize(llm, PROMPTS, tmp_path / f"{number}", CONFIG)
        synthesize(llm, PROMPTS, tmp_path / f"{number}", CONFIG)
        assert_same(tmp_path / f"{number}", uninterrupted)


class Ended(BaseException):
    """Nothing handles it."""


def end_at(patch: pytest.MonkeyPatch, step: str, number: int, after: bool, killed: bool) -> None:
    calls, dead = 0, False

    def deadly(name: str, real):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal calls, dead
            if dead:
                raise Ended
            calls += name == step
            ends = name == step and calls == number + 1
            dead = ends and killed
            result = None if ends and not after else real(*args, **kwargs)
            if ends:
                raise Ended
            return result

        return call

    for name in ("write", "ftruncate", "fsync"):
        patch.setattr(os, name, deadly(name, getattr(os, name)))
    patch.setattr(Path, "replace", deadly("replace", Path.replace))
    patch.setattr(pq, "write_table", deadly("write_table", pq.write_table))


def test_half_a_line_and_half_a_shard_were_never_there(llm: LLM, uninterrupted: Path, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.counts["answers kept"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(llm, PROMPTS, tmp_path, CONFIG, report=stop)
    assert len(rows_of(tmp_path)) == 7, "what is complete becomes a shard when a run is interrupted"
    (tmp_path / "answers-00001.partial").write_bytes(b"PAR1 and then nothing")
    for name in ("journal.jsonl", "dropped.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"prompt_hash": 12, "sam')
    synthesize(llm, PROMPTS, tmp_path, CONFIG)
    assert not list(tmp_path.glob("*.partial"))
    assert_same(tmp_path, uninterrupted)


def test_a_full_disk_is_one_sentence_and_costs_nothing(
    llm: LLM, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is counted in bytes, as a disk does: the last write is cut short, and shards do not fit either."""
    room, write = 6_000, os.write

    def filling(file: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(file, data[:room])
        room -= written
        return written

    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", filling)
        patch.setattr("pyarrow.parquet.write_table", no_room)
        with pytest.raises(ConfigError, match=r"No space left on device.*same command again") as raised:
            synthesize(llm, PROMPTS, tmp_path, CONFIG)
    assert "\n" not in str(raised.value)
    whole = (tmp_path / "journal.jsonl").read_bytes().count(b"\n")
    assert whole >= 10
    seen: list[int] = []
    synthesize(llm, PROMPTS, tmp_path, CONFIG, report=lambda p: seen.append(p.counts["answers kept"]))
    assert seen[0] == whole, "all that was complete is still there"
    assert_same(tmp_path, uninterrupted)


def test_more_prompts_may_join_and_the_old_ones_are_not_asked_again(llm: LLM, uninterrupted: Path, tmp_path: Path) -> None:
    synthesize(llm, PROMPTS[:11], tmp_path, CONFIG)
    first = rows_of(tmp_path)
    progress: list[Progress] = []
    synthesize(llm, PROMPTS, tmp_path, CONFIG, report=lambda p: progress.append(replace(p)))
    assert first.items() <= rows_of(tmp_path).items()
    assert (progress[0].done, progress[0].total) == (22, 24)
    assert_same(tmp_path, uninterrupted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(config=replace(CONFIG, seed=7)), "seed 0, and this is 7"),
        (dict(config=replace(CONFIG, temperatures=(0.5,))), r"temperatures \[0.8\], and this is \[0.5\]"),
        (dict(config=replace(CONFIG, samples=3)), "samples 2, and this is 3"),
        (dict(target="other/name"), "target , and this is other/name"),
    ],
)
def test_other_settings_are_refused_in_one_sentence(llm: LLM, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    synthesize(llm, PROMPTS[:2], tmp_path, CONFIG)
    config = change.pop("config", CONFIG)
    with pytest.raises(ConfigError, match=message):
        synthesize(llm, PROMPTS[:2], tmp_path, config, **change)
    synthesize(llm, PROMPTS[:2], tmp_path, CONFIG)


def test_another_tokenizer_is_refused(llm: LLM, tmp_path: Path) -> None:
    synthesize(llm, PROMPTS[:2], tmp_path / "out", CONFIG)
    other = tiny_llm(tmp_path / "pair", draft=False)
    other.tokenizer.chat_template += " "
    with pytest.raises(ConfigError, match="another tokenizer or chat template"):
        synthesize(other, PROMPTS[:2], tmp_path / "out", CONFIG)


@pytest.mark.parametrize("generator", ["engine", "rollout"])
def test_answers_name_the_weights_that_made_them_and_others_do_not_join(tmp_path: Path, generator: Generator) -> None:
    def answer(seed: int) -> str | None:
        pair = saved_pair(tmp_path / str(seed), seed=seed)
        source = load_source(pair.target, Lengths(20, 12), generator=generator, device="cpu")
        synthesize(source, PROMPTS[:2], tmp_path / "out", CONFIG)
        assert source.target_hash == target_hash(load_target(pair.target))
        return source.target_hash

    made_by = answer(0)
    assert [header["target_hash"] for header in headers(tmp_path / "out").values()] == [made_by]
    with pytest.raises(ConfigError, match=f"holds answers with target hash {made_by}, and this is "):
        answer(1)
    synthesize(tiny_llm(tmp_path / "unknown", draft=False), PROMPTS[:3], tmp_path / "out", CONFIG)  # of a ready engine


def test_a_target_that_was_moved_goes_on_with_its_answers(tmp_path: Path) -> None:
    def answer(target: Path, count: int) -> int:
        source = load_source(target, Lengths(20, 12), device="cpu")
        return synthesize(source, PROMPTS[:count], tmp_path / "out", CONFIG, target=str(target))["answers kept"]

    target = saved_pair(tmp_path / "before").target
    before = answer(target, 1)
    assert answer(target.rename(tmp_path / "after"), 3) > before


def test_two_runs_into_one_directory_are_kept_apart(llm: LLM, tmp_path: Path) -> None:
    store = Store(tmp_path, {})
    with pytest.raises(ConfigError, match="another process is adding answers"):
        synthesize(llm, PROMPTS, tmp_path, CONFIG)
    store.close()
    Store(tmp_path, {}).close()


def test_what_cannot_be_written_is_named(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written \(Is a directory: journal.jsonl\)"):
        synthesize(llm, PROMPTS[:2], tmp_path, CONFIG)


def test_answers_of_unknown_origin_are_not_added_to(llm: LLM, tmp_path: Path) -> None:
    synthesize(llm, PROMPTS[:2], tmp_path, CONFIG)
    (tmp_path / "synthesis.json").unlink()
    with pytest.raises(ConfigError, match=r"holds answers but no synthesis\.json"):
        synthesize(llm, PROMPTS[:2], tmp_path, CONFIG)


def test_an_answer_is_on_disk_when_it_is_added(tmp_path: Path) -> None:
    store = Store(tmp_path, {})
    store.drop(Key(3, 0, 0), "repetition", 5)
    assert json.loads((tmp_path / "dropped.jsonl").read_bytes())["prompt_hash"] == 3
    store.close()


def test_a_million_known_answers_are_looked_up_in_little_time(tmp_path: Path) -> None:
    store = Store(tmp_path, {})
    store._done = records.keys_of(range(1_000_000), 1, 0)
    store._done.sort()
    begun = time.perf_counter()
    assert store.are_done(records.keys_of(range(500_000, 1_500_000), 1, 0)).sum() == 500_000
    assert not store.are_done(records.keys_of(range(1000), 1, 1)).any()
    assert not store.are_done(records.keys_of(range(1000), 0, 0)).any()
    assert time.perf_counter() - begun < 2
    store.close()
