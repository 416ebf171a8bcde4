"""Runs a batch: prefill chunks, and verify steps as draft | verify to logits | sample, compare, append."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from flashdraft.draft import DFlashDraft
from flashdraft.engine.cache import PagePool, kv_shapes
from flashdraft.engine.host_choice import HostChooser
from flashdraft.engine.media import media_of
from flashdraft.engine.pages import PackedRows, PageTables, rounded_up
from flashdraft.engine.prompt_scores import score
from flashdraft.engine.proposals import propose
from flashdraft.engine.row_cost import RowCost, fastest, thread_seconds
from flashdraft.engine.sampling import arg_max
from flashdraft.engine.scheduler import Batch, Choice, Flight, PrefillChunk, Result, Sequence, VerifyRow
from flashdraft.engine.width import StepCost
from flashdraft.kernels.attention import KEY_SPLIT
from flashdraft.kernels.linear import STABLE_ROWS, RowStableLinear
from flashdraft.targets.target import LayerSpec, MediaRows, Target, TargetAttend

MOST_TIMED_ROWS = 128  # what more cost follows from these
TIMED_CONTEXT = 240  # tokens before the rows that are timed; behind more a draft is worth more than it is taken to be
PROPOSAL_WEIGHT = 0.1  # of the last step, in what taking a proposal from logits costs: the mean of about ten


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
        # Seconds of taking a proposal from its logits, by how requests sample: 0.06 ms greedily, 1 ms at temperature 0.7.
        self._proposal_seconds = 0.0
        self._chooser = HostChooser(target.vocab_size, target.device)
        own, layers = target.storing_layers, list(zip(pool.layers, kv_shapes(target, draft), strict=True))
        self._target_layers = dict(zip(own, layers[: len(own)], strict=True))
        self._draft_layers = layers[len(own) :]
        self._feature_layers = draft.config.target_layer_ids if draft is not None else ()
        target.capture(self._feature_layers)  # a target without one hidden state a token is refused here, not at the first step
        head = target.model.get_output_embeddings()
        self._head: Callable[[Tensor], Tensor] = (
            head.product if isinstance(head, RowStableLinear) else target.head
        )  # of the draft
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
        wanted = torch.tensor([*range(chunk.scored), *([chunk.count - 1] * chunk.last)], dtype=torch.long, device=device)
        ids = torch.tensor(rows.padded(sequence.tokens[part.start : part.stop]), device=device)
        logits, features = self._target_forward(ids, rows, wanted, media)
        self._append(features, rows)
        result.chunks.append(chunk)
        result.scores.extend(score([chunk], logits))
        if chunk.last:
            result.choices.append(self._chooser.first(sequence, logits[-1:]))

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
        """As many proposals for every sequence as are verified: one non-causal pass over the context keys and the block."""
        if self.draft is None or not asked:
            return {}
        c, device = self.draft.config, self.tables.units.device
        size, widths = c.block_size, [row.width for row in asked]
        positions = [list(range(n, n + size)) for n in (len(row.sequence.tokens) - 1 for row in asked)]
        rows = PackedRows(self.tables, [row.sequence.slot for row in asked], positions, multiple=1)
        ids = [[row.sequence.tokens[-1], *[c.mask_token_id] * (size - 1)] for row in asked]
        hidden = self._draft_pass(torch.tensor(ids, device=device).flatten(), rows)
        verified = [s * size + 1 + i for s, width in enumerate(widths) for i in range(width)]
        logits = self.draft.logits(hidden[torch.tensor(verified, device=device)], self._head)
        sequences = [row.sequence for row in asked]
        start = thread_seconds()
        tokens = propose(self.draft, logits, sequences, widths, self._proposal_noise, self.target.vocab_size)
        self._proposal_seconds += PROPOSAL_WEIGHT * ((thread_seconds() - start) / len(verified) - self._proposal_seconds)
        return {sequence: own.tolist() for sequence, own in zip(sequences, tokens.split(widths), strict=True)}

    def _draft_pass(self, ids: Tensor, rows: PackedRows) -> Tensor:
        """The draft's hidden states [T, H] at every row of blocks."""
        assert self.draft is not None
        return self.draft(self._embed(ids), rows.positions, self._draft_attend(rows))

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

    @torch.inference_mode()
    def measure(self, budget: float = 1.2) -> StepCost:
        """What a step costs, from timed passes: products by rows, attention by sequences, the draft by blocks, its head by
        proposals. Pages and sequences are left alone. `budget`: seconds; the ends of each are timed at any rate.
        """
        assert self.draft is not None
        slots, proposals = self.tables.units.shape[1], self.draft.config.num_proposals
        # In bfloat16 products take so many rows at a time, and cost as much for fewer.
        stride = STABLE_ROWS if self.target.dtype == torch.bfloat16 else self.row_multiple
        most = rounded_up(min(MOST_TIMED_ROWS, slots * (proposals + 1)), stride)
        several = max(1, min(slots, MOST_TIMED_ROWS // (proposals + 1)))
        sizes: dict[Callable[[int], None], list[int]] = {
            self._pass_products: sorted({stride, min(2 * stride, most), most}),
            self._pass_attention: sorted({1, min(4, several), several}),
            self._pass_blocks: sorted({1, min(4, several), several}),
            self._pass_head: sorted({proposals, most}),
        }
        ends = [(part, n) for part, own in sizes.items() for n in {own[0], own[-1]}]
        middle = [(part, n) for part, own in sizes.items() for n in own[1:-1]]
        seconds = fastest({(part, n): partial(part, n) for part, n in (*ends, *middle)}, len(ends), budget)
        products, attention, blocks, head = (
            RowCost({n: seconds[part, n] for n in own if (part, n) in seconds}) for part, own in sizes.items()
        )

        def verify(sequences: int, rows: int) -> float:
            proposing = head(rows - sequences) if rows > sequences else 0.0
            return products(rounded_up(rows, stride)) + attention(sequences) + proposing

        return StepCost(verify, blocks, lambda: self._proposal_seconds)

    def _pass_products(self, rows: int) -> None:
        """All of a verify step of so many rows but attention, and the draft's context."""
        assert self.draft is not None
        ids = torch.randint(self.target.vocab_size, (rows,), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(rows)
        self.target.capture(self._feature_layers)
        logits, features = self.target.forward(
            ids, positions, lambda index, spec, q, k, v: q.new_zeros(*q.shape[:2], v.shape[2])
        )
        assert features is not None
        self.draft.context_keys_values(self.draft.context(features), positions)
        arg_max(logits)

    def _pass_attention(self, sequences: int) -> None:
        rows = self._nobodys(sequences, 1, self.row_multiple)
        attend = self._target_attend(rows)
        for index, spec in enumerate(self.target.layer_specs):
            heads = (spec.heads, spec.key_size), (spec.kv_heads, spec.key_size), (spec.kv_heads, spec.value_size)
            q, k, v = (torch.zeros((len(rows.positions), *own), dtype=self.target.dtype) for own in heads)
            attend(index, spec, q, k, v)

    def _pass_blocks(self, sequences: int) -> None:
        assert self.draft is not None
        rows = self._nobodys(sequences, self.draft.config.block_size, 1)
        self._draft_pass(torch.zeros_like(rows.positions), rows)

    def _pass_head(self, proposals: int) -> None:
        assert self.draft is not None
        hidden = torch.zeros((proposals, self.draft.config.hidden_size), dtype=self.target.dtype)
        self.draft.logits(hidden, self._head)

    def _nobodys(self, sequences: int, count: int, multiple: int) -> PackedRows:
        """Rows of sequences that do not exist, behind a context of zeros; what they store goes to the trash unit."""
        longest = self.tables.units.shape[2] * self.tables.pool.page_size - KEY_SPLIT
        start = max(0, min(TIMED_CONTEXT, longest - count))
        rows = PackedRows(self.tables, [0] * sequences, [list(range(start, start + count))] * sequences, multiple)
        rows.count = 0
        return rows
