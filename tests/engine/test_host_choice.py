"""Choices that the host makes: the same row by row as all at once, and none behind a rejection that costs anything."""

from __future__ import annotations

import torch
from pairs import VOCAB

from flashdraft.engine import host_choice
from flashdraft.engine.host_choice import HostChooser
from flashdraft.engine.request import SamplingParams
from flashdraft.engine.sampling import RequestRows, TokenCounts, choose

KINDS = [
    dict(temperature=0.0),
    dict(temperature=0.8),
    dict(temperature=1.3, top_p=0.8, top_k=20, min_p=0.01),
    dict(temperature=0.9, presence_penalty=0.7, repetition_penalty=1.2),
    dict(temperature=0.7, logit_bias={5: 3.0}, min_tokens=4),
]


def batch_of(seed, most=7):
    """Requests of every kind, some with masks, whose proposals are right up to a place of their own; and their logits."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(high, (), generator=generator))

    batch, logits = [], []
    for number in range(12):
        params, width = SamplingParams(**KINDS[draw(len(KINDS))]), draw(most + 1)
        z = 3 * torch.randn(width + 1, VOCAB, generator=generator)
        mask = torch.rand(width + 1, VOCAB, generator=generator) < 0.7 if draw(3) == 0 else None
        counts = TokenCounts([3, 4, 5], VOCAB) if params.penalised else None
        rows = dict(index=draw(6), seed=number, stop_ids=frozenset({1}), counts=counts, mask=mask)
        proposals: list[int] = []
        for i in range(width):  # right with probability 0.8
            request = RequestRows(params, rows=width + 1, proposals=[*proposals, *[0] * (width - i)], **rows)
            right = int(choose(z, [request])[i])
            proposals.append(right if draw(5) else (right + 1) % VOCAB)
        batch.append(RequestRows(params, rows=width + 1, proposals=proposals, **rows))
        logits.append(z)
    return batch, torch.cat(logits)


def test_choices_up_to_a_rejection_are_those_of_all_rows_at_once():
    chooser, rejected = HostChooser(VOCAB, torch.device("cpu")), 0
    for seed in range(12):
        batch, logits = batch_of(seed)
        every = choose(logits, batch).split([r.rows for r in batch])
        for request, mine, all_of_it in zip(batch, chooser._until_rejected(batch, logits), every, strict=True):
            right = next((i for i, p in enumerate(request.proposals) if all_of_it[i] != p), request.rows - 1)
            assert mine[: right + 1] == all_of_it[: right + 1].tolist()
            if not (request.params.greedy or request.params.penalised):
                assert len(mine) == right + 1, "no sampled row behind a rejection"
            rejected += right + 1 < request.rows
    assert rejected > 30


def test_a_row_that_leaves_nothing_to_choose_ends_its_request_alone():
    chooser = HostChooser(VOCAB, torch.device("cpu"))
    sampled = SamplingParams(temperature=1.0)
    logits = torch.randn(6, VOCAB)
    first = choose(logits[:3], [RequestRows(sampled, rows=3)]).tolist()
    logits[1] = float("nan")
    batch = [RequestRows(sampled, rows=3, proposals=first[:2]), RequestRows(sampled, rows=3, seed=1, proposals=[0, 0])]
    broken, other = chooser._until_rejected(batch, logits)
    assert broken == [first[0], -1]
    assert other[0] == int(choose(logits[3:4], [RequestRows(sampled, seed=1)])[0])


def test_greedy_rows_are_one_arg_max(monkeypatch):
    calls = []
    monkeypatch.setattr(host_choice, "choose", lambda logits, batch: calls.append(len(logits)) or choose(logits, batch))
    greedy = RequestRows(SamplingParams(temperature=0.0), rows=8, proposals=[0] * 7)
    HostChooser(VOCAB, torch.device("cpu"))._until_rejected([greedy] * 3, torch.randn(24, VOCAB))
    assert calls == [24]
