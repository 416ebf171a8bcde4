"""One decoding step for many slots: attention over contiguous keys and values, and how much their answers repeat.

The functions here are the PyTorch references and serve the CPU; on CUDA attention is the kernel of rollout_triton.py.
Cache shape: [N slots, kv heads, L positions, D].
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, active: Tensor, scale: float
) -> Tensor:
    """Store each slot's new key and value at its position, then attend over positions 0..position of the slot.

    q [N, heads, D], k and v [N, kv heads, D], positions [N] int32, active [N] bool (an inactive slot's row is 0).
    """
    if q.is_cuda:
        from flashdraft.kernels.rollout_triton import decode_attention as kernel

        return kernel(q, k, v, k_cache, v_cache, positions, active, scale)
    return decode_attention_reference(q, k, v, k_cache, v_cache, positions, active, scale)


def decode_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, active: Tensor, scale: float
) -> Tensor:
    slots = active.nonzero()[:, 0]
    rows = positions[slots].long()
    k_cache[slots, :, rows] = k[slots]
    v_cache[slots, :, rows] = v[slots]
    groups = q.shape[1] // k.shape[1]
    keys = k_cache.float().repeat_interleave(groups, 1)
    values = v_cache.float().repeat_interleave(groups, 1)
    scores = torch.einsum("nhd,nhld->nhl", q.float(), keys) * scale
    unseen = torch.arange(keys.shape[2], device=q.device) > positions[:, None]
    weights = scores.masked_fill(unseen[:, None], float("-inf")).softmax(-1)
    # a weight of 0 does not silence a NaN of memory nothing was written to
    values = values.masked_fill(unseen[:, None, :, None], 0.0)
    out = torch.einsum("nhl,nhld->nhd", weights, values)
    return torch.where(active[:, None, None], out, 0.0).to(q.dtype)


def repetition(tokens: Tensor, ngram: int = 8) -> Tensor:
    """The share of repeated n-grams in each row of tokens [N, L]: 1 - distinct / all, float32 [N]."""
    grams = tokens.long().unfold(1, ngram, 1)
    factors = torch.tensor([6364136223846793005 % (2**61 - 1) + 2 * i for i in range(ngram)], device=tokens.device)
    mixed = torch.zeros(grams.shape[:2], dtype=torch.long, device=tokens.device)
    for i in range(ngram):  # wraps around 2^64; a collision among a few hundred n-grams is a matter of 1e-14
        mixed = (mixed + grams[..., i] + 1) * factors[i]
        mixed = mixed ^ (mixed >> 29)
    ordered = mixed.sort(-1).values
    return (ordered[:, 1:] == ordered[:, :-1]).float().sum(-1) / grams.shape[1]
