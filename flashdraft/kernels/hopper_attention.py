"""Attention of many rows whose heads have 512 values on a Hopper GPU: Python side of cuda/hopper_attention.cuh.

It gives the partial softmaxes of `_attend` of paged_triton.py, with both products on wgmma and every key read once for
128 query rows. Each dtype, number of heads for a key head, and page size is compiled once (nvrtc.py): the first call of each
must lie outside a graph capture.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import e, log2
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdraft.kernels.narrow import TYPES
from flashdraft.kernels.nvrtc import Source, TensorMap, definitions, tensor_map

if TYPE_CHECKING:
    from flashdraft.kernels.paged import Rows, Settings

SOURCE = Source("hopper_attention", ("device.cuh", "hopper.cuh", "hopper_attention.cuh"), specific=True)
FORMATS = {torch.bfloat16: "bf16.bf16", torch.float16: "f16.f16"}
TILE_ROWS = 16  # step.TILE_ROWS
HEAD, ROWS, KEYS, LINE = 512, 64, 64, 64  # of a warpgroup's rows, a tile of keys; values in a swizzled line
GROUPS, THREADS = 2, 384
CONSUMER_REGISTERS = 232  # of 2 x 128 threads; 40 for the 128 others
# Queries of two warpgroups, four tiles, scores of both, 13 barriers, 2 times 6 numbers.
SHARED_BYTES = GROUPS * ROWS * HEAD + 4 * KEYS * HEAD + GROUPS * 4 * ROWS * KEYS + 8 * 13 + 24 * GROUPS


class Arguments(ctypes.Structure):
    """struct Arguments of hopper_attention.cuh."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("positions", "tile_slot", "tile_start", "tile_rows", "tile_end", "span", "table")
        ),
        *((name, ctypes.c_void_p) for name in ("sums", "stats")),
        ("table_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("tiles", "heads", "splits", "pairs", "max_spans")),
        ("scale", ctypes.c_float),
    )


def supports(q: Tensor, keys: Tensor, values: Tensor, rows: Rows, settings: Settings) -> bool:
    """`settings.hopper`, and causal attention without a window or soft cap, heads of 512 in 16 bits, tiles of 16 rows, at
    least 4 heads for a key head, on compute capability 9.0."""
    group = q.shape[1] // keys.shape[2]
    return (
        settings.hopper
        and settings.causal
        and settings.window is None
        and settings.softcap is None
        and not settings.reaches
        and settings.scale > 0
        and q.shape[2] == keys.shape[3] == values.shape[3] == HEAD
        and q.dtype == keys.dtype == values.dtype
        and q.dtype in TYPES
        and rows.max_tile_rows == TILE_ROWS
        and ROWS // TILE_ROWS <= group <= ROWS
        and ROWS % group == 0
        and keys.shape[1] in (16, 32, 64, 128)
        and all(_has_map(x) for x in (keys, values))
        and torch.cuda.get_device_capability(q.device) == (9, 0)
    )


def _has_map(pages: Tensor) -> bool:
    """TMA wants multiples of 16 bytes."""
    return pages.data_ptr() % 16 == 0 and pages.stride(3) == 1 and all(pages.stride(i) % 8 == 0 for i in range(3))


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    rows: Rows,
    settings: Settings,
    buffers: tuple[Tensor, Tensor],
    spans: int,
) -> None:
    """Partial sums, and maxima and sums of weights, of every row, head and span, to `buffers`; `spans`: that they hold."""
    heads, kv_heads, page = q.shape[1], keys.shape[2], keys.shape[1]
    assert q.is_contiguous()
    assert table.stride(1) == 1
    group, tiles = heads // kv_heads, len(rows.tile_slot)
    pairs = -(-tiles * group * TILE_ROWS // (GROUPS * ROWS))
    lines = rows.positions, rows.tile_slot, rows.tile_start, rows.tile_rows, rows.tile_end, settings.span, table, *buffers
    arguments = Arguments(
        *(line.data_ptr() for line in lines),
        table_stride=table.stride(0),
        tiles=tiles,
        heads=heads,
        splits=settings.splits,
        pairs=pairs,
        max_spans=spans,
        scale=settings.scale * log2(e),
    )
    maps = queries_map(q, group), pages_map(keys), pages_map(values)
    function = SOURCE.function(q.device, constants(q.dtype, group, page))
    stream = torch.cuda.current_stream(q.device).cuda_stream
    grid = 2 * pairs * kv_heads * settings.splits, 1, 1
    function.launch(grid, (THREADS, 1, 1), SHARED_BYTES, [*maps, arguments], stream, settings.pdl)


def queries_map(q: Tensor, group: int) -> TensorMap:
    """Boxes of 64 values of the heads of a key head, at as many positions as make 64 rows. Innermost first."""
    rows, heads, size = q.shape
    return _map(q.dtype, q.data_ptr(), (size, heads, rows), (2 * size, 2 * heads * size), (LINE, group, ROWS // group))


def pages_map(pages: Tensor) -> TensorMap:
    """Boxes of 64 values of up to 64 keys of a page, of one head."""
    units, page, heads, size = pages.shape
    strides = tuple(2 * pages.stride(i) for i in (1, 2, 0))
    return _map(pages.dtype, pages.data_ptr(), (size, page, heads, units), strides, (LINE, min(page, KEYS), 1, 1))


# Of pages the addresses recur; a map says nothing that is not in the arguments.
@lru_cache(maxsize=4096)
def _map(dtype: torch.dtype, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    return tensor_map(dtype, address, sizes, strides, box)


def constants(dtype: torch.dtype, group: int, page: int) -> str:
    """What hopper_attention.cuh expects to be defined. The operands of wgmma are text."""
    values: dict[str, object] = {
        "TYPE": TYPES[dtype],
        "GROUP": group,
        "PAGE": page,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "FORMATS": f'"{FORMATS[dtype]}"',
    }
    for name, sums, others in (("SCORE", 32, {"A": 1, "B": 1, "ADD": 1}), ("SUM", 128, {"A": 4, "B": 1, "ADD": 1})):
        values[f"{name}S"] = _operands(0, sums)
        values[f"{name}_OPERANDS(d)"] = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
        start = sums
        for other, count in others.items():
            values[f"{name}_{other}"] = _operands(start, count)
            start += count
    return definitions(values)


def _operands(start: int, count: int) -> str:
    return '"' + ", ".join(f"%{i}" for i in range(start, start + count)) + '"'
