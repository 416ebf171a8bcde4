"""Runs a step on a GPU as three graph replays: draft | verify to logits | sample, compare, append. The host waits for none.

What a step needs of the step before (anchors, lengths, proposals) stays on the device (state.py), so the next step is launched
before the host knows what this one chose. Shape letters: T rows of a forward, N sequences, B block size, V vocabulary.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flashdraft.draft import DFlashDraft
from flashdraft.engine.cache import PagePool
from flashdraft.engine.forward import Forward, PagedModels
from flashdraft.engine.graphs import Graphs, bucket_of, chunk_buckets, row_buckets, sequence_buckets
from flashdraft.engine.host_choice import HostChooser, decided, needs_host
from flashdraft.engine.media import asked_media, put_embeddings
from flashdraft.engine.prompt_scores import Scores, score, scored_rows
from flashdraft.engine.proposals import is_coupled
from flashdraft.engine.sampling import ALL_FILTERS, NO_FILTERS, Choosing, SampleTable, choosing, no_choice, sample_on_device
from flashdraft.engine.scheduler import MOST_SCORED, Batch, Choice, Flight, Result, Sequence, VerifyRow
from flashdraft.engine.state import RING, DeviceLimits, DeviceTables, Plan, SlotState, asked_chunks, asked_rows, padded_rows
from flashdraft.engine.width import StepCost
from flashdraft.kernels.fused import argmax_rows
from flashdraft.kernels.step import (
    TILE_ROWS,
    advance,
    block_rows,
    chunk_rows,
    keep_proposals,
    sampling_blocks,
    sampling_rows,
    verify_rows,
)
from flashdraft.targets.target import Target

TIMED_REPLAYS = 5

# A stage and the sizes it is captured for: the key of its graph.
Stage = tuple[str | int | Choosing, ...]


@dataclass
class DeviceFlight(Flight):
    """A launched step: what was asked, and where its outcome will lie."""

    outcome: Tensor = field(
        kw_only=True
    )  # int32 [S + P, B + 1]: of each sequence the tokens committed and the choices; the last rows are the prompts'
    landed: torch.cuda.Event | None = None
    verified: list[Choice] | None = None  # where the host chose
    firsts: list[Choice] | None = None
    scores: Scores = field(default_factory=list)


class DeviceRunner:
    """Owns the tensors of a step and the graphs over them."""

    asynchronous = True
    forced: Tensor | None = None  # of a benchmark: kernels.step.advance

    def __init__(self, target: Target, draft: DFlashDraft | None, pool: PagePool, limits: DeviceLimits) -> None:
        self.target, self.draft, self.limits = target, draft, limits
        device = target.device
        self.block_size = draft.config.block_size if draft is not None else 1
        slots = limits.max_num_seqs
        # The narrow kernel, for 16 bits, gives a row the same bits among 8 rows and alone; other products may not.
        few = device.type == "cuda" and target.dtype in (torch.bfloat16, torch.float16)
        self._rows = row_buckets(slots * (limits.num_proposals + 1), few)
        self._drafts, self._chunks = sequence_buckets(slots), chunk_buckets(limits.max_num_batched_tokens)
        sizes = dict(row_slot=self._rows[-1], row_offset=self._rows[-1], seq_slot=slots, seq_start=slots, seq_rows=slots)
        tiles, prompts = self._chunks[-1] // TILE_ROWS, limits.max_prefills
        sizes |= dict(chunk_slot=tiles, chunk_first=tiles, chunk_rows=tiles, chunk_end=tiles, chunk_ids=self._chunks[-1])
        if target.media is not None:
            sizes |= dict(chunk_media=self._chunks[-1], chunk_reach=self._chunks[-1])
        sizes |= dict(draft_slot=slots, prompt_slot=prompts, prompt_row=prompts, score_row=MOST_SCORED, spans=3)
        self.plan = Plan(sizes, device)
        self.state = SlotState(slots, self.block_size, device)
        self.tables = DeviceTables(pool, slots, limits.max_model_len + self.block_size)
        self.models = PagedModels(target, draft, pool, self.tables, limits.max_model_len, limits.deterministic)
        for rows, tiles in self._shapes():
            self.models.reserve(rows, tiles)
        self._graphs = Graphs(device, device.type == "cuda" and not limits.enforce_eager)
        self._chooser = HostChooser(target.vocab_size, device)
        self._logits = torch.zeros((self._rows[-1], target.vocab_size), dtype=target.dtype, device=device)
        self._first_logits = self._logits.new_zeros((prompts, target.vocab_size))
        self._scored_logits: Tensor | None = None  # while prompt tokens are scored
        self._media = None if target.media is None else self._logits.new_zeros((self._chunks[-1], target.hidden_size))
        self._outcome = torch.zeros((slots + prompts, self.block_size + 1), dtype=torch.int32, device=device)
        self._landings = [torch.empty_like(self._outcome, device="cpu", pin_memory=device.type == "cuda") for _ in range(RING)]
        self._turn = 0
        self._failed = False  # the last launch

    # What is asked of the device, from a batch.

    @torch.inference_mode()
    def launch(self, batch: Batch) -> DeviceFlight:
        """Start a step. Choices that need the host are made before this returns.

        One that fails, or is interrupted, may have moved the state on: the next takes everything from the host again.
        """
        if self._failed:
            self.tables.forget()
        self._failed, self._scored_logits = True, None
        flight = self._launch(batch)
        self._failed = False
        return flight

    def _launch(self, batch: Batch) -> DeviceFlight:
        sequences = [row.sequence for row in batch.verify] + [chunk.sequence for chunk in batch.prefill]
        stages, choices = self._stages(batch)
        for key in (*stages, *choices):
            self._capture(key)
        for sequence in self.tables.sync(sequences):
            self.state.place(sequence)
        self.plan.upload(self._asked(batch))
        if self._media is not None:
            put_embeddings(batch.prefill, self._media)
        flight = DeviceFlight(batch, outcome=self._landings[self._turn])
        for key in stages:
            self._run(key)
        if self._scored_logits is not None:
            flight.scores, self._scored_logits = score(batch.prefill, self._scored_logits), None
        if self._waits(batch.verify):
            flight.verified = self._verified_by_host(batch.verify)
        ending = [chunk.sequence for chunk in batch.prefill if chunk.last]
        if any(map(needs_host, ending)):
            flight.firsts = [self._chooser.first(s, self._first_logits[i : i + 1]) for i, s in enumerate(ending)]
        for key in choices:
            self._run(key)
        self.state.advance(decided([*(flight.verified or ()), *(flight.firsts or ())]))
        self._turn = (self._turn + 1) % RING
        flight.outcome.copy_(self._outcome, non_blocking=True)
        if self._outcome.is_cuda:
            flight.landed = torch.cuda.Event()
            flight.landed.record()
        return flight

    def waits_for_host(self, sequences: Iterable[Sequence]) -> bool:
        """Whether the next step depends on what has been committed: a choice of any of these, or all behind a failed launch."""
        return self._failed or any(map(needs_host, sequences))

    def _waits(self, rows: list[VerifyRow]) -> bool:
        return any(needs_host(row.sequence) for row in rows)

    def _shapes(self) -> Iterator[tuple[int, int]]:
        """Rows and tiles of every forward there is a graph for."""
        yield from ((rows, tiles) for rows in self._rows for tiles in self._tile_counts(rows))
        yield from ((n * self.block_size, n * -(-self.block_size // TILE_ROWS)) for n in self._drafts)
        yield from ((count, count // TILE_ROWS) for count in self._chunks)

    def _tile_counts(self, rows: int) -> list[int]:
        """Tiles, one a sequence, that there are graphs with so many rows for: all drafting, or as many as there may be."""
        most = min(rows, self.limits.max_num_seqs)
        return sorted({min(most, -(-rows // (self.limits.num_proposals + 1))), most})

    def _verify_stage(self, sequences: int, rows: int) -> tuple[str, int, int]:
        rows = bucket_of(rows, self._rows)
        return "verify", rows, bucket_of(sequences, self._tile_counts(rows))

    def _stages(self, batch: Batch) -> tuple[list[Stage], list[Stage]]:
        """Keys of the stages of a batch, in order: forwards, and then choices."""
        stages: list[Stage] = []
        choices: list[Stage] = []
        if batch.verify:
            drafting = [row.sequence for row in batch.verify if row.width]
            if drafting:
                coupled = is_coupled(drafting, self.limits.proposal_noise)
                stages.append(("draft", bucket_of(len(drafting), self._drafts), coupled))
            verify = self._verify_stage(len(batch.verify), sum(row.width + 1 for row in batch.verify))
            stages.append(verify)
            if not self._waits(batch.verify):
                choices.append(("choose", verify[1], choosing(row.sequence.request.params for row in batch.verify)))
        if batch.prefill:
            scores = any(chunk.scored for chunk in batch.prefill)
            stages.append(("score" if scores else "prefill", bucket_of(sum(map(padded_rows, batch.prefill)), self._chunks)))
            ending = [chunk.sequence for chunk in batch.prefill if chunk.last]
            if ending and not any(map(needs_host, ending)):
                choices.append(("first", choosing(sequence.request.params for sequence in ending)))
        return stages, choices

    def _asked(self, batch: Batch) -> dict[str, list[int]]:
        rows = batch.verify
        asked = asked_rows(rows)
        longest = max((len(s.tokens) + s.ahead for s in (row.sequence for row in rows)), default=1) + self.block_size
        spans = [self.models.span(longest, bucket_of(len(asked["draft_slot"]) or 1, self._drafts))]
        spans.append(self.models.span(longest, self._verify_stage(max(1, len(rows)), max(1, len(asked["row_slot"])))[2]))
        if batch.prefill:
            tiles = bucket_of(sum(map(padded_rows, batch.prefill)), self._chunks) // TILE_ROWS
            spans.append(self.models.span(max(chunk.start + chunk.count for chunk in batch.prefill), tiles))
            asked |= asked_chunks(batch.prefill) | dict(score_row=scored_rows(batch.prefill))
            if self._media is not None:
                asked |= asked_media(batch.prefill, len(asked["chunk_ids"]))
        return asked | dict(spans=spans)

    # The stages. Each reads the plan and the state and writes the state; all shapes come from its key.

    def _run(self, key: Stage) -> None:
        if key[0] == "score":  # rare, and of much memory: never captured
            return self._stage(key)
        self._graphs.run(key, lambda: self._stage(key))

    def _stage(self, key: Stage) -> None:
        name, *sizes = key
        getattr(self, f"_{name}")(*sizes)

    def _capture(self, key: Stage) -> None:
        if key[0] != "score" and key not in self._graphs:
            self.plan.upload({})
            self._graphs.capture(key, lambda: self._stage(key))

    @torch.inference_mode()
    def rehearse(self) -> None:
        """The largest of every stage, on padding: what they need of memory is needed now."""
        rows = self._rows[-1]
        stages: list[Stage] = [self._verify_stage(self.limits.max_num_seqs, rows), ("choose", rows, ALL_FILTERS)]
        stages.append(("score", self._chunks[-1]))
        if self.draft is not None and self.limits.num_proposals:
            stages.append(("draft", self._drafts[-1], self.limits.proposal_noise > 0))
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
            for tiles in self._tile_counts(rows):
                self._capture(("verify", rows, tiles))
            for way in (None, NO_FILTERS, ALL_FILTERS):
                self._capture(("choose", rows, way))
        if self.draft is not None and self.limits.num_proposals:
            for n in reversed(self._drafts):
                for coupled in (False, True) if self.limits.proposal_noise > 0 else (False,):
                    self._capture(("draft", n, coupled))
        for count in reversed(self._chunks):
            self._capture(("prefill", count))
        for way in (None, NO_FILTERS, ALL_FILTERS):
            self._capture(("first", way))

    @torch.inference_mode()
    def stage_seconds(self, context: int = 1024) -> dict[Stage, float]:
        """Seconds of every captured stage, from timed replays with all sequences at `context` tokens."""
        if not self.captures:
            return {}
        context = max(2, min(context, self.limits.max_model_len - self.block_size))
        seconds: dict[Stage, float] = {}
        for rows, tiles in [(count, tiles) for count in self._rows for tiles in self._tile_counts(count)]:
            n, each = tiles, max(1, rows // tiles)
            self.plan.upload(
                dict(
                    row_slot=[i for i in range(n) for _ in range(each)],
                    row_offset=list(range(each)) * n,
                    seq_slot=range(n),
                    seq_start=range(0, n * each, each),
                    seq_rows=[each] * n,
                    draft_slot=range(n),
                    spans=[self.models.span(context, tiles)] * 3,
                )
            )
            keys: list[Stage] = [("verify", rows, tiles), ("choose", rows, None)]
            keys += [("draft", d, False) for d in self._drafts if d <= n and ("draft", d, False) not in seconds]
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
        drafts = [d for d in self._drafts if ("draft", d, False) in seconds]
        passes = [seconds["draft", d, False] for d in drafts]

        def verify(sequences: int, rows: int) -> float:
            stage = self._verify_stage(sequences, rows)
            return seconds[stage] + seconds["choose", stage[1], None]

        return StepCost(verify, lambda drafting: passes[min(bisect_left(drafts, drafting), len(drafts) - 1)])

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

    def _draft(self, n: int, coupled: bool) -> None:
        """Proposals of n sequences: one pass over the context keys and the block."""
        assert self.draft is not None
        slots, mask_id = self.plan["draft_slot"][:n], self.draft.config.mask_token_id
        forward = Forward(block_rows(self.state, slots, mask_id, self.tables.limit), self.plan["spans"][0:1])
        if coupled:
            samples = sampling_blocks(self.state, slots, self.block_size, self.limits.proposal_noise)
            best = sample_on_device(self.models.proposal_logits(forward), SampleTable(*samples, NO_FILTERS))
        else:
            best = self.models.propose(forward)
        keep_proposals(self.state, slots, best)

    def _verify(self, rows: int, tiles: int) -> None:
        """The target on anchors and proposals, to logits; the draft's keys and values of all rows."""
        plan, limits = self.plan, self.limits
        slots, offsets = plan["row_slot"][:rows], plan["row_offset"][:rows]
        places = plan["seq_slot"][:tiles], plan["seq_start"][:tiles], plan["seq_rows"][:tiles]
        most = min(rows, limits.num_proposals + 1)
        inputs = verify_rows(self.state, slots, offsets, places, limits.max_model_len, most)
        # Kept by each graph, logits would be its own memory: 64 MB for 128 rows, 0.5 GB for all sizes.
        self.models.verify(Forward(inputs, plan["spans"][1:2]), self._logits[:rows])

    def _score(self, count: int) -> None:
        self._prefill(count, scoring=True)

    def _prefill(self, count: int, scoring: bool = False) -> None:
        plan, tiles = self.plan, count // TILE_ROWS
        places = plan["chunk_slot"][:tiles], plan["chunk_first"][:tiles], plan["chunk_rows"][:tiles], plan["chunk_end"][:tiles]
        inputs = chunk_rows(places, plan["prompt_row"], plan["chunk_ids"][:count])
        media = None
        if self._media is not None:
            media = plan["chunk_media"][:count] > 0, self._media[:count]
            inputs = replace(inputs, rows=replace(inputs.rows, reach=plan["chunk_reach"][:count]))
        firsts = out = self._first_logits
        if scoring:
            assert inputs.logit_rows is not None
            rows = torch.cat([inputs.logit_rows, plan["score_row"].long().clamp(min=0)])
            inputs, out = replace(inputs, logit_rows=rows), firsts.new_empty((len(rows), firsts.shape[1]))
        self.models.verify(Forward(inputs, self.plan["spans"][2:3], media), out)
        if scoring:
            firsts.copy_(out[: len(firsts)])
            self._scored_logits = out[len(firsts) :]

    def _choose(self, rows: int, choosing: Choosing) -> None:
        """The target's own choice at every row; accepted are the proposals that equal it; the state moves on."""
        plan, n = self.plan, min(rows, self.limits.max_num_seqs)
        tokens = self._choices(self._logits[:rows], plan["row_slot"][:rows], plan["row_offset"][:rows], choosing)
        places = plan["seq_start"][:n], plan["seq_rows"][:n]
        advance(self.state, tokens, self._outcome[:n], plan["seq_slot"][:n], places, self.forced)

    def _first(self, choosing: Choosing) -> None:
        """The token behind each prompt that ends."""
        slots = self.plan["prompt_slot"]
        tokens = self._choices(self._first_logits, slots, torch.zeros_like(slots), choosing)
        advance(self.state, tokens, self._outcome[-len(slots) :], slots, None)

    def _choices(self, logits: Tensor, slots: Tensor, offsets: Tensor, choosing: Choosing) -> Tensor:
        if choosing is None:
            return argmax_rows(logits)
        return sample_on_device(logits, SampleTable(*sampling_rows(self.state, slots, offsets), choosing))

    # What came of it, for the host.

    @torch.inference_mode()
    def collect(self, flight: Flight) -> Result:
        """Wait for a step; its choices."""
        assert isinstance(flight, DeviceFlight)
        batch = flight.batch
        if flight.landed is not None:
            flight.landed.synchronize()
        outcome = flight.outcome.tolist()
        choices = flight.verified
        if choices is None:
            choices = [self._choice(row.sequence, outcome[i], row.width) for i, row in enumerate(batch.verify)]
        firsts = flight.firsts
        if firsts is None:
            ending = [chunk.sequence for chunk in batch.prefill if chunk.last]
            behind = outcome[len(outcome) - self.limits.max_prefills :]
            firsts = [self._choice(s, line, 0, from_prefill=True) for s, line in zip(ending, behind, strict=False)]
        return Result(batch.prefill, [*choices, *firsts], flight.scores)

    def _choice(self, sequence: Sequence, outcome: list[int], drafted: int, from_prefill: bool = False) -> Choice:
        chosen, error = outcome[1 : 1 + outcome[0]], None
        if -1 in chosen:
            error, chosen = no_choice(None), chosen[: chosen.index(-1)]
        return Choice(sequence, chosen, drafted, None, from_prefill, error)

    def _verified_by_host(self, rows: list[VerifyRow]) -> list[Choice]:
        every = self.state.proposals.tolist()
        proposals = [every[row.sequence.slot][: row.width] for row in rows]
        return self._chooser.verify(rows, proposals, self._logits[: sum(row.width + 1 for row in rows)])
