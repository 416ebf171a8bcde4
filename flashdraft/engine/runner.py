"""Runs a batch: prefill chunks, and verify steps as draft | verify to logits | sample, compare, append."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from flashdraft.draft import DFlashDraft
from flashdraft.engine.cache import PagePool, kv_shapes
from flashdraft.engine.host_choice import HostChooser
from flashdraft.engine.media import media_of
from flashdraft.engine.pages import PackedRows, PageTables, rounded_up
from flashdraft.engine.proposals import propose
from flashdraft.engine.scheduler import Batch, Choice, Flight, PrefillChunk, Result, Sequence, VerifyRow
from flashdraft.targets.target import LayerSpec, MediaRows, Target, TargetAttend


class Runner:
    """Runs every step to its end: for a CPU."""

    asynchronous = False

    def __init__(
        self,
        target: Target,
        draft: DFlashDraft | None,
        pool: PagePool,
        tables: PageTables,
        row_multiple: int,
        proposal_noise: float = 0.0,
    ) -> None:
        self.target, self.draft, self.tables, self.row_multiple = target, draft, tables, row_multiple
        self._proposal_noise = proposal_noise
        self._chooser = HostChooser(target.vocab_size, target.device)
        own, layers = target.storing_layers, list(zip(pool.layers, kv_shapes(target, draft), strict=True))
        self._target_layers = dict(zip(own, layers[: len(own)], strict=True))
        self._draft_layers = layers[len(own) :]
        self._feature_layers = draft.config.target_layer_ids if draft is not None else ()
        target.capture(self._feature_layers)  # a target without one hidden state a token is refused here, not at the first step
        self._draft_scale = draft.config.head_dim**-0.5 if draft is not None else 0.0

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Flight:
        result = Result([], [])
        if batch.verify:
            result.choices.extend(self._verify(batch.verify))
        for chunk in batch.prefill:
            self._prefill(chunk, result)
        return Flight(batch, result)

    def collect(self, flight: Flight) -> Result:
        assert flight.result is not None
        return flight.result

    def waits_for_host(self, sequences: Iterable[Sequence]) -> bool:
        return False  # nothing is ever under way

    def _prefill(self, chunk: PrefillChunk, result: Result) -> None:
        sequence, device = chunk.sequence, self.tables.units.device
        part = range(chunk.start, chunk.start + chunk.count)
        self.tables.sync(sequence)
        media, reach = media_of(chunk, rounded_up(chunk.count, self.row_multiple), self.target)
        rows = PackedRows(self.tables, [sequence.slot], [list(part)], self.row_multiple, reach)
        wanted = torch.tensor([chunk.count - 1] if chunk.last else [], dtype=torch.long, device=device)
        ids = torch.tensor(rows.padded(sequence.tokens[part.start : part.stop]), device=device)
        logits, features = self._target_forward(ids, rows, wanted, media)
        self._append(features, rows)
        result.chunks.append(chunk)
        if chunk.last:
            result.choices.append(self._chooser.first(sequence, logits))

    def _verify(self, asked: list[VerifyRow]) -> list[Choice]:
        for row in asked:
            self.tables.sync(row.sequence)
        found = self._propose([row for row in asked if row.width])
        proposals = [found[row.sequence][: row.width] if row.width else [] for row in asked]
        anchors = [len(row.sequence.tokens) - 1 for row in asked]
        positions = [list(range(n, n + 1 + row.width)) for n, row in zip(anchors, asked, strict=True)]
        rows = PackedRows(self.tables, [row.sequence.slot for row in asked], positions, self.row_multiple)
        blocks = [[row.sequence.tokens[-1], *own] for row, own in zip(asked, proposals, strict=True)]
        ids = torch.tensor(rows.padded([token for block in blocks for token in block]), device=self.tables.units.device)
        logits, features = self._target_forward(ids, rows, None)
        self._append(features, rows)
        return self._chooser.verify(asked, proposals, logits[: rows.count])

    def _target_forward(
        self, ids: Tensor, rows: PackedRows, logit_rows: Tensor | None, media: MediaRows | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self.target.capture(self._feature_layers)  # engines may share a target
        return self.target.forward(ids, rows.positions, self._target_attend(rows), logit_rows, media=media)

    def _target_attend(self, rows: PackedRows) -> TargetAttend:
        def attend(index: int, spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer, shape = self._target_layers[spec.source]
            if spec.source == index:
                rows.write(layer, k, v)
            whole = spec.sees_whole_images
            return rows.attend(layer, shape, q, True, spec.scale, spec.softcap, spec.sinks, sees_whole_images=whole)

        return attend

    def _propose(self, asked: list[VerifyRow]) -> dict[Sequence, list[int]]:
        """Proposals for every sequence: one non-causal pass over the context keys and the block."""
        if self.draft is None or not asked:
            return {}
        c, device = self.draft.config, self.tables.units.device
        size = c.block_size
        anchors = [len(row.sequence.tokens) - 1 for row in asked]
        positions = [list(range(n, n + size)) for n in anchors]
        rows = PackedRows(self.tables, [row.sequence.slot for row in asked], positions, multiple=1)
        ids = torch.tensor([[row.sequence.tokens[-1], *[c.mask_token_id] * (size - 1)] for row in asked], device=device)
        hidden = self.draft(self._embed(ids.flatten()), rows.positions, self._draft_attend(rows))
        logits = self.draft.logits(hidden, self.target.head).view(len(asked), size, -1)[:, 1:]
        sequences = [row.sequence for row in asked]
        proposals = propose(self.draft, logits, sequences, self._proposal_noise, self.target.vocab_size)
        return dict(zip(sequences, proposals.tolist(), strict=True))

    def _embed(self, ids: Tensor) -> Tensor:
        assert self.draft is not None
        own = self.draft.embed_tokens
        return own(ids) if own is not None else self.target.embed_rows(ids)

    def _draft_attend(self, rows: PackedRows) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        assert self.draft is not None
        causal = self.draft.config.causal

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer, shape = self._draft_layers[index]
            rows.write(layer, k, v)
            return rows.attend(layer, shape, q, causal=causal[index], scale=self._draft_scale, softcap=None)

        return attend

    def _append(self, features: Tensor | None, rows: PackedRows) -> None:
        """Store the draft's keys and values of the positions just computed; those of rejected proposals are overwritten
        later."""
        if self.draft is None:
            return
        assert features is not None
        context = self.draft.context(features)
        pairs = self.draft.context_keys_values(context, rows.positions)
        for (layer, _), (keys, values) in zip(self._draft_layers, pairs, strict=True):
            rows.write(layer, keys, values)
