"""Runs a step on a GPU as three graph replays: draft | verify to logits | sample, compare, append. The host waits for none.

What a step needs of the step before (anchors, lengths, proposals) stays on the device (state.py), so the next step is launched
before the host knows what this one chose. Shape letters: T rows of a forward, N sequences, B block size, V vocabulary.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashdraft.draft import DFlashDraft
from flashdraft.engine.cache import PagePool
from flashdraft.engine.forward import TILE_ROWS, Forward, PagedModels
from flashdraft.engine.graphs import Graphs, bucket_of, chunk_buckets, row_buckets, sequence_buckets
from flashdraft.engine.host_choice import HostChooser, needs_host
from flashdraft.engine.sampling import SampleFilters, SampleTable, no_choice, sample_on_device
from flashdraft.engine.scheduler import Batch, Choice, Flight, Result, Sequence, VerifyRow
from flashdraft.engine.state import RING, DeviceTables, Plan, SlotState
from flashdraft.engine.width import StepCost
from flashdraft.kernels.fused import argmax_rows
from flashdraft.targets.target import Target

TIMED_REPLAYS = 5

# How the rows of a batch choose: by the arg-max of raw logits (None), or sampled with these filters.
Choosing = SampleFilters | None
NO_FILTERS, ALL_FILTERS = SampleFilters(False, False, False), SampleFilters(True, True, True)
# A stage and the sizes it is captured for: the key of its graph.
Stage = tuple[str | int | Choosing, ...]


@dataclass
class DeviceFlight(Flight):
    """A launched step: what was asked, and where its outcome will lie."""

    outcome: Tensor = field(
        kw_only=True
    )  # int32 [S + 1, B + 1]: of each sequence the tokens committed and the choices; the last row is the prompt's
    landed: torch.cuda.Event | None = None
    verified: list[Choice] | None = None  # where the host chose
    first: Choice | None = None


@dataclass(frozen=True)
class DeviceLimits:
    """Sizes that the tensors of a step are made for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_proposals: int
    enforce_eager: bool
    deterministic: bool


class DeviceRunner:
    """Owns the tensors of a step and the graphs over them."""

    asynchronous = True

    def __init__(self, target: Target, draft: DFlashDraft | None, pool: PagePool, limits: DeviceLimits) -> None:
        self.target, self.draft, self.limits = target, draft, limits
        device = target.device
        self.block_size = draft.config.block_size if draft is not None else 1
        slots, self._rows = limits.max_num_seqs, row_buckets(limits.max_num_seqs * (limits.num_proposals + 1))
        self._drafts, self._chunks = sequence_buckets(slots), chunk_buckets(limits.max_num_batched_tokens)
        sizes = dict(row_slot=self._rows[-1], row_offset=self._rows[-1], seq_slot=slots, seq_start=slots, seq_rows=slots)
        sizes |= dict(draft_slot=slots, chunk=4, chunk_ids=self._chunks[-1], spans=3)
        self.plan = Plan(sizes, device)
        self.state = SlotState(slots, self.block_size, device)
        self.tables = DeviceTables(pool, slots, limits.max_model_len + self.block_size)
        self.models = PagedModels(target, draft, pool, self.tables, limits.max_model_len, limits.deterministic)
        for rows, tiles in self._shapes():
            self.models.reserve(rows, tiles)
        self._graphs = Graphs(device, device.type == "cuda" and not limits.enforce_eager)
        self._chooser = HostChooser(target.vocab_size, device)
        self._logits = torch.zeros((self._rows[-1], target.vocab_size), dtype=target.dtype, device=device)
        self._first_logits = self._logits.new_zeros((1, target.vocab_size))
        self._outcome = torch.zeros((slots + 1, self.block_size + 1), dtype=torch.int32, device=device)
        self._landings = [torch.empty_like(self._outcome, device="cpu", pin_memory=device.type == "cuda") for _ in range(RING)]
        self._turn = 0

    # What is asked of the device, from a batch.

    @torch.inference_mode()
    def launch(self, batch: Batch) -> DeviceFlight:
        """Start a step. Where `waits_for_host` holds, its choices are made before this returns."""
        sequences = [row.sequence for row in batch.verify] + ([batch.prefill.sequence] if batch.prefill else [])
        stages, choices = self._stages(batch)
        for key in (*stages, *choices):
            self._capture(key)
        for sequence in self.tables.sync(sequences):
            self.state.place(sequence)
        self.plan.upload(self._asked(batch))
        flight = DeviceFlight(batch, outcome=self._landings[self._turn])
        for key in stages:
            self._run(key)
        # Whatever may fail has been done once the state moves on: a step that fails changes nothing.
        if self._waits(batch.verify):
            flight.verified = self._verified_by_host(batch.verify)
        if batch.prefill is not None and batch.prefill.last and needs_host(batch.prefill.sequence):
            flight.first = self._chooser.first(batch.prefill.sequence, self._first_logits)
        for key in choices:
            self._run(key)
        self.state.advance(_decided([*(flight.verified or ()), *filter(None, [flight.first])]))
        self._turn = (self._turn + 1) % RING
        flight.outcome.copy_(self._outcome, non_blocking=True)
        if self._outcome.is_cuda:
            flight.landed = torch.cuda.Event()
            flight.landed.record()
        return flight

    def waits_for_host(self, sequences: Iterable[Sequence]) -> bool:
        """Whether the next choice of any of these depends on what has been committed."""
        return any(map(needs_host, sequences))

    def _waits(self, rows: list[VerifyRow]) -> bool:
        return self.waits_for_host(row.sequence for row in rows)

    def _shapes(self) -> Iterator[tuple[int, int]]:
        """Rows and tiles of every forward there is a graph for."""
        yield from ((rows, min(rows, self.limits.max_num_seqs)) for rows in self._rows)
        yield from ((n * self.block_size, n * -(-self.block_size // TILE_ROWS)) for n in self._drafts)
        yield from ((count, count // TILE_ROWS) for count in self._chunks)

    def _stages(self, batch: Batch) -> tuple[list[Stage], list[Stage]]:
        """Keys of the stages of a batch, in order: forwards, and then choices."""
        stages: list[Stage] = []
        choices: list[Stage] = []
        if batch.verify:
            drafting = sum(row.width > 0 for row in batch.verify)
            if drafting:
                stages.append(("draft", bucket_of(drafting, self._drafts)))
            rows = bucket_of(sum(row.width + 1 for row in batch.verify), self._rows)
            stages.append(("verify", rows))
            if not self._waits(batch.verify):
                choices.append(("choose", rows, _choosing(row.sequence for row in batch.verify)))
        chunk = batch.prefill
        if chunk is not None:
            stages.append(("prefill", bucket_of(chunk.count, self._chunks)))
            if chunk.last and not needs_host(chunk.sequence):
                choices.append(("first", _choosing([chunk.sequence])))
        return stages, choices

    def _asked(self, batch: Batch) -> dict[str, list[int]]:
        rows, chunk = batch.verify, batch.prefill
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + row.width + 1)
        asked = dict(
            row_slot=[row.sequence.slot for row in rows for _ in range(row.width + 1)],
            row_offset=[i for row in rows for i in range(row.width + 1)],
            seq_slot=[row.sequence.slot for row in rows],
            seq_start=starts[:-1],
            seq_rows=[row.width + 1 for row in rows],
            draft_slot=[row.sequence.slot for row in rows if row.width],
        )
        longest = max((len(s.tokens) + s.ahead for s in (row.sequence for row in rows)), default=1) + self.block_size
        spans = [self.models.span(longest, bucket_of(len(asked["draft_slot"]) or 1, self._drafts))]
        spans.append(self.models.span(longest, min(self.limits.max_num_seqs, bucket_of(max(starts[-1], 1), self._rows))))
        if chunk is not None:
            tokens = chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
            asked |= dict(chunk=[chunk.sequence.slot, chunk.start, chunk.count, chunk.count - 1], chunk_ids=tokens)
            tiles = bucket_of(chunk.count, self._chunks) // TILE_ROWS
            spans.append(self.models.span(chunk.start + chunk.count, tiles))
        return asked | dict(spans=spans)

    # The stages. Each reads the plan and the state and writes the state; all shapes come from its key.

    def _run(self, key: Stage) -> None:
        self._graphs.run(key, lambda: self._stage(key))

    def _stage(self, key: Stage) -> None:
        name, *sizes = key
        getattr(self, f"_{name}")(*sizes)

    def _capture(self, key: Stage) -> None:
        if key not in self._graphs:
            self.plan.upload({})
            self._graphs.capture(key, lambda: self._stage(key))

    @torch.inference_mode()
    def rehearse(self) -> None:
        """The largest of every stage, on padding: what they need of memory is needed now."""
        stages: list[Stage] = [("verify", self._rows[-1]), ("choose", self._rows[-1], ALL_FILTERS)]
        stages.append(("prefill", self._chunks[-1]))
        if self.draft is not None and self.limits.num_proposals:
            stages.append(("draft", self._drafts[-1]))
        self.plan.upload({})
        for stage in stages:
            self._stage(stage)

    @property
    def captures(self) -> bool:
        """Whether stages are graphs, whose times hold from one step to the next."""
        return self._graphs.enabled

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture what any batch may need, largest first, so that the smaller ones live in memory the larger have taken."""
        if not self.captures:
            return
        for rows in reversed(self._rows):
            self._capture(("verify", rows))
            for choosing in (None, NO_FILTERS, ALL_FILTERS):
                self._capture(("choose", rows, choosing))
        if self.draft is not None and self.limits.num_proposals:
            for n in reversed(self._drafts):
                self._capture(("draft", n))
        for count in reversed(self._chunks):
            self._capture(("prefill", count))
        for choosing in (None, NO_FILTERS, ALL_FILTERS):
            self._capture(("first", choosing))

    @torch.inference_mode()
    def stage_seconds(self, context: int = 1024) -> dict[Stage, float]:
        """Seconds of every captured stage, from timed replays with all sequences at `context` tokens."""
        if not self.captures:
            return {}
        context = max(2, min(context, self.limits.max_model_len - self.block_size))
        seconds: dict[Stage, float] = {}
        for rows in self._rows:
            each = min(self.limits.num_proposals + 1, rows)
            n = min(self.limits.max_num_seqs, rows // each)
            self.plan.upload(
                dict(
                    row_slot=[i for i in range(n) for _ in range(each)],
                    row_offset=list(range(each)) * n,
                    seq_slot=range(n),
                    seq_start=range(0, n * each, each),
                    seq_rows=[each] * n,
                    draft_slot=range(n),
                    spans=[self.models.span(context, min(rows, self.limits.max_num_seqs))] * 3,
                )
            )
            keys: list[Stage] = [("verify", rows), ("choose", rows, None)]
            keys += [("draft", d) for d in self._drafts if d <= n and ("draft", d) not in seconds]
            for key in keys:
                if key in self._graphs:
                    self.state.length.fill_(context)  # each choice moves it on
                    seconds[key] = self._seconds(key)
        self.state.length.fill_(1)
        self.plan.upload({})
        return seconds

    def measure(self, context: int = 1024) -> StepCost:
        """What a step costs, from the times of its stages."""
        seconds = self.stage_seconds(context)
        steps = [seconds["verify", rows] + seconds["choose", rows, None] for rows in self._rows]
        drafts = [d for d in self._drafts if ("draft", d) in seconds]
        passes = [seconds["draft", d] for d in drafts]

        def cost(sequences: int, rows: int, drafting: int) -> float:
            step = steps[bisect_left(self._rows, rows)]
            return step if not drafting else step + passes[min(bisect_left(drafts, drafting), len(drafts) - 1)]

        return cost

    def _seconds(self, key: Stage) -> float:
        """The median of a few replays."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(TIMED_REPLAYS):
            start.record()
            self._run(key)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return statistics.median(times)

    def _draft(self, n: int) -> None:
        """Greedy proposals of n sequences: one pass over the context keys and the block."""
        state, size = self.state, self.block_size
        slots = self.plan["draft_slot"][:n]
        index = state.rows_of(slots)
        anchors = state.length[index] - 1
        assert self.draft is not None
        ids = torch.full((n, size), self.draft.config.mask_token_id, device=slots.device)
        ids[:, 0] = state.anchor[index]
        forward = Forward.blocks(slots, anchors, size, self.plan["spans"][0:1], self.tables.limit)
        best = self.models.propose(ids.flatten(), forward).view(n, size)
        state.proposals[index] = best[:, 1:].long().clamp(min=0)

    def _verify(self, rows: int) -> None:
        """The target on anchors and proposals, to logits; the draft's keys and values of all rows."""
        state, plan = self.state, self.plan
        slots, offsets = plan["row_slot"][:rows], plan["row_offset"][:rows].long()
        index = state.rows_of(slots)
        ids = state.anchor[index]
        if self.limits.num_proposals:
            ids = torch.where(offsets > 0, state.proposals[index, (offsets - 1).clamp(min=0)], ids)
        tiles = min(rows, self.limits.max_num_seqs)
        seq_slot, seq_rows = plan["seq_slot"][:tiles], plan["seq_rows"][:tiles]
        forward = Forward.rows_of_sequences(
            slots,
            state.length[index] - 1 + offsets,
            (seq_slot, plan["seq_start"][:tiles], seq_rows, state.length[state.rows_of(seq_slot)] - 1 + seq_rows),
            plan["spans"][1:2],
            self.limits.max_model_len,
            self.limits.num_proposals + 1,
        )
        self._logits[:rows].copy_(self.models.verify(ids, forward, None))

    def _prefill(self, count: int) -> None:
        plan = self.plan
        slot, start, real, last = plan["chunk"].clamp(min=-1).unbind()
        forward = Forward.chunk(slot, start, real, count, plan["spans"][2:3])
        ids = plan["chunk_ids"][:count].long().clamp(min=0)
        self._first_logits.copy_(self.models.verify(ids, forward, last.clamp(min=0).long()[None]))

    def _choose(self, rows: int, choosing: Choosing) -> None:
        """The target's own choice at every row; accepted are the proposals that equal it; the state moves on."""
        state, plan = self.state, self.plan
        n = min(rows, self.limits.max_num_seqs)
        tokens = self._choices(self._logits[:rows], plan["row_slot"][:rows], plan["row_offset"][:rows], choosing)
        slots = plan["seq_slot"][:n]
        index = state.rows_of(slots)
        offsets = torch.arange(self.block_size, device=slots.device)
        chosen = tokens[(plan["seq_start"][:n, None] + offsets).clamp(min=0, max=rows - 1)]
        right = (chosen[:, :-1] == state.proposals[index]) & (offsets[1:] < plan["seq_rows"][:n, None])
        self._advance(index, chosen, self._accepted(right, index), self._outcome[:n])

    def _accepted(self, right: Tensor, index: Tensor) -> Tensor:
        """How many proposals are accepted [N], from which are right [N, B - 1] (a benchmark may say otherwise)."""
        return right.long().cumprod(1).sum(1)

    def _first(self, choosing: Choosing) -> None:
        """The token behind a prompt."""
        slot = self.plan["chunk"][:1]
        chosen = self._choices(self._first_logits, slot, torch.zeros_like(slot), choosing)[:, None].expand(1, self.block_size)
        self._advance(self.state.rows_of(slot), chosen, torch.zeros_like(slot, dtype=torch.long), self._outcome[-1:])

    def _choices(self, logits: Tensor, slots: Tensor, offsets: Tensor, choosing: Choosing) -> Tensor:
        if choosing is None:
            return argmax_rows(logits).long()
        state, index = self.state, self.state.rows_of(slots)
        output_index = (state.length[index] - state.prompt[index] + offsets).clamp(min=0)
        return sample_on_device(logits, SampleTable.from_lines(state.sampling[index], output_index, choosing))

    def _advance(self, index: Tensor, chosen: Tensor, accepted: Tensor, outcome: Tensor) -> None:
        state = self.state
        outcome[:, 0], outcome[:, 1:] = accepted + 1, chosen
        # A row without a choice is -1: its request ends, and until then any token will do.
        state.anchor[index] = chosen.gather(1, accepted[:, None])[:, 0].clamp(min=0)
        state.length[index] = torch.where(index == state.nobody, 1, state.length[index] + accepted + 1)

    # What came of it, for the host.

    @torch.inference_mode()
    def collect(self, flight: Flight) -> Result:
        """Wait for a step; its choices."""
        assert isinstance(flight, DeviceFlight)
        batch, chunk = flight.batch, flight.batch.prefill
        if flight.landed is not None:
            flight.landed.synchronize()
        outcome = flight.outcome.tolist()
        choices = flight.verified
        if choices is None:
            choices = [self._choice(row.sequence, outcome[i], row.width) for i, row in enumerate(batch.verify)]
        if chunk is not None and chunk.last:
            choices.append(flight.first or self._choice(chunk.sequence, outcome[-1], 0, from_prefill=True))
        return Result([] if chunk is None else [chunk], choices)

    def _choice(self, sequence: Sequence, outcome: list[int], drafted: int, from_prefill: bool = False) -> Choice:
        chosen, error = outcome[1 : 1 + outcome[0]], None
        if -1 in chosen:
            error, chosen = no_choice(None), chosen[: chosen.index(-1)]
        return Choice(sequence, chosen, drafted, None, from_prefill, error)

    def _verified_by_host(self, rows: list[VerifyRow]) -> list[Choice]:
        every = self.state.proposals.tolist()
        proposals = [every[row.sequence.slot][: row.width] for row in rows]
        return self._chooser.verify(rows, proposals, self._logits[: sum(row.width + 1 for row in rows)])


def _choosing(sequences: Iterable[Sequence]) -> Choosing:
    """One of three ways, so that there are few graphs: filters that a request does not use let everything through."""
    params = [sequence.request.params for sequence in sequences]
    if all(p.greedy for p in params):
        return None
    return ALL_FILTERS if any(vars(SampleFilters.of(params)).values()) else NO_FILTERS


def _decided(choices: list[Choice]) -> list[tuple[int, int, int]]:
    """(slot, length, anchor) after choices that the host has made."""
    return [(c.sequence.slot, len(c.sequence.tokens) + len(c.tokens), c.tokens[-1]) for c in choices if c.tokens]
