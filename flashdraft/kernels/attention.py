"""Attention over paged keys and values: the PyTorch reference, which also serves the CPU.

A batch is a rectangle of S sequences and R query rows. Keys are visited in ranges that start at fixed absolute positions
(multiples of KEY_SPLIT), so that a row's bits depend only on its prefix: not on how many rows are verified with it, and not on
how far the other rows of its sequence reach (measured: bit-equal in bf16 and float32 on the CPU).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Ranges of keys begin at multiples of this many tokens; a gathered range is padded to a multiple of KEY_PAD. The CPU's
# scaled_dot_product_attention walks keys in steps of 512 and is bit-stable for tails that are multiples of 256.
KEY_SPLIT = 512
KEY_PAD = 256


def write_pages(pages: Tensor, units: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """Store rows [T, kv heads, D] at slot (units [T], offsets [T]) of pages [U, page size, kv heads, D]."""
    pages.index_put_((units, offsets), rows)


def gather_pages(pages: Tensor, table: Tensor) -> Tensor:
    """Keys or values of pages [U, page size, kv heads, D] listed in table [S, P], as [S, kv heads, P * page size, D]."""
    rows = pages.index_select(0, table.flatten())
    return rows.view(table.shape[0], -1, *pages.shape[2:]).transpose(1, 2)


def score_mask(
    positions: Tensor,
    first_key: int,
    num_keys: int,
    ends: Tensor,
    window: int | None,
    causal: bool,
    group: int,
    dtype: torch.dtype,
    reach: Tensor | None = None,
) -> Tensor:
    """What is added to scores: 0 where a row sees a key, -inf elsewhere, [S, 1, R * group, K].

    positions [S, R] of the rows, first_key the absolute position of the first gathered key, ends [S] the number of positions
    that hold a key; `group` query heads share a key head. reach [S, R]: the last position that a row sees, where that is not
    its own (causal only). Built once for all layers that see alike.
    """
    keys = first_key + torch.arange(num_keys, device=positions.device)
    distance = positions[:, :, None] - keys
    visible = (keys < ends[:, None, None]).expand_as(distance)
    if reach is not None:
        visible = visible & (keys <= reach[:, :, None])
    elif causal:
        visible = visible & (distance >= 0)
    if window is not None:  # it bounds the past alone where a row sees an image to its end
        visible = visible & ((distance if reach is not None else distance.abs()) < window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
    return mask.repeat_interleave(group, 1)[:, None]


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Grouped-query attention of q [S, R, heads, D] over k, v [S, kv heads, K, D] -> [S, R, heads, Dv]; mask of score_mask.

    sinks [heads]: the score of one more key a head, whose value is zero (gpt-oss).
    Keys and values that nobody sees must still be finite: neither a score of -inf nor a weight of 0 silences a NaN.
    """
    s, r, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    # The heads that share a key head become further query rows: keys are read once, and not repeated in memory.
    q = q.view(s, r, kv_heads, group, -1).permute(0, 2, 1, 3, 4).reshape(s, kv_heads, r * group, -1)
    if softcap is None and sinks is None:
        width = v.shape[-1]
        if width < k.shape[-1]:
            v = F.pad(v, (0, k.shape[-1] - width))  # unequal sizes (multi-head latent attention) leave the bit-stable kernel
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[..., :width]
    else:
        if sinks is not None:
            sinks = sinks.float().view(kv_heads, 1, group).expand(-1, r, -1).reshape(1, kv_heads, r * group, 1)
        out = _explicit(q, k, v, mask, scale, softcap, sinks)
    return out.unflatten(2, (r, group)).permute(0, 2, 1, 3, 4).reshape(s, r, heads, -1)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Scores pass through softcap * tanh(score / softcap), sinks join the sum of weights; key ranges of KEY_PAD go in order."""
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    weights = (scores - top).exp()
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float32, device=q.device)
    total = torch.zeros_like(top) if sinks is None else (sinks - top).exp()
    for start in range(0, k.shape[2], KEY_PAD):
        part = weights[..., start : start + KEY_PAD]
        out = out + part @ v[:, :, start : start + KEY_PAD].float()
        total = total + part.sum(-1, keepdim=True)
    return (out / total).to(q.dtype)
