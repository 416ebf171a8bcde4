"""Rows of a pass from plan and state, and the state behind a choice, against what a loop over the sequences says."""

from __future__ import annotations

import pytest
import torch
from step_scene import LIMIT, SLOTS, SceneState, chunk_plan, numbers, verify_plan

from flashdraft.kernels.paged import Rows
from flashdraft.kernels.step import Inputs, advance, block_rows, chunk_rows, keep_proposals, verify_rows

SEQUENCES = [(3, 4), (5, 2), (0, 1), (1, 4), (6, 3)]


def tiles_of(rows: Rows) -> list[tuple[int, ...]]:
    parts = rows.tile_slot, rows.tile_start, rows.tile_rows, rows.tile_end
    return list(zip(*(x.tolist() for x in parts), strict=True))


def assert_dtypes(inputs: Inputs) -> None:
    """What transformers and the attention kernels take, laid out as kernels read it."""
    rows = inputs.rows
    assert inputs.ids.dtype == inputs.positions.dtype == torch.int64
    for x in (rows.positions, rows.slots, rows.tile_slot, rows.tile_start, rows.tile_rows, rows.tile_end):
        assert x.dtype == torch.int32
        assert x.is_contiguous()
    assert inputs.positions.tolist() == rows.positions.tolist()


def test_verified_are_anchors_and_proposals_and_rows_past_the_longest_text_are_padding():
    state = SceneState(4, "cpu")
    got = verify_rows(state, *verify_plan(SEQUENCES, 16, 6, "cpu"), LIMIT, 4)
    assert_dtypes(got)
    at = 0
    for (slot, count), tile in zip(SEQUENCES, tiles_of(got.rows), strict=False):
        start = int(state.length[slot]) - 1
        for i in range(count):
            assert int(got.ids[at + i]) == int(state.anchor[slot] if i == 0 else state.proposals[slot, i - 1])
            inside = start + i < LIMIT
            assert int(got.positions[at + i]) == (start + i if inside else LIMIT - 1)
            assert int(got.rows.slots[at + i]) == (slot if inside else -1)
        assert tile == (slot, at, count, min(start + count, LIMIT))
        at += count
    assert got.rows.slots[at:].tolist() == [-1] * (16 - at)
    assert got.positions[at:].tolist() == [0] * (16 - at)
    assert tiles_of(got.rows)[5:] == [(-1, 0, 0, 0)]
    assert got.rows.max_tile_rows == 4
    assert got.logit_rows is None


def test_without_a_draft_only_anchors_are_verified():
    state = SceneState(1, "cpu")
    got = verify_rows(state, *verify_plan([(2, 1), (4, 1)], 8, 7, "cpu"), LIMIT, 1)
    assert got.ids[:2].tolist() == state.anchor[[2, 4]].tolist()


@pytest.mark.parametrize(("block_size", "cuts"), [(2, [2]), (8, [8]), (13, [13]), (21, [16, 5])])
def test_blocks_are_an_anchor_and_masks_in_tiles_of_16(block_size, cuts):
    state, slots = SceneState(block_size, "cpu"), numbers([4, 1], 3, "cpu")
    got = block_rows(state, slots, 99, LIMIT)
    assert_dtypes(got)
    assert got.ids.view(3, -1)[:, 1:].unique().tolist() == [99]
    assert got.ids.view(3, -1)[:2, 0].tolist() == state.anchor[[4, 1]].tolist()
    expected = []
    for i, slot in enumerate((4, 1, -1)):
        anchor = int(state.length[slot]) - 1
        places = torch.arange(anchor, anchor + block_size)
        assert got.positions.view(3, -1)[i].tolist() == places.clamp(max=LIMIT - 1).tolist()
        assert got.rows.slots.view(3, -1)[i].tolist() == torch.where(places < LIMIT, slot, -1).tolist()
        end = min(anchor + block_size, LIMIT)
        expected += [(slot, i * block_size + 16 * j, rows, end) for j, rows in enumerate(cuts)]
    assert tiles_of(got.rows) == expected
    assert got.rows.max_tile_rows == min(16, 1 << (block_size - 1).bit_length())


def test_chunks_of_prompts_are_cut_in_tiles_of_16_and_padded_with_their_last_positions():
    plan = chunk_plan([(3, 10, 24), (1, 0, 5)], 4, "cpu")
    got = chunk_rows(*plan, numbers([*range(100, 124), *[-1] * 8, *range(200, 205)], 64, "cpu"))
    assert_dtypes(got)
    assert got.ids.tolist() == [*range(100, 124), *[0] * 8, *range(200, 205), *[0] * 27]
    assert got.positions.tolist() == [*range(10, 34), *[33] * 8, *range(5), *[4] * 11, *[0] * 16]
    assert got.rows.slots.tolist() == [3] * 24 + [-1] * 8 + [1] * 5 + [-1] * 27
    assert tiles_of(got.rows) == [(3, 0, 16, 34), (3, 16, 8, 34), (1, 32, 5, 5), (-1, 48, 0, 0)]
    assert got.logit_rows.tolist() == [23, 36, 0]


def test_an_empty_plan_is_nothing_but_padding():
    state, nothing = SceneState(4, "cpu"), numbers([], 16, "cpu")
    before = state.parts()
    verified, block = verify_rows(state, *verify_plan([], 16, 4, "cpu"), LIMIT, 4), block_rows(state, nothing[:2], 9, LIMIT)
    for got in (verified, block, chunk_rows(*chunk_plan([], 1, "cpu"), nothing)):
        assert got.rows.slots.unique().tolist() == got.rows.tile_slot.unique().tolist() == [-1]
        assert got.positions.min() >= 0
        assert got.ids.min() >= 0
    keep_proposals(state, nothing[:2], torch.arange(8))
    advance(state, torch.arange(8), torch.zeros((2, 5), dtype=torch.int32), nothing[:2], (nothing[:2], nothing[:2]))
    assert all(map(torch.equal, state.parts(), before))
    assert int(state.length[-1]) == 1


def test_proposals_are_what_follows_the_anchor_and_a_row_without_one_proposes_0():
    state = SceneState(4, "cpu")
    before = state.proposals.clone()
    keep_proposals(state, numbers([6, 2], 3, "cpu"), torch.tensor([9, 1, -1, 3, 9, 4, 5, 6, 9, 7, 7, 7], dtype=torch.int32))
    assert state.proposals[[6, 2]].tolist() == [[1, 0, 3], [4, 5, 6]]
    others = [0, 1, 3, 4, 5]
    assert torch.equal(state.proposals[others], before[others])


@pytest.mark.parametrize("right", [0, 1, 2, 3])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_accepted_are_the_proposals_before_the_first_that_was_not_chosen(right, width):
    state = SceneState(4, "cpu")
    length, proposals = int(state.length[2]), state.proposals[2].tolist()
    tokens = torch.tensor([7, *proposals[:right], 60, 61, 62, 63], dtype=torch.int32)[:8]
    outcome = torch.zeros((3, 5), dtype=torch.int32)
    places = numbers([1], 3, "cpu"), numbers([width], 3, "cpu")
    advance(state, tokens, outcome, numbers([2], 3, "cpu"), places)
    accepted = min(right, width - 1)
    assert outcome[0].tolist() == [accepted + 1, *tokens[1:5].tolist()]
    assert int(state.length[2]) == length + accepted + 1
    assert int(state.anchor[2]) == int(tokens[1 + accepted])


def test_a_row_without_a_choice_leaves_any_token_as_the_anchor():
    state = SceneState(4, "cpu")
    outcome = torch.zeros((1, 5), dtype=torch.int32)
    advance(state, torch.tensor([-1]), outcome, numbers([2], 1, "cpu"), None)
    assert outcome.tolist() == [[1, -1, -1, -1, -1]]
    assert int(state.anchor[2]) == 0


def test_a_benchmark_says_how_many_are_accepted_by_the_length():
    state, forced = SceneState(4, "cpu"), torch.tensor([0, 9, 1], dtype=torch.int32)
    slots, before = numbers(list(range(SLOTS)), SLOTS, "cpu"), state.length.clone()
    outcome, starts = torch.zeros((SLOTS, 5), dtype=torch.int32), torch.arange(SLOTS, dtype=torch.int32)
    advance(state, torch.full((SLOTS,), 70), outcome, slots, (starts, torch.ones_like(starts)), forced)
    expected = [min(forced.tolist()[length % 3], 3) + 1 for length in before.tolist()]
    assert outcome[:, 0].tolist() == expected[:SLOTS]
    assert (state.length - before)[:SLOTS].tolist() == expected[:SLOTS]
