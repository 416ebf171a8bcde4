"""How partial softmaxes become one (paged.py). Imported on CUDA (or under TRITON_INTERPRET=1) alone."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Partials that a combining program reads at once, from absolute multiples on, so that its sums have one shape.
CHUNK = tl.constexpr(16)
MOST_ROWS = tl.constexpr(16)  # of a tile: step.TILE_ROWS


@triton.jit
def tile_sight(  # type: ignore[no-untyped-def]
    lines, tile, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, REACHES: tl.constexpr
):
    # lines: positions, tile_slot, tile_start, tile_rows, tile_end, span, reach. Five loads that do not wait for each other,
    # then one. A tile of slot -1 may hold any numbers.
    slot, start = tl.load(lines[1] + tile), tl.load(lines[2] + tile)
    rows, end = tl.load(lines[3] + tile), tl.load(lines[4] + tile)
    span = tl.load(lines[5])
    first = tl.load(lines[0] + start, mask=slot >= 0, other=0)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(first - WINDOW + 1, 0)
    stop = end
    if CAUSAL:
        stop = first + rows
        if REACHES:
            row = tl.arange(0, MOST_ROWS)
            reach = tl.load(lines[6] + start + row, mask=(slot >= 0) & (row < rows), other=-1)
            stop = tl.maximum(stop, tl.max(reach, 0) + 1)
        stop = tl.minimum(end, stop)
    elif WINDOW > 0:
        stop = tl.minimum(end, first + rows - 1 + WINDOW)
    return slot, start, rows, first, lowest, tl.where(slot >= 0, stop, 0), span


@triton.jit
def combine(  # type: ignore[no-untyped-def]
    buffers,
    sinks_ptr,
    out_ptr,
    lines,
    max_spans,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    REACHES: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program for a row and a head.
    partials_ptr, stats_ptr = buffers
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    slot, start, rows, _first, lowest, stop, span = tile_sight(lines, tl.program_id(0) // TILE_ROWS, WINDOW, CAUSAL, REACHES)
    row = tl.program_id(0) % TILE_ROWS
    first_span, last_span = lowest // span, tl.cdiv(stop, span)
    place = (start + row).to(tl.int64) * HEADS + head
    dv, chunk = tl.arange(0, DV_PAD), tl.arange(0, CHUNK)
    peak = float("-inf")
    total = 0.0
    if SINKS:
        peak = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        total = 1.0
    acc = tl.zeros([DV_PAD], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (slot < 0) | (row >= rows):
        return
    for begin in range(first_span // CHUNK * CHUNK, last_span, CHUNK):
        number = begin + chunk
        held = (number >= first_span) & (number < last_span) & (number - first_span < max_spans)
        at = place * max_spans + (number - first_span)
        peaks = tl.load(stats_ptr + at * 2, mask=held, other=float("-inf"))
        totals = tl.load(stats_ptr + at * 2 + 1, mask=held, other=0.0)
        parts = tl.load(partials_ptr + at[:, None] * DV + dv[None, :], mask=held[:, None] & (dv < DV)[None, :], other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(peaks - level)
        decay = tl.exp2(peak - level)
        total = total * decay + tl.sum(weights * totals, 0)
        acc = acc * decay + tl.sum(weights[:, None] * parts, 0)
        peak = higher
    total = tl.where(total == 0, 1.0, total)  # a row that sees nothing is 0
    total = tl.where(last_span - first_span > max_spans, float("nan"), total)
    tl.store(out_ptr + place * DV + dv, (acc / total).to(out_ptr.dtype.element_ty), mask=dv < DV)
