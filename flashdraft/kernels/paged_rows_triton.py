"""The Triton kernels that store and project rows (paged.py). Imported on CUDA (or under TRITON_INTERPRET=1) alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from flashdraft.kernels.fused import Norm
    from flashdraft.kernels.paged import ContextPages, Projection, Rows


def launch_options(pdl: bool) -> dict[str, Any]:
    # launch_pdl is an option of the CUDA compiler alone, so it is not named where it is not wanted.
    return dict(PDL=True, launch_pdl=True) if pdl else dict(PDL=False)


@triton.jit
def _normed(y, factor, weight, NORM: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    # float32 values, rounded to dtype after every step that the reference rounds
    if NORM == "none":
        return y
    y = y * factor
    if NORM == "weight":
        y = y * weight
    if NORM == "round, weight":
        y = y.to(dtype).to(tl.float32) * weight
    return y.to(dtype).to(tl.float32)


@triton.jit
def project_heads(  # type: ignore[no-untyped-def]
    x_ptr,
    at,
    real,
    weight_ptr,
    eps,
    turns,
    turn_at,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
):
    # Heads [H, D] at x_ptr + at [H], normed, then turned in their first TURN dimensions by turns = (cos, sin) + turn_at [H].
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    d = tl.arange(0, D_PAD)
    inside = real[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if NORM != "none":
        factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    y = _normed(x, factor, _weight(weight_ptr, d, d < D, NORM), NORM, dtype)
    if TURN > 0:
        # The other half is read once more (from the first-level cache) rather than exchanged between threads.
        half: tl.constexpr = TURN // 2
        other = tl.where(d < half, d + half, d - half)
        inside = real[:, None] & (d < TURN)[None, :]
        z = tl.load(x_ptr + at[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32)
        z = _normed(z, factor, _weight(weight_ptr, other, d < TURN, NORM), NORM, dtype)
        cos = tl.load(turns[0] + turn_at[:, None] + d[None, :], mask=inside, other=1.0).to(tl.float32)
        sin = tl.load(turns[1] + turn_at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        y = y * cos + tl.where(d < half, -z, z) * sin
    return y.to(dtype)


@triton.jit
def _weight(weight_ptr, d, inside, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    if NORM == "weight" or NORM == "round, weight":
        return tl.load(weight_ptr + d, mask=inside, other=0.0)[None, :]
    else:
        return 1.0


@triton.jit
def _page(table_ptr, slot, position, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(table_ptr + position // PAGE, mask=slot >= 0, other=0).to(tl.int64), position % PAGE


@triton.jit
def _project_rows(  # type: ignore[no-untyped-def]
    qkv_ptr,
    norms,
    turns,
    positions_ptr,
    slots_ptr,
    pages,
    q_ptr,
    qkv_stride,
    turn_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TURN: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    PAGE: tl.constexpr,
    UNITS: tl.constexpr,
    STRIDES: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program for a row and a head: query heads, then key heads, then value heads. norms: weight and eps of each kind.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    slot = -1
    unit, offset = tl.full([], 0, tl.int64), 0
    if KV_HEADS > 0:
        slot = tl.load(slots_ptr + row)
        unit, offset = _page(pages[2] + slot * table_stride, slot, tl.load(positions_ptr + row), PAGE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    one, d = tl.arange(0, 1), tl.arange(0, D_PAD)[None, :]
    at, turn_at, real = row.to(tl.int64) * qkv_stride + (one + head) * D, one + row * turn_stride, one == 0
    if head < HEADS:
        q = project_heads(qkv_ptr, at, real, norms[0], norms[1], turns, turn_at, D, D_PAD, TURN, Q_NORM)
        tl.store(q_ptr + (row.to(tl.int64) * HEADS + head) * D + d, q, mask=d < D)
    elif slot >= 0:
        if head < HEADS + KV_HEADS:
            k = project_heads(qkv_ptr, at, real, norms[2], norms[3], turns, turn_at, D, D_PAD, TURN, K_NORM)
            place = unit * UNITS[0] + offset * STRIDES[0] + (head - HEADS) * STRIDES[1]
            tl.store(pages[0] + place + d, k, mask=d < D)
        else:
            v = project_heads(qkv_ptr, at, real, norms[4], norms[5], turns, turn_at, D, D_PAD, 0, V_NORM)
            place = unit * UNITS[1] + offset * STRIDES[2] + (head - HEADS - KV_HEADS) * STRIDES[3]
            tl.store(pages[1] + place + d, v, mask=d < D)


def project_rows(p: Projection, rows: Rows, table: Tensor, keys: Tensor, values: Tensor, *, pdl: bool = False) -> Tensor:
    """paged.project_rows on the device; cos and sin have equal strides."""
    (t, width), cos, sin = p.qkv.shape, p.cos, p.sin
    assert width == (p.heads + 2 * p.kv_heads) * p.head_dim and p.qkv.stride(1) == 1
    assert cos is None or sin is None or (cos.stride() == sin.stride() and cos.stride(1) == 1)
    parameters = [(p.qkv, 0.0) if n is None else (p.qkv if n.weight is None else n.weight, n.eps) for n in p.norms]
    q = torch.empty((t, p.heads, p.head_dim), dtype=p.qkv.dtype, device=p.qkv.device)
    _project_rows[(t, p.heads + 2 * p.kv_heads)](
        qkv_ptr=p.qkv,
        norms=tuple(value for pair in parameters for value in pair),
        turns=(p.qkv if cos is None else cos, p.qkv if sin is None else sin),
        positions_ptr=rows.positions,
        slots_ptr=rows.slots,
        pages=(keys, values, table),
        q_ptr=q,
        qkv_stride=p.qkv.stride(0),
        turn_stride=0 if cos is None else cos.stride(0),
        table_stride=table.stride(0),
        HEADS=p.heads,
        KV_HEADS=p.kv_heads,
        D=p.head_dim,
        D_PAD=triton.next_power_of_2(p.head_dim),
        TURN=0 if cos is None else cos.shape[1],
        **{f"{name}_NORM": norm_kind(norm) for name, norm in zip("QKV", p.norms, strict=True)},
        **page_layout(keys, values),
        num_warps=1,  # a row of 512 is 16 elements a thread
        **launch_options(pdl),
    )
    return q


def norm_kind(norm: Norm | None) -> str:
    if norm is None:
        return "none"
    return "plain" if norm.weight is None else "round, weight" if norm.round_first else "weight"


def page_layout(keys: Tensor, values: Tensor) -> dict[str, Any]:
    """Page size and strides of a layer's pages, as kernels take them: constants, equal for all layers of a KV group."""
    assert keys.stride(3) == values.stride(3) == 1
    strides = (keys.stride(1), keys.stride(2), values.stride(1), values.stride(2))
    return dict(PAGE=keys.shape[1], UNITS=(keys.stride(0), values.stride(0)), STRIDES=strides)


@triton.jit
def _store_rows(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    keys_ptr,
    values_ptr,
    k_stride,
    v_stride,
    table_stride,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    UNITS: tl.constexpr,
    STRIDES: tl.constexpr,
):
    # One program for a row and a key head.
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    unit, offset = _page(table_ptr + slot * table_stride, slot, tl.load(positions_ptr + row), PAGE)
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    k = tl.load(k_ptr + row * k_stride + head * D + d, mask=d < D)
    v = tl.load(v_ptr + row * v_stride + head * DV + dv, mask=dv < DV)
    tl.store(keys_ptr + unit * UNITS[0] + offset * STRIDES[0] + head * STRIDES[1] + d, k, mask=d < D)
    tl.store(values_ptr + unit * UNITS[1] + offset * STRIDES[2] + head * STRIDES[3] + dv, v, mask=dv < DV)


def store_rows(k: Tensor, v: Tensor, rows: Rows, table: Tensor, keys: Tensor, values: Tensor) -> None:
    """paged.store_rows on the device."""
    (t, kv_heads, d), dv = k.shape, v.shape[2]
    k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (k, v))
    _store_rows[(t, kv_heads)](
        k,
        v,
        rows.positions,
        rows.slots,
        table,
        keys,
        values,
        k.stride(0),
        v.stride(0),
        table.stride(0),
        D=d,
        DV=dv,
        D_PAD=triton.next_power_of_2(d),
        DV_PAD=triton.next_power_of_2(dv),
        **page_layout(keys, values),
        num_warps=1,
    )


@triton.jit
def _store_context(  # type: ignore[no-untyped-def]
    kv_ptr,
    weight_ptr,
    turns,
    positions_ptr,
    slots_ptr,
    tables_ptr,
    key_starts_ptr,
    value_starts_ptr,
    slabs_ptr,
    pool_ptr,
    kv_stride,
    turn_stride,
    slab_stride,
    table_stride,
    unit_stride,
    eps,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program for a row and a layer.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, layer = tl.program_id(0), tl.program_id(1)
    slot, slab = tl.load(slots_ptr + row), tl.load(slabs_ptr + layer).to(tl.int64)
    key_start, value_start = tl.load(key_starts_ptr + layer), tl.load(value_starts_ptr + layer)
    table_ptr = tables_ptr + slab * slab_stride + slot * table_stride
    unit, offset = _page(table_ptr, slot, tl.load(positions_ptr + row), PAGE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if slot < 0:
        return
    heads, d = tl.arange(0, HEADS_PAD), tl.arange(0, D_PAD)
    real = heads < HEADS
    inside = real[:, None] & (d < D)[None, :]
    x_ptr = kv_ptr + row.to(tl.int64) * kv_stride + layer * (2 * HEADS * D)
    turn_at = tl.zeros([HEADS_PAD], tl.int32) + row * turn_stride
    k = project_heads(x_ptr, heads * D, real, weight_ptr + layer * D, eps, turns, turn_at, D, D_PAD, D, NORM)
    v = tl.load(x_ptr + HEADS * D + heads[:, None] * D + d[None, :], mask=inside, other=0.0)
    at = unit * unit_stride + offset * (HEADS * D) + heads[:, None] * D + d[None, :]
    tl.store(pool_ptr + key_start + at, k, mask=inside)
    tl.store(pool_ptr + value_start + at, v, mask=inside)


def store_context(
    kv: Tensor,
    k_norms: Tensor,
    eps: float,
    round_first: bool,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    pages: ContextPages,
    *,
    pdl: bool = False,
) -> None:
    """paged.store_context on the device, one launch for all layers."""
    (t, layers), d = kv.shape[:2], k_norms.shape[1]
    size = 2 * pages.kv_heads * d
    assert kv.shape[2] * kv.shape[3] == size and kv.stride()[1:] == (size, size // 2, 1) and k_norms.is_contiguous()
    assert cos.shape[1] == d and cos.stride() == sin.stride() and cos.stride(1) == 1 and pages.tables.stride(2) == 1
    _store_context[(t, layers)](
        kv,
        k_norms,
        (cos, sin),
        rows.positions,
        rows.slots,
        pages.tables,
        pages.keys,
        pages.values,
        pages.slabs,
        pages.pool,
        kv.stride(0),
        cos.stride(0),
        pages.tables.stride(0),
        pages.tables.stride(1),
        pages.pool.stride(0),
        eps,
        HEADS=pages.kv_heads,
        HEADS_PAD=triton.next_power_of_2(pages.kv_heads),
        D=d,
        D_PAD=triton.next_power_of_2(d),
        PAGE=pages.page_size,
        NORM="round, weight" if round_first else "weight",
        num_warps=4,
        **launch_options(pdl),
    )
