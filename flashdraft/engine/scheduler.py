"""Which sequences run in the next step, and what becomes of the tokens they got. Host only: no tensors."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from flashdraft.engine.cache import CacheManager, page_keys
from flashdraft.engine.request import FinishReason, Output, Request, TokenLogprobs, check_length
from flashdraft.engine.sequence import Sequence
from flashdraft.engine.width import WidthPolicy
from flashdraft.errors import FlashdraftError, RequestError


@dataclass(frozen=True)
class PrefillChunk:
    """Compute positions [start, start + count); `last` if the first output token is to be chosen from its last row. The first
    `scored` rows score the prompt tokens behind them.
    """

    sequence: Sequence
    start: int
    count: int
    last: bool
    scored: int = 0


@dataclass(frozen=True)
class VerifyRow:
    """Verify the anchor of `sequence` and `width` proposals behind it (0: plain decoding)."""

    sequence: Sequence
    width: int


@dataclass(frozen=True)
class Batch:
    prefill: list[PrefillChunk]
    verify: list[VerifyRow]

    @property
    def empty(self) -> bool:
        return not self.prefill and not self.verify


@dataclass(frozen=True)
class Choice:
    """What the target chose for one sequence: `tokens`[i] after the first i proposals, all of them to be committed in order.

    With an error there was no choice behind them, and the request ends.
    """

    sequence: Sequence
    tokens: list[int]
    drafted: int
    logprobs: list[TokenLogprobs] | None
    from_prefill: bool = False
    error: FlashdraftError | None = None


@dataclass(frozen=True)
class Result:
    chunks: list[PrefillChunk]
    choices: list[Choice]
    scores: list[tuple[PrefillChunk, list[TokenLogprobs]]] = field(default_factory=list)


@dataclass
class Flight:
    """A step that has been launched: on a CPU its result is known at once, on a GPU it is awaited (device_runner.py)."""

    batch: Batch
    result: Result | None = None


MOST_SCORED = 128  # positions of prompts in a step whose logits are all kept: 64 MiB in bfloat16 for a vocabulary of 262,144
CHUNK_MULTIPLE = 16  # positions: chunks of several prompts start at multiples of it in the rows of a step


def _rows(count: int) -> int:
    """Rows of a step that so many positions of a prompt take."""
    return -(-count // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


class Scheduler:
    """Continuous batching, oldest first: every decoding sequence each step, and beside them chunks of at most `max_prefills`
    prompts, max_num_batched_tokens positions in all.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_proposals: int,
        max_prefills: int = 1,
    ) -> None:
        self.cache = cache
        self.max_prefills = max_prefills
        self.policy: WidthPolicy | None = None  # None: every request at its widest
        self._interrupt: BaseException | None = None  # what a hook raised that is not for the engine to handle
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.block_size, self.num_proposals = max_model_len, block_size, num_proposals
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._lookahead = max(max_num_batched_tokens, block_size)  # rows that one step may write past what is computed
        self._arrivals = 0

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that can never run: too long for the context or for all of the KV memory."""
        check_length(length := len(request.prompt), self.max_model_len)
        if any(request.id == sequence.request.id for sequence in (*self.waiting, *self.running)):
            raise RequestError(f"request id {request.id!r} is in use: every request in the engine needs an id of its own")
        longest = min(self.max_model_len, length + (request.params.max_tokens or self.max_model_len)) + self.block_size
        units, pool = self.cache.units_for(longest, self._lookahead), self.cache.pool
        if units > pool.num_units:
            raise RequestError(
                f"this request may grow to {longest} tokens, needing {units * pool.unit_bytes / 2**20:.1f} MiB of KV memory; "
                f"the engine has {pool.num_units * pool.unit_bytes / 2**20:.1f} MiB: lower max_tokens or raise "
                "kv_cache_memory_bytes"
            )

    def add(self, request: Request) -> Output:
        """Queue a request that has been checked."""
        output = Output(request)
        self.waiting.append(Sequence(request, output, self._arrivals, list(request.prompt), self.cache.new_sequence()))
        self._arrivals += 1
        return output

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def candidates(self) -> Iterable[Sequence]:
        """The sequences that the next step may run."""
        return itertools.chain(self.running, itertools.islice(self.waiting, self.max_prefills))

    def schedule(self, under_way: bool = False) -> Batch | None:
        """What to run next. `under_way`: a step has been launched and not committed; then None means that it must be first,
        for a running sequence would have to be preempted.
        """
        verify = []
        ready = [s for s in self.running if s.decoding and not s.ends_for_certain(self.max_model_len)]
        ready.sort(key=lambda s: s.arrival)
        for sequence, width in zip(ready, self._widths(ready), strict=True):
            if sequence.slot < 0:
                continue  # preempted for an older one, just now
            reach = len(sequence.tokens) - 1 + sequence.ahead + (self.block_size if width else 1)
            if self._make_room(sequence, min(reach, self.max_model_len + self.block_size), under_way):
                verify.append(VerifyRow(sequence, width))
            elif under_way:
                return None
        batch = Batch(self._next_chunks(), [row for row in verify if row.sequence.slot >= 0])
        self._count(batch, 1)
        return batch

    def cancel(self, batch: Batch) -> None:
        """Forget a scheduled batch that could not be run."""
        self._count(batch, -1)
        for chunk in batch.prefill:
            chunk.sequence.launched = chunk.start

    def _count(self, batch: Batch, sign: int) -> None:
        for row in batch.verify:
            row.sequence.pending += sign
            row.sequence.ahead += sign * (row.width + 1)
        for chunk in batch.prefill:
            chunk.sequence.launched = chunk.start + chunk.count
            chunk.sequence.pending += sign * chunk.last
            chunk.sequence.ahead += sign * chunk.last

    def _widths(self, sequences: list[Sequence]) -> list[int]:
        limits = [self._width_limit(sequence) for sequence in sequences]
        return limits if self.policy is None else self.policy.choose(list(zip(sequences, limits, strict=True)))

    def _width_limit(self, sequence: Sequence) -> int:
        limit = sequence.request.max_draft_tokens
        width = self.num_proposals if limit is None else min(limit, self.num_proposals)
        return max(0, min(width, self.max_model_len - len(sequence.tokens) - sequence.pending))

    def _make_room(self, sequence: Sequence, tokens: int, under_way: bool) -> bool:
        """Grow a sequence, preempting the newest others; False if it was itself the newest and had to go, or if none may be
        preempted.
        """
        while not self._grow(sequence, tokens):
            if under_way:
                return False
            victim = max(self.running, key=lambda s: s.arrival)
            assert len(self.running) > 1, "a request was admitted that does not fit alone"
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        if tokens <= sequence.room:
            return True  # as in most steps
        if not self.cache.grow(sequence.held, tokens):
            return False
        sequence.room = self.cache.room(sequence.held)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages and let it wait at the front; its tokens are kept and computed again later."""
        self._leave(sequence)
        assert not sequence.pending, "a sequence was preempted while a step with it was under way"
        sequence.computed = sequence.launched = 0
        sequence.output.preemptions += 1
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.cache.free(sequence.held)
        if self.policy is not None:
            self.policy.forget(sequence)
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        sequence.slot, sequence.room, sequence.stays = -1, 0, 0

    def _next_chunks(self) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        begun, room, to_score = [s for s in self.running if not s.decoding], self.max_num_batched_tokens, MOST_SCORED
        if begun and self.max_prefills > 1:
            begun = self._short_first(begun, room)
        while room > 0 and len(chunks) < self.max_prefills:
            sequence = begun.pop(0) if begun else self._admit()
            if sequence is None or sequence.decoding:
                break
            start, most = sequence.launched, min(room, to_score) if sequence.unscored else room
            if most == 0:
                continue  # those behind it need not wait for all that is to be scored
            count = sequence.uncut(start, min(sequence.prefill_goal - start, most))
            if count == 0:
                break  # what comes next does not fit beside the others
            if not self._grow(sequence, start + count):
                break  # decoding sequences hold the memory; they finish or are preempted by older ones
            last = not sequence.output.tokens and start + count == sequence.prefill_goal
            chunks.append(PrefillChunk(sequence, start, count, last, sequence.scored(start, count)))
            room, to_score = room - _rows(count), to_score - chunks[-1].scored
            sequence.launched = start + count
        return chunks

    def _short_first(self, begun: list[Sequence], room: int) -> list[Sequence]:
        """Prompts that are next in line and fit, whole, into half of a step go before one that fills more than a step: they
        need not wait for all of it, and it takes twice as long at most.
        """
        first, others, half = begun[0], begun[1:], room // 2
        if first.prefill_goal - first.launched <= room or not first.uncut(first.launched, half):
            return begun
        short: list[Sequence] = []
        while len(short) < self.max_prefills - 1 and (others or self.waiting):
            following = others[0] if others else self.waiting[0]
            half -= _rows(following.prefill_goal - following.launched)
            if half < 0 or (not others and self._admit() is None):
                break
            short.append(following)
            del others[:1]
        return [*short, first, *others]

    def _admit(self) -> Sequence | None:
        if not self.waiting or not self.free_slots:
            return None
        sequence = self.waiting[0]
        # Admitting what cannot be held would only preempt it again; with nothing else running it always fits (see add).
        need = self.cache.units_for(len(sequence.tokens) + self.block_size, self._lookahead)
        if self.running and need > self.cache.pool.available_units:
            return None
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.slot = self.free_slots.pop()
        media = sequence.request.media
        sequence.keys = page_keys(sequence.tokens, self.cache.page_size, sequence.keys, media)
        sequence.computed = self.cache.attach_prefix(sequence.held, sequence.keys, sequence.cacheable, media)
        if self._is_computing_more(sequence):
            self._leave(sequence)
            sequence.computed = 0
            self.waiting.appendleft(sequence)
            return None
        sequence.launched = sequence.computed
        if not sequence.output.preemptions:
            sequence.output.cached_tokens = sequence.computed
        return sequence

    def _is_computing_more(self, sequence: Sequence) -> bool:
        """Whether a prompt under way has more in common with this one than the prefix cache: that is worth waiting for."""
        if not self.cache.enable_prefix_caching or sequence.unscored:
            return False
        pages = sequence.computed // self.cache.page_size
        if pages >= len(sequence.keys):
            return False
        others = (s for s in self.running if s is not sequence and s.launched > s.computed and len(s.keys) > pages)
        return any(other.keys[pages] == sequence.keys[pages] for other in others)  # a key names all tokens up to its page's end

    def commit(self, result: Result) -> list[Output]:
        """Append the chosen tokens one by one; returns the outputs that changed.

        Hooks may abort requests, this one too, and may raise: whatever happens, every sequence stays consistent, and at worst
        computes some positions again.
        """
        changed = []
        self._interrupt = None
        for choice in result.choices:
            choice.sequence.pending -= 1
            choice.sequence.ahead -= choice.drafted + 1
        for chunk, entries in result.scores:
            chunk.sequence.score(chunk.start, entries)
        for chunk in result.chunks:
            # The last chunk of a prompt counts once its choice is committed, below: without one it has to run again.
            if chunk.sequence.slot >= 0 and not chunk.last:
                self._computed(chunk.sequence, chunk.start + chunk.count)
        for choice in result.choices:
            sequence, output = choice.sequence, choice.sequence.output
            if sequence.slot < 0:
                continue  # aborted, or ended by the step before
            if choice.from_prefill:
                self._computed(sequence, len(sequence.tokens))
            committed = self._commit_tokens(sequence, choice)
            output.discarded += len(choice.tokens) - committed
            if not choice.from_prefill:
                output.committed_per_step.append(committed)
                output.drafted_per_step.append(choice.drafted)
            if choice.drafted and self.policy is not None and not choice.from_prefill and choice.error is None:
                self.policy.observe(sequence, choice.drafted, len(choice.tokens) - 1)
            changed.append(output)
            if sequence.slot < 0:
                continue  # aborted by its own hook
            if not choice.from_prefill:
                self._computed(sequence, len(sequence.tokens) - 1)
            if output.finished:
                self._leave(sequence)
        if self._interrupt is not None:
            raise self._interrupt
        return changed

    def _computed(self, sequence: Sequence, computed: int) -> None:
        """Positions [0, computed) are in the pages, all of committed tokens: publish what is full, drop what is passed."""
        full, before = computed // self.cache.page_size, sequence.computed // self.cache.page_size
        sequence.computed = computed
        sequence.launched = max(sequence.launched, computed)
        if full != before:
            if full > len(sequence.keys):
                tokens, media = sequence.tokens[:computed], sequence.request.media
                sequence.keys = page_keys(tokens, self.cache.page_size, sequence.keys, media)
            self.cache.publish(sequence.held, sequence.keys, computed)
        if computed >= sequence.stays:
            sequence.stays = self.cache.drop_behind(sequence.held, computed)

    def _commit_tokens(self, sequence: Sequence, choice: Choice) -> int:
        """Commit tokens until the request ends; how many they were."""
        output = sequence.output
        for i, token in enumerate(choice.tokens):
            sequence.tokens.append(token)
            output.tokens.append(token)
            if choice.logprobs is not None:
                output.logprobs.append(choice.logprobs[i])
            try:
                reason = self._finish_reason(sequence, token)
            except Exception as error:
                reason, output.error = "error", error
            except BaseException as interrupt:  # Ctrl-C: raised once the other sequences have what they are due
                reason, self._interrupt = "abort", interrupt
            output.finish_reason = output.finish_reason or reason  # a hook that aborted its own request has set it
            if output.finished:
                return i + 1
        if choice.error is not None:
            output.finish_reason, output.error = "error", choice.error
        return len(choice.tokens)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        request, output = sequence.request, sequence.output
        if token in request.stop_ids and len(output.tokens) > request.params.min_tokens:
            output.stop_token = token
            return "stop"
        reason = request.on_token(token) if request.on_token else None
        if request.constraint is not None:
            request.constraint.advance(token)
        if reason is not None:
            return reason
        if len(output.tokens) == request.params.max_tokens or len(sequence.tokens) >= self.max_model_len:
            return "length"
        return None

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; True if it was there."""
        for sequence in [*self.waiting, *self.running]:
            if sequence.request.id == request_id:
                sequence.output.finish_reason = sequence.output.finish_reason or "abort"
                if sequence.slot < 0:
                    self.waiting.remove(sequence)
                else:
                    self._leave(sequence)
                return True
        return False
