"""The kernels of a step, on the shapes of Gemma 4 E4B and the reference draft, with what PyTorch does in their place.

A part is a table of kernel_times.py. Its lines are made one by one, for their memory: rows are those of the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashdraft.engine.forward import MANY_TILES
from flashdraft.engine.request import SamplingParams
from flashdraft.engine.sampling import RequestRows, SampleTable, sample_on_device
from flashdraft.kernels import norm_triton
from flashdraft.kernels.fused import (
    Norm,
    add_norm,
    add_norm_reference,
    argmax_linear,
    argmax_rows,
    fused_linear,
    fused_linear_reference,
    gated_activation_reference,
)
from flashdraft.kernels.paged import (
    ContextPages,
    Projection,
    Rows,
    Settings,
    most_spans,
    paged_attention,
    project_rows,
    span_of,
    splits_of,
    store_context,
    turned,
    workspace_size,
)
from flashdraft.kernels.step import TILE_ROWS, chunk_rows

HIDDEN, VOCAB, PAGE, BLOCK, CHUNK = 2560, 262144, 16, 8, 512
ROTATED_BYTES, MOST_COPIES = 160 << 20, 128  # the L2 cache of an H200 holds 60 MB
# Outputs, inputs, and what follows the product.
PRODUCTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "q, k, v": (3072, HIDDEN, {}),
    "output": (HIDDEN, 2048, {}),
    "output, global": (HIDDEN, 4096, {}),
    "gate, up": (10240, HIDDEN, {"activation": "gelu_tanh", "gated": True}),
    "down": (HIDDEN, 10240, {}),
    "per-layer gate": (256, HIDDEN, {"activation": "gelu_tanh", "multiply": True}),
    "per-layer proj.": (HIDDEN, 256, {}),
    "draft q, k, v": (6144, HIDDEN, {}),
    "draft output": (HIDDEN, 4096, {}),
    "draft gate, up": (5120, HIDDEN, {"activation": "silu", "gated": True}),
    "draft down": (HIDDEN, 5120, {}),
}
LAYER = ("q, k, v", "output", "gate, up", "down", "per-layer gate", "per-layer proj.")


@dataclass(frozen=True)
class Attention:
    """A kind of layer."""

    heads: int
    kv_heads: int
    size: int
    window: int | None
    causal: bool = True


LAYERS = {
    "sliding": Attention(8, 2, 256, 512),
    "global": Attention(8, 2, 512, None),
    "draft": Attention(32, 8, 128, 1024, causal=False),
}


@dataclass(frozen=True)
class Case:
    """What a line measures: ours and its peer, called with one of `copies` after the other.

    size: bytes that a call must move; operations: multiplications and additions of its products.
    """

    size: int
    copies: list[Any]
    ours: Callable[[Any], object]
    peer: Callable[[Any], object]
    operations: float = 0.0


Line = tuple[str, int, Callable[[], Case]]  # name, rows, and what makes the case


@dataclass(frozen=True)
class Machine:
    """Where cases run. `shrink`: every size but heads, rows and pages is divided by it."""

    device: torch.device
    shrink: int = 1

    @property
    def pdl(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (9, 0)

    def __call__(self, size: int) -> int:
        return max(1, size // self.shrink)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(std=scale)

    def ints(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def norm(self, size: int) -> Norm:
        return Norm(torch.rand(size, device=self.device) + 0.5, 1e-6, False)

    def copies(self, make: Callable[[], Any], size: int) -> list[Any]:
        """So many, two at least, that `size` bytes of each are more together than the L2 cache holds."""
        wanted = -(-ROTATED_BYTES // size) if self.device.type == "cuda" else 2
        return [make() for _ in range(min(MOST_COPIES, max(2, wanted)))]


def features(on: Machine, outputs: int, rows: int, given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "multiply": on.random(rows, outputs)} if given.get("multiply") else given


def products(on: Machine, rows: list[int]) -> Iterator[Line]:
    """The products of a target's layer and of a draft's, with what follows them; the peer is F.linear alone."""
    for name, (outputs, k, given) in PRODUCTS.items():
        for count in rows:
            yield name, count, partial(product, on, on(outputs), on(k), given, count)


def product(on: Machine, outputs: int, k: int, given: dict[str, Any], rows: int) -> Case:
    height = outputs * (2 if given.get("gated") else 1)
    x, after = on.random(rows, k), features(on, outputs, rows, given)
    size = 2 * (height * k + rows * (k + outputs * (2 if "multiply" in after else 1)))
    weights = on.copies(lambda: on.random(height, k, scale=k**-0.5), 2 * height * k)
    operations = 2.0 * rows * height * k
    return Case(size, weights, lambda w: fused_linear(w, x, **after), lambda w: F.linear(x, w), operations)


def head(on: Machine, rows: list[int]) -> Iterator[Line]:
    """Logits, and the likeliest token alone, as the draft wants it; the peer is F.linear, with an argmax."""

    def case(n: int, best: bool) -> Case:
        vocab, k = on(VOCAB), on(HIDDEN)
        x, size, operations = on.random(n, k), 2 * vocab * k, 2.0 * n * vocab * k
        weights = on.copies(lambda: on.random(vocab, k, scale=k**-0.5), size)
        if best:
            return Case(size, weights, lambda w: argmax_linear(w, x), lambda w: F.linear(x, w).argmax(-1), operations)
        return Case(size + 2 * n * vocab, weights, lambda w: fused_linear(w, x), lambda w: F.linear(x, w), operations)

    for n in rows:
        yield "logits", n, partial(case, n, best=False)
        yield "arg max", n, partial(case, n, best=True)


def layer(on: Machine, rows: list[int]) -> Iterator[Line]:
    """All of a target's layer but attention: six products, their norms, additions and activations; the peer is plain torch."""
    for n in rows:
        yield "a target's layer", n, partial(whole_layer, on, n)


def whole_layer(on: Machine, rows: int) -> Case:
    shapes = {name: (PRODUCTS[name][0] * (2 if "gated" in PRODUCTS[name][2] else 1), PRODUCTS[name][1]) for name in LAYER}
    shapes = {name: (on(n), on(k)) for name, (n, k) in shapes.items()}
    size = sum(2 * n * k for n, k in shapes.values())
    layers = on.copies(lambda: {name: on.random(n, k, scale=k**-0.5) for name, (n, k) in shapes.items()}, size)
    norms = [on.norm(on(HIDDEN)) for _ in range(5)]
    x, added, multiply = on.random(rows, on(HIDDEN)), on.random(rows, on(HIDDEN)), on.random(rows, on(256))
    gelu = {"activation": "gelu_tanh"}

    def run(linear: Callable[..., tuple[Tensor, Tensor]], w: dict[str, Tensor]) -> Tensor:
        qkv, r = linear(w["q, k, v"], x, add=added, post_norm=norms[0], scale=0.5, norm=norms[1])
        out, _ = linear(w["output"], qkv[:, : w["output"].shape[1]])  # attention is left out
        z, r = linear(w["gate, up"], r, add=out, post_norm=norms[2], norm=norms[3], gated=True, **gelu)
        down, _ = linear(w["down"], z)
        z, r = linear(w["per-layer gate"], r, add=down, post_norm=norms[4], multiply=multiply, **gelu)
        return linear(w["per-layer proj."], z)[0]

    operations = 1.0 * rows * size
    return Case(size, layers, lambda w: run(fused_linear, w), lambda w: run(fused_linear_reference, w), operations)


def attention(on: Machine, rows: list[int]) -> Iterator[Line]:
    """Blocks of 8 rows of 1 and 16 sequences, and a chunk of 512 rows of a prompt, behind so many tokens."""
    for name, kind in LAYERS.items():
        for batch, each in ((1, BLOCK), (16, BLOCK), (1, CHUNK)):
            for context in (1024, 8192, 32768):
                if each == BLOCK or kind.causal:
                    title = f"{name}, {context // 1024}k" + ("" if each == BLOCK else ", prompt")
                    n = each if each == BLOCK else max(TILE_ROWS, on(each))
                    yield title, batch * n, partial(attend, on, kind, batch, on(context), n)


def attend(on: Machine, kind: Attention, batch: int, context: int, each: int, hopper: bool = False) -> Case:
    heads, kv, d = kind.heads, kind.kv_heads, on(kind.size)
    window = None if kind.window is None else on(kind.window)
    end, tiles = context + each, batch * (1 if each == BLOCK else each // TILE_ROWS)
    low = 0 if window is None else max(0, context - window + 1)
    seen = end - low
    rows, place = tiles_of(on, batch, context, each), settings(on, kind, window, tiles, end, batch * each)
    q, size = on.random(batch * each, heads, d), 2 * batch * d * (seen * kv * 2 + each * heads * 2)
    folded = q.view(batch, each, kv, -1, d).permute(0, 2, 3, 1, 4).reshape(batch, kv, -1, d)

    def memory() -> tuple[Tensor, ...]:
        # Pages behind the window are gone, as in the engine: they are all page 0.
        first, last = low // PAGE, -(-end // PAGE)
        pool = on.random(1 + batch * (last - first), 2, PAGE, kv, d)
        table = on.ints([[0] * last] * batch)
        table[:, first:] = 1 + torch.randperm(batch * (last - first), device=on.device).view(batch, -1)
        return pool[:, 0], pool[:, 1], table, on.random(batch, kv, seen, d), on.random(batch, kv, seen, d)

    def other(m: tuple[Tensor, ...]) -> Tensor:
        if hopper:
            return paged_attention(q, m[0], m[1], m[2], rows, replace(place, hopper=False))
        return F.scaled_dot_product_attention(folded, m[3], m[4])

    middle = context + each // 2 if kind.causal else end
    operations = 4.0 * d * heads * batch * each * (middle - (low if window is None else max(0, context + each // 2 - window)))
    return Case(
        size,
        on.copies(memory, size),
        lambda m: paged_attention(q, m[0], m[1], m[2], rows, replace(place, hopper=hopper)),
        other,
        operations,
    )


def tiles_of(on: Machine, batch: int, context: int, each: int) -> Rows:
    """Rows behind `context` tokens of every sequence: a block of each, or a chunk of one."""
    if each != BLOCK:
        firsts = range(context, context + each, TILE_ROWS)
        counts = [min(TILE_ROWS, context + each - first) for first in firsts]
        tiles = [0] * len(firsts), list(firsts), counts, [context + each] * len(firsts)
        return chunk_rows(tuple(map(on.ints, tiles)), on.ints([each - 1]), on.ints([0] * len(firsts) * TILE_ROWS)).rows
    positions, slots = zip(*((context + i, s) for s in range(batch) for i in range(each)), strict=True)
    starts, counts, ends = range(0, batch * each, each), [each] * batch, [context + each] * batch
    return Rows(*(on.ints(list(x)) for x in (positions, slots, range(batch), starts, counts, ends)), max_tile_rows=BLOCK)


def settings(on: Machine, kind: Attention, window: int | None, tiles: int, longest: int, rows: int) -> Settings:
    """Keys are divided as PagedModels in engine/forward.py divides them."""
    splits = most = splits_of(2 * on(kind.size), kind.kv_heads, window, tiles)
    span = span_of(longest if window is None else window + TILE_ROWS, splits)
    if window is not None:
        splits = most = most_spans(span, TILE_ROWS, longest, window)
    query_rows = 0 if tiles < MANY_TILES else 32 if rows // tiles <= BLOCK else 64
    workspace = torch.empty(workspace_size(rows, kind.heads, on(kind.size), most), device=on.device)
    rule = dict(window=window, causal=kind.causal, scale=on(kind.size) ** -0.5)
    return Settings(**rule, span=on.ints([span]), splits=splits, workspace=workspace, query_rows=query_rows, pdl=on.pdl)


def places(on: Machine, n: int) -> tuple[Rows, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Rows at position 1,000 of one or more sequences, their page table, the same as indices of pages; cos and sin of it."""
    batch = max(1, n // BLOCK)
    rows, pages = tiles_of(on, batch, on(1000), n // batch), -(-(on(1000) + BLOCK) // PAGE)
    table = torch.randperm(batch * pages, device=on.device).view(batch, pages).int()
    positions = rows.positions.long()
    return rows, table, (table[rows.slots.long(), positions // PAGE].long(), positions % PAGE), (positions, positions)


def projection(on: Machine, rows: list[int]) -> Iterator[Line]:
    """Norms and RoPE of queries and keys, keys and values to their pages; the peer is plain torch."""

    def case(kind: Attention, n: int) -> Case:
        heads, kv, d = kind.heads, kind.kv_heads, on(kind.size)
        (where, table, index, _), wide = places(on, n), (kind.heads + 2 * kind.kv_heads) * on(kind.size)
        pool = on.random(table.numel(), 2, PAGE, kv, d)
        cos, sin = on.random(n, 2 * d).chunk(2, -1)
        norms = on.norm(d), on.norm(d), Norm(None, 1e-6, False)

        def peer(qkv: Tensor) -> Tensor:
            parts = qkv.unflatten(-1, (-1, d)).split([heads, kv, kv], 1)
            q, k, v = (norm(x) for norm, x in zip(norms, parts, strict=True))
            pool[:, 0].index_put_(index, turned(k, cos, sin))
            pool[:, 1].index_put_(index, v)
            return turned(q, cos, sin)

        def ours(qkv: Tensor) -> Tensor:
            p = Projection(qkv, heads, kv, d, *norms, cos, sin)
            return project_rows(p, where, table, pool[:, 0], pool[:, 1], pdl=on.pdl)

        size = 2 * n * 2 * (wide + d)
        return Case(size, on.copies(lambda: on.random(n, wide), size), ours, peer)

    for name, kind in LAYERS.items():
        for n in (BLOCK, 16 * BLOCK):
            yield name, n, partial(case, kind, n)


def context(on: Machine, rows: list[int]) -> Iterator[Line]:
    """The draft's keys and values of five layers to their pages; the peer is plain torch."""

    def case(n: int, layers: int = 5) -> Case:
        kv, d = LAYERS["draft"].kv_heads, on(128)
        (where, table, index, _), part = places(on, n), PAGE * kv * d
        pool = on.random(table.numel(), layers, 2, PAGE, kv, d)
        starts = torch.arange(layers, device=on.device) * 2 * part
        tables, slabs = table[None], on.ints([0] * layers)
        pages = ContextPages(pool.flatten(1), tables, starts, starts + part, slabs, PAGE, kv)
        norms, (cos, sin) = torch.rand(layers, d, device=on.device), on.random(n, 2 * d).chunk(2, -1)

        def peer(given: Tensor) -> None:
            for i in range(layers):
                k, v = given[:, i].unflatten(-1, (kv, d)).unbind(1)
                pool[:, i, 0].index_put_(index, turned(Norm(norms[i], 1e-6, True)(k), cos, sin))
                pool[:, i, 1].index_put_(index, v)

        def ours(given: Tensor) -> None:
            store_context(given, norms, 1e-6, True, cos, sin, where, pages, pdl=on.pdl)

        size = 2 * n * (2 * layers * 2 * kv * d + 2 * d)
        return Case(size, on.copies(lambda: on.random(n, layers, 2, kv * d), size), ours, peer)

    for n in (BLOCK, 16 * BLOCK):
        yield "context of 5 layers", n, partial(case, n)


def rowwise(on: Machine, rows: list[int]) -> Iterator[Line]:
    """What stands between products, and the likeliest token of logits; the peer is plain torch."""
    cuda = on.device.type == "cuda"

    def adding(n: int) -> Case:
        post, norm, k = on.norm(on(HIDDEN)), on.norm(on(HIDDEN)), on(HIDDEN)
        pairs = on.copies(lambda: (on.random(n, k), on.random(n, k)), 8 * n * k)
        ours, peer = (lambda p, f=f: f(*p, post, 0.5, norm) for f in (add_norm, add_norm_reference))
        return Case(8 * n * k, pairs, ours, peer)

    def gated(n: int) -> Case:
        k = on(20480)
        ours = (lambda y: norm_triton.gated_activation(y, "gelu_tanh", pdl=on.pdl)) if cuda else plain
        return Case(3 * n * k, on.copies(lambda: on.random(n, k), 3 * n * k), ours, plain)

    def plain(y: Tensor) -> Tensor:
        return gated_activation_reference(y, "gelu_tanh")

    def best(n: int) -> Case:
        size = 2 * n * on(VOCAB)
        return Case(size, on.copies(lambda: on.random(n, on(VOCAB)), size), argmax_rows, lambda x: x.argmax(-1))

    for name, case in (("addition, two norms", adding), ("gated activation", gated), ("arg max", best)):
        for n in (BLOCK, 16 * BLOCK):
            yield name, n, partial(case, n)


FILTERS = {"no filter": {}, "top-p 0.95": {"top_p": 0.95}, "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95}}


def sampler(on: Machine, rows: list[int]) -> Iterator[Line]:
    """Choices by keyed noise; the peer sorts, drops and draws."""

    def case(filters: dict[str, Any], n: int) -> Case:
        lines = [RequestRows(SamplingParams(temperature=1.0, **filters), seed=i, index=i) for i in range(n)]
        table, size = SampleTable.of(lines, on.device), 2 * n * on(VOCAB)

        def logits() -> Tensor:  # a few likely tokens, as of a language model
            x = on.random(n, on(VOCAB), scale=3.0)
            return x + 12 * (torch.rand(x.shape, device=on.device) < 2e-5)

        return Case(size, on.copies(logits, size), lambda x: sample_on_device(x, table), lambda x: sorted_sample(x, **filters))

    for name, filters in FILTERS.items():
        for n in (BLOCK, 16 * BLOCK):
            yield name, n, partial(case, filters, n)


def sorted_sample(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Top-k, top-p and a draw from what is left, the usual way."""
    x = logits.float()
    if top_k or top_p < 1:
        x, order = x.sort(-1)
        if top_k:
            x = x.masked_fill(x < x[:, -top_k, None], -torch.inf)
        below = x.softmax(-1).cumsum(-1) <= 1 - top_p
        below[:, -1] = False
        x = torch.empty_like(x).scatter_(-1, order, x.masked_fill(below, -torch.inf))
    probabilities = x.softmax(-1)
    return probabilities.div_(torch.empty_like(x).exponential_()).argmax(-1)


PARTS = {
    "products": products,
    "head": head,
    "layer": layer,
    "attention": attention,
    "projection": projection,
    "context": context,
    "rowwise": rowwise,
    "sampler": sampler,
}
