"""The Triton kernels around a step's products against their references: on CUDA, or on the CPU under TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from dataclasses import fields

import pytest
import torch
from step_scene import LIMIT, SLOTS, SceneState, chunk_plan, numbers, verify_plan

from flashdraft.kernels import step
from flashdraft.kernels.paged import Rows

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA, or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEQUENCES = [(3, 4), (5, 2), (0, 1), (1, 4), (6, 3)]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setattr(step, "_has_kernels", lambda x: True)


def assert_same(got: step.Inputs, expected: step.Inputs) -> None:
    """Every number and every dtype; the ids of padding may differ, as whatever nobody's state holds."""
    assert got.rows.max_tile_rows == expected.rows.max_tile_rows
    pairs = [(got.ids, expected.ids), (got.positions, expected.positions), (got.logit_rows, expected.logit_rows)]
    names = [f.name for f in fields(Rows) if f.name != "max_tile_rows"]
    pairs += [(getattr(got.rows, name), getattr(expected.rows, name)) for name in names]
    for mine, theirs in pairs:
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype
            assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize(("rows", "tiles"), [(14, 5), (16, 7), (144, 130), (300, 260)])
def test_rows_to_verify_are_those_of_the_reference(rows, tiles):
    state, plan = SceneState(4, DEVICE), verify_plan(SEQUENCES, rows, tiles, DEVICE)
    expected = step.verify_rows_reference(state, *plan, LIMIT, 4)
    assert_same(step.verify_rows(state, *plan, LIMIT, 4), expected)


def test_rows_to_verify_without_a_draft_are_those_of_the_reference():
    state, plan = SceneState(1, DEVICE), verify_plan([(4, 1), (5, 1), (2, 1)], 8, 7, DEVICE)
    assert_same(step.verify_rows(state, *plan, LIMIT, 1), step.verify_rows_reference(state, *plan, LIMIT, 1))


@pytest.mark.parametrize("block_size", [2, 8, 13, 16, 21, 40])
@pytest.mark.parametrize("n", [1, 6])
def test_blocks_are_those_of_the_reference(block_size, n):
    state, slots = SceneState(block_size, DEVICE), numbers([4, 1, 5, 0][:n], n, DEVICE)
    expected = step.block_rows_reference(state, slots, 11, LIMIT)
    assert_same(step.block_rows(state, slots, 11, LIMIT), expected)


@pytest.mark.parametrize(
    ("chunks", "tiles"),
    [([(3, 10, 40)], 3), ([(3, 0, 1)], 1), ([(2, 7, 250)], 17), ([], 2), ([(3, 5, 20), (1, 0, 16), (2, 9, 1)], 6)],
)
def test_rows_of_chunks_are_those_of_the_reference(chunks, tiles):
    plan, ids = chunk_plan(chunks, tiles, DEVICE), numbers([*range(16 * tiles - 3)], 16 * tiles, DEVICE)
    assert_same(step.chunk_rows(*plan, ids), step.chunk_rows_reference(*plan, ids))


def assert_same_samples(got: step.Samples, expected: step.Samples) -> None:
    for name, mine, theirs in zip(step.Samples._fields, got, expected, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        assert mine.equal(theirs), name


@pytest.mark.parametrize("rows", [1, 14, 300])
def test_how_rows_sample_is_that_of_the_reference(rows):
    state, (slots, offsets, _) = SceneState(4, DEVICE), verify_plan(SEQUENCES, max(rows, 14), 5, DEVICE)
    slots, offsets = slots[:rows], offsets[:rows]
    assert_same_samples(step.sampling_rows(state, slots, offsets), step.sampling_rows_reference(state, slots, offsets, 1.0))


@pytest.mark.parametrize(("n", "block_size"), [(1, 2), (6, 8), (6, 21), (40, 8)])
def test_how_blocks_are_proposed_is_that_of_the_reference(n, block_size):
    state, slots = SceneState(block_size, DEVICE), numbers([6, 2, 0, 5][:n], n, DEVICE)
    offsets = torch.arange(-1, block_size - 1, device=DEVICE).repeat(n)
    expected = step.sampling_rows_reference(state, slots.repeat_interleave(block_size), offsets, 0.7)
    got = step.sampling_blocks(state, slots, block_size, 0.7)
    assert got.noise[0, 3] == max(state.length[6] - state.prompt[6] - 1, 0)
    assert_same_samples(got, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size", [2, 4, 13, 21])
def test_kept_proposals_are_those_of_the_reference(block_size, dtype):
    mine, theirs = SceneState(block_size, DEVICE), SceneState(block_size, DEVICE)
    slots = numbers([6, 2, 0], 4, DEVICE)
    best = torch.randint(-1, 90, (4 * block_size,), generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    step.keep_proposals(mine, slots, best)
    step.keep_proposals_reference(theirs, slots, best)
    assert all(map(torch.equal, mine.parts(), theirs.parts()))


@pytest.mark.parametrize("forced", [None, [0, 2, 1, 1], [99]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 13])
def test_the_state_behind_a_choice_is_that_of_the_reference(block_size, dtype, forced):
    mine, theirs = SceneState(block_size, DEVICE), SceneState(block_size, DEVICE)
    widths = [min(block_size, n) for n in (4, 8, 1, 3, 13)]
    sequences = list(zip((3, 5, 0, 1, 6), widths, strict=True))
    _, _, (slots, starts, counts) = verify_plan(sequences, 48, 7, DEVICE)
    forced = None if forced is None else torch.tensor(forced, dtype=torch.int32, device=DEVICE)
    seen = set()
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(-1, 4, (sum(widths) + 2,), generator=generator).to(DEVICE, dtype)
        if seed % 2 and block_size > 1:  # right up to some row
            for (slot, width), start in zip(sequences, starts.tolist(), strict=False):
                right = min(seed, width - 1)
                tokens[start : start + right] = theirs.proposals[slot, :right].to(dtype)
        got, expected = (torch.zeros((7, block_size + 1), dtype=torch.int32, device=DEVICE) for _ in range(2))
        step.advance(mine, tokens, got, slots, (starts, counts), forced)
        step.advance_reference(theirs, tokens, expected, slots, (starts, counts), forced)
        assert got[:5].tolist() == expected[:5].tolist()
        assert all(map(torch.equal, mine.parts(), theirs.parts()))
        assert int(mine.length[SLOTS]) == 1
        seen |= set(got[:5, 0].tolist())
    assert forced is not None or block_size == 1 or len(seen) > 1, "nothing was accepted"


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("slot", [2, -1])
@pytest.mark.parametrize("token", [17, -1])
def test_the_token_behind_a_prompt_is_that_of_the_reference(block_size, slot, token):
    mine, theirs = SceneState(block_size, DEVICE), SceneState(block_size, DEVICE)
    if block_size > 1:
        mine.proposals[2] = theirs.proposals[2] = token  # none of them was asked about
    slots, tokens = numbers([slot], 1, DEVICE), torch.tensor([token], dtype=torch.int32, device=DEVICE)
    got, expected = (torch.zeros((1, block_size + 1), dtype=torch.int32, device=DEVICE) for _ in range(2))
    step.advance(mine, tokens, got, slots, None)
    step.advance_reference(theirs, tokens, expected, slots, None)
    assert got.tolist() == expected.tolist() == [[1] + [token] * block_size]
    assert all(map(torch.equal, mine.parts(), theirs.parts()))
