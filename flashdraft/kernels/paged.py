"""Rows of a forward pass over paged keys and values: storing them, projecting them, attention. The PyTorch references.

Shape letters: T rows, N tiles, D key size, Dv value size. Pages are `keys` [units, page size, kv heads, D] and `values`
[units, page size, kv heads, Dv], strided views with contiguous heads; `table` [slots, pages] int32 holds the unit of every
page of a sequence. On CUDA the functions hand over to the kernels of paged_*triton.py.

A row's bits depend on its prefix only: keys are cut at absolute multiples of `span`, every span gives a partial softmax
(maximum, sum, accumulator in float32), and partials are combined in an order that absolute positions alone decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashdraft.kernels.fused import Norm

SPAN_MULTIPLE = 64  # spans are multiples of it, so that they hold whole tiles of keys


@dataclass(frozen=True)
class Rows:
    """The rows of one pass, on the device, int32, in *tiles*: rows of one sequence at consecutive positions.

    positions [T]: absolute. slots [T]: the page-table row of each row's sequence, -1 for padding (its keys are not stored).
    tile_slot [N]: the page-table row of the tile's sequence, -1: no tile. tile_start [N]: its first row. tile_rows [N]: their
    number, 1..max_tile_rows. tile_end [N]: one past the last position that holds a key once this pass has stored its own.

    Key j is visible from position p iff j < tile_end, |p - j| < window (if there is one) and, if causal, j <= p. reach [T]: in
    layers that reach (Settings), which are causal, row t sees j <= max(p, reach[t]) instead, and p - j < window.
    """

    positions: Tensor
    slots: Tensor
    tile_slot: Tensor
    tile_start: Tensor
    tile_rows: Tensor
    tile_end: Tensor
    max_tile_rows: int
    reach: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What attention does, and how a pass computes it.

    window, causal, reaches: what a row sees (Rows). scale: of the products of queries and keys. softcap: scores become
    softcap * tanh(score / softcap). sinks [heads] float32: the score of one more key, whose value is 0.
    span [1] int32, on the device: keys of a span, a multiple of SPAN_MULTIPLE. splits: programs along the keys; program s takes
    the spans s, s + splits, ... that the tile sees. workspace: flat float32, at least workspace_size elements, shared by the
    layers of a pass; a tile that sees more spans than it holds gets NaN.
    query_rows: of a program (a power of two): more of them read keys for fewer programs. 0: what is best for few rows, a number
    that depends on the layer and the chip alone, so that a row's bits do not depend on the pass. deterministic: such a number,
    but the best for many rows.
    hopper: by the kernel of hopper_attention.py where that one supports it; the number of query rows is then its own.
    pdl: programmatic dependent launch (compute capability 9.0 and up). Rows, tables and span are then read while the kernel
    before still runs: a launch without pdl must stand between whatever writes them and the first reader.
    """

    window: int | None
    causal: bool
    reaches: bool = False
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    span: Tensor
    splits: int
    workspace: Tensor
    query_rows: int = 0
    deterministic: bool = False
    hopper: bool = False
    pdl: bool = False


@dataclass(frozen=True)
class ContextPages:
    """Where all L layers of the draft keep the context: pool [units, elements], tables [slabs, slots, pages] int32.

    keys, values [L] int64: first element of the layer's keys and values in a unit. slabs [L] int32: its row of `tables`.
    """

    pool: Tensor
    tables: Tensor
    keys: Tensor
    values: Tensor
    slabs: Tensor
    page_size: int
    kv_heads: int


def most_spans(span: int, max_tile_rows: int, max_tokens: int, window: int | None, ahead: int = 0) -> int:
    """The most spans that a tile can see of a sequence of up to max_tokens; `ahead`: keys it sees behind its own last row."""
    spans = -(-max_tokens // span)
    return spans if window is None else min(spans, -(-(window + max_tile_rows + ahead) // span) + 1)


MULTIPROCESSORS = 132  # of an H200, which numbers of programs are made for
MOST_SPLITS, MOST_WINDOW_SPLITS = 64, 16  # a window of 512 is then cut in 9 or 10 spans of 64 keys


def splits_of(head_sizes: int, kv_heads: int, window: int | None, tiles: int) -> int:
    """Programs along the keys for a pass of `tiles` tiles, so that all of a layer run at once; head_sizes: D + Dv."""
    at_once = MULTIPROCESSORS * (1 if head_sizes > 256 else 3)  # as shared memory holds
    return max(1, min(MOST_SPLITS if window is None else MOST_WINDOW_SPLITS, at_once // (tiles * kv_heads)))


def span_of(keys: int, spans: int) -> int:
    """Keys of a span such that `spans` of them hold `keys`."""
    return -(-keys // (spans * SPAN_MULTIPLE)) * SPAN_MULTIPLE


def workspace_size(rows: int, heads: int, value_size: int, spans: int) -> int:
    """Elements of Settings.workspace that `rows` rows need to see `spans` spans each."""
    return rows * heads * spans * (value_size + 2)


def store_rows(k: Tensor, v: Tensor, rows: Rows, table: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store k [T, kv heads, D] and v [T, kv heads, Dv] in the pages of their positions; padding rows are skipped."""
    if k.is_cuda:
        from flashdraft.kernels.paged_triton import store_rows as kernel

        return kernel(k, v, rows, table, keys, values)
    return store_rows_reference(k, v, rows, table, keys, values)


def store_rows_reference(k: Tensor, v: Tensor, rows: Rows, table: Tensor, keys: Tensor, values: Tensor) -> None:
    real = rows.slots >= 0
    positions = rows.positions[real].long()
    units = table[rows.slots[real].long(), positions // keys.shape[1]].long()
    keys.index_put_((units, positions % keys.shape[1]), k[real])
    values.index_put_((units, positions % keys.shape[1]), v[real])


@dataclass(frozen=True)
class Projection:
    """The fused product of a layer's queries, keys and values, and what is still to be done to them: norms, then RoPE.

    qkv [T, (heads + 2 kv_heads) * D]; a layer that shares another's keys has kv_heads 0. Each head is normed where there is a
    norm; queries and keys are then turned by cos, sin [T, R] (None: not), the first R dimensions of a head, half against half.
    """

    qkv: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Norm | None
    k_norm: Norm | None
    v_norm: Norm | None
    cos: Tensor | None
    sin: Tensor | None

    @property
    def norms(self) -> tuple[Norm | None, Norm | None, Norm | None]:
        return self.q_norm, self.k_norm, self.v_norm


def project_rows(p: Projection, rows: Rows, table: Tensor, keys: Tensor, values: Tensor, *, pdl: bool = False) -> Tensor:
    """Queries [T, heads, D] of a projection; its keys and values, if it has any, go to their pages."""
    if p.qkv.is_cuda:
        from flashdraft.kernels.paged_triton import project_rows as kernel

        return kernel(p, rows, table, keys, values, pdl=pdl)
    return project_rows_reference(p, rows, table, keys, values)


def project_rows_reference(p: Projection, rows: Rows, table: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    heads = p.qkv.unflatten(-1, (-1, p.head_dim)).split([p.heads, p.kv_heads, p.kv_heads], 1)
    q, k, v = (x if norm is None else norm(x) for x, norm in zip(heads, p.norms, strict=True))
    if p.cos is not None and p.sin is not None:
        q, k = turned(q, p.cos, p.sin), turned(k, p.cos, p.sin)
    if p.kv_heads:
        store_rows_reference(k, v, rows, table, keys, values)
    return q.contiguous()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [T, heads, D] by cos, sin [T, R]: x cos + rotate(x) sin in float32, rounded once; dimensions behind R stay."""
    size = cos.shape[-1]
    y = x[..., :size].float()
    left, right = y.chunk(2, -1)
    y = y * cos.float()[:, None] + torch.cat((-right, left), -1) * sin.float()[:, None]
    return torch.cat((y.to(x.dtype), x[..., size:]), -1)


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
    """Store the draft's context keys and values of all layers: kv [T, L, 2, kv heads * D], k_norms [L, D] float32.

    Keys are normed by head and turned by cos, sin [T, D]; values are stored as they are. eps, round_first: see Norm.
    """
    if kv.is_cuda:
        from flashdraft.kernels.paged_triton import store_context as kernel

        return kernel(kv, k_norms, eps, round_first, cos, sin, rows, pages, pdl=pdl)
    return store_context_reference(kv, k_norms, eps, round_first, cos, sin, rows, pages)


def store_context_reference(
    kv: Tensor, k_norms: Tensor, eps: float, round_first: bool, cos: Tensor, sin: Tensor, rows: Rows, pages: ContextPages
) -> None:
    shape = (-1, pages.page_size, pages.kv_heads, k_norms.shape[1])
    size = pages.page_size * pages.kv_heads * k_norms.shape[1]
    for layer, weight in enumerate(k_norms):
        k, v = (x.unflatten(-1, shape[2:]) for x in kv[:, layer].unbind(1))
        k = turned(Norm(weight, eps, round_first)(k), cos, sin)
        keys, values = (pages.pool[:, start : start + size].view(shape) for start in (pages.keys[layer], pages.values[layer]))
        store_rows_reference(k, v, rows, pages.tables[pages.slabs[layer]], keys, values)


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Rows, settings: Settings) -> Tensor:
    """Attention of q [T, heads, D] over the pages -> [T, heads, Dv]; rows outside every tile may hold anything."""
    if q.is_cuda:
        from flashdraft.kernels.paged_triton import paged_attention as kernel

        return kernel(q, keys, values, table, rows, settings)
    return paged_attention_reference(q, keys, values, table, rows, settings)


def paged_attention_reference(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Rows, settings: Settings) -> Tensor:
    size, window = int(settings.span), settings.window
    assert size > 0 and size % SPAN_MULTIPLE == 0
    out = torch.zeros((*q.shape[:2], values.shape[3]), dtype=q.dtype, device=q.device)
    tiles = zip(*(x.tolist() for x in (rows.tile_slot, rows.tile_start, rows.tile_rows, rows.tile_end)), strict=True)
    for slot, start, count, end in tiles:
        for row in range(start, start + count) if slot >= 0 else ():
            p = int(rows.positions[row])
            low = 0 if window is None else max(0, p - window + 1)
            last = max(p, int(rows.reach[row])) if settings.reaches and rows.reach is not None else p
            stop = min(end, last + 1) if settings.causal else end if window is None else min(end, p + window)
            parts = [
                _partial(q[row], keys, values, table[slot], max(low, s), min(stop, s + size), s, settings)
                for s in range(low // size * size, stop if low < stop else 0, size)
            ]
            if parts:
                out[row] = _combined(parts, settings.sinks, q.shape[1]).to(q.dtype)
    return out


Partial = tuple[Tensor, Tensor, Tensor]  # maximum [heads, 1], sum [heads, 1], accumulator [heads, Dv], all float32


def _partial(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, low: int, stop: int, start: int, settings: Settings
) -> Partial:
    """Softmax attention of a row q [heads, D] over keys low..stop-1 of the span at `start`; products have the span's shape."""
    (page, kv_heads), span, softcap = keys.shape[1:3], int(settings.span), settings.softcap
    positions = torch.arange(low, stop, device=q.device)
    units = table[positions // page].long()
    k = torch.zeros((span, *keys.shape[2:]), device=q.device)
    v = torch.zeros((span, *values.shape[2:]), device=q.device)
    k[low - start : stop - start] = keys[units, positions % page].float()
    v[low - start : stop - start] = values[units, positions % page].float()
    scores = q.float().view(kv_heads, -1, q.shape[-1]) @ k.permute(1, 2, 0) * settings.scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores[..., : low - start] = scores[..., stop - start :] = float("-inf")
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total, acc = weights.sum(-1, keepdim=True), weights @ v.transpose(0, 1)
    return top.flatten(0, 1), total.flatten(0, 1), acc.flatten(0, 1)


def _combined(parts: list[Partial], sinks: Tensor | None, heads: int) -> Tensor:
    """[heads, Dv] from the partials, ascending."""
    top = torch.stack([part[0] for part in parts]).amax(0)
    total, acc = torch.zeros_like(top), torch.zeros_like(parts[0][2])
    if sinks is not None:
        sink = sinks.float().view(heads, 1)
        top = torch.maximum(top, sink)
        total = (sink - top).exp()
    for peak, part, rows in parts:
        weight = (peak - top).exp()
        total, acc = total + weight * part, acc + weight * rows
    return acc / total
