"""Attention over packed rows: several documents side by side in one row, each blind to the others.

What a query sees are a few spans of keys. On the CPU they become a dense boolean mask for scaled_dot_product_attention, the
reference; on CUDA a block mask for flex attention, which skips every 128 x 128 tile that is empty. Tests hold the two together.
Symbols: B rows, Q queries, K keys, P spans of a query.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flashdraft.kernels.nvrtc import MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device_attribute

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Mask = Tensor | BlockMask
TILE = 128  # queries and keys that flex attention skips, or takes, together


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once, at first use on CUDA: eager flex attention would hold every score."""
    return torch.compile(function, dynamic=False)


@dataclass(frozen=True)
class Spans:
    """The keys that queries see: from `low` up to and without `high`, both integers [B, P, Q]. Spans of a query do not overlap;
    one whose high is not above its low is empty."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, *pairs: tuple[Tensor, Tensor]) -> Spans:
        """From the (low, high) [B, Q] of each span."""
        low, high = (torch.stack(ends, 1).int() for ends in zip(*pairs, strict=True))
        return cls(low, high)

    @property
    def mask_mod(self) -> MaskMod:
        """Whether q sees kv, by their indices: a plain function, as flex attention wants it."""
        low, high = self.low, self.high

        def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            seen = (kv >= low[b, 0, q]) & (kv < high[b, 0, q])
            for span in range(1, low.shape[1]):
                seen = seen | ((kv >= low[b, span, q]) & (kv < high[b, span, q]))
            return seen

        return visible


def dense_mask(spans: Spans, keys: int) -> Tensor:
    """The mask function at every index: bool [B, 1, Q, keys]."""
    batch, _, queries = spans.low.shape
    device = spans.low.device
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    q = torch.arange(queries, device=device).view(1, 1, -1, 1)
    kv = torch.arange(keys, device=device).view(1, 1, 1, -1)
    return spans.mask_mod(b, torch.zeros_like(b), q, kv)


def block_mask(spans: Spans, keys: int) -> BlockMask:
    """The same for flex attention, its tiles found from the ends of the spans.

    create_block_mask looks at every index: compiled, that is one kernel that takes minutes to compile for 10,240 queries.
    """
    low, high = spans.low[..., None], spans.high[..., None]
    queries = low.shape[2]
    first = torch.arange(0, keys, TILE, dtype=torch.int32, device=low.device)
    touched = ((low < first + TILE) & (high > first) & (low < high)).any(1)  # [B, Q, tiles of keys]
    covered = ((low <= first) & (high >= first + TILE)).any(1)
    missing = -queries % TILE
    touched, covered = (F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, TILE)) for x in (touched, covered))
    whole = covered.all(2)
    counts, indices = _ordered(touched.any(2) & ~whole)
    whole_counts, whole_indices = _ordered(whole)
    return BlockMask.from_kv_blocks(
        counts, indices, whole_counts, whole_indices, TILE, spans.mask_mod, seq_lengths=(queries, keys)
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the tiles bool [B, q, k] each q takes, int32 [B, 1, q], and which, in front, int32 [B, 1, q, k]."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


def make_mask(spans: Spans, keys: int) -> Mask:
    return block_mask(spans, keys) if spans.low.is_cuda else dense_mask(spans, keys)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scaling: float) -> Tensor:
    """q [B, heads, Q, D], k and v [B, kv heads, K, D] -> [B, heads, Q, D]."""
    if isinstance(mask, BlockMask):
        compiling = torch.compiler.is_compiling()  # then it becomes part of the caller's graph
        flex: Any = flex_attention if compiling else _compiled(flex_attention)
        options = wide_head_options(q.shape[-1], q.dtype, _shared_bytes(q.device)) if q.shape[-1] > 256 else None
        return flex(q, k, v, block_mask=mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1], kernel_options=options)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])


def wide_head_options(size: int, dtype: torch.dtype, shared_bytes: int) -> dict[str, int]:
    """Tiles of flex attention for heads of more than 256 values, which fit into a program's shared memory.

    PyTorch's own for 512 values in 16 bits (64 queries, 32 keys, three stages, four warps; 2.11 to 2.13) need 256 KiB, and a
    Hopper GPU has 227.
    """
    for queries, keys, stages in ((64, 32, 2), (32, 32, 2), (32, 16, 2), (16, 16, 2), (16, 16, 1)):
        if (queries + 2 * stages * keys) * size * dtype.itemsize <= shared_bytes:
            break
    return {"BLOCK_M": queries, "BLOCK_N": keys, "num_stages": stages, "num_warps": 8}


def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return device_attribute(index, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)


def starts_of(documents: Tensor) -> Tensor:
    """Where the document of each position begins [B, S], in the row: documents [B, S] lie one behind the other."""
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return torch.where(begins, at, 0).cummax(1).values


def document_spans(documents: Tensor, window: int | None) -> Spans:
    """Causal within a document: key kv visible from q iff kv <= q, the same document [B, S], and q - kv < window."""
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    low = starts_of(documents)
    return Spans.of((low if window is None else torch.maximum(low, at - window + 1), at + 1))


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
            self.masks[spec.window] = make_mask(document_spans(self.documents, spec.window), length)
        q, k, v = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in (q, k, v))
        return masked_attention(q, k, v, self.masks[spec.window], spec.scale).transpose(1, 2).flatten(0, 1)


__all__ = ["DocumentAttention", "Mask", "Spans", "document_spans", "make_mask", "masked_attention", "starts_of"]
