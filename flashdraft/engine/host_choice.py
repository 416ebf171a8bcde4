"""Choices that involve the host: penalties, grammars, biases, log-probabilities; on the CPU all of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flashdraft.engine.sampling import RequestRows, TokenCounts, choose, logprobs, no_choice
from flashdraft.engine.scheduler import Choice, Sequence, VerifyRow


def needs_host(sequence: Sequence) -> bool:
    """Whether the next choice depends on more than logits, temperature, top-k, top-p, min-p and noise."""
    if not sequence.may_need_host:
        return False
    request = sequence.request
    return request.is_for_host or len(sequence.output.tokens) < request.params.min_tokens


def decided(choices: list[Choice]) -> list[tuple[int, int, int]]:
    """(slot, length, anchor) after choices that the host has made."""
    return [(c.sequence.slot, len(c.sequence.tokens) + len(c.tokens), c.tokens[-1]) for c in choices if c.tokens]


class HostChooser:
    """Takes the target's choices from logits, row by row, and compares them with the proposals."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        # Kept as long as the sequence lives anywhere; penalties are rare, so most sequences have none.
        self._counts: WeakKeyDictionary[Sequence, tuple[TokenCounts, int]] = WeakKeyDictionary()

    def verify(self, rows: list[VerifyRow], proposals: list[list[int]], logits: Tensor) -> list[Choice]:
        """At every row the target's own choice; accepted are the proposals that equal it.

        proposals[s] are those that row s verifies, logits [sum(width + 1), V] those of their positions.
        """
        batch = [self._request_rows(row.sequence, own) for row, own in zip(rows, proposals, strict=True)]
        choices, start = [], 0
        for row, own, mine in zip(rows, proposals, self._until_rejected(batch, logits), strict=True):
            accepted = next((i for i, p in enumerate(own) if mine[i] != p), row.width)
            choices.append(
                self._choice(row.sequence, mine[: accepted + 1], logits[start : start + accepted + 1], drafted=row.width)
            )
            start += row.width + 1
        return choices

    def _until_rejected(self, batch: list[RequestRows], logits: Tensor) -> list[list[int]]:
        """Choices at each request's rows, in order, up to the first that is not the proposal at least.

        On a CPU a sampled row takes over 1 ms at temperature 0.7, an arg-max 0.06: sampled rows come one after another, and
        those behind a rejection not at all.
        """
        starts = list(itertools.accumulate((r.rows for r in batch), initial=0))
        whole = [self.device.type != "cpu" or r.params.greedy or r.params.penalised for r in batch]
        if all(whole):
            chosen = choose(logits, batch).tolist()
            return [chosen[start:end] for start, end in itertools.pairwise(starts)]
        found: list[list[int]] = [[] for _ in batch]
        left, at = list(range(len(batch))), 0
        while left:
            parts = [batch[s] if whole[s] else batch[s].row(at) for s in left]
            places = [starts[s] + at + i for s, part in zip(left, parts, strict=True) for i in range(part.rows)]
            tokens = iter(choose(logits[torch.tensor(places)], parts).tolist())
            for s, part in zip(left, parts, strict=True):
                found[s] += itertools.islice(tokens, part.rows)
            left = [s for s in left if at + 1 < batch[s].rows and not whole[s] and found[s][at] == batch[s].proposals[at]]
            at += 1
        return found

    def first(self, sequence: Sequence, logits: Tensor) -> Choice:
        """The first token behind a prompt, from the logits [1, V] of its last position."""
        chosen = choose(logits, [self._request_rows(sequence, [])]).tolist()
        return self._choice(sequence, chosen, logits, drafted=0, from_prefill=True)

    def _choice(
        self, sequence: Sequence, chosen: list[int], logits: Tensor, drafted: int, from_prefill: bool = False
    ) -> Choice:
        error = None
        if -1 in chosen:
            count = chosen.index(-1)
            error, chosen, logits = no_choice(logits[count]), chosen[:count], logits[:count]
        wanted = sequence.request.params.logprobs
        details = None if wanted is None else logprobs(logits, torch.tensor(chosen, device=logits.device), wanted)
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
        return replace(rows, counts=self._counts_of(sequence)) if request.params.penalised else rows

    def _counts_of(self, sequence: Sequence) -> TokenCounts:
        """The request's token counts, brought up to date with what was committed since the last step."""
        known = self._counts.get(sequence)
        if known is None:
            known = TokenCounts(sequence.request.prompt, self.vocab_size, device=self.device), 0
        counts, seen = known
        counts.commit(sequence.output.tokens[seen:])
        self._counts[sequence] = (counts, len(sequence.output.tokens))
        return counts
