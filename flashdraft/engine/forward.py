"""Forward passes of target and draft over pages, with all shapes fixed: what the stages of a device step are made of.

Shape letters: T rows, N tiles (consecutive rows of one sequence that attention takes together), H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashdraft.draft import DFlashDraft
from flashdraft.engine.cache import KVShape, LayerPages, PagePool, kv_shapes
from flashdraft.engine.draft_pass import DraftPass, fits
from flashdraft.engine.state import DeviceTables
from flashdraft.kernels.fused import FusedOptions
from flashdraft.kernels.paged import (
    SPAN_MULTIPLE,
    ContextPages,
    PagedOptions,
    Projection,
    Rows,
    Settings,
    Workspace,
    fused_paged_attention,
    most_spans,
    paged_attention,
    project_rows,
    store_rows,
    workspace_size,
)
from flashdraft.targets.target import LayerSpec, Target

TILE_ROWS = 16
PROGRAMS = 264  # programs of attention to aim at, twice the 132 multiprocessors of an H200
MOST_SPLITS = 64


def tile_rows(most: int) -> int:
    """Rows that a tile is made for, where a sequence has at most so many: half the query side of attention for blocks of 8."""
    return TILE_ROWS // 2 if most <= TILE_ROWS // 2 else TILE_ROWS


@dataclass(frozen=True)
class Forward:
    """The rows of one pass, and the span of keys that full layers are cut in (int32 [1])."""

    rows: Rows
    span: Tensor
    single_tiles: bool  # every sequence is one tile, so that attention may also store its keys

    @property
    def positions(self) -> Tensor:
        return self.rows.positions.long()

    @classmethod
    def rows_of_sequences(
        cls, slots: Tensor, positions: Tensor, tiles: tuple[Tensor, Tensor, Tensor, Tensor], span: Tensor, limit: int, most: int
    ) -> Forward:
        """Rows int32 [T] of slots at positions, in tiles (slots, first rows, rows, ends) int32 [N] of at most `most` rows. Rows
        at `limit` or beyond, of steps behind a request's end, are like padding.
        """
        slot, start, count, end = tiles
        slots = torch.where(positions < limit, slots, -1)
        return cls(
            Rows(
                positions=positions.clamp(0, limit - 1).int(),
                slots=slots,
                tile_slot=slot,
                tile_start=start.clamp(min=0),
                tile_rows=count.clamp(min=0),
                tile_end=end.clamp(0, limit).int(),
                max_tile_rows=tile_rows(most),
            ),
            span,
            single_tiles=most <= TILE_ROWS,
        )

    @classmethod
    def blocks(cls, slots: Tensor, anchors: Tensor, size: int, span: Tensor, limit: int) -> Forward:
        """Blocks of `size` rows from the anchors' positions on [N]."""
        offsets = torch.arange(size, device=slots.device)
        starts = torch.arange(0, size, TILE_ROWS, device=slots.device, dtype=torch.int32)
        first = torch.arange(len(slots), device=slots.device, dtype=torch.int32)[:, None] * size + starts
        tiles = (
            slots.repeat_interleave(len(starts)),
            first.flatten(),
            (size - starts).clamp(max=TILE_ROWS).repeat(len(slots)),
            (anchors + size).repeat_interleave(len(starts)),
        )
        positions = (anchors[:, None] + offsets).flatten()
        return cls.rows_of_sequences(slots.repeat_interleave(size), positions, tiles, span, limit, size)

    @classmethod
    def chunk(cls, slot: Tensor, start: Tensor, real: Tensor, count: int, span: Tensor) -> Forward:
        """`real` consecutive rows of one sequence from position `start` on, of `count` rows in all."""
        offsets = torch.arange(count, device=slot.device, dtype=torch.int32)
        tiles = torch.arange(0, count, TILE_ROWS, device=slot.device, dtype=torch.int32)
        end = start + real
        return cls(
            Rows(
                positions=torch.minimum(start + offsets, end - 1).clamp(min=0),
                slots=torch.where(offsets < real, slot, -1),
                tile_slot=torch.where(tiles < real, slot, -1),
                tile_start=tiles,
                tile_rows=(real - tiles).clamp(0, TILE_ROWS),
                tile_end=end.repeat(len(tiles)),
                max_tile_rows=TILE_ROWS,
            ),
            span,
            single_tiles=False,
        )


class PagedModels:
    """Target and draft with their pages: one pass each over the rows of a Forward."""

    fuse_projection = False  # norms, RoPE and page writes inside attention, where every sequence is one tile

    def __init__(
        self,
        target: Target,
        draft: DFlashDraft | None,
        pool: PagePool,
        tables: DeviceTables,
        max_model_len: int,
        deterministic: bool,
    ) -> None:
        self.target, self.draft, self.pool, self.tables = target, draft, pool, tables
        on_hopper = target.device.type == "cuda" and torch.cuda.get_device_capability(target.device) >= (9, 0)
        self.options = PagedOptions(pdl=on_hopper)
        # The layers that store keys, the target's own first, then the draft's.
        self.layers, self.shapes = pool.layers, kv_shapes(target, draft)
        self.place = {index: i for i, index in enumerate(target.storing_layers)}
        self._first_draft = len(self.place)
        self._feature_layers = draft.config.target_layer_ids if draft is not None else ()
        self.block_size = draft.config.block_size if draft is not None else 1
        target.capture(self._feature_layers)
        # Bits must not depend on the batch: then spans are those of the longest text there can be.
        self._fixed_span = max(2 * SPAN_MULTIPLE, _span(max_model_len, 128)) if deterministic else None
        self._heads = max([spec.heads for spec in target.layer_specs] + ([draft.config.num_attention_heads] if draft else []))
        self._kv_heads = min(shape.kv_heads for shape in self.shapes)
        self._max_tokens, device = tables.units.shape[2] * pool.page_size, target.device
        # A window of 512 is cut in 9 or 10 spans of 64 keys: enough programs, and few enough partials.
        self._window_spans = {
            shape.window: torch.tensor([_span(shape.window + TILE_ROWS, 16)], dtype=torch.int32, device=device)
            for shape in self.shapes
            if shape.window is not None
        }
        self._workspace = Workspace.allocate(0, 0, device)
        self._draft_pass = self._fused_draft()
        if self._draft_pass is not None:
            self._context_pages = self._context_places()

    def span(self, longest: int, tiles: int) -> int:
        """Keys a span of full layers holds when the longest sequence has this many positions."""
        return self._fixed_span or _span(longest, self._splits(tiles))

    def _splits(self, tiles: int) -> int:
        """Programs along the keys of full layers for a pass of this many tiles."""
        return max(4, min(MOST_SPLITS, PROGRAMS // (tiles * self._kv_heads)))

    def _most_spans(self, shape: KVShape, tiles: int) -> int:
        if shape.window is not None:
            ahead = max(0, self.block_size - TILE_ROWS) if shape.draft else 0
            return most_spans(_span(shape.window + TILE_ROWS, 16), TILE_ROWS, self._max_tokens, shape.window, ahead)
        return self._splits(tiles) if self._fixed_span is None else -(-self._max_tokens // self._fixed_span)

    def reserve(self, rows: int, tiles: int) -> None:
        """Grow the workspace to what attention needs for a pass of this many rows and tiles."""
        size = max(
            workspace_size(rows, self._heads, shape.value_size, self._most_spans(shape, tiles)) for shape in set(self.shapes)
        )
        counters = tiles * self._heads  # one serves at least 16 query rows, and a tile has 16 rows at most
        if size > self._workspace.partials.numel() or counters > self._workspace.counters.numel():
            size, counters = max(size, self._workspace.partials.numel()), max(counters, self._workspace.counters.numel())
            self._workspace = Workspace.allocate(size, counters, self.target.device)

    def verify(self, ids: Tensor, forward: Forward, logit_rows: Tensor | None) -> Tensor:
        """Logits of ids [T] (of `logit_rows` only, if given); the draft's context keys and values of all rows are stored."""
        self.target.capture(self._feature_layers)  # engines may share a target
        logits, features = self.target.forward(ids, forward.positions, _TargetAttention(self, forward), logit_rows)
        if self._draft_pass is not None:
            assert features is not None
            self._draft_pass.store_context(features, forward.positions, forward.rows, self._context_pages)
        elif self.draft is not None:
            assert features is not None
            pairs = self.draft.context_keys_values(self.draft.context(features), forward.positions)
            for index, (keys, values) in enumerate(pairs, self._first_draft):
                self.store(index, keys, values, forward)
        return logits

    def propose(self, ids: Tensor, forward: Forward) -> Tensor:
        """The draft's likeliest token at every row of the blocks with ids [T]; -1 where its logits are not finite."""
        draft, first = self.draft, self._first_draft
        assert draft is not None
        rules = [Rule(causal, draft.config.head_dim**-0.5) for causal in draft.config.causal]
        embed = draft.embed_tokens if draft.embed_tokens is not None else self.target.embed_rows
        if self._draft_pass is not None:
            head = self.target.model.get_output_embeddings().weight
            best = self._draft_pass.propose(
                embed(ids), forward.positions, lambda i, p: self.attend_projected(first + i, p, forward, rules[i]), head
            )
            return torch.where(best < 0, -1, draft.to_target_ids(best.clamp(min=0).long()))

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.store(first + index, k, v, forward)
            return self.attend(first + index, q, forward, rules[index])

        hidden = draft(embed(ids), forward.positions, attend)
        return draft.to_target_ids(draft.logits(hidden, self.target.head).max(-1).indices)

    def _fused_draft(self) -> DraftPass | None:
        """The draft in fused products, where that computes what its module does. Its bits may vary: the text does not."""
        head = self.target.model.get_output_embeddings()
        if self.draft is None or not fits(self.draft):
            return None
        if self.draft.lm_head is None and not (type(head) is nn.Linear and head.bias is None):
            return None
        return DraftPass(self.draft, self._max_tokens, FusedOptions(), self.options.pdl)

    def _context_places(self) -> ContextPages:
        """Where in the pool all draft layers keep the context."""
        pool, layers = self.pool, self.layers[self._first_draft :]
        shape, base, device = self.shapes[-1], pool.memory.storage_offset(), pool.memory.device
        return ContextPages(
            pool=pool.memory,
            tables=self.tables.units,
            keys=torch.tensor([layer.keys.storage_offset() - base for layer in layers], device=device),
            values=torch.tensor([layer.values.storage_offset() - base for layer in layers], device=device),
            slabs=torch.tensor([layer.slab for layer in layers], dtype=torch.int32, device=device),
            page_size=pool.page_size,
            kv_heads=shape.kv_heads,
        )

    def table(self, layer: LayerPages) -> Tensor:
        return self.tables.units[layer.slab]

    def store(self, index: int, keys: Tensor, values: Tensor, forward: Forward) -> None:
        """Keys and values [T, kv heads, D] of storing layer `index`, to their pages."""
        layer = self.layers[index]
        store_rows(keys, values, forward.rows, self.table(layer), layer.keys, layer.values)

    def attend(self, index: int, q: Tensor, forward: Forward, rule: Rule) -> Tensor:
        """Attention of queries [T, heads, D] over the pages of storing layer `index`, which hold their keys."""
        layer, settings = self.layers[index], self._settings(index, forward, rule)
        return paged_attention(q, layer.keys, layer.values, self.table(layer), forward.rows, settings)

    def attend_projected(self, index: int, p: Projection, forward: Forward, rule: Rule) -> Tensor:
        """The same from the fused product of queries, keys and values, which are normed, turned and stored on the way."""
        layer = self.layers[index]
        pages = self.table(layer), layer.keys, layer.values
        if self.fuse_projection and forward.single_tiles:
            return fused_paged_attention(p, forward.rows, *pages, self._settings(index, forward, rule))
        return self.attend(index, project_rows(p, forward.rows, *pages, pdl=self.options.pdl), forward, rule)

    def _settings(self, index: int, forward: Forward, rule: Rule) -> Settings:
        shape, tiles = self.shapes[index], len(forward.rows.tile_slot)
        return Settings(
            window=shape.window,
            causal=rule.causal,
            scale=rule.scale,
            softcap=rule.softcap,
            sinks=rule.sinks,
            span=forward.span if shape.window is None else self._window_spans[shape.window],
            splits=self._splits(tiles) if shape.window is None else self._most_spans(shape, tiles),
            workspace=self._workspace,
            options=self.options,
        )


@dataclass(frozen=True)
class Rule:
    """How a layer attends."""

    causal: bool
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


class _TargetAttention:
    """What the target's layers call in one pass: TargetAttend, and for fused layers `projected` (targets/fused_layer.py)."""

    def __init__(self, models: PagedModels, forward: Forward) -> None:
        self.models, self.forward = models, forward

    def __call__(self, index: int, spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if spec.source == index:
            self.models.store(self.models.place[index], k, v, self.forward)
        return self.models.attend(self.models.place[spec.source], q, self.forward, self._rule(spec))

    def projected(self, index: int, spec: LayerSpec, projection: Projection) -> Tensor:
        return self.models.attend_projected(self.models.place[spec.source], projection, self.forward, self._rule(spec))

    def _rule(self, spec: LayerSpec) -> Rule:
        return Rule(True, spec.scale, spec.softcap, spec.sinks)


def _span(keys: int, parts: int) -> int:
    """Keys of a span such that `parts` of them hold `keys`."""
    return -(-keys // (parts * SPAN_MULTIPLE)) * SPAN_MULTIPLE
