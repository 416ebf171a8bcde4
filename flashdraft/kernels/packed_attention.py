"""Attention over packed rows: several documents side by side in one row, each blind to the others.

A mask is one function of indices. On the CPU it becomes a dense boolean mask for scaled_dot_product_attention, the reference;
on CUDA a block mask for flex attention, which skips every 128 x 128 tile that is empty. Tests hold the two together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Mask = Tensor | BlockMask


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once, at first use on CUDA: eager flex attention would hold every score."""
    return torch.compile(function, dynamic=False)


def dense_mask(mask_mod: MaskMod, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """The mask function at every index: bool [batch, 1, queries, keys]."""
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    q = torch.arange(queries, device=device).view(1, 1, -1, 1)
    kv = torch.arange(keys, device=device).view(1, 1, 1, -1)
    return mask_mod(b, torch.zeros_like(b), q, kv).expand(batch, 1, queries, keys)


def make_mask(mask_mod: MaskMod, batch: int, queries: int, keys: int, device: torch.device) -> Mask:
    if device.type != "cuda":
        return dense_mask(mask_mod, batch, queries, keys, device)
    return _compiled(create_block_mask)(mask_mod, batch, None, queries, keys, device=str(device))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scaling: float) -> Tensor:
    """q [B, heads, Q, D], k and v [B, kv heads, K, D] -> [B, heads, Q, D]."""
    if isinstance(mask, BlockMask):
        compiling = torch.compiler.is_compiling()  # then it becomes part of the caller's graph
        flex: Any = flex_attention if compiling else _compiled(flex_attention)
        return flex(q, k, v, block_mask=mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])


def document_mask_mod(documents: Tensor, window: int | None) -> MaskMod:
    """Causal within a document: key kv visible from q iff kv <= q, the same document [B, S], and q - kv < window."""

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        mask = (kv <= q) & (documents[b, q] == documents[b, kv])
        return mask if window is None else mask & (q - kv < window)

    return visible


class LayerLike(Protocol):
    """What packed attention asks of a target's layer."""

    @property
    def window(self) -> int | None: ...
    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def sinks(self) -> Tensor | None: ...


class DocumentAttention:
    """The `attend` of a target over packed rows [B, S] run as one flat batch of B*S tokens; one mask for each window."""

    def __init__(self, documents: Tensor) -> None:
        self.documents = documents
        self.masks: dict[int | None, Mask] = {}

    def __call__(self, layer: int, spec: LayerLike, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B*S, heads, D], k and v [B*S, kv heads, D] -> [B*S, heads, D]."""
        if spec.softcap is not None or spec.sinks is not None:
            raise NotImplementedError(f"layer {layer}: packed rows know neither an attention soft cap nor attention sinks")
        batch, length = self.documents.shape
        if spec.window not in self.masks:
            mask_mod = document_mask_mod(self.documents, spec.window)
            self.masks[spec.window] = make_mask(mask_mod, batch, length, length, self.documents.device)
        q, k, v = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in (q, k, v))
        return masked_attention(q, k, v, self.masks[spec.window], spec.scale).transpose(1, 2).flatten(0, 1)


__all__ = ["DocumentAttention", "Mask", "MaskMod", "dense_mask", "document_mask_mod", "make_mask", "masked_attention"]
