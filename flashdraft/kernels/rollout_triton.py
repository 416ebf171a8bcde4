"""The Triton kernel of rollout.py. Imported on CUDA (or under TRITON_INTERPRET=1) alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _decode_attention(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    positions_ptr,
    active_ptr,
    out_ptr,
    q_stride,
    k_stride,
    v_stride,
    length,
    scale,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program for a slot and a key head: its query heads share every key that is read.
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    in_group = (rows < GROUPS)[:, None]
    out_offsets = slot * (KV_HEADS * GROUPS * D) + (head * GROUPS + rows)[:, None] * D + d[None, :]
    if tl.load(active_ptr + slot) == 0:
        tl.store(out_ptr + out_offsets, tl.zeros([ROWS, D], tl.float32).to(out_ptr.dtype.element_ty), mask=in_group)
        return
    position = tl.load(positions_ptr + slot)
    base = (slot * KV_HEADS + head) * length * D
    new_k = tl.load(k_ptr + slot * k_stride + head * D + d)
    new_v = tl.load(v_ptr + slot * v_stride + head * D + d)
    tl.store(k_cache_ptr + base + position * D + d, new_k)
    tl.store(v_cache_ptr + base + position * D + d, new_v)
    q = tl.load(q_ptr + slot * q_stride + (head * GROUPS + rows)[:, None] * D + d[None, :], mask=in_group, other=0.0)
    # The new key starts the online softmax, so that the loop reads only keys of earlier steps.
    peak = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
    total = tl.full([ROWS], 1.0, tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32) + new_v.to(tl.float32)[None, :]
    columns = tl.arange(0, BLOCK)
    for start in range(0, position, BLOCK):
        seen = start + columns < position
        offsets = base + (start + columns)[:, None] * D + d[None, :]
        keys = tl.load(k_cache_ptr + offsets, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        decay = tl.exp(peak - higher)
        values = tl.load(v_cache_ptr + offsets, mask=seen[:, None], other=0.0)
        acc = acc * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)
        peak = higher
    tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=in_group)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, active: Tensor, scale: float
) -> Tensor:
    n, heads, d = q.shape
    kv_heads, length = k_cache.shape[1:3]
    q, k, v = (x if x.stride()[1:] == (d, 1) else x.contiguous() for x in (q, k, v))
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and d == triton.next_power_of_2(d)
    out = torch.empty((n, heads, d), dtype=q.dtype, device=q.device)
    _decode_attention[(n, kv_heads)](
        q,
        k,
        v,
        k_cache,
        v_cache,
        positions,
        active,
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        length,
        scale,
        KV_HEADS=kv_heads,
        GROUPS=heads // kv_heads,
        D=d,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        BLOCK=64,
        num_warps=2,
        num_stages=3,
    )
    return out
