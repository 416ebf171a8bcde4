from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flashdraft.draft import DFlashDraft
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.targets.target import Target
from flashdraft.train.data import Batches, Records, lay_out, load_records, pack_rows, read_column, write_shard
from flashdraft.train.trainer import packed_forward


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

    write_shard(tmp_path, [row([1, 2], [3], 2**64 - 1), row([4], [5, 6, 7], 8)])
    write_shard(tmp_path, [row([9], [10], 11)])
    records = load_records(tmp_path)
    assert [records.record(i).tolist() for i in range(3)] == [[1, 2, 3], [4, 5, 6, 7], [9, 10]]
    assert records.prompt_lengths.tolist() == [2, 1, 1]
    assert records.answer_tokens == 5
    assert read_column(tmp_path, "prompt_hash") == [2**64 - 1, 8, 11]


def test_records_that_hold_the_mask_token_are_left_out() -> None:
    records = Records.from_lists([([5, 6], [7]), ([5], [3, 8]), ([3], [4]), ([9], [9, 9])], "abcd")
    kept = records.without(3)
    assert [kept.record(i).tolist() for i in range(len(kept))] == [[5, 6, 7], [9, 9, 9]]
    assert kept.prompt_lengths.tolist() == [2, 1]
    assert kept.categories == ["a", "d"]


def test_loading_without_shards_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="run synthesize first"):
        load_records(tmp_path)
