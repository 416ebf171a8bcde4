"""The Triton kernel that projects the rows of a pass and attends at once (paged.fused_paged_attention).

Imported on CUDA (or under TRITON_INTERPRET=1) alone. The arithmetic is that of paged_rows_triton and paged_triton, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.paged_rows_triton import project_heads, projection
from flashdraft.kernels.paged_triton import attend_spans, finish, first_units, launch, place_program

if TYPE_CHECKING:
    from flashdraft.kernels.paged import Projection, Rows, Settings


@triton.jit
def _store_new(  # type: ignore[no-untyped-def]
    qkv_ptr,
    norms,
    turns,
    pages,
    sight,
    start,
    rows,
    qkv_stride,
    turn_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TURN: tl.constexpr,
    K_NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    PAGE: tl.constexpr,
    UNITS: tl.constexpr,
    STRIDES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    # The tile's own keys and values go to their pages, by the program that is about to read them there. They lie in two spans
    # at most; most programs have none of them.
    keys_ptr, values_ptr, table_ptr = pages
    first, lowest, stop, span = sight
    head, first_span = tl.program_id(1), lowest // span
    turn_now = (first // span - first_span) % tl.num_programs(2)
    turn_last = ((first + rows - 1) // span - first_span) % tl.num_programs(2)
    if (turn_now == tl.program_id(2)) | (turn_last == tl.program_id(2)):
        row, d = tl.arange(0, TILE_ROWS), tl.arange(0, D_PAD)
        position = first + row
        # Rows at tile_end or behind are padding.
        mine = (row < rows) & (position < stop) & ((position // span - first_span) % tl.num_programs(2) == tl.program_id(2))
        unit = tl.load(table_ptr + position // PAGE, mask=mine, other=0).to(tl.int64)
        at, turn_at = (start + row).to(tl.int64) * qkv_stride + (HEADS + head) * D, (start + row) * turn_stride
        inside = mine[:, None] & (d < D)[None, :]
        k = project_heads(qkv_ptr, at, mine, norms[2], norms[3], turns, turn_at, D, D_PAD, TURN, K_NORM)
        place = unit * UNITS[0] + position % PAGE * STRIDES[0] + head * STRIDES[1]
        tl.store(keys_ptr + place[:, None] + d[None, :], k, mask=inside)
        v = project_heads(qkv_ptr, at + KV_HEADS * D, mine, norms[4], norms[5], turns, turn_at, D, D_PAD, 0, V_NORM)
        place = unit * UNITS[1] + position % PAGE * STRIDES[2] + head * STRIDES[3]
        tl.store(values_ptr + place[:, None] + d[None, :], v, mask=inside)
        tl.debug_barrier()  # every thread may now read what the others stored


@triton.jit
def _project_attend(  # type: ignore[no-untyped-def]
    qkv_ptr,
    norms,
    turns,
    pages,
    lines,
    buffers,
    ends,
    qkv_stride,
    turn_stride,
    table_stride,
    scale,
    max_spans,
    PAGE: tl.constexpr,
    UNITS: tl.constexpr,
    STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    TURN: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    FUSE: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile, slot, sight = place_program(lines, PARTS, M, GROUP, WINDOW, CAUSAL)
    start, rows, row, query_head = tile
    real = row < rows
    place = (start + row).to(tl.int64) * HEADS + query_head
    pages = (pages[0], pages[1], pages[2] + slot * table_stride)
    unit = first_units(pages[2], sight, PAGE, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if slot < 0:
        return
    if KV_HEADS > 0:
        _store_new(
            qkv_ptr, norms, turns, pages, sight, start, rows, qkv_stride, turn_stride,
            HEADS, KV_HEADS, D, D_PAD, TURN, K_NORM, V_NORM, PAGE, UNITS, STRIDES, TILE_ROWS,
        )  # fmt: skip
    at, turn_at = (start + row).to(tl.int64) * qkv_stride + query_head * D, (start + row) * turn_stride
    q = project_heads(qkv_ptr, at, real, norms[0], norms[1], turns, turn_at, D, D_PAD, TURN, Q_NORM)
    attend_spans(
        q, unit, pages, buffers, sight, row, real, place, scale, max_spans,
        PAGE, UNITS, STRIDES, D, DV, DV_PAD, WINDOW, CAUSAL, SOFTCAP, BLOCK,
    )  # fmt: skip
    if FUSE:
        finish(buffers, ends, sight, real, place, query_head, max_spans, DV, DV_PAD, SINKS)


def fused_paged_attention(p: Projection, rows: Rows, table: Tensor, keys: Tensor, values: Tensor, settings: Settings) -> Tensor:
    """paged.fused_paged_attention on the device."""
    assert keys.shape[3] == values.shape[3] == p.head_dim and p.kv_heads in (0, keys.shape[2])
    own = projection(p) | dict(qkv_ptr=p.qkv, TILE_ROWS=triton.next_power_of_2(rows.max_tile_rows))
    return launch(_project_attend, own, p.qkv.shape[0], keys, values, table, rows, settings)
