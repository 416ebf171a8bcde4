from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from answers import write_answers

from flashdraft.draft import DFlashDraft
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.targets.target import Target
from flashdraft.train.data import Batches, Records, lay_out, load_records, pack_rows, read_column, write_shard
from flashdraft.train.features import packed_forward


def test_every_record_is_packed_once_and_rows_are_full() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 400, 3000)
    rows = pack_rows(lengths, 2048, rng)
    assert sorted(i for row in rows for i in row) == list(range(3000))
    used = [int(lengths[row].sum()) for row in rows]
    assert max(used) <= 2048
    assert sum(used) / (2048 * len(rows)) > 0.95


def test_a_record_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise seq_length"):
        pack_rows(np.array([10, 33]), 32)


def test_layout_restarts_positions_and_masks_prompts(tiny_records: Records) -> None:
    ids, positions, documents, loss_mask = lay_out(tiny_records, [[1, 2]], 32)
    assert ids[0, :28].tolist() == [*tiny_records.record(1), *tiny_records.record(2)]
    assert positions[0, :28].tolist() == [*range(19), *range(9)]
    assert documents[0].tolist() == [0] * 19 + [1] * 9 + [-1] * 4
    assert loss_mask[0].tolist() == [False] * 5 + [True] * 14 + [False] * 2 + [True] * 7 + [False] * 4


def test_packed_documents_do_not_see_each_other(tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records) -> None:
    tiny_target.capture(tiny_draft.config.target_layer_ids)
    together = Batches(tiny_records, seq_length=48, rows=2, anchors=4, block_size=4, seed=0)
    apart = Batches(tiny_records, seq_length=48, rows=1, anchors=4, block_size=4, seed=0)
    together.rows, apart.rows = [[0, 1], [2, 3]], [[1]]
    batch = together.batch(0)
    packed = packed_forward(tiny_target, batch)
    alone = packed_forward(tiny_target, apart.batch(0))
    row = int((batch.ids[:, 12] == int(tiny_records.record(1)[0])).nonzero()[0])
    for ours, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours[row, 12:31], theirs[0, :19], atol=1e-5, rtol=1e-4)


def test_shards_are_appended_and_read_back(tmp_path: Path) -> None:
    def row(prompt: list[int], output: list[int], key: int) -> dict[str, object]:
        return {
            "prompt_ids": prompt, "output_ids": output, "category": "code", "lang": "en", "thinking": False, "finish": "stop",
            "temperature": 0.5, "prompt_hash": key,
        }  # fmt: skip

    write_shard(tmp_path, [row([1, 2], [3, 3], 2**64 - 1), row([4], [5, 6, 7], 8)])
    write_shard(tmp_path, [row([9], [10], 11)])
    records = load_records(tmp_path)
    assert [records.record(i).tolist() for i in range(3)] == [[1, 2, 3, 3], [4, 5, 6, 7], [9, 10]]
    assert records.prompt_lengths.tolist() == [2, 1, 1]
    assert (records.answer_tokens, records.origins.tolist()) == (6, [0, 4, 8])
    assert read_column(tmp_path, "prompt_hash") == [2**64 - 1, 8, 11]


def test_records_that_hold_the_mask_token_are_left_out() -> None:
    records = Records.from_lists([([5, 6], [7]), ([5], [3, 8]), ([3], [4]), ([9], [9, 9])], "abcd")
    kept = records.without(3)
    assert [kept.record(i).tolist() for i in range(len(kept))] == [[5, 6, 7], [9, 9, 9]]
    assert kept.prompt_lengths.tolist() == [2, 1]
    assert kept.categories == ["a", "d"]


def test_loading_without_shards_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="run `flashdraft synthesize` first"):
        load_records(tmp_path)


def test_records_longer_than_a_row_are_cut_and_keep_their_place_in_the_data(tiny_records: Records) -> None:
    cut = tiny_records.cut(10)
    # Prompts of 3, 5, 2, 4, 6, 3, 1, 4 tokens; the last record has one answer token, which no anchor can follow.
    assert cut.lengths.tolist() == [10, 10, 9, 10, 10, 5, 10]
    assert [cut.record(i).tolist() for i in (0, 3)] == [tiny_records.record(i)[:10].tolist() for i in (0, 3)]
    assert cut.origins.tolist() == tiny_records.starts[:7].tolist()
    assert cut.categories == tiny_records.categories[:7]


def test_a_selection_takes_every_column_along(tiny_records: Records) -> None:
    keep = np.array([False, True, True, False, False, False, False, True])
    chosen = tiny_records.select(keep)
    assert [chosen.record(i).tolist() for i in range(3)] == [tiny_records.record(i).tolist() for i in (1, 2, 7)]
    assert chosen.origins.tolist() == tiny_records.starts[[1, 2, 7]].tolist()
    assert chosen.prompt_hashes.tolist() == tiny_records.prompt_hashes[keep].tolist()
    assert chosen.digest() != tiny_records.digest() == tiny.make_records().digest()


def test_shards_bring_language_thinking_and_prompt(tmp_path: Path) -> None:
    write_answers(tmp_path, [([1, 2], [3, 4])] * 4)
    records = load_records(tmp_path)
    assert records.languages == ["fr", "en", "en", "en"]
    assert records.thinking.tolist() == [True, False, False, True]
    assert len(set(records.prompt_hashes.tolist())) == 4


def test_a_shard_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_answers(tmp_path, [([1, 2], [3, 4])])
    (tmp_path / "answers-00001.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(CheckpointError, match=r"answers-00001.parquet cannot be read .*: remove it"):
        load_records(tmp_path)


def test_trimmed_batches_hold_no_block_that_is_padding_everywhere(tiny_records: Records) -> None:
    fixed, trimmed = (
        Batches(tiny_records, seq_length=32, rows=2, anchors=30, block_size=4, seed=0, trim=trim).batch(0)
        for trim in (False, True)
    )
    used = int(trimmed.supervised[:, :, 0].sum(1).max())
    assert fixed.anchors.shape == (2, 30)
    assert trimmed.anchors.shape == (2, used)
    assert torch.equal(trimmed.anchors, fixed.anchors[:, -used:])
    assert torch.equal(fixed.labels[fixed.supervised], trimmed.labels[trimmed.supervised])


@pytest.mark.parametrize(("micro_rows", "ranks"), [(2, 1), (1, 1), (1, 2)])
def test_rows_and_anchors_of_an_update_do_not_depend_on_how_they_are_shared(
    tiny_records: Records, micro_rows: int, ranks: int
) -> None:
    def update(micro_rows: int, ranks: int) -> torch.Tensor:
        shared = [
            Batches(
                tiny_records, seq_length=32, rows=2, anchors=6, block_size=4, seed=1, micro_rows=micro_rows, rank=r, ranks=ranks
            )
            for r in range(ranks)
        ]
        return torch.cat([b.batch(5, part).anchors for b in shared for part in range(b.parts)])

    assert torch.equal(update(micro_rows, ranks), update(2, 1))


def test_no_question_is_on_both_sides_of_a_split() -> None:
    # The conversation that begins with 1 asks 8 later, that of 8 asks 1, and that of 7 what nobody else does.
    first = np.array([1, 1, 2, 3, 4, 5, 6, 7, 7, 8, 8], dtype=np.uint64) << np.uint64(60)
    turn = np.array([1, 8, 2, 3, 4, 5, 6, 7, 15, 8, 1], dtype=np.uint64) << np.uint64(60)
    records = replace(Records.from_lists([([i], [5, 6]) for i in range(11)]), prompt_hashes=first, turn_hashes=turn)
    train, held = records.split(2.5 / 16)
    assert [int(train.record(i)[0]) for i in range(len(train))] == [3, 4, 5, 6, 7, 8, 9]
    assert [int(held.record(i)[0]) for i in range(len(held))] == [0, 2]
    train, held = records.split(0.0, least=2, seen=first[[0, 3]])
    assert [int(held.record(i)[0]) for i in range(len(held))] == [2, 4]
    assert len(train) == 9


@pytest.mark.parametrize("lengths", [(0, 1), (1, 0), (0, 0)])
def test_answers_too_short_to_train_on_are_cut_away(lengths: tuple[int, int]) -> None:
    records = Records.from_lists([([1, 2], [3] * lengths[0]), ([4], [5, 6]), ([7], [8] * lengths[1])])
    cut = records.cut(100)
    assert [cut.record(i).tolist() for i in range(len(cut))] == [[4, 5, 6]]
