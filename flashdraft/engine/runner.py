"""Runs a batch: prefill chunks, and verify steps as draft | verify to logits | sample, compare, append."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flashdraft.draft import DFlashDraft
from flashdraft.engine.cache import KVShape, PagePool
from flashdraft.engine.pages import PageTables, Rectangle
from flashdraft.engine.sampling import RequestRows, TokenCounts, choose, logprobs, no_choice
from flashdraft.engine.scheduler import Batch, Choice, PrefillChunk, Result, Sequence, VerifyRow
from flashdraft.targets.target import LayerSpec, Target, TargetAttend


def kv_shapes(target: Target, draft: DFlashDraft | None) -> list[KVShape]:
    """One shape for each layer that stores keys: the target's own (shared layers read another's pages), then the draft's."""
    shapes = [
        KVShape(spec.kv_heads, spec.key_size, spec.value_size, spec.window)
        for index, spec in enumerate(target.layer_specs)
        if spec.source == index
    ]
    if draft is not None:
        c = draft.config
        shapes += [KVShape(c.num_key_value_heads, c.head_dim, c.head_dim, window, draft=True) for window in c.windows]
    return shapes


class Runner:
    """Owns the tensors of a step. Everything it needs is allocated up front; a batch only fills it in."""

    def __init__(
        self, target: Target, draft: DFlashDraft | None, pool: PagePool, tables: PageTables, row_multiple: int
    ) -> None:
        self.target, self.draft, self.tables, self.row_multiple = target, draft, tables, row_multiple
        # Kept as long as the sequence lives anywhere; penalties are rare, so most sequences have none.
        self._counts: WeakKeyDictionary[Sequence, tuple[TokenCounts, int]] = WeakKeyDictionary()
        self.shapes = kv_shapes(target, draft)
        own = [index for index, spec in enumerate(target.layer_specs) if spec.source == index]
        self._target_layers = {index: (pool.layers[i], self.shapes[i]) for i, index in enumerate(own)}
        self._draft_layers = list(zip(pool.layers[len(own) :], self.shapes[len(own) :], strict=True))
        self._feature_layers = draft.config.target_layer_ids if draft is not None else ()
        target.capture(self._feature_layers)  # a target without one hidden state a token is refused here, not at the first step
        self._draft_scale = draft.config.head_dim**-0.5 if draft is not None else 0.0

    @torch.inference_mode()
    def run(self, batch: Batch) -> Result:
        result = Result([], [])
        if batch.verify:
            result.choices.extend(self._verify(batch.verify))
        if batch.prefill is not None:
            self._prefill(batch.prefill, result)
        return result

    def _padded(self, rows: int) -> int:
        return -(-rows // self.row_multiple) * self.row_multiple

    def _prefill(self, chunk: PrefillChunk, result: Result) -> None:
        sequence, device = chunk.sequence, self.tables.units.device
        rows = self._padded(chunk.count)
        positions = list(range(chunk.start, chunk.start + chunk.count))
        padding = rows - chunk.count
        ids = sequence.tokens[chunk.start : chunk.start + chunk.count] + [sequence.tokens[chunk.start]] * padding
        self.tables.sync(sequence)
        rectangle = Rectangle(
            self.tables, [sequence.slot], [positions + [chunk.start] * padding], [[True] * chunk.count + [False] * padding]
        )
        wanted = torch.tensor([chunk.count - 1] if chunk.last else [], dtype=torch.long, device=device)
        logits, features = self._target_forward(torch.tensor(ids, device=device), rectangle, wanted)
        self._append(features, rectangle)
        result.chunks.append(chunk)
        if chunk.last:
            tokens = choose(logits, [self._request_rows(sequence, [])])
            result.choices.append(self._choice(sequence, tokens.tolist(), logits, tokens, 0, from_prefill=True))

    def _verify(self, rows: list[VerifyRow]) -> list[Choice]:
        device = self.tables.units.device
        for row in rows:
            self.tables.sync(row.sequence)
        proposals = self._propose([row for row in rows if row.width])
        count = self._padded(1 + max(row.width for row in rows))
        ids, positions, real = [], [], []
        for row in rows:
            tokens, anchor = row.sequence.tokens, len(row.sequence.tokens) - 1
            block = [tokens[-1], *proposals.get(row.sequence, [])[: row.width]]
            padding = count - len(block)
            ids.append(block + [tokens[-1]] * padding)
            positions.append([anchor + i for i in range(len(block))] + [anchor] * padding)
            real.append([True] * len(block) + [False] * padding)
        rectangle = Rectangle(self.tables, [row.sequence.slot for row in rows], positions, real)
        logits, features = self._target_forward(torch.tensor(ids, device=device).flatten(), rectangle, None)
        self._append(features, rectangle)
        return self._choose(rows, ids, logits, count)

    def _target_forward(self, ids: Tensor, rectangle: Rectangle, logit_rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self.target.capture(self._feature_layers)  # engines may share a target
        return self.target.forward(ids, rectangle.flat_positions, self._target_attend(rectangle), logit_rows)

    def _target_attend(self, rectangle: Rectangle) -> TargetAttend:
        def attend(index: int, spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer, shape = self._target_layers[spec.source]
            if spec.source == index:
                rectangle.write(layer, k, v)
            return rectangle.attend(layer, shape, q, causal=True, scale=spec.scale, softcap=spec.softcap, sinks=spec.sinks)

        return attend

    def _propose(self, rows: list[VerifyRow]) -> dict[Sequence, list[int]]:
        """Greedy proposals for every sequence: one non-causal pass over the context keys and the block."""
        if self.draft is None or not rows:
            return {}
        c, device = self.draft.config, self.tables.units.device
        size = c.block_size
        anchors = [len(row.sequence.tokens) - 1 for row in rows]
        positions = [list(range(n, n + size)) for n in anchors]
        rectangle = Rectangle(self.tables, [row.sequence.slot for row in rows], positions, [[True] * size for _ in rows])
        ids = torch.tensor([[row.sequence.tokens[-1], *[c.mask_token_id] * (size - 1)] for row in rows], device=device)
        hidden = self.draft(self._embed(ids.flatten()), rectangle.flat_positions, self._draft_attend(rectangle))
        logits = self.draft.logits(hidden, self.target.head)
        best = self.draft.to_target_ids(logits.max(-1).indices).view(len(rows), size)[:, 1:].tolist()
        return {row.sequence: tokens for row, tokens in zip(rows, best, strict=True)}

    def _embed(self, ids: Tensor) -> Tensor:
        assert self.draft is not None
        own = self.draft.embed_tokens
        return own(ids) if own is not None else self.target.embed_rows(ids)

    def _draft_attend(self, rectangle: Rectangle) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        assert self.draft is not None
        causal = self.draft.config.causal

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer, shape = self._draft_layers[index]
            rectangle.write(layer, k, v)
            return rectangle.attend(layer, shape, q, causal=causal[index], scale=self._draft_scale, softcap=None)

        return attend

    def _append(self, features: Tensor | None, rectangle: Rectangle) -> None:
        """Store the draft's keys and values of the positions just computed; those of rejected proposals are overwritten
        later."""
        if self.draft is None:
            return
        assert features is not None
        context = self.draft.context(features)
        pairs = self.draft.context_keys_values(context, rectangle.flat_positions)
        for (layer, _), (keys, values) in zip(self._draft_layers, pairs, strict=True):
            rectangle.write(layer, keys, values)

    def _choose(self, rows: list[VerifyRow], ids: list[list[int]], logits: Tensor, count: int) -> list[Choice]:
        """At every row the target's own choice; accepted are the proposals that equal it."""
        real = [s * count + i for s, row in enumerate(rows) for i in range(row.width + 1)]
        logits = logits[: len(real)] if len(rows) == 1 else logits[torch.tensor(real, device=logits.device)]
        batch = [self._request_rows(row.sequence, ids[s][1 : row.width + 1]) for s, row in enumerate(rows)]
        tokens = choose(logits, batch)
        chosen, choices, start = tokens.tolist(), [], 0
        for s, row in enumerate(rows):
            mine, proposals = chosen[start : start + row.width + 1], ids[s][1 : row.width + 1]
            accepted = next((i for i, p in enumerate(proposals) if mine[i] != p), row.width)
            kept = slice(start, start + accepted + 1)
            choices.append(self._choice(row.sequence, mine[: accepted + 1], logits[kept], tokens[kept], row.width))
            start += row.width + 1
        return choices

    def _choice(
        self, sequence: Sequence, chosen: list[int], logits: Tensor, tokens: Tensor, drafted: int, from_prefill: bool = False
    ) -> Choice:
        error = None
        if -1 in chosen:
            count = chosen.index(-1)
            error, chosen, logits, tokens = no_choice(logits[count]), chosen[:count], logits[:count], tokens[:count]
        wanted = sequence.request.params.logprobs
        details = None if wanted is None else logprobs(logits, tokens, wanted)
        return Choice(sequence, chosen, drafted, details, from_prefill, error)

    def _request_rows(self, sequence: Sequence, proposals: list[int]) -> RequestRows:
        request, tokens = sequence.request, sequence.output.tokens
        rows = RequestRows(
            request.params,
            rows=len(proposals) + 1,
            index=len(tokens),
            seed=request.seed or 0,
            choice=request.choice,
            proposals=proposals,
            stop_ids=request.stop_ids,
            mask=None if request.constraint is None else request.constraint.masks(proposals),
        )
        return replace(rows, counts=self._counts_of(sequence)) if rows.penalised else rows

    def _counts_of(self, sequence: Sequence) -> TokenCounts:
        """The request's token counts, brought up to date with what was committed since the last step."""
        known = self._counts.get(sequence)
        if known is None:
            known = TokenCounts(sequence.request.prompt, self.target.vocab_size, device=self.tables.units.device), 0
        counts, seen = known
        counts.commit(sequence.output.tokens[seen:])
        self._counts[sequence] = (counts, len(sequence.output.tokens))
        return counts
