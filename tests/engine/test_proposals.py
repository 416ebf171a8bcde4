"""Proposals that see the target's noise: the same text, and more of them accepted."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from pairs import VOCAB, OftenRight, prompts, request, run, small_engine, tiny_draft, tiny_target

from flashdraft.draft import DFlashDraft
from flashdraft.engine.engine import EngineConfig
from flashdraft.engine.proposals import over_target, propose
from flashdraft.engine.request import SamplingParams
from flashdraft.engine.sampling import RequestRows, choose
from flashdraft.errors import ConfigError
from flashdraft.targets.target import packed_attend

PROMPT = prompts(1, seed=3)[0]
SAMPLED = dict(temperature=0.9, seed=11, max_tokens=57)


class Knowing(OftenRight):
    """A draft whose logits are the target's own, at the positions that a test knows them of."""

    known: dict[int, torch.Tensor]

    def logits(self, hidden, head=None):
        z = DFlashDraft.logits(self, hidden, head).clone()
        for row, position in enumerate(self.positions_of(hidden)):
            if position in self.known:
                z[row] = self.known[position]
        return z


def knowing(target, tokens):
    """Of the text PROMPT + tokens."""
    draft = tiny_draft(target, kind=Knowing)
    ids = torch.tensor(PROMPT + tokens)
    positions = torch.arange(len(ids))
    logits, _ = target.forward(ids, positions, packed_attend(torch.zeros_like(ids), positions))
    draft.known = {position + 1: row for position, row in enumerate(logits)}
    return draft


def sequence(seed=3, choice=0, index=0, **params):
    return SimpleNamespace(
        request=SimpleNamespace(params=SamplingParams(**params), seed=seed, choice=choice),
        output=SimpleNamespace(tokens=[5] * index),
    )


def plain(d2t=None):
    return SimpleNamespace(d2t=d2t, to_target_ids=lambda ids: ids if d2t is None else ids + d2t[ids])


@pytest.mark.usefixtures("steps")
def test_a_draft_that_knows_as_much_as_the_target_is_always_right_with_all_of_its_noise():
    target = tiny_target()
    [alone] = run(small_engine(target), [request(PROMPT, **SAMPLED)])
    draft = knowing(target, alone.tokens)
    outputs = {}
    for noise in (1.0, 0.7, 0.0):
        [outputs[noise]] = run(small_engine(target, draft, proposal_noise=noise), [request(PROMPT, **SAMPLED)])
        assert outputs[noise].tokens == alone.tokens
    assert outputs[1.0].committed_per_step == [8] * 7
    lengths = [outputs[noise].acceptance_length for noise in (1.0, 0.7, 0.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[1] > 1.5 * lengths[2]


@pytest.mark.usefixtures("steps")
def test_noise_is_counted_from_each_requests_own_first_token_seed_and_choice():
    target = tiny_target()
    wanted = [dict(SAMPLED, seed=seed, max_tokens=33) for seed in (4, 5, 1 << 40)] + [dict(temperature=0.0, max_tokens=33)]
    alone = [run(small_engine(target), [request(PROMPT, **params)])[0] for params in wanted]
    for params, answer in zip(wanted, alone, strict=True):
        engine = small_engine(target, knowing(target, answer.tokens), proposal_noise=1.0)
        others = [request(prompt, temperature=1.0, seed=1) for prompt in prompts(2, seed=8)]
        output = run(engine, [others[0], request(PROMPT, **params), others[1]])[1]
        assert output.tokens == answer.tokens
        assert output.acceptance_length == 8.0


def proposed(draft, logits, sequences, share):
    """Of logits [N, K, V_draft], all K of every sequence, [N, K]."""
    n, k = logits.shape[:2]
    return propose(draft, logits.flatten(0, 1), sequences, [k] * n, share, VOCAB).view(n, k)


def test_proposals_are_the_targets_choices_from_the_same_logits_and_noise():
    torch.manual_seed(0)
    logits = 3 * torch.randn(3, 7, VOCAB)
    sequences = [sequence(temperature=0.8, index=4), sequence(temperature=0.0), sequence(1 << 50, 2, 0, temperature=1.3)]
    found = proposed(plain(), logits, sequences, 1.0)
    rows = [
        RequestRows(s.request.params, 7, len(s.output.tokens), s.request.seed, s.request.choice, proposals=[0] * 6)
        for s in sequences
    ]
    assert found.tolist() == choose(logits.flatten(0, 1), rows).view(3, 7).tolist()
    assert found[1].tolist() == logits[1].argmax(-1).tolist()
    assert proposed(plain(), logits, sequences, 0.0).tolist() == logits.argmax(-1).tolist()


def test_what_is_proposed_does_not_depend_on_how_many_are():
    torch.manual_seed(3)
    logits = 3 * torch.randn(4, 7, VOCAB)
    sequences = [sequence(seed, temperature=1.1, index=seed) for seed in range(4)]
    every, widths = proposed(plain(), logits, sequences, 0.7), [2, 7, 1, 3]
    some = torch.cat([own[:width] for own, width in zip(logits, widths, strict=True)])
    found = propose(plain(), some, sequences, widths, 0.7, VOCAB).split(widths)
    assert [own.tolist() for own in found] == [own[:width].tolist() for own, width in zip(every, widths, strict=True)]


def test_a_share_of_the_noise_is_the_rest_divided_by_it():
    torch.manual_seed(1)
    logits = 3 * torch.randn(1, 7, VOCAB)
    half = proposed(plain(), logits, [sequence(temperature=0.8)], 0.5)
    assert half.tolist() == proposed(plain(), logits, [sequence(temperature=0.4)], 1.0).tolist()


def test_noise_is_that_of_the_targets_ids_where_the_draft_has_fewer():
    torch.manual_seed(2)
    ids = torch.arange(1, VOCAB, 3)
    draft, logits = plain(ids - torch.arange(len(ids))), torch.randn(1, 7, len(ids))
    whole = over_target(draft, logits, VOCAB)
    assert whole[..., ids].equal(logits)
    assert whole.isfinite().sum() == logits.numel()
    sampled = [sequence(temperature=1.0)]
    found = proposed(draft, logits, sampled, 0.7)
    assert found.tolist() == proposed(plain(), whole, sampled, 0.7).tolist()
    assert set(found.flatten().tolist()) <= set(ids.tolist())
    assert proposed(draft, logits, [sequence(temperature=0.0)], 0.7).tolist() == ids[logits.argmax(-1)].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_finite_propose_some_token(temperature):
    logits = torch.full((1, 3, VOCAB), math.nan)
    logits[0, 1] = -math.inf
    assert proposed(plain(), logits, [sequence(temperature=temperature)], 0.7).tolist() == [[0, 0, 0]]


def test_proposals_lie_where_the_logits_are():
    """As on a GPU without async_scheduling."""
    found = proposed(plain(), torch.zeros(2, 7, VOCAB, device="meta"), [sequence(temperature=0.7)] * 2, 0.7)
    assert (found.device.type, found.shape) == ("meta", (2, 7))


@pytest.mark.parametrize("noise", [-0.1, 1e-300, 1.5, True, "all", math.nan])
def test_a_share_is_none_or_one_that_temperatures_survive(noise):
    with pytest.raises(ConfigError, match=r"proposal_noise must be 0 or a number from 0\.01 to 1"):
        EngineConfig(proposal_noise=noise)
