"""The Triton kernels of paged attention (paged.py). Imported on CUDA (or under TRITON_INTERPRET=1) alone.

A program takes some query rows (rows of a tile times the query heads of a key head) and some spans of keys. Under
`Settings.deterministic` it takes 16 or 32, a number of the layer's: one kernel, whose order of additions is fixed, then serves
tiles of every size, and a row's bits cannot tell them apart.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels import hopper_attention
from flashdraft.kernels.paged_combine_triton import LOG2E, combine, tile_sight
from flashdraft.kernels.paged_rows_triton import launch_options, page_layout, project_rows, store_context, store_rows

if TYPE_CHECKING:
    from flashdraft.kernels.paged import Rows, Settings

LEAST_SHARED_BYTES = 99 * 1024  # of compute capability 8.9 and 12.0; assumed where no driver can be asked


@triton.jit
def _units(table_ptr, begin, low, high, columns, PAGE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # The units of the keys begin + columns, read for keys low..high-1 alone. A few pages are read one by one and by halves:
    # a load of 32 bits would become a stage of the pipeline, and keys and values would be one tile ahead instead of two.
    if PAGE % BLOCK == 0 or (BLOCK % PAGE == 0 and BLOCK // PAGE <= 8):
        unit = tl.zeros([BLOCK], tl.int32)
        for i in tl.static_range(max(1, BLOCK // PAGE)):
            start = (begin // PAGE + i) * PAGE
            half = (table_ptr + begin // PAGE + i).to(tl.pointer_type(tl.uint16))
            needed = (start < high) & (start + PAGE > low)
            one = tl.load(half, mask=needed, other=0).to(tl.int32) | tl.load(half + 1, mask=needed, other=0).to(tl.int32) << 16
            unit = tl.where(columns // PAGE == i, one, unit)
    else:
        keys = begin + columns
        unit = tl.load(table_ptr + keys // PAGE, mask=(keys >= low) & (keys < high), other=0)
    return unit.to(tl.int64)


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    q,
    k,
    positions,
    last,
    keys,
    held,
    scale,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    REACHES: tl.constexpr,
):
    # In units of log2, as exp2 is the instruction; -inf where a row does not see a key.
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0:
        # cap tanh(s / cap), from the exponential that cannot overflow
        fall = tl.exp2(tl.abs(s) * (-2.0 * LOG2E / SOFTCAP))
        s = tl.where(s < 0, -SOFTCAP, SOFTCAP) * (1.0 - fall) / (1.0 + fall)
    seen = held[None, :]
    distance = positions[:, None] - keys[None, :]
    if REACHES:
        seen = seen & (keys[None, :] <= last[:, None])
    elif CAUSAL:
        seen = seen & (distance >= 0)
    if WINDOW > 0:
        seen = seen & (distance < WINDOW)
        if not REACHES:
            seen = seen & (distance > -WINDOW)
    return tl.where(seen, s * LOG2E, float("-inf"))


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,
    pages,
    lines,
    buffers,
    table_stride,
    scale,
    max_spans,
    PAGE: tl.constexpr,
    UNITS: tl.constexpr,
    STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    REACHES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PARTS: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program for M query rows of a tile, a key head and every split-th span. pages: keys, values, table. buffers: partials,
    # their maxima and sums.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot, start, rows, first, lowest, stop, span = tile_sight(lines, tl.program_id(0) // PARTS, WINDOW, CAUSAL, REACHES)
    head, first_span = tl.program_id(1), lowest // span
    m = tl.program_id(0) % PARTS * M + tl.arange(0, M)
    row, real = m // GROUP, m // GROUP < rows
    last = first + row
    if REACHES:
        last = tl.maximum(last, tl.load(lines[6] + start + row, mask=real & (slot >= 0), other=-1))
    place = (start + row).to(tl.int64) * HEADS + head * GROUP + m % GROUP
    d, dv, columns = tl.arange(0, D_PAD), tl.arange(0, DV_PAD), tl.arange(0, BLOCK)
    # Units are read one tile of keys ahead, the first ones before anything else: then the first keys wait for no other load.
    table_ptr = pages[2] + slot * table_stride
    low = tl.maximum((first_span + tl.program_id(2)) * span, lowest)
    high = tl.minimum((first_span + tl.program_id(2) + 1) * span, stop)
    unit = _units(table_ptr, low // BLOCK * BLOCK, low, high, columns, PAGE, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if slot < 0:  # behind the wait: what this kernel has waited for is over for those behind it too
        return
    q = tl.load(q_ptr + place[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    for number in range(first_span + tl.program_id(2), tl.cdiv(stop, span), tl.num_programs(2)):
        low, high = tl.maximum(number * span, lowest), tl.minimum((number + 1) * span, stop)
        peak = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DV_PAD], tl.float32)
        for begin in range(low // BLOCK * BLOCK, high, BLOCK):
            keys = begin + columns
            held = (keys >= low) & (keys < high)  # other slots may never have been written
            ahead = _units(table_ptr, begin + BLOCK, low, high, columns, PAGE, BLOCK)
            k_at = unit * UNITS[0] + keys % PAGE * STRIDES[0] + head * STRIDES[1]
            v_at = unit * UNITS[1] + keys % PAGE * STRIDES[2] + head * STRIDES[3]
            k = tl.load(pages[0] + k_at[:, None] + d[None, :], mask=held[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(pages[1] + v_at[:, None] + dv[None, :], mask=held[:, None] & (dv < DV)[None, :], other=0.0)
            s = _scores(q, k, first + row, last, keys, held, scale, SOFTCAP, WINDOW, CAUSAL, REACHES)
            higher = tl.maximum(peak, tl.max(s, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(s - level[:, None])
            decay = tl.exp2(peak - level)
            total = total * decay + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            peak, unit = higher, ahead
        low = (number + tl.num_programs(2)) * span
        unit = _units(table_ptr, low, low, tl.minimum(low + span, stop), columns, PAGE, BLOCK)
        at = place * max_spans + (number - first_span)
        kept = real & (number - first_span < max_spans)
        tl.store(buffers[0] + at[:, None] * DV + dv[None, :], acc, mask=kept[:, None] & (dv < DV)[None, :])
        tl.store(buffers[1] + at * 2, peak, mask=kept)
        tl.store(buffers[1] + at * 2 + 1, total, mask=kept)


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Rows, settings: Settings) -> Tensor:
    """paged.paged_attention on the device."""
    (t, heads, _), kv_heads, dv, tiles = q.shape, keys.shape[2], values.shape[3], rows.tile_slot.shape[0]
    workspace = settings.workspace
    out = torch.empty((t, heads, dv), dtype=q.dtype, device=q.device)
    max_spans = workspace.numel() // max(1, t * heads * (dv + 2))
    assert all(x.is_contiguous() for x in (rows.positions, rows.tile_slot, rows.tile_start, rows.tile_rows, rows.tile_end))
    assert heads % kv_heads == 0 and table.stride(1) == 1 and max_spans > 0
    buffers = workspace, workspace[t * heads * max_spans * dv :]
    reach = rows.reach if settings.reaches and rows.reach is not None else rows.positions
    common: dict[str, Any] = dict(
        buffers=buffers,
        lines=(rows.positions, rows.tile_slot, rows.tile_start, rows.tile_rows, rows.tile_end, settings.span, reach),
        max_spans=max_spans,
        HEADS=heads,
        DV=dv,
        DV_PAD=triton.next_power_of_2(dv),
        WINDOW=settings.window or 0,
        CAUSAL=settings.causal,
        REACHES=reach is not rows.positions,
        **launch_options(settings.pdl),
    )
    q = q.contiguous()
    if hopper_attention.supports(q, keys, values, rows, settings):
        hopper_attention.attend(q, keys, values, table, rows, settings, buffers, max_spans)
    else:
        _launch_attend(q, keys, values, table, rows, settings, common)
    combine[(tiles * rows.max_tile_rows, heads)](
        sinks_ptr=workspace if settings.sinks is None else settings.sinks,
        out_ptr=out,
        TILE_ROWS=rows.max_tile_rows,
        SINKS=settings.sinks is not None,
        num_warps=4 if dv > 128 else 2,
        **common,
    )
    return out


def _launch_attend(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Rows, settings: Settings, common: dict[str, Any]
) -> None:
    (_, heads, d), kv_heads, dv, tiles = q.shape, keys.shape[2], values.shape[3], len(rows.tile_slot)
    group = heads // kv_heads
    query_rows = 0 if settings.deterministic else min(settings.query_rows, rows.max_tile_rows * group)
    shape = tile_shape(d, dv, group, keys.dtype, shared_bytes(), query_rows, settings.deterministic)
    parts = triton.cdiv(rows.max_tile_rows * group, shape["M"])
    _attend[(tiles * parts, kv_heads, settings.splits)](
        q_ptr=q,
        pages=(keys, values, table),
        table_stride=table.stride(0),
        scale=settings.scale,
        GROUP=group,
        D=d,
        D_PAD=triton.next_power_of_2(d),
        SOFTCAP=settings.softcap or 0.0,
        PARTS=parts,
        **page_layout(keys, values),
        **shape,
        **common,
    )


def shared_bytes() -> int:
    """Shared memory that a program may have on the current device."""
    if triton.knobs.runtime.interpret:
        return LEAST_SHARED_BYTES
    driver = triton.runtime.driver.active
    return _shared_bytes_of(driver, driver.get_current_device())


@functools.cache
def _shared_bytes_of(driver: Any, device: int) -> int:
    return driver.utils.get_device_properties(device)["max_shared_mem"]


def tile_shape(
    d: int, dv: int, group: int, dtype: torch.dtype, shared: int, query_rows: int = 0, deterministic: bool = False
) -> dict[str, int]:
    """Query rows M and keys BLOCK of a program, its warps, and how many tiles of keys it holds (num_stages - 1).

    Without `query_rows` they depend on the layer and the chip alone. A tile of keys and values is 64 KiB at most. M is then 16
    where D + Dv >= 512, in 16 bits: 32 spill registers (24 to 40 bytes a thread), and on one H200, for 8 rows of a sequence of
    1,024 positions, a group of 4 and a window of 512, a layer of D = Dv = 256 takes 4.3 us instead of 6.0, one of 512 without
    a window 7.7 instead of 11.6. For D = Dv = 128 it is the other way round: with what combines the partials, 16 rows take
    10.5 us, 32 take 9.9. `deterministic`: 32 all the same, for with 16 sequences 16 cost twice the time. 8 warps where
    D + Dv > 256: 4 would spill (48 bytes at 256 + 256, 96 at 512 + 512).
    """
    d, dv = triton.next_power_of_2(d), triton.next_power_of_2(dv)
    m = 16 if (d + dv >= 512 and not deterministic) or 8 * group <= 16 else 32
    if query_rows:  # 64 of 512 + 512 would need 256 KiB of shared memory
        m = max(16, min(triton.next_power_of_2(query_rows), 32 if d + dv > 512 else 64))
    if dtype == torch.float32:
        m = 16
    block = min(64, 32768 // (d + dv))
    if dtype == torch.float32:
        block = max(16, block // 2)
    tile = block * (d + dv) * dtype.itemsize
    while m > 16 and m * (d * dtype.itemsize + block * 4) + tile > shared:
        m //= 2
    tiles = (shared - m * (d * dtype.itemsize + block * 4)) // tile
    return dict(M=m, BLOCK=block, num_warps=8 if d + dv > 256 else 4, num_stages=1 + max(1, min(2, tiles)))


__all__ = ["paged_attention", "project_rows", "store_context", "store_rows"]
