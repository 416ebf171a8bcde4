"""The Triton kernels of fused.py. Imported on CUDA (or under TRITON_INTERPRET=1) alone.

`pdl`: programmatic dependent launch, from compute capability 9.0 on. A kernel then starts while the one before it still runs,
reads its weights, and waits (griddepcontrol.wait) before it touches anything that kernel writes. Every kernel here waits, so
that what it has waited for is over for those behind it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.paged_rows_triton import launch_options

if TYPE_CHECKING:
    from flashdraft.kernels.fused import Norm

# Elements of a row that one program of an element-wise kernel, or of the first stage of argmax, takes.
COLUMNS = 1024
SEGMENT = 4096


@triton.jit
def _start(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _normed(y, weight, eps, SIZE: tl.constexpr, WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    # y float32, zero behind SIZE; the result is rounded to dtype and float32 again
    y = y * tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps)
    if WEIGHT:
        if ROUND_FIRST:
            y = y.to(dtype).to(tl.float32)
        y = y * weight
    return y.to(dtype).to(tl.float32)


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    x_ptr,
    add_ptr,
    post_weight_ptr,
    weight_ptr,
    residual_ptr,
    normed_ptr,
    x_stride,
    add_stride,
    scale,
    post_eps,
    eps,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    POST: tl.constexpr,
    POST_WEIGHT: tl.constexpr,
    POST_ROUND_FIRST: tl.constexpr,
    SCALE: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program a row. Weights are asked for before the wait: no kernel writes them.
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < SIZE
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    post_weight = 1.0
    weight = 1.0
    if POST_WEIGHT:
        post_weight = tl.load(post_weight_ptr + k, mask=inside, other=0.0)
    if WEIGHT:
        weight = tl.load(weight_ptr + k, mask=inside, other=0.0)
    _start(PDL)
    r = tl.load(x_ptr + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(add_ptr + row * add_stride + k, mask=inside, other=0.0).to(tl.float32)
        if POST:
            y = _normed(y, post_weight, post_eps, SIZE, POST_WEIGHT, POST_ROUND_FIRST, dtype)
        r = (r + y).to(dtype).to(tl.float32)
    if SCALE:
        r = (r * scale).to(dtype).to(tl.float32)
    if RESIDUAL:
        tl.store(residual_ptr + row * SIZE + k, r.to(dtype), mask=inside)
    if NORM:
        a = _normed(r, weight, eps, SIZE, WEIGHT, ROUND_FIRST, dtype)
        tl.store(normed_ptr + row * SIZE + k, a.to(dtype), mask=inside)


def add_norm(
    x: Tensor, add: Tensor | None, post_norm: Norm | None, scale: float, norm: Norm | None, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """add_norm_reference in one launch: x, add [T, K] with contiguous rows -> r, a [T, K]; r is x if nothing changes it."""
    assert x.dim() == 2 and x.stride(1) == 1 and (add is None or (add.shape == x.shape and add.stride(1) == 1))
    rows, size = x.shape
    changed = add is not None or scale != 1.0
    r = torch.empty((rows, size), dtype=x.dtype, device=x.device) if changed else x
    a = torch.empty((rows, size), dtype=x.dtype, device=x.device) if norm is not None else r
    if rows == 0 or not (changed or norm is not None):
        return r, a
    post_norm = post_norm if add is not None else None
    weights = [None if n is None else n.weight for n in (post_norm, norm)]
    assert all(w is None or (w.dtype == torch.float32 and w.shape == (size,) and w.is_contiguous()) for w in weights)
    block = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        x,
        x if add is None else add,
        x if weights[0] is None else weights[0],
        x if weights[1] is None else weights[1],
        r,
        a,
        x.stride(0),
        0 if add is None else add.stride(0),
        scale,
        0.0 if post_norm is None else post_norm.eps,
        0.0 if norm is None else norm.eps,
        SIZE=size,
        ADD=add is not None,
        POST=post_norm is not None,
        POST_WEIGHT=weights[0] is not None,
        POST_ROUND_FIRST=post_norm is not None and post_norm.round_first,
        SCALE=scale != 1.0,
        NORM=norm is not None,
        WEIGHT=weights[1] is not None,
        ROUND_FIRST=norm is not None and norm.round_first,
        RESIDUAL=changed,
        BLOCK=block,
        num_warps=_warps(block),
        **_launch(x, pdl),
    )
    return r, a


def _warps(block: int) -> int:
    """16 elements a thread: 8 warps for a row of 2,560 to 4,096."""
    return min(16, max(1, block // 512))


def _launch(x: Tensor, pdl: bool) -> dict[str, Any]:
    return launch_options(pdl and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0))


@triton.jit
def _activate(  # type: ignore[no-untyped-def]
    y_ptr,
    multiply_ptr,
    out_ptr,
    y_stride,
    multiply_stride,
    size,
    KIND: tl.constexpr,
    MULTIPLY: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < size
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    _start(PDL)
    y = tl.load(y_ptr + row * y_stride + n, mask=inside, other=0.0).to(tl.float32)
    by = y
    if MULTIPLY:
        by = tl.load(multiply_ptr + row * multiply_stride + n, mask=inside, other=0.0).to(tl.float32)
    # gelu_tanh(y) = y/2 (1 + tanh u) = y sigmoid(2u), which keeps its digits where tanh is near -1
    steep = y
    if KIND == "gelu_tanh":
        steep = 1.5957691216057308 * (y + 0.044715 * y * y * y)
    z = y / (1.0 + tl.exp(-steep))
    if MULTIPLY:
        z = z.to(dtype).to(tl.float32) * by
    tl.store(out_ptr + row * size + n, z.to(dtype), mask=inside)


def gated_activation(y: Tensor, activation: str, *, pdl: bool = False) -> Tensor:
    """gated_activation_reference: y [T, 2N] with contiguous rows -> [T, N]."""
    gate, up = y.chunk(2, -1)
    return activation_multiply(gate, activation, up, pdl=pdl)


def activation_multiply(y: Tensor, activation: str, multiply: Tensor | None, *, pdl: bool = False) -> Tensor:
    """activation_multiply_reference: y, multiply [T, N] with contiguous rows -> [T, N]."""
    assert y.dim() == 2 and y.stride(1) == 1 and activation in ("silu", "gelu_tanh")
    assert multiply is None or (multiply.shape == y.shape and multiply.stride(1) == 1)
    rows, size = y.shape
    out = torch.empty((rows, size), dtype=y.dtype, device=y.device)
    if rows == 0:
        return out
    block = min(COLUMNS, triton.next_power_of_2(size))
    _activate[(rows, triton.cdiv(size, block))](
        y,
        y if multiply is None else multiply,
        out,
        y.stride(0),
        0 if multiply is None else multiply.stride(0),
        size,
        KIND=activation,
        MULTIPLY=multiply is not None,
        BLOCK=block,
        num_warps=4,
        **_launch(y, pdl),
    )
    return out


@triton.jit
def _soft_cap(z_ptr, out_ptr, size, cap, PDL: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    _start(PDL)
    z = tl.load(z_ptr + n, mask=n < size, other=0.0).to(tl.float32)
    z = tl.div_rn(z, cap).to(dtype).to(tl.float32)
    # tanh from an exponential that cannot overflow; for small z, where its digits cancel, from the series.
    fall = tl.exp(-2.0 * tl.abs(z))
    far = tl.where(z < 0, -1.0, 1.0) * (1.0 - fall) / (1.0 + fall)
    near = z - z * z * z * (1.0 / 3.0) * (1.0 - 0.4 * z * z)
    z = tl.where(tl.abs(z) < 0.1, near, far).to(dtype).to(tl.float32)
    tl.store(out_ptr + n, (z * cap).to(dtype), mask=n < size)


def soft_cap(z: Tensor, cap: float, out: Tensor, *, pdl: bool = False) -> Tensor:
    """soft_cap_reference: z, out [T, V], contiguous."""
    assert z.is_contiguous() and out.is_contiguous() and z.shape == out.shape and z.dtype == out.dtype
    if z.numel():
        _soft_cap[(triton.cdiv(z.numel(), SEGMENT),)](z, out, z.numel(), cap, BLOCK=SEGMENT, num_warps=8, **_launch(z, pdl))
    return out


@triton.jit
def _argmax_segments(  # type: ignore[no-untyped-def]
    logits_ptr, best_ptr, ids_ptr, stride, vocab, PDL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    ids = segment * BLOCK + tl.arange(0, BLOCK)
    _start(PDL)
    z = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    z = tl.where(z == z, z, float("inf"))  # NaN wins, and is not finite
    top = tl.max(z, 0)
    place = row * tl.num_programs(1) + segment
    tl.store(best_ptr + place, top)
    tl.store(ids_ptr + place, tl.min(tl.where(z == top, ids, vocab), 0))


@triton.jit
def _argmax_rows(  # type: ignore[no-untyped-def]
    best_ptr, ids_ptr, out_ptr, segments, PDL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    s = tl.arange(0, BLOCK)
    _start(PDL)
    best = tl.load(best_ptr + row * segments + s, mask=s < segments, other=float("-inf"))
    ids = tl.load(ids_ptr + row * segments + s, mask=s < segments, other=2147483647)
    top = tl.max(best, 0)
    chosen = tl.min(tl.where(best == top, ids, 2147483647), 0)
    finite = (top > float("-inf")) & (top < float("inf"))
    tl.store(out_ptr + row, tl.where(finite, chosen, -1))


def argmax_rows(logits: Tensor, *, pdl: bool = False) -> Tensor:
    """argmax_rows_reference: logits [T, V] with contiguous rows -> [T] int32, by segments of SEGMENT ids, then of those."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    segments = triton.cdiv(vocab, SEGMENT)
    best = torch.empty((rows, segments), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, segments), dtype=torch.int32, device=logits.device)
    _argmax_segments[(rows, segments)](
        logits, best, ids, logits.stride(0), vocab, BLOCK=SEGMENT, num_warps=8, **_launch(logits, pdl)
    )
    block = triton.next_power_of_2(segments)
    _argmax_rows[(rows,)](best, ids, out, segments, BLOCK=block, num_warps=1, **_launch(logits, pdl))
    return out
