"""What stands around the products of a step: rows of a pass from plan and state, proposals kept, the state behind a choice.

These are the PyTorch references; on CUDA each is one kernel of step_triton.py, since a launch costs 1.5 to 2 us in a graph
however small it is. Shape letters: S slots, N sequences, T rows, B block size. A plan is int32, -1 where it says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashdraft.kernels.paged import Rows

TILE_ROWS = 16


class State(Protocol):
    """What is known of every slot, int64. The last row belongs to nobody: rows of padding use it.

    length [S + 1]: tokens; the anchor [S + 1], the last of them, is at position length - 1. proposals [S + 1, B - 1]. prompt
    [S + 1]: tokens of the prompt. sampling float64 [S + 1, 8]: a line of Samples, with the first three columns of the noise.
    """

    length: Tensor
    anchor: Tensor
    proposals: Tensor
    prompt: Tensor
    sampling: Tensor


@dataclass(frozen=True)
class Inputs:
    """The rows of one pass: ids and positions int64 [T], their tiles, and which rows need logits (int64; None: all)."""

    ids: Tensor
    positions: Tensor
    rows: Rows
    logit_rows: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, tiles: int, most: int, device: torch.device) -> Inputs:
        """To be filled. Every tensor has memory of its own, for attention would compile anew for another alignment."""
        ids, whole = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
        positions, slots = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
        slot, start, count, end = (torch.empty(tiles, dtype=torch.int32, device=device) for _ in range(4))
        return cls(ids, whole, Rows(positions, slots, slot, start, count, end, tile_rows(most)))


class Samples(NamedTuple):
    """How rows sample: temperature and limit float32 [T, 1], top_k int64 [T, 1], top_p float64 [T, 1], greedy bool [T], noise
    int64 [T, 4] (seed low, seed high, choice, output token)."""

    temperature: Tensor
    limit: Tensor
    top_k: Tensor
    top_p: Tensor
    greedy: Tensor
    noise: Tensor

    @classmethod
    def from_lines(cls, lines: Tensor, index: Tensor) -> Samples:
        """Of lines float64 [T, 8], the columns in their order, for output tokens index int64 [T]."""
        temperature, limit, top_k, top_p, greedy = lines[:, :5].split(1, 1)
        noise = torch.cat([lines[:, 5:8].long(), index[:, None]], 1)
        return cls(temperature.float(), limit.float(), top_k.long(), top_p, greedy[:, 0] > 0, noise)


def tile_rows(most: int) -> int:
    """Rows that a tile is made for, where a sequence has at most so many: a power of two, TILE_ROWS at most."""
    return min(TILE_ROWS, 1 << (most - 1).bit_length())


def state_rows(state: State, slots: Tensor) -> Tensor:
    """State rows int64 of slots int32, nobody's for -1."""
    return torch.where(slots < 0, len(state.length) - 1, slots).long()


def verify_rows(
    state: State, slots: Tensor, offsets: Tensor, tiles: tuple[Tensor, Tensor, Tensor], limit: int, most: int
) -> Inputs:
    """Anchors (offset 0) and proposals (offset 1 and up) of slots [T], in tiles (slots, first rows, rows) [N].

    most: rows of a tile at most. Rows at position `limit` or beyond, of steps behind a request's end, are like padding.
    """
    if _has_kernels(slots):
        inputs = Inputs.empty(len(slots), len(tiles[0]), most, slots.device)
        _triton().verify_rows(inputs, state, slots, offsets, tiles, limit)
        return inputs
    return verify_rows_reference(state, slots, offsets, tiles, limit, most)


def verify_rows_reference(
    state: State, slots: Tensor, offsets: Tensor, tiles: tuple[Tensor, Tensor, Tensor], limit: int, most: int
) -> Inputs:
    index, (tile_slot, start, count) = state_rows(state, slots), tiles
    ids = state.anchor[index]
    if state.proposals.shape[1]:
        ids = torch.where(offsets > 0, state.proposals[index, (offsets.long() - 1).clamp(min=0)], ids)
    ends = state.length[state_rows(state, tile_slot)] - 1 + count
    return _inputs(ids, slots, state.length[index] - 1 + offsets, (tile_slot, start, count, ends), limit, most)


def block_rows(state: State, slots: Tensor, mask_id: int, limit: int) -> Inputs:
    """The draft's blocks of slots [N]: the anchor, then B - 1 mask tokens. Positions as in verify_rows."""
    if _has_kernels(slots):
        n, size = len(slots), state.proposals.shape[1] + 1
        inputs = Inputs.empty(n * size, n * -(-size // TILE_ROWS), size, slots.device)
        _triton().block_rows(inputs, state, slots, mask_id, limit)
        return inputs
    return block_rows_reference(state, slots, mask_id, limit)


def block_rows_reference(state: State, slots: Tensor, mask_id: int, limit: int) -> Inputs:
    index, n, size = state_rows(state, slots), len(slots), state.proposals.shape[1] + 1
    ids = torch.full((n, size), mask_id, device=slots.device)
    ids[:, 0] = state.anchor[index]
    anchors = state.length[index] - 1
    positions = anchors[:, None] + torch.arange(size, device=slots.device)
    starts = torch.arange(0, size, TILE_ROWS, device=slots.device, dtype=torch.int32)
    first = torch.arange(n, device=slots.device, dtype=torch.int32)[:, None] * size + starts
    tiles = (
        slots.repeat_interleave(len(starts)),
        first.flatten(),
        (size - starts).clamp(max=TILE_ROWS).repeat(n),
        (anchors + size).repeat_interleave(len(starts)),
    )
    return _inputs(ids.flatten(), slots.repeat_interleave(size), positions.flatten(), tiles, limit, size)


def _inputs(
    ids: Tensor, slots: Tensor, positions: Tensor, tiles: tuple[Tensor, Tensor, Tensor, Tensor], limit: int, most: int
) -> Inputs:
    tile_slot, start, count, end = tiles
    slots, positions = torch.where(positions < limit, slots, -1), positions.clamp(0, limit - 1)
    ends = end.clamp(0, limit).int()
    rows = Rows(positions.int(), slots, tile_slot, start.clamp(min=0), count.clamp(min=0), ends, tile_rows(most))
    return Inputs(ids, positions, rows)


def chunk_rows(tiles: tuple[Tensor, Tensor, Tensor, Tensor], logit_rows: Tensor, ids: Tensor) -> Inputs:
    """Parts of prompts, with T = TILE_ROWS * N ids: tiles (slots, first positions, rows, ends) [N]. logit_rows [P]: of the last
    rows of the prompts that end; what is behind them may be any row.
    """
    if _has_kernels(ids):
        wanted = torch.empty(len(logit_rows), dtype=torch.int64, device=ids.device)
        inputs = replace(Inputs.empty(len(ids), len(tiles[0]), TILE_ROWS, ids.device), logit_rows=wanted)
        _triton().chunk_rows(inputs, tiles, logit_rows, ids)
        return inputs
    return chunk_rows_reference(tiles, logit_rows, ids)


def chunk_rows_reference(tiles: tuple[Tensor, Tensor, Tensor, Tensor], logit_rows: Tensor, ids: Tensor) -> Inputs:
    slot, first, count, end = tiles
    offsets = torch.arange(TILE_ROWS, device=ids.device, dtype=torch.int32)
    count = count.clamp(min=0)
    positions = (first[:, None] + torch.minimum(offsets, count[:, None] - 1)).clamp(min=0).flatten()
    rows = Rows(
        positions=positions,
        slots=torch.where(offsets < count[:, None], slot[:, None], -1).flatten(),
        tile_slot=slot,
        tile_start=torch.arange(0, len(ids), TILE_ROWS, device=ids.device, dtype=torch.int32),
        tile_rows=count,
        tile_end=end.clamp(min=0),
        max_tile_rows=TILE_ROWS,
    )
    return Inputs(ids.long().clamp(min=0), positions.long(), rows, logit_rows.long().clamp(min=0))


def sampling_rows(state: State, slots: Tensor, offsets: Tensor) -> Samples:
    """How rows [T] at these offsets behind the known tokens of slots [T] sample."""
    if _has_kernels(slots):
        return _triton().sampling_rows(state, slots, offsets, block=1, share=1.0)
    return sampling_rows_reference(state, slots, offsets, 1.0)


def sampling_blocks(state: State, slots: Tensor, block: int, share: float) -> Samples:
    """How the rows [N * B] of blocks of slots [N] are proposed: row k is for the k-th token behind the anchor.

    share: of the noise, above 0 (engine/proposals.py); the temperature takes it.
    """
    if _has_kernels(slots):
        return _triton().sampling_rows(state, slots, None, block=block, share=share)
    offsets = torch.arange(-1, block - 1, device=slots.device).repeat(len(slots))
    return sampling_rows_reference(state, slots.repeat_interleave(block), offsets, share)


def sampling_rows_reference(state: State, slots: Tensor, offsets: Tensor, share: float) -> Samples:
    row = state_rows(state, slots)
    samples = Samples.from_lines(state.sampling[row], (state.length[row] - state.prompt[row] + offsets).clamp(min=0))
    return samples._replace(temperature=samples.temperature * share)


def keep_proposals(state: State, slots: Tensor, best: Tensor) -> None:
    """The draft's tokens [N * B] at every row of the blocks, any integer: all but the anchors' become proposals, 0 for -1."""
    if _has_kernels(slots):
        return _triton().keep_proposals(state, slots, best)
    return keep_proposals_reference(state, slots, best)


def keep_proposals_reference(state: State, slots: Tensor, best: Tensor) -> None:
    state.proposals[state_rows(state, slots)] = best.view(len(slots), -1)[:, 1:].long().clamp(min=0)


def advance(
    state: State,
    tokens: Tensor,
    outcome: Tensor,
    slots: Tensor,
    places: tuple[Tensor, Tensor] | None,
    forced: Tensor | None = None,
) -> None:
    """Move slots [N] on by what the target has chosen: tokens [T], any integer, -1 for a row without a choice.

    places: first row and number of rows of each sequence [N]; None: one row each, and nothing to accept. Accepted are the
    proposals up to the first that is not the choice at its row. outcome int32 [N, B + 1]: tokens committed, then the choices.
    forced int32 (a benchmark): so many are accepted, in turn by length, whatever they are.
    """
    if _has_kernels(tokens):
        return _triton().advance(state, tokens, outcome, slots, places, forced)
    return advance_reference(state, tokens, outcome, slots, places, forced)


def advance_reference(
    state: State,
    tokens: Tensor,
    outcome: Tensor,
    slots: Tensor,
    places: tuple[Tensor, Tensor] | None,
    forced: Tensor | None = None,
) -> None:
    index, most = state_rows(state, slots), state.proposals.shape[1]
    start, count = places or (torch.arange(len(slots), device=slots.device), torch.ones_like(slots))
    offsets = torch.arange(most + 1, device=slots.device)
    chosen = tokens.long()[(start[:, None] + offsets).clamp(0, len(tokens) - 1)]
    length = state.length[index]
    if forced is None:
        right = (chosen[:, :-1] == state.proposals[index]) & (offsets[1:] < count[:, None])
        accepted = right.long().cumprod(1).sum(1)
    else:
        accepted = forced[length % len(forced)].long().clamp(max=most)
    outcome[:, 0], outcome[:, 1:] = accepted + 1, chosen
    # A row without a choice is -1: its request ends, and until then any token will do.
    state.anchor[index] = chosen.gather(1, accepted[:, None])[:, 0].clamp(min=0)
    state.length[index] = torch.where(slots < 0, 1, length + accepted + 1)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda


def _triton() -> ModuleType:
    from flashdraft.kernels import step_triton

    return step_triton
