"""Sequences in pages, and rows of them to be computed in one pass. Memory of nobody is NaN, and so is what no row may see."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashdraft.kernels import paged
from flashdraft.kernels.fused import Norm
from flashdraft.kernels.paged import ContextPages, Rows, Settings, most_spans, workspace_size

LONGEST = 700


@dataclass(frozen=True)
class Layer:
    heads: int = 4
    kv_heads: int = 2
    key_size: int = 32
    value_size: int = 32
    window: int | None = None
    causal: bool = True
    softcap: float | None = None
    sinks: tuple[float, ...] | None = None
    image: tuple[int, int] | None = None  # positions that all see the last of them
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return self.key_size**-0.5


@dataclass(frozen=True)
class Part:
    """Rows start..start+rows-1 of the sequence of this name; what stands before them is in pages already."""

    name: int
    start: int
    rows: int


LAYERS = {
    "full": Layer(),
    "one key head": Layer(heads=6, kv_heads=1),
    "as many key heads": Layer(heads=3, kv_heads=3, key_size=40, value_size=40),
    "unequal sizes": Layer(key_size=24, value_size=16),
    "window 1": Layer(window=1),
    "window 5": Layer(window=5),
    "window 70": Layer(window=70, heads=8),
    "both ways": Layer(causal=False),
    "both ways, window": Layer(causal=False, window=20),
    "soft cap": Layer(softcap=3.0),
    "an image, window 20": Layer(window=20, image=(138, 170)),
    "an image": Layer(heads=6, kv_heads=1, image=(52, 83), softcap=3.0),
    "sinks, window": Layer(sinks=(-1.0, 0.5, 2.0, 8.0), window=30),
}
MIXED = [Part(1, 0, 1), Part(2, 131, 8), Part(3, 64, 3), Part(4, 63, 16), Part(5, 300, 5)]


def contents(layer: Layer, name: int) -> tuple[Tensor, Tensor, Tensor]:
    """All queries, keys and values [LONGEST, heads, D] of a sequence: the same in every scene."""
    generator = torch.Generator().manual_seed(name)
    sizes = (layer.heads, layer.key_size), (layer.kv_heads, layer.key_size), (layer.kv_heads, layer.value_size)
    q, k, v = (torch.randn((LONGEST, *size), generator=generator).to(layer.dtype) for size in sizes)
    return q * 2, k, v


class Scene:
    """Pages, tables and rows of `parts`. Behind the rows stand two of padding, behind the tiles one that is none."""

    def __init__(self, layer: Layer, parts: list[Part], page_size: int = 16, tile_rows: int = 8, device: str = "cpu") -> None:
        self.layer, self.parts, self.page_size, self.device = layer, parts, page_size, device
        needed = sum(-(-(part.start + part.rows) // page_size) for part in parts)
        self.free = torch.randperm(needed + 1, generator=torch.Generator().manual_seed(1)).tolist()
        nobody = self.free.pop()
        key_elements, value_elements = (page_size * layer.kv_heads * size for size in (layer.key_size, layer.value_size))
        unit = 2 * (key_elements + value_elements)  # a second layer shares the pool
        self.pool = torch.full((needed + 1, unit), math.nan, dtype=layer.dtype, device=device)
        shape = (-1, page_size, layer.kv_heads)
        self.keys = self.pool[:, unit // 2 : unit // 2 + key_elements].view(*shape, layer.key_size)
        self.values = self.pool[:, unit // 2 + key_elements :].view(*shape, layer.value_size)
        self.table = torch.full((len(parts) + 2, -(-LONGEST // page_size)), nobody, dtype=torch.int32, device=device)
        rows: list[tuple[int, int, int]] = []  # (part, position, slot)
        tiles: list[tuple[int, int, int, int]] = []
        for index, part in enumerate(parts):
            slot = len(parts) - index  # not the order of the rows
            self._place(part, slot)
            for start in range(0, part.rows, tile_rows):
                count = min(tile_rows, part.rows - start)
                tiles.append((slot, len(rows) + start, count, part.start + part.rows))
            rows += [(index, part.start + i, slot) for i in range(part.rows)]
        self.real = len(rows)
        positions, slots = [p for _, p, _ in rows] + [0, 5], [s for _, _, s in rows] + [-1, -1]
        columns = [self._ints(column) for column in zip(*tiles, (-1, 0, 3, 9), strict=True)]
        reach = None
        if layer.image is not None:
            start, stop = layer.image
            reach = self._ints([stop - 1 if start <= p < stop else -1 for p in positions])
        self.rows = Rows(self._ints(positions), self._ints(slots), *columns, tile_rows, reach)
        self.q, self.k, self.v = (
            torch.stack([*(contents(layer, parts[i].name)[which][p] for i, p, _ in rows), *contents(layer, 0)[which][:2]]).to(
                device
            )
            for which in range(3)
        )
        self.sinks = None if layer.sinks is None else torch.tensor(layer.sinks, device=device)

    def _ints(self, values: list[int] | tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _place(self, part: Part, slot: int) -> None:
        """Give the sequence its pages, but those behind its window, and write the keys before `start` there."""
        window, size = self.layer.window, self.page_size
        first = 0 if window is None else max(0, part.start - window + 1) // size
        _, k, v = (x.to(self.device) for x in contents(self.layer, part.name))
        for page in range(first, -(-(part.start + part.rows) // size)):
            unit = self.free.pop()
            self.table[slot, page] = unit
            held = slice(page * size, min((page + 1) * size, part.start))
            count = max(0, held.stop - held.start)
            self.keys[unit, :count], self.values[unit, :count] = k[held][:count], v[held][:count]

    def expected(self) -> Tensor:
        """Softmax attention of the real rows, in float64, by its definition: [rows, heads, Dv]."""
        ranges = [(contents(self.layer, part.name), part.start, part.start + part.rows) for part in self.parts]
        return torch.cat([plain(self.layer, *whole, start, stop) for whole, start, stop in ranges])


def plain(layer: Layer, q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> Tensor:
    """Softmax attention of rows [start, stop) of a sequence over its keys before `stop`, in float64, by its definition."""
    group = layer.heads // layer.kv_heads
    q = q[start:stop].double().transpose(0, 1)
    k, v = (x[:stop].double().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.mT * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    distance = torch.arange(start, stop)[:, None] - torch.arange(stop)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if layer.image is not None:
        rows, (first, end) = torch.arange(start, stop), layer.image
        last = torch.where((rows >= first) & (rows < end), end - 1, rows)
        hidden |= torch.arange(stop) > last[:, None]
    elif layer.causal:
        hidden |= distance < 0
    if layer.window is not None:
        hidden |= (distance if layer.image is not None else distance.abs()) >= layer.window
    scores = scores.masked_fill(hidden, -math.inf)
    if layer.sinks is not None:
        column = torch.tensor(layer.sinks).double()[:, None, None].expand(-1, stop - start, 1)
        scores = torch.cat([scores, column], -1)
    return (scores.softmax(-1)[..., :stop] @ v).transpose(0, 1)


def attend(
    scene: Scene, span: int = 64, splits: int = 4, spans: int | None = None, kernels: Any = paged, query_rows: int = 0
) -> Tensor:
    """Store the scene's rows, attend, and return the real rows; `spans`: how many the workspace holds, if not enough."""
    kernels.store_rows(scene.k, scene.v, scene.rows, scene.table, scene.keys, scene.values)
    settings = replace(attention_settings(scene, span, splits, spans), query_rows=query_rows)
    return kernels.paged_attention(scene.q, scene.keys, scene.values, scene.table, scene.rows, settings)[: scene.real]


def attention_settings(scene: Scene, span: int = 64, splits: int = 4, spans: int | None = None, pdl: bool = False) -> Settings:
    layer = scene.layer
    spans = spans or most_spans(span, scene.rows.max_tile_rows, LONGEST, layer.window, ahead=16 if layer.image is None else 40)
    size = workspace_size(scene.q.shape[0], layer.heads, layer.value_size, spans)
    return Settings(
        window=layer.window,
        causal=layer.causal,
        reaches=layer.image is not None,
        scale=layer.scale,
        softcap=layer.softcap,
        sinks=scene.sinks,
        span=torch.tensor([span], dtype=torch.int32, device=scene.device),
        splits=splits,
        workspace=torch.empty(size, device=scene.device),
        pdl=pdl,
    )


def plain_norm(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x.double()
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return y if norm.weight is None else y * norm.weight.double()


NORMS = {
    "no norms": (None, None, None),
    "Llama's rounding": (Norm(torch.rand(32) + 0.5, 1e-6, True), Norm(torch.rand(32) + 0.5, 1e-5, True), None),
    "Gemma's": (Norm(torch.rand(32) + 0.5, 1e-6, False), Norm(torch.rand(32) + 0.5, 1e-6, False), Norm(None, 1e-6, False)),
}


def context_scene(dtype: torch.dtype, device: str = "cpu") -> tuple[Rows, ContextPages, list[Scene]]:
    """Three layers: two in the units of one slab, the third in another's."""
    scenes = [Scene(Layer(kv_heads=3, dtype=dtype), [Part(1, 30, 5), Part(2, 0, 2)], device=device) for _ in range(2)]
    pool = torch.cat([scene.pool for scene in scenes])
    tables = torch.stack([scenes[0].table, scenes[1].table + len(scenes[0].pool)])
    size = 16 * 3 * 32
    starts = torch.tensor([0, 2 * size, 0], device=device)
    slabs = torch.tensor([0, 0, 1], dtype=torch.int32, device=device)
    return scenes[0].rows, ContextPages(pool, tables, starts, starts + size, slabs, 16, 3), scenes
