"""Forward passes of target and draft over pages, with all shapes fixed: what the stages of a device step are made of.

Shape letters: T rows, N tiles (consecutive rows of one sequence that attention takes together), H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashdraft.draft import DFlashDraft
from flashdraft.engine.cache import KVShape, LayerPages, PagePool, kv_shapes
from flashdraft.engine.draft_pass import DraftPass, fits
from flashdraft.engine.proposals import over_target
from flashdraft.engine.state import DeviceTables
from flashdraft.kernels.fused import FusedOptions
from flashdraft.kernels.paged import (
    SPAN_MULTIPLE,
    ContextPages,
    Projection,
    Rows,
    Settings,
    most_spans,
    paged_attention,
    project_rows,
    span_of,
    splits_of,
    store_rows,
    workspace_size,
)
from flashdraft.kernels.step import TILE_ROWS, Inputs
from flashdraft.quant.linear import expand
from flashdraft.targets.target import LayerSpec, MediaRows, Target

MANY_TILES = 4  # from here on there are programs enough for each to read keys once for all rows of a tile
# Up to so many hidden values (rows x H) the draft's context runs beside the target: 32 rows of a 4B target, at 128 of which a
# verify was 0.2 ms longer for it.
SIDE_VALUES = 32 * 2560


@dataclass(frozen=True)
class Forward:
    """The rows of one pass, the span of keys that full layers are cut in (int32 [1]), and what media put into the rows."""

    inputs: Inputs
    span: Tensor
    media: MediaRows | None = None

    @property
    def rows(self) -> Rows:
        return self.inputs.rows

    @property
    def positions(self) -> Tensor:
        return self.inputs.positions


class PagedModels:
    """Target and draft with their pages: one pass each over the rows of a Forward."""

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
        self.pdl = on_hopper and FusedOptions().pdl
        self._hopper = on_hopper and FusedOptions().hopper_attention
        # The layers that store keys, the target's own first, then the draft's.
        self.layers, self.shapes = pool.layers, kv_shapes(target, draft)
        self.place = {index: i for i, index in enumerate(target.storing_layers)}
        self._first_draft = len(self.place)
        self._feature_layers = draft.config.target_layer_ids if draft is not None else ()
        self.block_size = draft.config.block_size if draft is not None else 1
        target.capture(self._feature_layers)
        # Bits must not depend on the batch: then spans are those of the longest text there can be.
        self._fixed_span = max(2 * SPAN_MULTIPLE, span_of(max_model_len, 128)) if deterministic else None
        self._heads = max([spec.heads for spec in target.layer_specs] + ([draft.config.num_attention_heads] if draft else []))
        self._max_tokens = tables.units.shape[2] * pool.page_size
        self._full_shapes = [shape for shape in self.shapes if shape.window is None] or self.shapes
        self._window_spans: dict[int, Tensor] = {}  # keys of a span, on the device
        # What rows may see behind them: the workspace is made for it. The references need none.
        self._longest_image = 0 if target.media is None or target.device.type != "cuda" else target.media.longest_whole_image
        self._workspace = torch.empty(0, dtype=torch.float32, device=target.device)
        self._side = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None
        self._draft_pass = self._fused_draft()
        if self._draft_pass is not None:
            self._context_pages = self._context_places()

    def span(self, longest: int, tiles: int) -> int:
        """Keys a span of full layers holds when the longest sequence has this many positions."""
        return self._fixed_span or span_of(longest, min(self._splits(shape, tiles) for shape in self._full_shapes))

    def _splits(self, shape: KVShape, tiles: int) -> int:
        """Programs along the keys for a pass of this many tiles."""
        tiles = tiles if self._fixed_span is None else 1
        return splits_of(shape.key_size + shape.value_size, shape.kv_heads, shape.window, tiles)

    def _window_span(self, window: int, shape: KVShape, tiles: int) -> int:
        return span_of(window + TILE_ROWS, self._splits(shape, tiles))

    def _most_spans(self, shape: KVShape, tiles: int) -> int:
        if shape.window is not None:
            ahead = max(0, self.block_size - TILE_ROWS) if shape.draft else self._longest_image
            span = self._window_span(shape.window, shape, tiles)
            return most_spans(span, TILE_ROWS, self._max_tokens, shape.window, ahead)
        if self._fixed_span is None:
            return max(self._splits(other, tiles) for other in self._full_shapes)
        return -(-self._max_tokens // self._fixed_span)

    def reserve(self, rows: int, tiles: int) -> None:
        """Make what attention needs for a pass of this many rows and tiles: workspace, and spans on the device."""
        size = 0
        for shape in set(self.shapes):
            size = max(size, workspace_size(rows, self._heads, shape.value_size, self._most_spans(shape, tiles)))
            if shape.window is not None:
                span = self._window_span(shape.window, shape, tiles)
                if span not in self._window_spans:  # graphs hold the address
                    self._window_spans[span] = torch.tensor([span], dtype=torch.int32, device=self.target.device)
        if size > self._workspace.numel():
            self._workspace = torch.empty(size, dtype=torch.float32, device=self.target.device)

    def verify(self, forward: Forward, out: Tensor) -> None:
        """Logits of all rows, or of the inputs' `logit_rows`, to `out`; the draft's keys and values of all rows to pages."""
        self.target.capture(self._feature_layers)  # engines may share a target
        given, draft_pass = forward.inputs, self._draft_pass
        inputs = given.ids, given.positions, _TargetAttention(self, forward), given.logit_rows, out
        if draft_pass is not None:
            side = self._side if len(given.ids) * self.target.hidden_size <= SIDE_VALUES else None
            held: list[Tensor] = []  # until the streams meet, so that nothing else is put in their place

            def store(features: list[Tensor]) -> None:
                held.extend(features)
                with _beside(side):
                    whole = features[0] if len(features) == 1 else torch.cat(features, -1)
                    draft_pass.store_context(whole, forward.positions, forward.rows, self._context_pages)

            try:
                self.target.forward(*inputs, store, forward.media)
            finally:
                if side is not None:
                    torch.cuda.current_stream().wait_stream(side)
            return
        _, features = self.target.forward(*inputs, media=forward.media)
        if self.draft is not None:
            assert features is not None
            pairs = self.draft.context_keys_values(self.draft.context(features), forward.positions)
            for index, (keys, values) in enumerate(pairs, self._first_draft):
                self.store(index, keys, values, forward)

    def propose(self, forward: Forward) -> Tensor:
        """The draft's likeliest token at every row of the blocks; -1 where its logits are not finite."""
        draft, hidden = self.draft, self._hidden(forward)
        assert draft is not None
        if self._draft_pass is None:
            return draft.to_target_ids(draft.logits(hidden, self.target.head).max(-1).indices)
        best = self._draft_pass.best(hidden, self._head_weight)
        return best if draft.d2t is None else torch.where(best < 0, -1, draft.to_target_ids(best.clamp(min=0).long()))

    def proposal_logits(self, forward: Forward) -> Tensor:
        """The draft's logits [T, V] at every row of the blocks, over the target's vocabulary."""
        draft, hidden = self.draft, self._hidden(forward)
        assert draft is not None
        if self._draft_pass is not None:
            logits = draft.scaled(self._draft_pass.products(hidden, self._head_weight))
        else:
            logits = draft.logits(hidden, self.target.head)
        return over_target(draft, logits, self.target.vocab_size)

    def _hidden(self, forward: Forward) -> Tensor:
        """The draft's last hidden states at every row of the blocks."""
        draft, first = self.draft, self._first_draft
        assert draft is not None
        rules = [Rule(causal, draft.config.head_dim**-0.5) for causal in draft.config.causal]
        embed = draft.embed_tokens if draft.embed_tokens is not None else self.target.embed_rows
        embeddings = embed(forward.inputs.ids)
        if self._draft_pass is not None:
            return self._draft_pass.hidden(
                embeddings, forward.positions, lambda i, p: self.attend_projected(first + i, p, forward, rules[i])
            )

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.store(first + index, k, v, forward)
            return self.attend(first + index, q, forward, rules[index])

        return draft(embeddings, forward.positions, attend)

    @property
    def _head_weight(self) -> Tensor:
        return self.target.model.get_output_embeddings().weight

    def _fused_draft(self) -> DraftPass | None:
        """The draft in fused products, where that computes what its module does. Its bits may vary: the text does not."""
        if self.draft is None:
            return None
        head = self.target.model.get_output_embeddings()
        if fits(self.draft) and (self.draft.lm_head is not None or (type(head) is nn.Linear and head.bias is None)):
            return DraftPass(self.draft, self._max_tokens, FusedOptions(), self.pdl)
        expand(self.draft, self.target.dtype)
        return None

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
        return self.attend(index, project_rows(p, forward.rows, *pages, pdl=self.pdl), forward, rule)

    def _settings(self, index: int, forward: Forward, rule: Rule) -> Settings:
        shape, tiles = self.shapes[index], len(forward.rows.tile_slot)
        span, splits, query_rows, hopper = forward.span, self._splits(shape, tiles), 0, False
        if shape.window is not None:
            span = self._window_spans[self._window_span(shape.window, shape, tiles)]
            splits = self._most_spans(shape, tiles)
        if self._fixed_span is None and tiles >= MANY_TILES:
            query_rows = 64 if forward.rows.max_tile_rows > TILE_ROWS // 2 else 32
            hopper = self._hopper
        return Settings(
            window=shape.window,
            causal=rule.causal,
            reaches=rule.sees_whole_images and forward.rows.reach is not None,
            scale=rule.scale,
            softcap=rule.softcap,
            sinks=rule.sinks,
            span=span,
            splits=splits,
            workspace=self._workspace,
            query_rows=query_rows,
            deterministic=self._fixed_span is not None,
            hopper=hopper,
            pdl=self.pdl,
        )


@contextmanager
def _beside(side: torch.cuda.Stream | None) -> Iterator[None]:
    """What runs here may run on `side` while the target goes on: small kernels, for whose starts and ends it would wait.

    On one H200 a step of the built-in pair, 0.53 ms, becomes 2 % shorter. With 128 rows of a 4B target it was 0.2 ms longer.
    """
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield


@dataclass(frozen=True)
class Rule:
    """How a layer attends."""

    causal: bool
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    sees_whole_images: bool = False


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
        return Rule(True, spec.scale, spec.softcap, spec.sinks, spec.sees_whole_images)
