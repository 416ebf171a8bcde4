"""The Triton kernels of step.py. Imported on CUDA (or under TRITON_INTERPRET=1) alone.

They are launched without programmatic dependent launch: kernels behind them read rows and tables before they wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.step import Samples

if TYPE_CHECKING:
    from flashdraft.kernels.step import Inputs, State

ROWS = 128  # of a program, and as many tiles


@triton.jit
def _store_rows(out, at, real, token, position, slot):  # type: ignore[no-untyped-def]
    ids_ptr, whole_ptr, position_ptr, slot_ptr = out
    tl.store(ids_ptr + at, token, mask=real)
    tl.store(whole_ptr + at, position, mask=real)
    tl.store(position_ptr + at, position, mask=real)
    tl.store(slot_ptr + at, slot, mask=real)


@triton.jit
def _store_tiles(out, at, real, slot, start, count, end):  # type: ignore[no-untyped-def]
    slot_ptr, start_ptr, count_ptr, end_ptr = out
    tl.store(slot_ptr + at, slot, mask=real)
    tl.store(start_ptr + at, start, mask=real)
    tl.store(count_ptr + at, count, mask=real)
    tl.store(end_ptr + at, end, mask=real)


@triton.jit(do_not_specialize=["rows", "tiles", "nobody", "limit"])
def _verify_rows(  # type: ignore[no-untyped-def]
    plan, state, out, tiles_out, rows, tiles, nobody, limit, PROPOSALS: tl.constexpr, BLOCK: tl.constexpr
):
    slot_ptr, offset_ptr, tile_slot_ptr, tile_start_ptr, tile_rows_ptr = plan
    length_ptr, anchor_ptr, proposals_ptr = state
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < rows
    slot = tl.load(slot_ptr + at, mask=real, other=-1)
    offset = tl.load(offset_ptr + at, mask=real, other=-1)
    row = tl.where(slot < 0, nobody, slot)
    token = tl.load(anchor_ptr + row, mask=real, other=0)
    if PROPOSALS:
        proposed = real & (offset > 0)
        token = tl.where(proposed, tl.load(proposals_ptr + row * PROPOSALS + offset - 1, mask=proposed, other=0), token)
    position = tl.load(length_ptr + row, mask=real, other=1) - 1 + offset
    slot = tl.where(position < limit, slot, -1)
    _store_rows(out, at, real, token, tl.minimum(tl.maximum(position, 0), limit - 1), slot)
    real = at < tiles
    slot = tl.load(tile_slot_ptr + at, mask=real, other=-1)
    start = tl.load(tile_start_ptr + at, mask=real, other=0)
    count = tl.load(tile_rows_ptr + at, mask=real, other=0)
    end = tl.load(length_ptr + tl.where(slot < 0, nobody, slot), mask=real, other=1) - 1 + count
    end = tl.minimum(tl.maximum(end, 0), limit)
    _store_tiles(tiles_out, at, real, slot, tl.maximum(start, 0), tl.maximum(count, 0), end)


def verify_rows(
    inputs: Inputs, state: State, slots: Tensor, offsets: Tensor, tiles: tuple[Tensor, Tensor, Tensor], limit: int
) -> None:
    rows, count = len(slots), len(tiles[0])
    assert count <= rows
    _verify_rows[(triton.cdiv(rows, ROWS),)](
        (slots, offsets, *tiles),
        _state(state),
        *_parts(inputs),
        rows,
        count,
        len(state.length) - 1,
        limit,
        PROPOSALS=state.proposals.shape[1],
        BLOCK=ROWS,
    )


@triton.jit(do_not_specialize=["sequences", "nobody", "limit", "mask_id"])
def _block_rows(  # type: ignore[no-untyped-def]
    slots_ptr,
    state,
    out,
    tiles_out,
    sequences,
    nobody,
    limit,
    mask_id,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    length_ptr, anchor_ptr, _ = state
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < sequences * SIZE
    slot = tl.load(slots_ptr + at // SIZE, mask=real, other=-1)
    row = tl.where(slot < 0, nobody, slot)
    token = tl.where(at % SIZE == 0, tl.load(anchor_ptr + row, mask=real, other=0), mask_id)
    position = tl.load(length_ptr + row, mask=real, other=1) - 1 + at % SIZE
    slot = tl.where(position < limit, slot, -1)
    _store_rows(out, at, real, token, tl.minimum(tl.maximum(position, 0), limit - 1), slot)
    TILES: tl.constexpr = (SIZE + TILE - 1) // TILE  # of a sequence
    real = at < sequences * TILES
    slot = tl.load(slots_ptr + at // TILES, mask=real, other=-1)
    end = tl.load(length_ptr + tl.where(slot < 0, nobody, slot), mask=real, other=1) - 1 + SIZE
    start = at % TILES * TILE
    end = tl.minimum(tl.maximum(end, 0), limit)
    _store_tiles(tiles_out, at, real, slot, at // TILES * SIZE + start, tl.minimum(SIZE - start, TILE), end)


def block_rows(inputs: Inputs, state: State, slots: Tensor, mask_id: int, limit: int) -> None:
    n, size = len(slots), state.proposals.shape[1] + 1
    _block_rows[(triton.cdiv(n * size, ROWS),)](
        slots,
        _state(state),
        *_parts(inputs),
        n,
        len(state.length) - 1,
        limit,
        mask_id,
        SIZE=size,
        TILE=inputs.rows.max_tile_rows,
        BLOCK=ROWS,
    )


@triton.jit(do_not_specialize=["rows", "wanted"])
def _chunk_rows(  # type: ignore[no-untyped-def]
    plan, ids_ptr, wanted_ptr, logit_rows_ptr, out, tiles_out, rows, wanted, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    slot_ptr, first_ptr, count_ptr, end_ptr = plan
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    tile, offset = at // TILE, at % TILE
    slot = tl.load(slot_ptr + tile, mask=inside, other=-1)
    count = tl.maximum(tl.load(count_ptr + tile, mask=inside, other=0), 0)
    position = tl.load(first_ptr + tile, mask=inside, other=0) + tl.minimum(offset, count - 1)
    token = tl.maximum(tl.load(ids_ptr + at, mask=inside, other=0), 0)
    _store_rows(out, at, inside, token, tl.maximum(position, 0), tl.where(offset < count, slot, -1))
    inside = at < rows // TILE
    slot = tl.load(slot_ptr + at, mask=inside, other=-1)
    count = tl.maximum(tl.load(count_ptr + at, mask=inside, other=0), 0)
    end = tl.maximum(tl.load(end_ptr + at, mask=inside, other=0), 0)
    _store_tiles(tiles_out, at, inside, slot, at * TILE, count, end)
    inside = at < wanted
    tl.store(logit_rows_ptr + at, tl.maximum(tl.load(wanted_ptr + at, mask=inside, other=0), 0), mask=inside)


def chunk_rows(inputs: Inputs, tiles: tuple[Tensor, Tensor, Tensor, Tensor], logit_rows: Tensor, ids: Tensor) -> None:
    rows, tile = len(ids), inputs.rows.max_tile_rows
    assert rows == len(inputs.rows.tile_slot) * tile and inputs.logit_rows is not None
    programs = triton.cdiv(max(rows, len(logit_rows)), ROWS)
    _chunk_rows[(programs,)](
        tiles, ids, logit_rows, inputs.logit_rows, *_parts(inputs), rows, len(logit_rows), TILE=tile, BLOCK=ROWS
    )


@triton.jit(do_not_specialize=["rows", "nobody", "share"])
def _sampling_rows(  # type: ignore[no-untyped-def]
    plan, state, out, rows, nobody, share, SIZE: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr
):
    slots_ptr, offsets_ptr = plan
    length_ptr, prompt_ptr, lines_ptr = state
    temperature_ptr, limit_ptr, top_k_ptr, top_p_ptr, greedy_ptr, noise_ptr = out
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < rows
    slot = tl.load(slots_ptr + at // SIZE, mask=real, other=-1)
    offset = at % SIZE - 1
    if GIVEN:
        offset = tl.load(offsets_ptr + at, mask=real, other=0)
    row = tl.where(slot < 0, nobody, slot)
    index = tl.load(length_ptr + row, mask=real, other=0) - tl.load(prompt_ptr + row, mask=real, other=0) + offset
    line = lines_ptr + row * 8
    tl.store(temperature_ptr + at, tl.load(line, mask=real, other=1).to(tl.float32) * share, mask=real)
    tl.store(limit_ptr + at, tl.load(line + 1, mask=real, other=0).to(tl.float32), mask=real)
    tl.store(top_k_ptr + at, tl.load(line + 2, mask=real, other=0).to(tl.int64), mask=real)
    tl.store(top_p_ptr + at, tl.load(line + 3, mask=real, other=0), mask=real)
    tl.store(greedy_ptr + at, tl.load(line + 4, mask=real, other=0) > 0, mask=real)
    for column in tl.static_range(3):
        tl.store(noise_ptr + at * 4 + column, tl.load(line + 5 + column, mask=real, other=0).to(tl.int64), mask=real)
    tl.store(noise_ptr + at * 4 + 3, tl.maximum(index, 0).to(tl.int64), mask=real)


def sampling_rows(state: State, slots: Tensor, offsets: Tensor | None, *, block: int, share: float) -> Samples:
    """Of rows at given offsets, or of whole blocks."""
    parts = state.length, state.prompt, state.sampling
    assert all(part.is_contiguous() for part in parts) and state.sampling.shape[1] == 8
    rows, device = len(slots) * block, slots.device
    dtypes = (torch.float32, torch.float32, torch.int64, torch.float64)
    columns = [torch.empty((rows, 1), dtype=dtype, device=device) for dtype in dtypes]
    greedy = torch.empty(rows, dtype=torch.bool, device=device)
    noise = torch.empty((rows, 4), dtype=torch.int64, device=device)
    out = (*columns, greedy, noise)
    _sampling_rows[(triton.cdiv(rows, ROWS),)](
        (slots, slots if offsets is None else offsets),
        parts,
        out,
        rows,
        len(state.length) - 1,
        share,
        SIZE=block,
        GIVEN=offsets is not None,
        BLOCK=ROWS,
    )
    return Samples(*out)


@triton.jit(do_not_specialize=["nobody"])
def _keep_proposals(slots_ptr, best_ptr, proposals_ptr, nobody, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    sequence = tl.program_id(0)
    slot = tl.load(slots_ptr + sequence)
    row = tl.where(slot < 0, nobody, slot)
    j = tl.arange(0, BLOCK)
    token = tl.load(best_ptr + sequence * SIZE + 1 + j, mask=j < SIZE - 1, other=0)
    tl.store(proposals_ptr + row * (SIZE - 1) + j, tl.maximum(token, 0), mask=j < SIZE - 1)


def keep_proposals(state: State, slots: Tensor, best: Tensor) -> None:
    _, _, proposals = _state(state)
    size = proposals.shape[1] + 1
    assert best.numel() == len(slots) * size and best.is_contiguous()
    _keep_proposals[(len(slots),)](
        slots, best, proposals, len(proposals) - 1, SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=1
    )


@triton.jit(do_not_specialize=["rows", "nobody"])
def _advance(  # type: ignore[no-untyped-def]
    tokens_ptr,
    outcome_ptr,
    slots_ptr,
    starts_ptr,
    counts_ptr,
    forced_ptr,
    state,
    rows,
    nobody,
    PLACES: tl.constexpr,
    FORCED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program of one warp a sequence: whoever writes a length has read it.
    length_ptr, anchor_ptr, proposals_ptr = state
    sequence = tl.program_id(0)
    slot = tl.load(slots_ptr + sequence)
    row = tl.where(slot < 0, nobody, slot)
    start = sequence
    count = 1
    if PLACES:
        start = tl.load(starts_ptr + sequence)
        count = tl.load(counts_ptr + sequence)
    j = tl.arange(0, BLOCK)
    place = tl.minimum(tl.maximum(start + j, 0), rows - 1)
    chosen = tl.load(tokens_ptr + place, mask=j < SIZE, other=0).to(tl.int64)
    length = tl.load(length_ptr + row)
    if FORCED:
        accepted = tl.minimum(tl.load(forced_ptr + length % FORCED), SIZE - 1)
    else:
        proposal = tl.load(proposals_ptr + row * (SIZE - 1) + j, mask=j < SIZE - 1, other=0)
        right = (j < SIZE - 1) & (j + 1 < count) & (chosen == proposal)
        accepted = tl.min(tl.where(right, BLOCK, j), 0)
    tl.store(outcome_ptr + sequence * (SIZE + 1), accepted + 1)
    tl.store(outcome_ptr + sequence * (SIZE + 1) + 1 + j, chosen, mask=j < SIZE)
    tl.store(anchor_ptr + row, tl.maximum(tl.sum(tl.where(j == accepted, chosen, 0), 0), 0))
    tl.store(length_ptr + row, tl.where(slot < 0, 1, length + accepted + 1))


def advance(
    state: State,
    tokens: Tensor,
    outcome: Tensor,
    slots: Tensor,
    places: tuple[Tensor, Tensor] | None,
    forced: Tensor | None = None,
) -> None:
    length, anchor, proposals = _state(state)
    size = proposals.shape[1] + 1
    assert outcome.shape == (len(slots), size + 1) and outcome.is_contiguous() and tokens.is_contiguous()
    _advance[(len(slots),)](
        tokens,
        outcome,
        slots,
        *(places or (slots, slots)),
        slots if forced is None else forced,
        (length, anchor, proposals),
        len(tokens),
        len(length) - 1,
        PLACES=places is not None,
        FORCED=0 if forced is None else len(forced),
        SIZE=size,
        BLOCK=max(2, triton.next_power_of_2(size)),
        num_warps=1,
    )


def _state(state: State) -> tuple[Tensor, Tensor, Tensor]:
    parts = state.length, state.anchor, state.proposals
    assert all(part.is_contiguous() and part.dtype == torch.int64 for part in parts)
    return parts


def _parts(inputs: Inputs) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What is written of rows, and of tiles."""
    rows = inputs.rows
    of_rows = inputs.ids, inputs.positions, rows.positions, rows.slots
    return of_rows, (rows.tile_slot, rows.tile_start, rows.tile_rows, rows.tile_end)
