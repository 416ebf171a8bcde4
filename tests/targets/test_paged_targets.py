"""Logits and features of every layer, computed over pages in any partition, are those of the model's own forward (float32)."""

from __future__ import annotations

import random

import pytest
import torch
from families import VOCAB, make
from paged import PagedRun, Rows, assert_close, own_forward
from pairs import request, run, small_engine

from flashdraft.kernels.attention import KEY_SPLIT
from flashdraft.kernels.linear import make_rows_stable
from flashdraft.targets.target import Target

LENGTH = KEY_SPLIT + 60
WINDOW = 24  # of the sliding layers of these models
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "gemma4"]


def tokens(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Case:
    """A family: our target of it, and a fresh model of the same weights that computes the expected values."""

    def __init__(self, name: str) -> None:
        self.target = Target(make(name))
        self.own = make(name)
        self.ids = tokens(1)
        self.expected = own_forward(self.own, self.ids)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    return Case(request.param)


def prefilled(run: PagedRun, ids: list[int], length: int, chunk: int = 256):
    """A sequence whose first `length` tokens are in pages."""
    sequence = run.sequence()
    for start in range(0, length, chunk):
        run.advance(Rows(sequence, start, ids[start : min(start + chunk, length)]))
    return sequence


def test_the_models_are_what_they_are_here_for():
    specs = Target(make("gemma4")).layer_specs
    assert {s.window for s in specs} == {WINDOW, None}
    assert {s.key_size for s in specs} == {16, 32}
    assert [s.source for s in specs] == [0, 1, 2, 1, 1, 2]
    assert {s.window for s in Target(make("gemma3")).layer_specs} == {WINDOW, None}


def test_logits_are_not_flat(case):
    probabilities = case.expected[0].softmax(-1).amax(-1)
    assert probabilities.median() > 5 / VOCAB


def test_whole_prefill(case):
    run = PagedRun(case.target)
    [got] = run.advance(Rows(run.sequence(), 0, case.ids))
    assert_close(got, case.expected, slice(0, LENGTH))


@pytest.mark.parametrize(("chunk", "page_size"), [(5, 16), (17, 4), (WINDOW + 19, 16), (64, 64), (300, 256)])
def test_chunked_prefill(case, chunk, page_size):
    run = PagedRun(case.target, page_size=page_size, max_tokens=1024)
    sequence, length = run.sequence(), LENGTH if chunk > 64 else 150
    for start in range(0, length, chunk):
        part = case.ids[start : min(start + chunk, length)]
        [got] = run.advance(Rows(sequence, start, part))
        assert_close(got, case.expected, slice(start, start + len(part)))


@pytest.mark.parametrize("first", [0, WINDOW - 8, KEY_SPLIT - 6])
def test_decoding_one_by_one(case, first):
    run = PagedRun(case.target)
    sequence = prefilled(run, case.ids, first)
    for position in range(first, first + 14):
        [got] = run.advance(Rows(sequence, position, [case.ids[position]]))
        assert_close(got, case.expected, slice(position, position + 1))


@pytest.mark.parametrize("page_size", [1, 16])
def test_verify_rows_of_8_anywhere_and_again_after_a_rejection(case, page_size):
    run = PagedRun(case.target, page_size=page_size, slots=1)
    sequence, done = run.sequence(), 0
    for position in (1, 12, WINDOW - 1, 2 * WINDOW + 1, KEY_SPLIT - 5, KEY_SPLIT + 8):
        for start in range(done, position, 256):
            run.advance(Rows(sequence, start, case.ids[start : min(start + 256, position)]))
        guess = [*case.ids[position : position + 3], *tokens(9, 5)]
        [got] = run.forward([Rows(sequence, position, guess)])  # 3 rows right, 5 rejected: their keys stay behind as garbage
        assert_close((got[0][:3], got[1][:3]), case.expected, slice(position, position + 3))
        again = Rows(sequence, position + 1, case.ids[position + 1 : position + 9])
        [got] = run.advance(again)
        assert_close(got, case.expected, slice(position + 1, position + 9))
        done = position + 9


def test_batches_of_mixed_lengths_and_widths(case):
    run = PagedRun(case.target)
    lengths, widths = [KEY_SPLIT - 3, 1, WINDOW + 5, 130], [8, 3, 8, 1]
    prompts = [case.ids, *(tokens(seed, 160) for seed in (2, 3, 4))]
    expected = [case.expected, *(own_forward(case.own, ids) for ids in prompts[1:])]
    sequences = [prefilled(run, ids, n) for ids, n in zip(prompts, lengths, strict=True)]
    order = [0, 1, 2, 3]
    for step in range(3):
        random.Random(step).shuffle(order)
        batch = [Rows(sequences[i], lengths[i], prompts[i][lengths[i] : lengths[i] + widths[i]]) for i in order]
        for i, got in zip(order, run.advance(*batch), strict=True):
            assert_close(got, expected[i], slice(lengths[i], lengths[i] + widths[i]))
            lengths[i] += widths[i]


def test_the_engine_says_what_the_model_says(case):
    prompts = [case.ids[:n] for n in (1, 30, 77)]
    outputs = run(small_engine(case.target), [request(p, max_tokens=24) for p in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = own_forward(case.own, prompt + output.tokens)[0]
        assert output.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_a_tokens_bits_do_not_depend_on_how_its_prefix_was_cut(name):
    target = Target(make(name, torch.bfloat16))
    make_rows_stable(target.model)
    ids, first, last = tokens(1), KEY_SPLIT - 30, KEY_SPLIT + 18
    by_8, by_1, at_once = PagedRun(target, slots=2), PagedRun(target, slots=2), PagedRun(target, slots=2)
    other = by_8.sequence()
    by_8.advance(Rows(other, 0, ids[:19]))
    [expected] = at_once.advance(Rows(at_once.sequence(), 0, ids[:last]))
    blocks, singles = prefilled(by_8, ids, first, 100), prefilled(by_1, ids, first, 256)
    for start in range(first, last, 8):
        got = by_8.advance(Rows(blocks, start, ids[start : start + 8]), Rows(other, 19 + start - first, ids[:8]))[0]
        assert all(torch.equal(mine, theirs[start : start + 8]) for mine, theirs in zip(got, expected, strict=True))
    for position in range(first, last):
        [got] = by_1.advance(Rows(singles, position, [ids[position]]))
        assert all(torch.equal(mine[0], theirs[position]) for mine, theirs in zip(got, expected, strict=True))
